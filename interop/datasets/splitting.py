"""A dataset with a row for each trajectory, padded to the longest."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase, pad

from interop.datasets.conversion import write
from interop.postprocs import split_trajectories
from interop.storages import LazyMemmapStorage, TensorStorage

_SCANNED = 1 << 16  # rows
_WRITTEN = 1 << 26  # bytes, padding included


def split(storage: TensorStorage, folder: Path) -> int:
    """Write the trajectories of a storage to a folder as rows [T], T the longest; how many there are.

    A trajectory ends where ("next", "done") is set, and where "episode" changes. Rows get "traj_ids" and "mask", which is
    False in the padding.
    """
    starts = np.concatenate([[0], _ends(storage) + 1])
    longest = int(np.diff(starts).max())
    made = LazyMemmapStorage(len(starts) - 1, scratch_dir=folder)
    try:
        write(made, _groups(storage, starts, longest), len(starts) - 1, "Splitting")
        return len(made)
    finally:
        made.close()


def _ends(storage: TensorStorage) -> np.ndarray:
    """The last row of each trajectory."""
    found, previous = [np.zeros(0, np.int64)], None
    for start in range(0, len(storage), _SCANNED):
        rows: Any = storage.get(slice(start, start + _SCANNED))
        found.append(start + np.flatnonzero(rows["next", "done"].reshape(len(rows), -1).any(1).numpy()))
        if "episode" in rows.keys():  # noqa: SIM118
            ids = rows["episode"].reshape(-1).numpy()
            before = ids[:1] if previous is None else previous
            found.append(start - 1 + np.flatnonzero(ids != np.concatenate([before, ids[:-1]])))
            previous = ids[-1:]
    return np.unique(np.concatenate([*found, [len(storage) - 1]]))


def _groups(storage: TensorStorage, starts: np.ndarray, longest: int) -> Iterator[TensorDictBase]:
    first: Any = storage.get(slice(0, 1))
    count = max(_WRITTEN // max(longest * first.bytes(), 1), 1)  # trajectories
    for group in range(0, len(starts) - 1, count):
        bounds = starts[group : group + count + 1]
        rows = storage.get(slice(int(bounds[0]), int(bounds[-1]))).copy()
        ids = np.repeat(np.arange(group, group + len(bounds) - 1), np.diff(bounds))
        rows["traj_ids"] = torch.from_numpy(ids)
        made = split_trajectories(rows, prefix=())
        yield pad(made, [0, 0, 0, longest - made.shape[1]])
