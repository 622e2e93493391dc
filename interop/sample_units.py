"""What a drawn item becomes in a batch: itself, or the rows around it."""

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from interop.data.class_names import class_of
from interop.data.numbers import whole
from interop.storages import Storage, columns

_BOUNDARIES = ("pad", "stop", "include_reset")


class SampleUnit(ABC):
    """Expands the items that a sampler draws, the anchors, into those that a batch is made of."""

    @abstractmethod
    def expand(self, index: Any, info: dict[Any, Any], storage: Storage) -> tuple[Any, dict[Any, Any]]:
        """The index of the batch and its info; called while the lock of the storage is held.

        Args:
            index: of the anchors, int64 [anchors], or a tuple of coordinates for a storage of several item dims.
            info: that of the anchors. Entries that have one value an anchor are to be brought in line with
                the new index.
            storage: only to be read.
        """


class Transition(SampleUnit):
    """Each anchor as it is."""

    def expand(self, index: Any, info: dict[Any, Any], storage: Storage) -> tuple[Any, dict[Any, Any]]:
        return index, info

    def __repr__(self) -> str:
        return "Transition()"


class Sequence(SampleUnit):
    """Each anchor as a window of rows in time: `burn_in` before it, `length` from it on, `bootstrap` behind these.

    Batches are flat, one window after the other; the info, and a tensordict sample, says of each row:

    - "sequence_id": the number of its window in the batch; "step_in_sequence": its place in the window.
    - "learning_mask": whether it is one of the `length` rows.
    - "validity_mask": whether it is a row of its own; false for one that repeats the last row before a boundary.
    - "anchor_index": the anchor that was drawn, which `update_tensordict_priority` gives the highest priority among the
      valid rows of its windows.

    What else the sampler says of an anchor is repeated for each row. Windows go around the end of a full ring, and never
    across its newest row or into rows that were not written. Only the ends of the rows around the anchors are read:
    O(batch * window * dilation).

    Args:
        length: rows from the anchor on.
        episode_boundary: "pad" repeats the last row of the episode; "stop" has the window begin earlier, so that it ends
            with the episode, and pads where the episode is too short; "include_reset" goes on into the next episode.
            Rows before the anchor are never of another episode, except with "include_reset".
        done_key: the entry that is true for the last row of an episode, one value an item; KeyError at the draw where it
            is not stored. None for one long episode.
        burn_in: rows before the anchor.
        bootstrap: rows after the `length` rows.
        dilation: every how many stored rows one is taken.
    """

    def __init__(
        self,
        length: int,
        episode_boundary: str = "pad",
        done_key: Any = ("next", "done"),
        burn_in: int = 0,
        bootstrap: int = 0,
        dilation: int = 1,
    ) -> None:
        if episode_boundary not in _BOUNDARIES:
            raise ValueError(f"episode_boundary must be one of {', '.join(_BOUNDARIES)}, got {episode_boundary!r}")
        steps = done_key if isinstance(done_key, tuple) else (done_key,)
        if done_key is not None and not (steps and all(isinstance(step, str) for step in steps)):
            raise TypeError(f"done_key must be a name, a tuple of names or None, got {done_key!r}")
        self.length = whole("length", length)
        self.episode_boundary = episode_boundary
        self.done_key = done_key
        self.burn_in = whole("burn_in", burn_in, least=0)
        self.bootstrap = whole("bootstrap", bootstrap, least=0)
        self.dilation = whole("dilation", dilation)

    def expand(self, index: Any, info: dict[Any, Any], storage: Storage) -> tuple[Any, dict[Any, Any]]:
        anchors = _coordinates(index, storage)
        rows, count = anchors[0], anchors[0].size
        steps = np.arange(-self.burn_in, self.length + self.bootstrap)
        filled = storage.filled_rows
        before, after = self._room(anchors, storage)
        offsets = np.broadcast_to(steps * self.dilation, (count, steps.size))
        if self.episode_boundary == "stop":
            offsets = offsets - np.minimum(np.maximum(steps[-1] * self.dilation - after, 0), before)[:, None]
        inside = np.clip(offsets, -before[:, None], after[:, None])
        found = (rows[:, None] + inside) % filled
        each = steps.size
        new: dict[Any, Any] = {key: _repeated(value, count, each) for key, value in info.items()}
        drawn = np.stack(anchors, -1) if len(anchors) > 1 else rows
        own = {
            "sequence_id": np.repeat(np.arange(count), each),
            "step_in_sequence": np.tile(np.arange(each), count),
            "learning_mask": np.tile((steps >= 0) & (steps < self.length), count),
            "validity_mask": (inside == offsets).reshape(-1),
            "anchor_index": np.repeat(drawn, each, 0),
        }
        new.update((key, torch.from_numpy(value)) for key, value in own.items())
        places = (found.reshape(-1), *(np.repeat(lane, each) for lane in anchors[1:]))
        named = tuple(torch.from_numpy(place) for place in places)
        new["index"] = named if len(named) > 1 else named[0]
        return new["index"], new

    def _room(self, anchors: tuple[np.ndarray, ...], storage: Storage) -> tuple[np.ndarray, np.ndarray]:
        """How many rows before and after each anchor its window may use."""
        rows = anchors[0]
        furthest = (self.length + self.bootstrap - 1) * self.dilation
        earliest = self.burn_in * self.dilation + (furthest if self.episode_boundary == "stop" else 0)
        filled = storage.filled_rows
        before, after = storage.ring.around(rows, filled, storage.row_capacity(None))
        before, after = np.minimum(before, earliest), np.minimum(after, furthest)
        if self.done_key is None or self.episode_boundary == "include_reset":
            return before, after
        steps = np.arange(-int(before.max(initial=0)), int(after.max(initial=0)))
        if not steps.size:
            return before, after
        near = np.clip(steps, -before[:, None], after[:, None])
        slots = (rows[:, None] + near) % filled
        for size, lane in zip((storage.shape or ())[1:], anchors[1:], strict=True):
            slots = slots * size + lane[:, None]
        ended = columns.flags(storage, self.done_key, slots)
        ended &= near == steps
        return _until(ended[:, steps < 0][:, ::-1], before), _until(ended[:, steps >= 0], after)  # the nearest first

    def __repr__(self) -> str:
        names = ("length", "episode_boundary", "done_key", "burn_in", "bootstrap", "dilation")
        return f"Sequence({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"


