"""Sample units: a batch has each drawn item itself, or the rows around it."""

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from interop.data.arguments import class_of, whole
from interop.data.keys import checked_key
from interop.storages import Storage, columns

_BOUNDARIES = ("pad", "stop", "include_reset")


class SampleUnit(ABC):
    """Expands the items that a sampler draws, the anchors, into the items of a batch."""

    @abstractmethod
    def expand(self, index: Any, info: dict[Any, Any], storage: Storage) -> tuple[Any, dict[Any, Any]]:
        """The index of the batch and its info. The lock of the storage is held.

        Args:
            index: of the anchors, int64 [anchors], or a tuple of coordinates for a storage of several item dims.
            info: of the anchors. Entries with one value an anchor need one value for each item of the new index.
            storage: to read from.
        """


class Transition(SampleUnit):
    """Each anchor as it is."""

    def expand(self, index: Any, info: dict[Any, Any], storage: Storage) -> tuple[Any, dict[Any, Any]]:
        return index, info

    def __repr__(self) -> str:
        return "Transition()"


class Sequence(SampleUnit):
    """A window of rows in time for each anchor: `burn_in` rows before it, `length` from it on, `bootstrap` after these.

    Batches are flat, one window after the other. The info, and a tensordict sample, has for each row:

    - "sequence_id": the number of its window in the batch; "step_in_sequence": its place in the window.
    - "learning_mask": whether it is one of the `length` rows.
    - "validity_mask": False for a row that repeats the last row before a boundary.
    - "anchor_index": the drawn anchor. `update_tensordict_priority` gives it the highest priority among the valid rows of
      its windows.

    Other entries of the info of an anchor are repeated for each row. Windows go around the end of a full ring, and never
    across the cursor or into rows that were not written. A draw reads the ends of the rows around the anchors:
    O(batch * window * dilation).

    Args:
        length: rows from the anchor on.
        episode_boundary: "pad" repeats the last row of the episode. "stop" moves the window back so that it ends with the
            episode, and pads where the episode is too short. "include_reset" continues with the next episode. Only then
            are rows before the anchor of another episode.
        done_key: the entry that is true for the last row of an episode, one value an item; KeyError at the draw where it
            is not stored. None for one long episode.
        burn_in: rows before the anchor.
        bootstrap: rows after the `length` rows.
        dilation: the distance of the rows of a window in the storage.
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
        self.length = whole("length", length)
        self.episode_boundary = episode_boundary
        self.done_key = checked_key("done_key", done_key)
        self.burn_in = whole("burn_in", burn_in, least=0)
        self.bootstrap = whole("bootstrap", bootstrap, least=0)
        self.dilation = whole("dilation", dilation)

    def expand(self, index: Any, info: dict[Any, Any], storage: Storage) -> tuple[Any, dict[Any, Any]]:
        anchors = _coordinates(index, storage)
        rows, count = anchors[0], anchors[0].size
        steps = np.arange(-self.burn_in, self.length + self.bootstrap)
        before, after = self._room(anchors, storage)
        offsets = np.broadcast_to(steps * self.dilation, (count, steps.size))
        if self.episode_boundary == "stop":
            offsets = offsets - np.minimum(np.maximum(steps[-1] * self.dilation - after, 0), before)[:, None]
        inside = np.clip(offsets, -before[:, None], after[:, None])
        found, each = (rows[:, None] + inside) % storage.filled_rows, steps.size
        entries = {
            "sequence_id": np.repeat(np.arange(count), each),
            "step_in_sequence": np.tile(np.arange(each), count),
            "learning_mask": np.tile((steps >= 0) & (steps < self.length), count),
            "validity_mask": (inside == offsets).reshape(-1),
            "anchor_index": np.repeat(np.stack(anchors, -1) if len(anchors) > 1 else rows, each, 0),
        }
        new: dict[Any, Any] = {key: _repeated(value, count, each) for key, value in info.items()}
        new |= {key: torch.from_numpy(value) for key, value in entries.items()}
        lanes = (torch.from_numpy(np.repeat(lane, each)) for lane in anchors[1:])
        places = torch.from_numpy(found.reshape(-1)), *lanes
        new["index"] = places if len(anchors) > 1 else places[0]
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
    """The sample unit, or None for a `Transition` and None. TypeError for anything else."""
    if given is not None and not isinstance(given, SampleUnit):
        raise TypeError(f"sample_unit must be a SampleUnit, got {class_of(given)}")
    return None if type(given) is Transition else given


def expanded(unit: SampleUnit | None, index: Any, info: dict[Any, Any], storage: Storage) -> tuple[Any, dict[Any, Any]]:
    """The index and the info, with "index", of a batch of these anchors."""
    if unit is not None:
        index, info = unit.expand(index, info, storage)
    info["index"] = index
    return index, info


def of_anchors(anchors: Tensor, valid: Tensor | None, values: Tensor) -> tuple[Tensor, Tensor]:
    """The different anchors, [n] or [n, ndim], and the highest value, [n], among the valid rows of each.

    Anchors [rows] or [rows, ndim], valid flags [rows] (None: all True) and values [rows] are those of the rows.
    """
    if valid is not None:
        anchors, values = anchors[valid], values[valid]
    named, group = torch.unique(anchors, dim=0, return_inverse=True)
    highest = values.new_zeros(named.shape[0]).scatter_reduce(0, group, values, "amax", include_self=False)
    return named, highest


def _until(ended: np.ndarray, room: np.ndarray) -> np.ndarray:
    """The room of each row up to its first True in `ended`."""
    return np.where(ended.any(1), np.minimum(room, ended.argmax(1)), room) if ended.shape[1] else room


def _coordinates(index: Any, storage: Storage) -> tuple[np.ndarray, ...]:
    """Rows and lanes, int64 [anchors] each."""
    named = index if isinstance(index, tuple) else (index,)
    if len(named) != storage.ndim:
        raise ValueError(f"the storage has {storage.ndim} item dims, the index of the anchors has {len(named)}")
    held = (each.cpu().numpy() if isinstance(each, Tensor) else np.asarray(each) for each in named)
    return tuple(each.reshape(-1).astype(np.int64, copy=False) for each in held)


def _repeated(value: Any, count: int, each: int) -> Any:
    """An entry of the info with every value `each` times, if it has one for each of `count` anchors."""
    if not isinstance(value, Tensor | np.ndarray) or value.ndim == 0 or value.shape[0] != count:
        return value
    return value.repeat_interleave(each, 0) if isinstance(value, Tensor) else np.repeat(value, each, 0)
