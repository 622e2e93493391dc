"""Sample units: a batch has each drawn item itself, or the rows around it."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from tensordict.utils import NestedKey
from torch import Tensor

from interop.data.arguments import class_of, whole
from interop.data.keys import as_path, checked_key
from interop.data.trajectory_keys import TrajectoryKeys
from interop.host.trajectories import Trajectories, lanes_of
from interop.samplers.boundary_keys import BoundaryKeys, NoMarkersError
from interop.samplers.stored_trajectories import StoredTrajectories
from interop.storages import Storage
from interop.writers import Writer

_DONE = ("next", "done")
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

    def check_fit(self, writer: Writer) -> None:
        """TypeError for a writer whose rows the unit cannot use."""


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
    across the cursor or into rows that were not written. Episodes are those of `SliceSampler`: all stored markers count, and
    the rows of interleaved episodes are separate. A draw costs O(batch * window), and looks once at the rows written since
    the last one.

    Args:
        length: rows from the anchor on.
        episode_boundary: "pad" repeats the last row of the episode. "stop" moves the window back so that it ends with the
            episode, and pads where the episode is too short. "include_reset" continues with the next episode. Only then
            are rows before the anchor of another episode. Of interleaved episodes the next one is that of the same ids, and
            the window pads where there is none.
        done_key: an entry that is true for the last row of an episode, one value an item. KeyError at the draw where it
            is not stored; where no marker at all is stored, for the default key. None: no flags count, ids do; without
            stored ids all is one long episode.
        burn_in: rows before the anchor.
        bootstrap: rows after the `length` rows.
        dilation: the distance of the rows of a window in their episode.
        traj_key: an entry of ids, one value an item, besides the default ones of `SliceSampler`.
        only_named_keys: only `done_key` and `traj_key` count.
    """

    def __init__(
        self,
        length: int,
        episode_boundary: str = "pad",
        done_key: NestedKey | None = ("next", "done"),
        burn_in: int = 0,
        bootstrap: int = 0,
        dilation: int = 1,
        *,
        traj_key: NestedKey | None = None,
        only_named_keys: bool = False,
    ) -> None:
        if episode_boundary not in _BOUNDARIES:
            raise ValueError(f"episode_boundary must be one of {', '.join(_BOUNDARIES)}, got {episode_boundary!r}")
        self.length = whole("length", length)
        self.episode_boundary = episode_boundary
        self.done_key = checked_key("done_key", done_key)
        self.burn_in = whole("burn_in", burn_in, least=0)
        self.bootstrap = whole("bootstrap", bootstrap, least=0)
        self.dilation = whole("dilation", dilation)
        self.traj_key = checked_key("traj_key", traj_key)
        self.only_named_keys = bool(only_named_keys)
        # The episodes of each storage: one unit may serve several buffers, from several threads.
        self._indices: WeakKeyDictionary[Storage, StoredTrajectories] = WeakKeyDictionary()

    def check_fit(self, writer: Writer) -> None:
        if not writer.keeps_order:
            raise TypeError(
                f"windows follow the order of writing, which a {type(writer).__name__} does not keep: draw items, or use a "
                "RoundRobinWriter"
            )

    def _keys(self) -> TrajectoryKeys | None:
        """The entries that divide the rows into runs that a window stays in; None for none."""
        if self.done_key is None and self.traj_key is None and self.only_named_keys:
            return None
        is_default = self.done_key is not None and as_path(self.done_key) == _DONE
        is_named = self.done_key is not None and (not is_default or self.only_named_keys)
        keys = TrajectoryKeys.chosen(self.traj_key, [self.done_key] if is_named else None, self.only_named_keys)
        if self.done_key is None or self.episode_boundary == "include_reset":
            return keys.without_ends()
        return keys.requiring(as_path(self.done_key)) if is_named else keys

    def expand(self, index: Any, info: dict[Any, Any], storage: Storage) -> tuple[Any, dict[Any, Any]]:
        anchors = _coordinates(index, storage)
        rows = anchors[0]
        count = anchors[0].size
        steps = np.arange(-self.burn_in, self.length + self.bootstrap)
        run = self._runs(anchors, storage)
        offsets = np.broadcast_to(steps * self.dilation, (count, steps.size))
        if self.episode_boundary == "stop":
            offsets = offsets - np.minimum(np.maximum(steps[-1] * self.dilation - run.after, 0), run.before)[:, None]
        inside = np.clip(offsets, -run.before[:, None], run.after[:, None])
        window_rows = run.rows_at(inside)
        length = steps.size
        entries = {
            "sequence_id": np.repeat(np.arange(count), length),
            "step_in_sequence": np.tile(np.arange(length), count),
            "learning_mask": np.tile((steps >= 0) & (steps < self.length), count),
            "validity_mask": (inside == offsets).reshape(-1),
            "anchor_index": np.repeat(np.stack(anchors, -1) if len(anchors) > 1 else rows, length, 0),
        }
        new: dict[Any, Any] = {key: _repeated(value, count, length) for key, value in info.items()}
        new |= {key: torch.from_numpy(value) for key, value in entries.items()}
        lanes = (torch.from_numpy(np.repeat(lane, length)) for lane in anchors[1:])
        places = torch.from_numpy(window_rows.reshape(-1)), *lanes
        new["index"] = places if len(anchors) > 1 else places[0]
        return new["index"], new

    def _runs(self, anchors: tuple[np.ndarray, ...], storage: Storage) -> "_Runs":
        """The runs of rows that the windows of the anchors stay in."""
        rows = anchors[0]
        index = self._trajectories(storage)
        if index is None or (self.episode_boundary == "include_reset" and not index.is_interleaved):
            filled = storage.contents.filled_rows
            before, after = storage.ring.around(rows, filled, storage.row_capacity(None))
            return _Runs(before, after, lambda offsets: (rows[:, None] + offsets) % filled)
        times, first, last = index.located(rows, lanes_of(anchors, storage.shape or ()))
        return _Runs(times - first, last - times, lambda offsets: index.rows_at(times[:, None] + offsets))

    def _trajectories(self, storage: Storage) -> Trajectories | None:
        """The index of a storage; None where nothing divides its rows."""
        keys = self._keys()
        if keys is None:
            return None
        trajectories = self._indices.get(storage)
        if trajectories is None or trajectories.keys.keys != keys:  # the attributes may be set
            trajectories = self._indices[storage] = StoredTrajectories(BoundaryKeys(keys))
        try:
            return trajectories.of(storage)
        except NoMarkersError as error:
            if self.done_key is None or self.episode_boundary == "include_reset":
                return None
            raise KeyError(f"{self.done_key!r} is not stored, which says where episodes end: {error}") from error

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "_indices"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._indices = WeakKeyDictionary()

    def __repr__(self) -> str:
        names = ["length", "episode_boundary", "done_key", "burn_in", "bootstrap", "dilation"]
        names += [name for name in ("traj_key", "only_named_keys") if getattr(self, name)]
        return f"Sequence({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"