def expanding(given: Any) -> SampleUnit | None:
    """A sample unit that does something; None for one that does not. TypeError for what is none."""
    if given is not None and not isinstance(given, SampleUnit):
        raise TypeError(f"sample_unit must be a SampleUnit, got {class_of(given)}")
    return None if type(given) is Transition else given


def expanded(unit: SampleUnit | None, index: Any, info: dict[Any, Any], storage: Storage) -> tuple[Any, dict[Any, Any]]:
    """The index of a batch and its info, with "index", for the index and the info of anchors."""
    if unit is not None:
        index, info = unit.expand(index, info, storage)
    info["index"] = index
    return index, info


def of_anchors(anchors: Tensor, valid: Tensor | None, values: Tensor) -> tuple[Tensor, Tensor]:
    """Different anchors, [n] or [n, ndim], each with the highest value among its valid rows.

    Args:
        anchors: of each row, [rows] or [rows, ndim].
        valid: which rows count, [rows]; all by default.
        values: of each row, [rows].
    """
    if valid is not None:
        anchors, values = anchors[valid], values[valid]
    named, group = torch.unique(anchors, dim=0, return_inverse=True)
    highest = values.new_zeros(named.shape[0]).scatter_reduce(0, group, values, "amax", include_self=False)
    return named, highest


def _until(ended: np.ndarray, room: np.ndarray) -> np.ndarray:
    """The room up to the first that has ended of each row."""
    if not ended.shape[1]:
        return room
    return np.where(ended.any(1), np.minimum(room, ended.argmax(1)), room)


def _coordinates(index: Any, storage: Storage) -> tuple[np.ndarray, ...]:
    """Rows and lanes, int64 [anchors] each."""
    named = index if isinstance(index, tuple) else (index,)
    if len(named) != storage.ndim:
        raise ValueError(f"the storage has {storage.ndim} item dims, the index of the anchors has {len(named)}")
    held = (each.cpu().numpy() if isinstance(each, Tensor) else np.asarray(each) for each in named)
    return tuple(each.reshape(-1).astype(np.int64, copy=False) for each in held)


def _repeated(value: Any, count: int, each: int) -> Any:
    """An entry of the info with every value `each` times, if it has one for each of `count` anchors."""
    if isinstance(value, Tensor) and value.ndim and value.shape[0] == count:
        return value.repeat_interleave(each, 0)
    if isinstance(value, np.ndarray) and value.ndim and value.shape[0] == count:
        return np.repeat(value, each, 0)
    return value
