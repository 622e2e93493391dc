"""What is made of rollouts before they are stored."""

from interop.postprocs.densify_reward import DensifyReward
from interop.postprocs.multi_step import MultiStep
from interop.postprocs.split_trajectories import split_trajectories

__all__ = ["DensifyReward", "MultiStep", "split_trajectories"]
