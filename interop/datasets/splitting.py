"""Splitting of a dataset into padded trajectories, one per row."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase, pad

from interop.datasets.conversion import write
from interop.postprocs import split_trajectories
from interop.storages import LazyMemmapStorage, Storage, columns

_WRITTEN = 1 << 26  # bytes per write, with padding


def split(storage: Storage, folder: Path, ends: bool = False) -> int:
    """Write the trajectories of a storage to a folder as rows [T], T the longest. Returns the number of trajectories.

    With `ends`, ("next", "done") is set in the last step of each trajectory, and in the last one of its padding.

    A trajectory ends at ("next", "done"), and where "episode" or "seed" changes. Rows get "traj_ids", and "mask", which is
    False in the padding. ValueError for rows without ("next", "done") and "episode".
    """
    starts = np.concatenate([[0], _ends(storage) + 1])
    longest = int(np.diff(starts).max())
    made = LazyMemmapStorage(len(starts) - 1, scratch_dir=folder)
    try:
        write(made, _groups(storage, starts, longest, ends), len(starts) - 1, "Splitting")
        return len(made)
    finally:
        made.close()


def _ends(storage: Storage) -> np.ndarray:
    """The last row of each trajectory."""
    done, count = ("next", "done"), len(storage)
    if not columns.has(storage, done) and not columns.has(storage, "episode"):
        raise ValueError('split_trajs needs "episode" or ("next", "done"): these rows are no trajectories')
    ends = [np.array([count - 1])]
    if columns.has(storage, done):
        ends.append((columns.whole(storage, done).reshape(count, -1) != 0).any(1).numpy().nonzero()[0])
    for key in ("episode", "seed"):
        if columns.has(storage, key):
            ids = columns.whole(storage, key).reshape(count, -1)
            ends.append((ids[1:] != ids[:-1]).any(1).numpy().nonzero()[0])
    return np.unique(np.concatenate(ends))


def _groups(storage: Storage, starts: np.ndarray, longest: int, ends: bool) -> Iterator[TensorDictBase]:
    first: Any = storage.get(slice(0, 1))
    count = max(_WRITTEN // max(longest * first.bytes(), 1), 1)  # trajectories per write
    for group in range(0, len(starts) - 1, count):
        bounds = starts[group : group + count + 1]
        rows = storage.get(slice(int(bounds[0]), int(bounds[-1]))).copy()
        ids = np.repeat(np.arange(group, group + len(bounds) - 1), np.diff(bounds))
        rows["traj_ids"] = torch.from_numpy(ids)
        made = split_trajectories(rows, prefix=())
        made = pad(made, [0, 0, 0, longest - made.shape[1]])
        if ends:
            lengths = torch.from_numpy(np.diff(bounds))
            done = made["next", "done"].clone()
            done[torch.arange(len(lengths)), lengths - 1] = True
            done[:, -1] = True
            made["next", "done"] = done
        yield made
