"""Splitting of a dataset into padded trajectories, one per row."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase, pad

from interop.data import trajectory_keys
from interop.data.trajectory_keys import TrajectoryKeys
from interop.datasets.conversion import write
from interop.postprocs import split_trajectories
from interop.postprocs.batch_trajectories import StepMarks, keys_of, rows_by_trajectory
from interop.storages import LazyMemmapStorage, Storage, columns

_WRITTEN = 1 << 26  # bytes per write, with padding


def split(storage: Storage, folder: Path, ids: Sequence[trajectory_keys.KeyPath] = (), ends: bool = False) -> int:
    """Write the trajectories of a storage to a folder as rows [T], T the longest. Returns the number of trajectories.

    A trajectory ends where any stored entry says so, as for `split_trajectories`; `ids` are further entries of ids. Rows get
    "traj_ids", and "mask", which is False in the padding. ValueError for rows that no entry divides into trajectories.

    With `ends`, ("next", "done") is set in the last step of each trajectory, and in the last one of its padding.
    """
    rows, lengths = rows_by_trajectory(_marks(storage, keys_of(None, (), False, ids=ids)))
    bounds = np.concatenate([[0], lengths.cumsum()])
    longest = int(lengths.max())
    out = LazyMemmapStorage(len(lengths), scratch_dir=folder)
    try:
        write(out, _groups(storage, rows, bounds, longest, ends), len(lengths), "Splitting")
        return len(out)
    finally:
        out.close()


def _marks(storage: Storage, keys: TrajectoryKeys) -> StepMarks:
    """The stored entries that mark trajectories."""
    marker_entries = TensorDict({}, [len(storage)])
    for path in keys.paths():
        if columns.has(storage, path):
            with suppress(TypeError):  # text or ragged rows, which mark nothing
                marker_entries[path] = columns.whole(storage, path)
    marks = StepMarks.of(marker_entries, 0, keys)
    if not any(marks.keys.groups()[:3]):
        raise ValueError(
            f"split_trajs needs an entry of one value a row that marks trajectories, one of {list(keys.paths())}: these "
            "rows are no trajectories"
        )
    return marks


def _groups(
    storage: Storage, rows: np.ndarray | None, bounds: np.ndarray, longest: int, ends: bool
) -> Iterator[TensorDictBase]:
    """The trajectories in groups; those of `rows`, or of all in their order, are divided by `bounds`."""
    first: Any = storage.get(slice(0, 1))
    count = max(_WRITTEN // max(longest * first.bytes(), 1), 1)  # trajectories per write
    for group in range(0, len(bounds) - 1, count):
        of_group = bounds[group : group + count + 1]
        start = int(of_group[0])
        stop = int(of_group[-1])
        steps = storage.get(slice(start, stop) if rows is None else torch.from_numpy(rows[start:stop])).copy()
        ids = np.repeat(np.arange(group, group + len(of_group) - 1), np.diff(of_group))
        steps["traj_ids"] = torch.from_numpy(ids)
        padded = split_trajectories(steps, prefix=(), only_named_keys=True)
        padded = pad(padded, [0, 0, 0, longest - padded.shape[1]])
        if ends:
            lengths = torch.from_numpy(np.diff(of_group))
            done = padded["next", "done"].clone()
            done[torch.arange(len(lengths)), lengths - 1] = True
            done[:, -1] = True
            padded["next", "done"] = done
        yield padded
