"""Slices that begin with items in proportion to their priority."""

import dataclasses
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tensordict.utils import NestedKey
from torch import Tensor

from fbuf.memory_plan import Share
from interop.host.priorities import Priorities
from interop.host.trajectories import Trajectories
from interop.samplers.prioritized import PrioritizedSampler
from interop.samplers.shares import ShardContents
from interop.samplers.slice_info import DrawnSlices
from interop.samplers.slices import SliceSampler
from interop.storages import Storage


class PrioritizedSliceSampler(SliceSampler, PrioritizedSampler):
    """Draws slices of trajectories whose first items come in proportion to their priority, as in `PrioritizedSampler`.

    Items too close to the end of their trajectory to begin a slice are not drawn, whatever their priority. Each item of a
    slice has the "priority_weight" of its first one. `update_priority` sets priorities of single items. Draws cost
    O(slices * log capacity + batch).

    Args:
        max_capacity, alpha, beta, eps, dtype, reduction, max_priority_within_buffer: as for `PrioritizedSampler`.
        num_slices, slice_len, end_key, end_keys, traj_key, ends, trajectories, cache_values, truncated_key, compile,
            only_named_keys: as for `SliceSampler`.
        strict_length: False also allows the first item of each trajectory, which then comes out whole where it is shorter.
        span: on the right as for `SliceSampler`, True for all but the last item; on the left nothing, with a warning.
    """

    _allowed_for: tuple[Trajectories, int, int, int] | None  # index, need, length and time of `_items`
    _items: np.ndarray  # by slot: items of a slice from there, 0 where none begins
    _of: weakref.ref[Storage] | None  # the storage whose items have the priorities

    def __init__(
        self,
        max_capacity: int,
        alpha: float,
        beta: float,
        eps: float = 1e-8,
        dtype: torch.dtype = torch.float,
        reduction: str = "max",
        *,
        num_slices: int | None = None,
        slice_len: int | None = None,
        end_key: NestedKey | None = None,
        end_keys: Sequence[Any] | None = None,
        traj_key: NestedKey | None = None,
        ends: Tensor | None = None,
        trajectories: Tensor | None = None,
        cache_values: bool = False,
        truncated_key: NestedKey | None = ("next", "truncated"),
        strict_length: bool = True,
        compile: bool | dict[str, Any] = False,
        span: Any = False,
        max_priority_within_buffer: bool = False,
        only_named_keys: bool = False,
    ) -> None:
        SliceSampler.__init__(
            self,
            num_slices=num_slices,
            slice_len=slice_len,
            end_key=end_key,
            end_keys=end_keys,
            traj_key=traj_key,
            ends=ends,
            trajectories=trajectories,
            cache_values=cache_values,
            truncated_key=truncated_key,
            strict_length=strict_length,
            compile=compile,
            span=span,
            only_named_keys=only_named_keys,
        )
        if self.span[0]:
            warnings.warn(
                f"slices that are drawn by the priority of their start have no span on the left: {span!r} counts as 0 there",
                UserWarning,
                stacklevel=2,
            )
            self.span = (False, self.span[1])
        PrioritizedSampler.__init__(
            self,
            max_capacity,
            alpha,
            beta,
            eps,
            dtype,
            reduction,
            max_priority_within_buffer=max_priority_within_buffer,
        )

    _EXCLUDES = True

    def _replace(self, priorities: Priorities) -> None:
        super()._replace(priorities)
        self._allow_all()

    def _allow_all(self) -> None:
        self._allowed_for = None
        self._items = np.zeros(0, np.int32)

    def _forget(self) -> None:
        super()._forget()
        self._of = None
        self._allow_all()

    def _slices(self, storage: Storage, count: int, length: int, key: np.ndarray) -> DrawnSlices:
        self._bind(storage)
        index = self.trajectories(storage)
        self._candidates(index, length)
        with self._lock:
            self._prepare(storage)  # first: where the priorities move, no item is excluded any more
            self._allow(storage, index, length)
            drawn, weights, _ = self.draw_by_priority(storage, count, key)
        starts = drawn.cpu().numpy()
        times = index.times_of(starts // index.lanes)
        slices = DrawnSlices.at(index, times, starts % index.lanes, length, self._items[starts], False)
        counts = slices.row_counts()
        repeats: Any = length if counts is None else torch.from_numpy(counts).to(weights.device)
        return slices._replace(weights=weights.repeat_interleave(repeats))

    def share(self, storage: Storage, batch_size: int) -> ShardContents:
        """The sum and the smallest of (priority + eps) ** alpha over the items that can begin a slice."""
        _, length = self._shape(batch_size)
        self._bind(storage)
        with self._lock:
            if self._eligible(storage, length):
                self._prepare(storage)
                self._allow(storage, self.trajectories(storage), length)
                return dataclasses.replace(PrioritizedSampler.share(self, storage, 1), unit=length)
        return ShardContents(len(storage), 0.0, beta=self.beta, unit=length, highest=self.highest)

    def memory_shares(self, storage: Storage, capacity: int) -> list[Share]:
        priorities = PrioritizedSampler.memory_shares(self, storage, capacity)
        return [*priorities, *SliceSampler.memory_shares(self, storage, capacity)]

    def _bind(self, storage: Storage) -> None:
        """RuntimeError for another storage than the one whose items have the priorities."""
        if self._of is None:
            self._of = weakref.ref(storage)
        if self._of() is not storage:
            raise RuntimeError(
                "this sampler has the priorities of the items of another storage: give each storage a sampler of its own, "
                "or put it in by set_sampler()"
            )

    def _allow(self, storage: Storage, index: Trajectories, length: int) -> None:
        """Exclude the items that cannot begin a slice. O(rows written since the last draw + length)."""
        right = self.span[1]
        since = index.oldest
        need = min(2, length) if right is True else length - int(right)
        if self._allowed_for is not None and self._allowed_for[0] is index and self._allowed_for[1:3] == (need, length):
            since = self._allowed_for[3]
            if since == index.now:
                return
        if len(storage) > len(self._items):
            size = max(len(storage), min(2 * len(self._items), storage.max_size))
            self._items = np.append(self._items, np.ones(size - len(self._items), np.int32))
        slots, items = items_from(index, need, length, self.strict_length, since)
        changed = slots[(self._items[slots] > 0) != (items > 0)]
        self._items[slots] = items
        self._allowed_for = index, need, length, index.now
        if changed.size:
            self.exclude(changed, self._items[changed] > 0, storage)

    # ------------------------------------------------------------------ checkpoints

    def __getstate__(self) -> dict[str, Any]:
        return {
            key: value for key, value in super().__getstate__().items() if key not in ("_of", "_allowed_for", "_items")
        }

    def __repr__(self) -> str:
        return f"{SliceSampler.__repr__(self)[:-1]}, {PrioritizedSampler.__repr__(self).partition('(')[2]}"


def items_from(index: Trajectories, need: int, length: int, strict: bool, since: int) -> tuple[np.ndarray, np.ndarray]:
    """The number of items of a slice from each slot, 0 where none begins; of the slots where it may have changed.

    A slice begins where `need` stored items of a trajectory are left, which has `length` items if strict; otherwise also
    with the first stored item of a trajectory. `since` is the time of the last call. O((rows since + length) * lanes +
    trajectories).
    """
    trajectories = index.stored()
    first = np.maximum(trajectories[:, 1], index.oldest)
    stop = trajectories[:, 2] + 1
    grown = (stop > since).nonzero()[0]
    cut = (first == index.oldest).nonzero()[0]
    numbers = np.concatenate([grown, cut])
    low = np.concatenate([np.maximum(first[grown], since - length), first[cut]])
    high = np.concatenate([stop[grown], np.minimum(first[cut] + length, stop[cut])])
    count = high - low
    of = np.repeat(numbers, count)
    times = np.arange(of.size) + np.repeat(low + count - count.cumsum(), count)
    first = first[of]
    left = stop[of] - times
    allowed = (left >= need) & (left + times - first >= length) if strict else (left >= need) | (times == first)
    return index.slots_at(times, trajectories[of, 0]), np.where(allowed, np.minimum(left, length), 0)
