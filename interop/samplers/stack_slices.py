"""Slices that become stacks of frames: a batch of n items is drawn as n slices."""

from collections.abc import Sequence
from typing import Any

import torch
from tensordict.utils import NestedKey
from torch import Tensor

from interop.samplers.slice_draws import SliceShape
from interop.samplers.slices import SliceSampler


class StackShape(SliceShape):
    """As many slices as the batch has items."""

    def of(self, batch_size: int) -> tuple[int, int]:
        assert self.slice_len is not None
        return batch_size, self.slice_len


class StackSampler(SliceSampler):
    """Draws as many slices as the batch has items, for a transform that makes one item of each slice.

    A batch of the buffer of size n is n slices of `stack` steps. See `CatFrames.make_rb_transform_and_sampler`.

    Args:
        stack: steps of a slice.

    The other arguments are those of `SliceSampler`.
    """

    _SHAPE = StackShape

    def __init__(
        self,
        stack: int,
        *,
        end_key: NestedKey | None = None,
        end_keys: Sequence[Any] | None = None,
        traj_key: NestedKey | None = None,
        ends: Tensor | None = None,
        trajectories: Tensor | None = None,
        cache_values: bool = False,
        truncated_key: NestedKey | None = ("next", "truncated"),
        strict_length: bool = True,
        pad_output: bool = False,
        compile: bool | dict[str, Any] = False,
        span: bool | int | Sequence[bool | int] = False,
        use_gpu: bool | torch.device | str | None = False,
        only_named_keys: bool = False,
    ) -> None:
        super().__init__(
            slice_len=stack,
            end_key=end_key,
            end_keys=end_keys,
            traj_key=traj_key,
            ends=ends,
            trajectories=trajectories,
            cache_values=cache_values,
            truncated_key=truncated_key,
            strict_length=strict_length,
            pad_output=pad_output,
            compile=compile,
            span=span,
            use_gpu=use_gpu,
            only_named_keys=only_named_keys,
        )
