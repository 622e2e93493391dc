"""Slices of trajectories, each trajectory once before any comes again."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from tensordict.utils import NestedKey
from torch import Tensor

from interop.data import randomness
from interop.host.epochs import Epoch, EpochState
from interop.host.trajectories import Trajectories
from interop.samplers.shares import ShardContents
from interop.samplers.slice_info import DrawnSlices
from interop.samplers.slices import SliceSampler
from interop.samplers.without_replacement import SamplerWithoutReplacement
from interop.storages import Storage


class SliceSamplerWithoutReplacement(SliceSampler, SamplerWithoutReplacement):
    """Draws slices like `SliceSampler`, one of each trajectory an epoch, in random order. A write begins an epoch.

    A batch is shorter where fewer trajectories are left than it has slices. With `strict_length` an epoch is over the
    trajectories that are long enough, RuntimeError where there are none. Another slice length begins an epoch where the
    number of these changes.

    Args:
        num_slices, slice_len, end_key, end_keys, traj_key, ends, trajectories, truncated_key, strict_length, compile,
            use_gpu, only_named_keys: as for `SliceSampler`; ends and trajectories need nothing else.
        drop_last: leave out the last trajectories of an epoch where they are fewer than a batch has slices.
        shuffle: False draws trajectories in the order of the storage.
    """

    _version: int | None  # of the trajectories of this epoch; None before the first draw
    _order: np.ndarray | None

    def __init__(
        self,
        *,
        num_slices: int | None = None,
        slice_len: int | None = None,
        drop_last: bool = False,
        end_key: NestedKey | None = None,
        end_keys: Sequence[Any] | None = None,
        traj_key: NestedKey | None = None,
        ends: Tensor | None = None,
        trajectories: Tensor | None = None,
        truncated_key: NestedKey | None = ("next", "truncated"),
        strict_length: bool = True,
        shuffle: bool = True,
        compile: bool | dict[str, Any] = False,
        use_gpu: Any = False,
        only_named_keys: bool = False,
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
            only_named_keys=only_named_keys,
        )

    def _forget(self) -> None:
        super()._forget()
        self._version = None
        self._order = None

    def mark_update(self, index: Any, *, storage: Storage | None = None) -> None:
        if self._version is None:  # a write between a load and the next draw, which no version shows
            self._epoch.restart()

    def trajectories(self, storage: Storage) -> Trajectories:
        index = super().trajectories(storage)
        if self._source.version != self._version:
            if self._version is not None:
                self._epoch.begin_anew()  # reserved slices are stale: their rows may hold other items now
            self._order = None
            self._version = self._source.version
        return index

    def share(self, storage: Storage, batch_size: int) -> ShardContents:
        """The trajectories of which one slice each is drawn in an epoch."""
        return self._in_epochs(super().share(storage, batch_size), self._source.version)

    @property
    def reads_to_reserve(self) -> bool:
        return True

    def catch_up(self, storage: Storage) -> None:
        with self._epoch.lock:
            self.trajectories(storage)

    def _slices(self, storage: Storage, count: int, length: int, key: np.ndarray) -> DrawnSlices:
        index = self.trajectories(storage)
        trajectories = self._candidates(index, length)
        positions = self._take(count, len(trajectories), key)
        if not self.shuffle:  # lane by lane, by the oldest stored row
            if self._order is None or self._order.size != len(trajectories):
                self._order = np.lexsort(
                    (index.rows_at(np.maximum(trajectories[:, 1], index.oldest)), trajectories[:, 0])
                )
            positions = self._order[positions]
        shares = randomness.generator_of(key ^ np.uint32(0x9E3779B9)).random(positions.size)
        return self._within(index, trajectories.take(positions, 0), shares, length)

    # ------------------------------------------------------------------ checkpoints

    def _epoch_state(self) -> EpochState:
        """The state of a new epoch where trajectories have changed since the last draw."""
        state = super()._epoch_state()
        version = self._version
        if version is None or (self._source.refresh() and self._source.version == version):
            return state
        return state._replace(position=0, over=False)

    def __getstate__(self) -> dict[str, Any]:
        epoch = Epoch(self.shuffle, self.drop_last)
        epoch.with_state(self._epoch_state())
        return {**super().__getstate__(), "_epoch": epoch}

    def __repr__(self) -> str:
        return f"{SliceSampler.__repr__(self)[:-1]}, {SamplerWithoutReplacement.__repr__(self).partition('(')[2]}"
