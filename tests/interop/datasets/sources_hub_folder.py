"""Folders as `to_hub_folder` writes them."""

from pathlib import Path

import numpy as np
import torch
from tensordict import TensorDict

from interop.datasets import to_hub_folder
from tests.interop.datasets.recorded import buffer, trajectories


def make(folder: Path, rng: np.random.Generator) -> TensorDict:
    """Write a dataset of three episodes in two files to a folder, which is removed first if empty. Returns its rows."""
    held = trajectories(rng, 5, 1, 4)
    if folder.exists():
        folder.rmdir()
    to_hub_folder(buffer(*held), folder, shard_bytes=400)
    for number, rows in enumerate(held):
        rows["episode"] = torch.full((len(rows),), number)
    return torch.cat(held)
