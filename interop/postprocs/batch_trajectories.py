"""The trajectories in a batch of steps: which rows belong together, by all entries that mark trajectories."""

from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from interop.data.trajectory_keys import Path, TrajectoryKeys
from interop.host import markers
from interop.host.markers import Markers


class BatchTrajectories(NamedTuple):
    """The trajectories of a batch of [*batch, T] steps, seen as [lanes, T] with the time dim last.

    Attributes:
        starts: bool [lanes, T]: whether the step at a place of `order` begins a trajectory.
        order: int64 [lanes, T]: the steps of each lane with those of one trajectory side by side, the trajectories by their
            first steps. None where they lie so already: no lane has interleaved trajectories.
        marked_by: the entries that were found.
    """

    starts: np.ndarray
    order: np.ndarray | None
    marked_by: TrajectoryKeys

    @property
    def places(self) -> np.ndarray:
        """int64 [lanes, T]: the place in `order` of each step."""
        lanes, count = self.starts.shape
        if self.order is None:
            return np.broadcast_to(np.arange(count), (lanes, count))
        places = np.empty((lanes, count), np.int64)
        np.put_along_axis(places, self.order, np.arange(count)[None], 1)
        return places


def batch_trajectories(data: TensorDictBase, time: int, keys: TrajectoryKeys) -> BatchTrajectories:
    """The trajectories of a batch with time in the batch dim `time`. O(steps).

    An entry counts if it is there, with one real value a step. KeyError for a named entry that is missing, TypeError and
    ValueError for a named one of another kind. Without any entry a lane is one trajectory.
    """
    shape, count = data.batch_size, data.batch_size[time]
    lanes = shape.numel() // max(count, 1) if shape.numel() else 0
    columns = {path: _column(data, path, path in keys.named) for path in keys.paths()}
    found = {path: column for path, column in columns.items() if column is not None}
    marked_by = keys.only(tuple(found))

    def steps_first(paths: tuple[Path, ...]) -> list[np.ndarray]:
        return [np.moveaxis(found[path].reshape(shape), time, 0).reshape(count, lanes) for path in paths]

    groups = (steps_first(group) for group in (marked_by.ids, marked_by.ends, marked_by.firsts, marked_by.masks))
    rows = Markers.of((count, lanes), *groups)
    starts, order = markers.starts(rows).T, None
    for lane in _maybe_interleaved(rows):
        of_lane = Markers(rows.ids[:, lane : lane + 1], rows.flags[:, lane : lane + 1])
        last = markers.previous(of_lane)
        if not ((last >= 0) & (last < np.arange(-1, count - 1))).any():
            continue
        if order is None:
            order = np.tile(np.arange(count), (lanes, 1))
            starts = starts.copy()
        order[lane] = markers.grouped(of_lane, last)
        starts[lane] = last[order[lane]] < 0
    return BatchTrajectories(starts, order, marked_by)


def _maybe_interleaved(rows: Markers) -> list[int]:
    """The lanes in which an id comes again after another one."""
    if not rows.ids.shape[-1] or len(rows.ids) < 3:
        return []
    falls = (rows.ids[1:] < rows.ids[:-1]).any((0, 2))  # ids that only rise never come again
    return [int(lane) for lane in falls.nonzero()[0]]


def _column(data: TensorDictBase, path: Path, is_named: bool) -> np.ndarray | None:
    """An entry with one value a step, in the order of the steps; None for one that is missing or of another kind."""
    value: Any = data.get(path, None)
    count = data.batch_size.numel()
    if isinstance(value, Tensor) and not value.is_nested and not value.is_complex() and value.numel() == count:
        held = value.detach().as_subclass(Tensor).cpu().reshape(-1)
        return (held.to(torch.float64) if held.dtype in (torch.bfloat16, torch.float16) else held).numpy()
    if not is_named:
        return None
    if value is None:
        raise KeyError(f"{path!r} is not in the tensordict, which says where trajectories end")
    if not isinstance(value, Tensor) or value.is_complex():
        kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"{path!r} must be a tensor of real numbers or bools, got {kind}")
    raise ValueError(
        f"{path!r} must have one value a step: the steps are {list(data.batch_size)}, it has the shape {list(value.shape)}"
    )
