"""The rows of a storage in an H5 file: a group for each trajectory, lane after lane, and some numbers beside."""

import math
import re
from pathlib import Path as File
from typing import Any

import numpy as np

from interop.checkpoint import h5_files
from interop.checkpoint.tensor_states import as_array
from interop.ted.by_trajectory import trajectory_names
from interop.ted.entries import Path, shown
from interop.ted.flattening import Flattened

_GROUP = re.compile(r"traj_\d+")


def write_groups(opened: Any, flat: Flattened, capacity: int, options: dict[str, Any]) -> None:
    """Make the groups; rows of lanes that were never written, up to `capacity`, are groups without data.

    One array is made at a time.
    """
    lengths, ended = (each.numpy() for each in flat.order.trajectories())
    filled, followed = flat.order.ring.shape[0], flat.entries.followed
    spare = capacity - filled
    groups: list[int | None] = []  # the number of a trajectory, or None
    behind = np.cumsum(lengths) % filled == 0
    for place, is_last in enumerate(behind.tolist()):
        groups += [place, None] if is_last and spare else [place]
    names = trajectory_names(len(groups))
    for path, (shape, _) in flat.specs().items():
        refuse_name(path)
        array = as_array(flat.array(path))
        sizes = lengths + ended if path in followed else lengths
        starts = np.cumsum(sizes) - sizes
        for name, number in zip(names, groups, strict=True):
            if number is None:
                h5_files.leave(opened, (name, *path), (spare, *shape[1:]), array.dtype, options)
            else:
                h5_files.write(opened, (name, *path), array[starts[number] : starts[number] + sizes[number]], options)


def refuse_name(path: Path) -> None:
    """ValueError for a key that cannot be a name in an H5 file."""
    if any(step in ("", ".", "..") or "/" in step or "\0" in step for step in path):
        raise ValueError(f"the key {shown(path)} cannot be a name in an H5 file: rename it")


class Groups:
    """The groups of an open file, and the numbers beside them. CheckpointCorrupt naming the file where it is damaged.

    Args:
        opened: the file.
        path: where it is.
    """

    def __init__(self, opened: Any, path: File) -> None:
        self._path = path
        self._parts: dict[str, dict[Path, h5_files.Stored]] = {}
        self._numbers: dict[Path, h5_files.Stored] = {}
        with h5_files.faults_of(path):
            for (first, *rest), held in h5_files.datasets(opened, path).items():
                if rest and _GROUP.fullmatch(first):
                    self._parts.setdefault(first, {})[tuple(rest)] = held
                else:
                    self._numbers[first, *rest] = held
            self._names = trajectory_names(len(self._parts))
            if set(self._names) != set(self._parts):
                raise ValueError(f"{len(self._parts)} groups should be {self._names[:1]} to {self._names[-1:]}")
        self._kept = self._names

    def number(self, path: Path) -> Any:
        """A number, or a list of them; None where there is none."""
        held = self._numbers.get(path)
        if held is None:
            return None
        with h5_files.faults_of(self._path):
            if math.prod(held.shape) > 64:
                raise ValueError(f"{path[-1]!r} should be a number")
            return held.read().tolist()

    def keep_filled(self, episodes: Path, filled: int, capacity: int, lanes: int) -> None:
        """Look at the groups of rows that were written only: the first `filled` of each lane, of which there is room for
        `capacity`."""
        kept, row, seen = [], 0, 0
        with h5_files.faults_of(self._path):
            for name in self._names:
                part = self._parts[name]
                if episodes not in part or not part[episodes].shape:
                    raise ValueError(f"{name} has no {shown(episodes)}")
                stop = row + part[episodes].shape[0]
                if row < filled:
                    kept.append(name)
                if stop > (filled if row < filled else capacity):
                    raise ValueError(f"{name} has more rows than there are in its lane")
                row, seen = (0, seen + 1) if stop == capacity else (stop, seen)
            if row or seen != lanes:
                raise ValueError(
                    f"there are {seen} lanes of {capacity} rows, and {row} more rows, instead of {lanes} lanes"
                )
        self._kept = kept

    def kinds(self) -> dict[Path, tuple[tuple[int, ...], Any]]:
        """The shape and the NumPy dtype of each flat array."""
        found: dict[Path, tuple[tuple[int, ...], Any]] = {}
        with h5_files.faults_of(self._path):
            first = self._parts[self._kept[0]]
            for name in self._kept:
                if self._parts[name].keys() != first.keys():
                    raise ValueError(f"{name} has other datasets than {self._kept[0]}")
            for path, model in first.items():
                all_of_it = [self._parts[name][path] for name in self._kept]
                if any(held.shape[1:] != model.shape[1:] or held.dtype != model.dtype for held in all_of_it):
                    raise ValueError(f"{shown(path)} has other shapes or dtypes in some groups")
                found[path] = (sum(held.shape[0] for held in all_of_it), *model.shape[1:]), model.dtype
        return found

    def read(self, path: Path) -> np.ndarray:
        """A flat array."""
        all_of_it = [self._parts[name][path] for name in self._kept]
        memory = np.empty((sum(held.shape[0] for held in all_of_it), *all_of_it[0].shape[1:]), all_of_it[0].dtype)
        start = 0
        with h5_files.faults_of(self._path):
            for held in all_of_it:
                held.read(memory[start : start + held.shape[0]])
                start += held.shape[0]
        return memory
