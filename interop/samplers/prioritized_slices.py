"""Slices that begin with items in proportion to their priority."""

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from tensordict.utils import NestedKey
from torch import Tensor

from interop.samplers.item_priorities import ItemPriorities
from interop.samplers.prioritized import PrioritizedSampler
from interop.samplers.priority_slice_draws import PrioritySliceDraws
from interop.samplers.slice_draws import SliceDraws
from interop.samplers.slices import SliceSampler


class PrioritizedSliceSampler(SliceSampler, PrioritizedSampler):
    """Draws slices of trajectories whose first items come in proportion to their priority, as in `PrioritizedSampler`.

    Items too close to the end of their trajectory to begin a slice are not drawn, whatever their priority. Each item of a
    slice has the "priority_weight" of its first one. `update_priority` sets priorities of single items. Draws cost
    O(slices * log capacity + batch).

    Args:
        max_capacity, alpha, beta, eps, dtype, reduction, max_priority_within_buffer: as for `PrioritizedSampler`.
        num_slices, slice_len, end_key, end_keys, traj_key, ends, trajectories, cache_values, truncated_key, init_key,
            compile, only_named_keys: as for `SliceSampler`.
        strict_length: False also allows the first item of each trajectory, which then comes out whole where it is shorter.
        span: on the right as for `SliceSampler`, True for all but the last item; on the left nothing, with a warning.
    """

    _EXCLUDES = True
    _library_draws: SliceDraws
    _library_values: ItemPriorities

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
        init_key: NestedKey | None = "is_init",
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
            init_key=init_key,
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
        source = self._library_draws.source
        shape = self._library_draws.shape
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
        self._library_draws = PrioritySliceDraws(source, shape, self._library_values)

    def __rich_repr__(self) -> Iterator[tuple[str, object]]:
        yield from SliceSampler.__rich_repr__(self)
        yield from PrioritizedSampler.__rich_repr__(self)