class _Runs(NamedTuple):
    """How many rows of its run are stored before and after each anchor, [anchors], and the rows at offsets from them."""

    before: np.ndarray
    after: np.ndarray
    rows_at: Callable[[np.ndarray], np.ndarray]


def expanding(unit: Any) -> SampleUnit | None:
    """The sample unit, or None for a `Transition` and None. TypeError for anything else."""
    if unit is not None and not isinstance(unit, SampleUnit):
        raise TypeError(f"sample_unit must be a SampleUnit, got {class_of(unit)}")
    return None if type(unit) is Transition else unit


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
        anchors = anchors[valid]
        values = values[valid]
    named, group = torch.unique(anchors, dim=0, return_inverse=True)
    highest = values.new_zeros(named.shape[0]).scatter_reduce(0, group, values, "amax", include_self=False)
    return named, highest


def _coordinates(index: Any, storage: Storage) -> tuple[np.ndarray, ...]:
    """Rows and lanes, int64 [anchors] each."""
    named = index if isinstance(index, tuple) else (index,)
    if len(named) != storage.ndim:
        raise ValueError(f"the storage has {storage.ndim} item dims, the index of the anchors has {len(named)}")
    columns = (column.cpu().numpy() if isinstance(column, Tensor) else np.asarray(column) for column in named)
    return tuple(column.reshape(-1).astype(np.int64, copy=False) for column in columns)


def _repeated(value: Any, count: int, repeats: int) -> Any:
    """An entry of the info with every value `each` times, if it has one for each of `count` anchors."""
    if not isinstance(value, Tensor | np.ndarray) or value.ndim == 0 or value.shape[0] != count:
        return value
    return value.repeat_interleave(repeats, 0) if isinstance(value, Tensor) else np.repeat(value, repeats, 0)
