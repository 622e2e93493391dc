"""Slices of trajectories, each trajectory once before any comes again."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from fbuf.checkpoint import CheckpointMismatch
from interop.checkpoint.rule import Rule
from interop.checkpoint.stateful import Entries
from interop.data import randomness
from interop.host.trajectories import Trajectories
from interop.samplers.shares import Share
from interop.samplers.slice_info import Slices
from interop.samplers.slices import SliceSampler
from interop.samplers.without_replacement import SamplerWithoutReplacement
from interop.storages import Storage

_UNKNOWN, _OUTDATED, _RESTORED = -1, -2, -3


class SliceSamplerWithoutReplacement(SliceSampler, SamplerWithoutReplacement):
    """Draws slices like `SliceSampler`, one of each trajectory an epoch, in random order. A write begins an epoch.

    Where fewer trajectories are left than a batch has slices, the batch has these. With `strict_length` an epoch is over the
    trajectories that are long enough, RuntimeError where there are none. Another slice length begins an epoch where the
    number of these changes.

    Args:
        num_slices, slice_len, end_key, end_keys, traj_key, ends, trajectories, truncated_key, strict_length, compile,
            use_gpu: as for `SliceSampler`; ends and trajectories need nothing else.
        drop_last: leave out what is left at the end of an epoch where it is less than a batch has slices.
        shuffle: without, trajectories come in the order of the storage.
    """

    def __init__(
        self,
        *,
        num_slices: int | None = None,
        slice_len: int | None = None,
        drop_last: bool = False,
        end_key: Any = None,
        end_keys: Sequence[Any] | None = None,
        traj_key: Any = None,
        ends: Tensor | None = None,
        trajectories: Tensor | None = None,
        truncated_key: Any = ("next", "truncated"),
        strict_length: bool = True,
        shuffle: bool = True,
        compile: bool | dict[str, Any] = False,
        use_gpu: Any = False,
    ) -> None:
        SamplerWithoutReplacement.__init__(self, drop_last, shuffle)
        SliceSampler.__init__(
            self,
            num_slices=num_slices,
            slice_len=slice_len,
            end_key=end_key,
            end_keys=end_keys,
            traj_key=traj_key,
            ends=ends,
            trajectories=trajectories,
            cache_values=True,
            truncated_key=truncated_key,
            strict_length=strict_length,
            compile=compile,
            use_gpu=use_gpu,
        )

    def _forget(self) -> None:
        super()._forget()
        self._version = _UNKNOWN  # of the trajectories that the epoch is over
        self._order: np.ndarray | None = None

    def _empty(self) -> None:
        SliceSampler._empty(self)
        SamplerWithoutReplacement._empty(self)

    def mark_update(self, index: Any, *, storage: Storage | None = None) -> None:
        if self._version == _RESTORED:  # nothing was read since, by which the write would be noticed
            self._version = _OUTDATED

    def trajectories(self, storage: Storage) -> Trajectories:
        index = super().trajectories(storage)
        if self._source.version != self._version:
            if self._version not in (_UNKNOWN, _RESTORED):
                self._epoch.restart()  # reserved slices are stale: their rows may hold other items now
            self._version, self._order = self._source.version, None
        return index

    def share(self, storage: Storage, batch_size: int) -> Share:
        """The trajectories of which one slice each is drawn in an epoch."""
        return self._in_epochs(SliceSampler.share(self, storage, batch_size), self._source.version)

    @property
    def reads_to_reserve(self) -> bool:
        return True

    def catch_up(self, storage: Storage) -> None:
        with self._epoch.lock:
            self.trajectories(storage)

    def _drawn(self, storage: Storage, count: int, length: int, key: np.ndarray) -> tuple[Slices, dict[Any, Any]]:
        index = self.trajectories(storage)
        found = self._candidates(index, length)
        positions = self._take(count, len(found), key)
        if not self.shuffle:
            positions = self._in_order(index, found)[positions]
        shares = randomness.generator_of(key ^ np.uint32(0x9E3779B9)).random(positions.size)
        return self._within(index, found.take(positions, 0), shares, length), {}

    def _in_order(self, index: Trajectories, found: np.ndarray) -> np.ndarray:
        """The trajectories in the order of the storage: lane by lane, by their oldest stored row."""
        if self._order is None or self._order.size != len(found):
            self._order = np.lexsort((index.rows_at(np.maximum(found[:, 1], index.oldest)), found[:, 0]))
        return self._order

    # ------------------------------------------------------------------ checkpoints

    def _entries(self) -> dict[str, Any]:
        return {
            **SliceSampler._entries(self),
            **SamplerWithoutReplacement._entries(self),
            "outdated": self._is_outdated(),
        }

    def __getstate__(self) -> dict[str, Any]:
        version = self._version if self._version < 0 else _OUTDATED if self._is_outdated() else _RESTORED
        return {**super().__getstate__(), "_version": version}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._version = min(state["_version"], _UNKNOWN)

    def _is_outdated(self) -> bool:
        """Whether trajectories have changed since the epoch began: the next draw begins another."""
        if self._version < 0 or self.is_static:
            return self._version == _OUTDATED
        return not self._source.refresh() or self._source.version != self._version

    def _loading(self, entries: Entries, rule: Rule) -> Callable[[], None]:
        puts = SliceSampler._loading(self, entries, rule), SamplerWithoutReplacement._loading(self, entries, rule)
        outdated = entries.flag("outdated")

        def put() -> None:
            for each in puts:
                each()
            self._version = _OUTDATED if outdated else _RESTORED

        return put

    def _as_dict(self, state: dict[str, Any]) -> dict[str, Any]:
        epoch = {name: value for name, value in state.items() if name not in ("slices", "outdated")}
        return {**SamplerWithoutReplacement._as_dict(self, epoch), "_outdated": state["outdated"]}

    def _of_dict(self, given: Mapping[str, Any]) -> Any:
        if ("_outdated" in given) != ("_epoch" in given):
            raise CheckpointMismatch(f"the state is of items without replacement, not that of a {type(self).__name__}")
        rest = {key: value for key, value in given.items() if key != "_outdated"}
        epoch = SamplerWithoutReplacement._of_dict(self, rest)
        if not isinstance(epoch, dict):
            return epoch
        return {**epoch, "slices": None, "outdated": given.get("_outdated", False)}

    def __repr__(self) -> str:
        return f"{SliceSampler.__repr__(self)[:-1]}, {SamplerWithoutReplacement.__repr__(self).partition('(')[2]}"
