"""Slices of trajectories, each trajectory once before any comes again."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from interop import randomness
from interop.samplers.slices import SliceSampler
from interop.samplers.without_replacement import SamplerWithoutReplacement
from interop.storages import Storage


class SliceSamplerWithoutReplacement(SliceSampler, SamplerWithoutReplacement):
    """Draws slices like `SliceSampler`, one of each trajectory an epoch, in random order. A write begins an epoch.

    Where fewer trajectories are left than a batch has slices, the batch has these. With `strict_length` trajectories that
    are too short take part, and are left out of the batch they come in; where it has no others, RuntimeError: they have had
    their turn then.

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
        self._version = -1  # of the trajectories that the epoch is over
        self._order: np.ndarray | None = None

    def _empty(self) -> None:
        SliceSampler._empty(self)
        SamplerWithoutReplacement._empty(self)

    def _synced(self, storage: Storage) -> None:
        super()._synced(storage)
        if self._index.version != self._version:
            if self._version != -1:
                self._epoch.restart()
            self._version, self._order = self._index.version, None

    def _windows(self, count: int, length: int, key: Any) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
        found = self._index.trajectories(1)
        self._epoch.check(count, len(found))
        key = randomness.key(self._rng) if key is None else key
        positions = self._epoch.take(count, len(found), key)
        if not self.shuffle:
            positions = self._in_order(found)[positions]
        chosen = found.take(positions, 0)
        if self.strict_length:
            long_enough = chosen[:, 2] - np.maximum(chosen[:, 1], self._index.oldest) >= length - 1
            if not long_enough.all():
                chosen = chosen[long_enough]
                chosen = chosen[self._index.order_of(chosen)]
            if not len(chosen):
                raise RuntimeError(
                    f"the batch has only trajectories shorter than its slices, {length}: use shorter slices, or "
                    "strict_length=False"
                )
        return self._within(chosen, randomness.uniforms(len(chosen), None, key ^ np.uint32(0x9E3779B9)), length)

    def _in_order(self, found: np.ndarray) -> np.ndarray:
        """The trajectories in the order of the storage."""
        if self._order is None:
            self._order = self._index.order_of(found)
        return self._order

    def __repr__(self) -> str:
        return f"{SliceSampler.__repr__(self)[:-1]}, {SamplerWithoutReplacement.__repr__(self).partition('(')[2]}"
