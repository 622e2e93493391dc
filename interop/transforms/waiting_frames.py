"""Frames of a stream that wait for those that follow, until their transitions of n steps are complete."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from interop.data.keys import entries_below
from interop.host import markers
from interop.host.markers import END, Markers
from interop.postprocs.batch_trajectories import maybe_interleaved
from interop.postprocs.multi_step import RolloutKeys, RolloutSteps, mapped

_FURTHEST = 1 << 16  # rows behind a frame after which its trajectory is not continued


@dataclasses.dataclass(frozen=True)
class WaitingFrames:
    """The newest frames of a stream, [*lanes, time], from the first one on that waits. Never changed in place.

    Attributes:
        frames: the frames; None for none.
        stored: which of them have been stored and are here for what follows, bool [*lanes, time]; None for none of them.
        interleaved: whether the stream has had interleaved trajectories: frames that are complete wait no longer.
    """

    frames: TensorDictBase | None = None
    stored: Tensor | None = None
    interleaved: bool = False

    def followed_by(
        self, new: TensorDictBase, keys: RolloutKeys, gamma: float, n: int
    ) -> tuple[TensorDictBase | None, "WaitingFrames"]:
        """The transitions that are complete with new frames, in the order in which they became so; and what waits then.

        Errors for new frames that do not fit, or have no transitions.
        """
        waiting = self.frames
        time = new.ndim - 1
        frames = mapped(new, time, new.shape[time], _detached)
        if waiting is not None:
            if waiting.ndim != frames.ndim or waiting.shape[:time] != frames.shape[:time]:
                raise ValueError(
                    f"the waiting frames are {list(waiting.shape)}, new ones {list(frames.shape)}: all dims but the last, "
                    "time, must agree"
                )
            frames = _joined(waiting, frames, time)
        steps = RolloutSteps.of(frames, keys)
        total = frames.shape[time]
        rows = _rows(steps) if steps.marks.keys.ids else None
        is_plain = self.stored is None and not self.interleaved
        if rows is None or (is_plain and _is_plain(rows, n)):
            count = max(total - n, 0)
            order = steps.side_by_side()
            # Few rows share no memory with many.
            transitions = steps.transitions(order, gamma, n, count, copy=count < n)
            after = WaitingFrames(_from(frames, count, waiting is None or new.shape[time] > n))
        else:
            stored = None if self.stored is None else self.stored.reshape(-1, self.stored.shape[-1]).numpy()
            plan = _Plan.of(rows, n, stored, self.interleaved)
            count = plan.chosen.shape[1]
            chosen = torch.from_numpy(plan.chosen).reshape(*frames.shape[:time], count).to(steps.device)
            transitions = steps.transitions(steps.side_by_side(), gamma, n, chosen)
            left = torch.from_numpy(plan.stored[:, plan.first :]).reshape(*frames.shape[:time], -1)
            after = WaitingFrames(_from(frames, plan.first, True), left if left.any() else None, plan.interleaved)
        return (transitions if count else None), after

    def as_end(self, keys: RolloutKeys, gamma: float, n: int) -> TensorDictBase | None:
        """The transitions of the frames that wait, as the end of the stream; None for none."""
        frames = self.frames
        stored = self.stored
        if frames is None or not frames.shape[-1]:
            return None
        steps = RolloutSteps.of(frames, keys)
        chosen = frames.shape[-1]
        if stored is None:
            return steps.transitions(steps.side_by_side(), gamma, n, chosen)
        waiting_steps = int((~stored).sum()) // max(stored.shape[:-1].numel(), 1)  # the same in all lanes
        if not waiting_steps:
            return None
        places = (~stored).nonzero()[:, -1].reshape(*stored.shape[:-1], waiting_steps)
        return steps.transitions(steps.side_by_side(), gamma, n, places.to(steps.device))

    def as_plain(self) -> dict[str, Any]:
        """As dicts, lists and tensors."""
        frames = None if self.frames is None else _as_plain(self.frames)
        return {"frames": frames, "stored": self.stored, "interleaved": self.interleaved}

    @classmethod
    def from_plain(cls, state: Mapping[str, Any]) -> "WaitingFrames":
        """The inverse of `as_plain`. TypeError or ValueError for other values."""
        frames = None if state["frames"] is None else _from_plain(state["frames"])
        stored = state["stored"]
        interleaved = state["interleaved"]
        if not isinstance(interleaved, bool) or not (stored is None or isinstance(stored, Tensor)):
            raise TypeError(f"interleaved is a bool and stored a tensor or None, got {interleaved!r} and {stored!r}")
        if stored is not None:
            if frames is None or stored.dtype != torch.bool or stored.shape != frames.batch_size:
                raise ValueError("stored must have a bool for each of the waiting frames")
            stored = stored.cpu().clone()
            if frames.ndim > 1 and len(set(stored.sum(-1).flatten().tolist())) > 1:
                raise ValueError("stored must have as many frames in each lane")
        return cls(frames, stored, interleaved)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Which frames of [lanes, time] are stored now.

    Attributes:
        chosen: int64 [lanes, count]: their places in time, in the order in which they became complete.
        stored: bool [lanes, time]: which frames are stored then.
        first: the first frame that is still needed.
        interleaved: whether the stream has had interleaved trajectories.
    """

    chosen: np.ndarray
    stored: np.ndarray
    first: int
    interleaved: bool

    @classmethod
    def of(cls, rows: Markers, n: int, stored: np.ndarray | None, interleaved: bool) -> "_Plan":
        """The plan for frames with these markers, [time, lanes]. Frames of `stored` are not stored again."""
        total, lanes = rows.flags.shape
        stored = np.zeros((lanes, total), np.bool_) if stored is None else stored
        stored = np.concatenate([stored, np.zeros((lanes, total - stored.shape[1]), np.bool_)], 1)
        complete = np.empty((lanes, total), np.int64)
        needed = total
        since = -1 if interleaved else total  # the row with which trajectories turned out to be interleaved
        for lane in range(lanes):
            of_lane = rows.lane(lane)
            last = markers.previous(of_lane)
            last[np.arange(total) - last > _FURTHEST] = -1
            apart = ((last >= 0) & (last < np.arange(-1, total - 1))).nonzero()[0]
            since = min(since, int(apart[0])) if apart.size else since
            complete[lane], is_open = _complete(of_lane, last, n)
            needed = min(needed, int(is_open.argmax()) if is_open.any() else total)
        # In the order of time until trajectories turn out to be interleaved, in the order of completion from there on. This
        # depends on the rows alone, so a stream that is cut in other places gives its transitions in the same order.
        in_time = np.maximum.accumulate(np.maximum(complete, np.arange(total) + n), 1)
        wait = np.where(in_time < since, in_time, np.maximum(complete, since))
        wait[stored] = total
        count = int((wait < total).sum(1).min(initial=total if lanes else 0))
        chosen = np.argsort(wait, 1, kind="stable")[:, :count]
        np.put_along_axis(stored, chosen, True, 1)
        left = ~stored.all(0)
        first = min(needed, int(left.argmax()) if left.any() else total)
        return cls(chosen, stored, first, since < total)


