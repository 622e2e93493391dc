"""Slices that become stacks of frames: a batch of n items is drawn as n slices."""

from typing import Any

from interop.samplers.slices import SliceSampler


class StackSampler(SliceSampler):
    """Draws as many slices as the batch has items, for a transform that makes one item of each slice.

    A batch of the buffer of size n is n slices of `stack` steps. See `CatFrames.make_rb_transform_and_sampler`.

    Args:
        stack: steps of a slice.
        **options: as for `SliceSampler`, without `num_slices` and `slice_len`.
    """

    def __init__(self, stack: int, **options: Any) -> None:
        super().__init__(slice_len=stack, **options)

    def _shape(self, batch_size: int) -> tuple[int, int]:
        assert self.slice_len is not None
        return batch_size, self.slice_len
