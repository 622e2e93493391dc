"""How many slices of which length a batch has, and how they lie in their trajectories."""

from dataclasses import dataclass
from typing import Any

from interop.data.arguments import whole


@dataclass(slots=True)
class SliceShape:
    """The parameters of `SliceSampler` with the same names; they may be set between draws.

    ValueError for a span that is no pair of bools and integers, or not shorter than a slice.
    """

    num_slices: int | None
    slice_len: int | None
    strict_length: bool
    pad_output: bool
    span: tuple[bool | int, bool | int]
    truncated_key: Any

    def __post_init__(self) -> None:
        self.span = _pair(self.span)
        if self.slice_len is not None:
            self._check_span(self.slice_len)

    def of(self, batch_size: int) -> tuple[int, int]:
        """How many slices of which length. RuntimeError where the batch cannot be made of them."""
        if self.slice_len is not None:
            if batch_size % self.slice_len:
                raise RuntimeError(f"batch_size={batch_size} is not a multiple of slice_len={self.slice_len}")
            return batch_size // self.slice_len, self.slice_len
        assert self.num_slices is not None
        if batch_size % self.num_slices:
            raise RuntimeError(f"batch_size={batch_size} is not a multiple of num_slices={self.num_slices}")
        length = batch_size // self.num_slices
        if self.span != (False, False):
            self._check_span(length)
        return self.num_slices, length

    def _check_span(self, length: int) -> None:
        if any(most is not True and most >= length for most in self.span):
            raise ValueError(f"span={self.span} must be less than the length of slices, {length}")


def _pair(span: Any) -> tuple[bool | int, bool | int]:
    if isinstance(span, tuple | list) and len(span) != 2:
        raise ValueError(f"span must be a bool, an int, or a pair of these, got {span!r}")
    left, right = span if isinstance(span, tuple | list) else (span, span)
    for most in (left, right):
        if not isinstance(most, bool):
            whole("span", most, least=0)
    return left, right