def _complete(rows: Markers, last: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """With which row each frame of a lane is complete, the number of rows if with none of these; and whether the trajectory
    of a frame may be continued behind that frame."""
    total = len(last)
    order = markers.grouped(rows, last)
    stops = np.append(last[order][1:] < 0, True).nonzero()[0]
    places = np.arange(total)
    stop = stops[stops.searchsorted(places)]  # of the trajectory of each place
    closed = np.minimum(markers.closings(rows), places + _FURTHEST)
    last_rows = np.empty(total, np.int64)
    last_rows[order] = np.where(stop - places >= n - 1, order[np.minimum(places + n - 1, stop)], closed[order[stop]])
    is_open = np.zeros(total, np.bool_)
    is_open[order[stops]] = closed[order[stops]] >= total
    return last_rows, is_open


def _rows(steps: RolloutSteps) -> Markers:
    return steps.marks.rows(steps.team_ends())


def _is_plain(rows: Markers, n: int) -> bool:
    """Whether all but the last n frames are complete and not needed any more, and no trajectories are interleaved.

    It may be False where that is so.
    """
    if maybe_interleaved(rows):
        return False
    total = len(rows.flags)
    again = (rows.ids[1:] == rows.ids[:-1]).all(-1)  # where an id comes again, all trajectories before it are closed
    behind = total - 1 - again[::-1].argmax(0) if total > 1 else np.zeros(rows.flags.shape[1], np.int64)
    place = np.arange(total)[:, None]
    may_go_on = (place > np.where(again.any(0), behind - 1, -1)) & (rows.flags & END == 0)
    return not may_go_on[: max(total - 2, total - n)].any()


def _from(frames: TensorDictBase, first: int, copy: bool) -> TensorDictBase:
    """The frames from the first one on."""
    time = frames.ndim - 1
    count = frames.shape[time] - first
    if not first and not copy:
        return frames

    def rest_of(_: Any, leaf: Tensor) -> Tensor:
        part = leaf.narrow(time, first, count)
        return part.clone() if copy else part

    rest: TensorDictBase = mapped(frames, time, count, rest_of)
    return rest


def _detached(path: tuple[str, ...], leaf: Any) -> Tensor:
    """The entry without gradients. TypeError for an entry that is no tensor."""
    if not isinstance(leaf, Tensor):
        raise TypeError(f"{path!r} is no tensor, and cannot wait for the frames that follow: leave it out")
    return leaf.detach() if leaf.requires_grad else leaf


def _joined(waiting: TensorDictBase, new: TensorDictBase, time: int) -> TensorDictBase:
    """The waiting frames and those that follow, on the device of these. Errors for new ones that do not fit."""
    old = dict(entries_below(waiting))

    def joined(path: tuple[str, ...], leaf: Tensor) -> Tensor:
        other = old.pop(path, None)
        if other is None:
            raise KeyError(f"{path!r} not found in the waiting frames: flush() them before entries change")
        if leaf.dtype != other.dtype:
            raise TypeError(f"{path!r} is {leaf.dtype}, in the waiting frames {other.dtype}")
        if leaf.shape[time + 1 :] != other.shape[time + 1 :]:
            item = list(leaf.shape[time + 1 :])
            shape = list(other.shape[time + 1 :])
            raise ValueError(f"{path!r} is {item} a frame, in the waiting frames {shape}")
        return torch.cat([other if other.device == leaf.device else other.to(leaf.device), leaf], time)

    frames = mapped(new, time, waiting.shape[time] + new.shape[time], joined)
    if old:
        raise KeyError(f"{sorted(old)} not found in new frames: flush() the waiting ones before entries change")
    return frames


def _as_plain(data: TensorDictBase) -> dict[str, Any]:
    """A tensordict as dicts, lists and tensors."""
    entries = {key: value if isinstance(value, Tensor) else _as_plain(value) for key, value in data.items()}
    return {"batch": list(data.batch_size), "entries": entries}


def _from_plain(plain: Any) -> TensorDictBase:
    """The tensordict of a result of `_as_plain`. TypeError or ValueError for other values."""
    if not isinstance(plain, Mapping) or set(plain) != {"batch", "entries"}:
        raise TypeError(f"frames have batch and entries, got {plain!r}")
    entries = {
        key: value.clone() if isinstance(value, Tensor) else _from_plain(value)
        for key, value in plain["entries"].items()
    }
    try:
        return TensorDict(entries, plain["batch"])
    except RuntimeError as error:
        raise ValueError(f"frames of batch size {plain['batch']} do not fit: {error}") from error
