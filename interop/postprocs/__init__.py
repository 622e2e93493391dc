"""Postprocessing of rollouts before they are stored: returns, n-step transitions, one row for each trajectory."""

from interop.postprocs.densify import DensifyReward
from interop.postprocs.multi_step import MultiStep
from interop.postprocs.split_trajectories import split_trajectories

__all__ = ["DensifyReward", "MultiStep", "split_trajectories"]
