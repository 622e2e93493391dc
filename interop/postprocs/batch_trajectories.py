"""The trajectories in a batch of steps: which rows belong together, by all entries that mark trajectories."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase, is_non_tensor, is_tensor_collection
from tensordict.utils import NestedKey
from torch import Tensor

from interop.data.keys import as_key
from interop.data.tensordicts import entries_of
from interop.data.trajectory_keys import KeyPath, TrajectoryKeys
from interop.host import markers
from interop.host.markers import PADDING, Markers


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


@dataclasses.dataclass(frozen=True)
class StepMarks:
    """The entries that mark trajectories in a batch of steps.

    Attributes:
        batch: the batch size of the steps.
        time: the dim of it that is time.
        keys: the entries that were found.
        entries: these, of one value a step.
    """

    batch: torch.Size
    time: int
    keys: TrajectoryKeys
    entries: Mapping[KeyPath, Tensor]

    @classmethod
    def of(cls, data: TensorDictBase, time: int, keys: TrajectoryKeys, batch: torch.Size | None = None) -> "StepMarks":
        """Those of `keys` that are there with one real value a step.

        `batch` are the dims of the steps, by default the batch size. KeyError for a named entry that is missing, TypeError
        and ValueError for a named one of another kind.
        """
        batch = data.batch_size if batch is None else batch
        entries = entries_of(data)
        if entries is None:
            entries = {key: data.get(key) for key in _firsts(keys) if key in data.keys()}  # noqa: SIM118
        holders: dict[Any, Any] = {key: entries[key] for key in _firsts(keys) if key in entries}
        marker_entries = dict[KeyPath, Tensor]()
        for path in keys.paths():
            if path[0] in holders or path in keys.named:
                value = _entry(holders, path, batch, path in keys.named)
                if value is not None:
                    marker_entries[path] = value
        return cls(batch, time, _only(keys, tuple(marker_entries)), marker_entries)

    @property
    def lanes(self) -> int:
        """How many lanes of steps there are."""
        count = self.batch[self.time]
        return self.batch.numel() // count if count else 0

    def rows(self, ends: Tensor | None = None) -> Markers:
        """The markers of the steps, [T, lanes]; `ends`, bool of the batch, are further ends."""
        shape = (self.batch[self.time], self.lanes)
        keys = self.keys
        groups = [[self._column(self.entries[path]) for path in group] for group in keys.groups()]
        if ends is not None:
            groups[1].append(self._column(ends))
        return Markers.of(shape, *groups)

    @functools.cached_property
    def ends(self) -> Tensor | None:
        """The flags of ends combined, bool of the batch; None without any. Not to be changed in place."""
        flags: Tensor | None = None
        for path in self.keys.ends:
            flag = self.entries[path]
            flag = flag if flag.dtype == torch.bool else flag != 0
            if flags is None:
                flags = flag
            elif flag.shape == flags.shape and flag.device == flags.device:
                flags = flags | flag
            else:
                flags = flags.reshape(self.batch) | flag.reshape(self.batch).to(flags.device)
        return None if flags is None else flags.reshape(self.batch)

    def _column(self, value: Tensor) -> np.ndarray:
        """An entry as [T, lanes]."""
        column = value.detach().as_subclass(Tensor).cpu().reshape(self.batch).movedim(self.time, 0)
        column = column.reshape(self.batch[self.time], self.lanes)
        return (column.to(torch.float64) if column.dtype in (torch.bfloat16, torch.float16) else column).numpy()


@dataclasses.dataclass(frozen=True)
class SideBySide:
    """The steps of a batch in an order in which those of each trajectory are side by side in time.

    Attributes:
        stops: bool of the batch size, in that order: whether a step is the last one of its trajectory in the batch.
        order: int64 of the batch size: the place in time of the step at each place. None where the steps lie so already.
        marks: the entries that were found.
        ended: whether the data says so for each lane of the batch, bool of the other dims: an end, or another trajectory.
    """

    stops: Tensor
    order: Tensor | None
    marks: StepMarks
    _places: Tensor | None = None

    @classmethod
    def of(
        cls, marks: StepMarks, device: torch.device, *, ends: Tensor | None = None, breaks: np.ndarray | None = None
    ) -> "SideBySide":
        """The order of steps with these marks.

        Args:
            marks: the entries that mark trajectories.
            device: of the results.
            ends: bool of the batch size; further last steps of trajectories.
            breaks: bool [lanes, T]: steps that do not continue any earlier one of their lane.
        """
        time = marks.time
        if breaks is None and not (marks.keys.ids or marks.keys.firsts or marks.keys.masks):
            stops = marks.ends if ends is None else ends  # no need to leave the device
            if stops is None:
                stops = torch.zeros(marks.batch, dtype=torch.bool, device=device)
            elif ends is not None and marks.ends is not None:
                stops = ends | marks.ends.to(ends.device)
            else:
                stops = stops.clone()
            stops = stops if stops.device == device else stops.to(device)
            if count := stops.shape[time]:
                stops.narrow(time, count - 1, 1).fill_(True)
            return cls(stops, None, marks)
        trajectories = trajectories_of(marks.rows(ends), marks.keys, breaks)
        lasts = np.ones_like(trajectories.starts)
        lasts[:, :-1] = trajectories.starts[:, 1:]
        places = None if trajectories.order is None else _in_time(marks, trajectories.places, device)
        order = None if trajectories.order is None else _in_time(marks, trajectories.order, device)
        return cls(_in_time(marks, lasts, device), order, marks, places)

    def arranged(self, leaf: Tensor) -> Tensor:
        """An entry, [*batch, ...], in this order. Gradients flow."""
        return leaf if self.order is None else _along_time(leaf, self.order, self.marks.time)

    def restored(self, leaf: Tensor) -> Tensor:
        """An entry in this order, [*batch, ...], in the order of the batch. Gradients flow."""
        return leaf if self._places is None else _along_time(leaf, self._places, self.marks.time)

    def all_stops(self, flags: Tensor) -> Tensor:
        """Flags of ends, [*batch, ...] in the order of the batch, with those of trajectories, in this order.

        Flags of one value a step are among the marks.
        """
        return self.stops.reshape(flags.shape) if flags.numel() == self.stops.numel() else self.with_stops(flags)

    def with_stops(self, flags: Tensor) -> Tensor:
        """Any flags of ends, [*batch, ...] in the order of the batch, with those of trajectories, in this order."""
        stops = self.stops.reshape(*self.stops.shape, *(1 for _ in flags.shape[self.stops.ndim :]))
        return self.arranged(flags) | stops.to(flags.device)


def keys_of(
    traj_key: NestedKey | None,
    ends: Sequence[KeyPath],
    only_named_keys: bool,
    masks: Sequence[KeyPath] = (),
    ids: Sequence[KeyPath] = (),
) -> TrajectoryKeys:
    """The keys of a consumer: the default ones, a `traj_key` that must be there, and others that count where they are.

    Args:
        traj_key: an entry of ids, or None.
        ends, masks: further entries. They count with `only_named_keys` too.
        only_named_keys: without the default keys.
        ids: further entries of ids.
    """
    return _keys_of(traj_key, tuple(ends), only_named_keys, tuple(masks), tuple(ids))


@functools.lru_cache(64)
def _keys_of(
    traj_key: NestedKey | None,
    ends: tuple[KeyPath, ...],
    only_named_keys: bool,
    masks: tuple[KeyPath, ...],
    ids: tuple[KeyPath, ...],
) -> TrajectoryKeys:
    keys = TrajectoryKeys.chosen(traj_key, ends, only_named_keys)
    return dataclasses.replace(
        keys,
        ids=tuple(dict.fromkeys((*keys.ids, *ids))),
        masks=tuple(dict.fromkeys((*masks, *keys.masks))),
        named=keys.named & frozenset(keys.ids),
    )


def trajectories_of(rows: Markers, marked_by: TrajectoryKeys, breaks: np.ndarray | None = None) -> BatchTrajectories:
    """The trajectories of steps with these markers, [T, lanes]. O(steps).

    `breaks`, bool [lanes, T], marks steps that continue none before them in their lane.
    """
    count, lanes = rows.flags.shape
    starts = markers.starts(rows).T
    order = None
    if breaks is not None:
        starts = starts | breaks
    for lane in maybe_interleaved(rows):
        cuts = None if breaks is None else np.flatnonzero(breaks[lane])
        of_lane = rows.lane(lane)
        last = markers.previous(of_lane, cuts)
        if not ((last >= 0) & (last < np.arange(-1, count - 1))).any():
            continue
        if order is None:
            order = np.tile(np.arange(count), (lanes, 1))
            starts = starts.copy()
        order[lane] = markers.grouped(of_lane, last)
        starts[lane] = last[order[lane]] < 0
    return BatchTrajectories(starts, order, marked_by)


def rows_by_trajectory(marks: StepMarks) -> tuple[np.ndarray | None, np.ndarray]:
    """The rows of trajectories one after the other, without padding, by their places in the flat batch; and their lengths.

    Time is the last dim. None in place of the rows where these are all, in their own order.
    """
    rows = marks.rows()
    trajectories = trajectories_of(rows, marks.keys)
    count, lanes = rows.flags.shape
    starts = trajectories.starts.reshape(-1)
    order = None
    if trajectories.order is not None:
        order = (trajectories.order + np.arange(lanes)[:, None] * count).reshape(-1)
    padding = (rows.flags.T.reshape(-1) & PADDING) != 0
    if padding.any():
        order = np.arange(starts.size) if order is None else order
        is_step = ~padding[order]
        order = order[is_step]
        starts = starts[is_step]
    return order, np.diff(starts.nonzero()[0], append=starts.size)


def maybe_interleaved(rows: Markers) -> list[int]:
    """The lanes in which an id comes again after another one."""
    if not rows.ids.shape[-1] or len(rows.ids) < 3:
        return []
    falls = (rows.ids[1:] < rows.ids[:-1]).any((0, 2))  # ids that only rise never come again
    breaks: list[int] = np.flatnonzero(falls).tolist()
    return breaks


def _in_time(marks: StepMarks, values: np.ndarray, device: torch.device) -> Tensor:
    """Values [lanes, T] as a tensor of the batch size."""
    lane_shape = [size for dim, size in enumerate(marks.batch) if dim != marks.time]
    tensor = torch.from_numpy(np.ascontiguousarray(values)).reshape(*lane_shape, marks.batch[marks.time])
    return tensor.movedim(-1, marks.time).to(device)


def _along_time(leaf: Tensor, places: Tensor, time: int) -> Tensor:
    index = places.to(leaf.device).reshape(*places.shape, *(1 for _ in leaf.shape[places.ndim :]))
    return leaf.take_along_dim(index, time)


@functools.lru_cache(64)
def _firsts(keys: TrajectoryKeys) -> tuple[Any, ...]:
    """The names of the root below which the entries are."""
    return tuple(dict.fromkeys(path[0] for path in keys.paths()))


@functools.lru_cache(256)
def _only(keys: TrajectoryKeys, paths: tuple[KeyPath, ...]) -> TrajectoryKeys:
    return keys.only(paths)


def _entry(holders: Mapping[Any, Any], path: KeyPath, batch: torch.Size, is_named: bool) -> Tensor | None:
    """An entry with one real value a step; None for one that is missing or of another kind."""
    value: Any = holders.get(path[0])
    for step in path[1:]:
        below = entries_of(value)
        if below is not None:
            value = below.get(step)
        else:
            value = value.get(step, None) if is_tensor_collection(value) and not is_non_tensor(value) else None
    if isinstance(value, Tensor) and not value.is_nested and not value.is_complex() and value.numel() == batch.numel():
        return value
    if not is_named:
        return None
    key = as_key(path)
    if value is None:
        raise KeyError(f"{key!r} is not in the tensordict, which says where trajectories end")
    if not isinstance(value, Tensor) or value.is_complex():
        kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"{key!r} must be a tensor of real numbers or bools, got {kind}")
    raise ValueError(
        f"{key!r} has the shape {list(value.shape)}, the rows have {list(batch)}: give the key of an entry with one value a "
        "row, which says where trajectories end"
    )
