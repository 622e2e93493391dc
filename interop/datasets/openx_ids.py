"""The datasets of Open X-Embodiment."""

_IDS = """
fractal20220817_data kuka bridge taco_play jaco_play berkeley_cable_routing roboturk
nyu_door_opening_surprising_effectiveness viola berkeley_autolab_ur5 toto language_table columbia_cairlab_pusht_real
stanford_kuka_multimodal_dataset+ nyu_rot_dataset+ stanford_hydra_dataset+ austin_buds_dataset+ nyu_franka_play_dataset+
maniskill_dataset+ furniture_bench_dataset+ cmu_franka_exploration_dataset+ ucsd_kitchen_dataset+
ucsd_pick_and_place_dataset+ austin_sailor_dataset+ austin_sirius_dataset+ bc_z usc_cloth_sim+
utokyo_pr2_opening_fridge+ utokyo_pr2_tabletop_manipulation+ utokyo_saytap+ utokyo_xarm_pick_and_place+
utokyo_xarm_bimanual+ robo_net berkeley_mvp+ berkeley_rpt+ kaist_nonprehensile+ stanford_mask_vit+ tokyo_u_lsmo+
dlr_sara_pour+ dlr_sara_grid_clamp+ dlr_edan_shared_control+ asu_table_top+ stanford_robocook+ eth_agent_affordances
imperialcollege_sawyer_wrist_cam iamlab_cmu_pickup_insert+ uiuc_d3field utaustin_mutex berkeley_fanuc_manipulation
cmu_playing_with_food cmu_play_fusion cmu_stretch berkeley_gnm_recon berkeley_gnm_cory_hall berkeley_gnm_sac_son
"""

IDS = _IDS.replace("+", "_converted_externally_to_rlds").split()
