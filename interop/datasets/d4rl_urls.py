"""URLs of D4RL files, from github.com/Farama-Foundation/D4RL: `d4rl/infos.py` and the registered environments."""

from collections.abc import Iterator
from itertools import product

_URL = "http://rail.eecs.berkeley.edu/datasets/offline_rl/{}.hdf5"

_KITCHEN = "kitchen_microwave_kettle"
_HANDS = {"human": "v0_demos_clipped", "cloned": "demos-v0-bc-combined", "expert": "v0_expert_clipped"}
_OTHERS = {
    "ant-random-expert-v0": "gym_mujoco/ant_random_expert",
    "walker2d-medium-replay-v0": "gym_mujoco/walker_mixed",
    "maze2d-open-v0": "maze2d/maze2d-open-sparse",
    "maze2d-open-dense-v0": "maze2d/maze2d-open-dense",
    "minigrid-fourrooms-v0": "minigrid/minigrid4rooms",
    "minigrid-fourrooms-random-v0": "minigrid/minigrid4rooms_random",
    "flow-ring-random-v0": "flow/flow-ring-v0-random",
    "flow-ring-controller-v0": "flow/flow-ring-v0-idm",
    "flow-merge-random-v0": "flow/flow-merge-v0-random",
    "flow-merge-controller-v0": "flow/flow-merge-v0-idm",
    "kitchen-complete-v0": f"kitchen/mini_{_KITCHEN}_light_slider-v0",
    "kitchen-partial-v0": f"kitchen/{_KITCHEN}_light_slider-v0",
    "kitchen-mixed-v0": f"kitchen/{_KITCHEN}_bottomburner_light-v0",
    "carla-lane-v0": "carla/carla_lane_follow_flat-v0",
    "carla-town-v0": "carla/carla_town_subsamp_flat-v0",
    "carla-town-full-v0": "carla/carla_town_flat-v0",
}


def _paths() -> Iterator[tuple[str, str]]:
    qualities = ("random", "medium", "expert", "medium-expert", "medium-replay", "full-replay")
    for agent, quality in product(("ant", "halfcheetah", "hopper", "walker2d"), qualities):
        name = f"{agent}_{quality.replace('-', '_')}"
        for version in ("v1", "v2"):
            yield f"{agent}-{quality}-{version}", f"gym_mujoco_{version}/{name}-{version}"
        if quality != "full-replay":
            yield f"{agent}-{quality}-v0", f"gym_mujoco/{name.replace('medium_replay', 'mixed')}"
            yield f"bullet-{agent}-{quality}-v0", f"bullet/bullet-{name}"
    for hand in ("door", "hammer", "pen", "relocate"):
        for who, name in _HANDS.items():
            yield f"{hand}-{who}-v0", f"hand_dapg/{hand}-{name}"
            yield f"{hand}-{who}-v1", f"hand_dapg_v1/{hand}-{who}-v1"
    for maze in ("umaze", "medium", "large"):
        for reward, suffix in ("sparse", ""), ("dense", "-dense"):
            yield f"maze2d-{maze}{suffix}-v0", f"maze2d/maze2d-{maze}-{reward}"
            for name in (maze, f"eval-{maze}"):
                yield f"maze2d-{name}{suffix}-v1", f"maze2d/maze2d-{name}-{reward}-v1"
    for maze in ("open", "umaze", "medium", "large"):
        yield f"bullet-maze2d-{maze}-v0", f"bullet/bullet-maze2d-{maze}-sparse"
    for maze, before in ("umaze", "u-maze"), ("medium", "big-maze"), ("large", "hardest-maze"):
        for goals in ("diverse", "" if maze == "umaze" else "play"):
            env = f"antmaze-{maze}-{goals}".removesuffix("-")
            kind = f"noisy_multistart_{env != 'antmaze-umaze'}_multigoal_{goals == 'diverse'}_sparse"
            yield f"{env}-v0", f"ant_maze_new/Ant_maze_{before}_{kind}"
            yield f"{env}-v1", f"ant_maze_v1/Ant_maze_{maze}_{kind}"
            yield f"{env}-v2", f"ant_maze_v2/Ant_maze_{before}_{kind}_fixed"


D4RL_URLS = {dataset_id: _URL.format(path) for dataset_id, path in sorted({**dict(_paths()), **_OTHERS}.items())}
