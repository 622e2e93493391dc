"""Rows of tensors as the bytes that NumPy sees: copied at the speed of memory, compared bit for bit, in threads."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from fbuf.checkpoint.files import at_once
from interop.data.nested_tensors import of_buffer

_HUGE = 1 << 22  # bytes; for less NumPy takes no huge pages, and a thread costs more than it saves
_PIECE = 1 << 19  # bytes that stay in a cache while they are compared

T = TypeVar("T")


def fresh(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Uninitialized memory on the CPU, by NumPy in huge pages: their first touch takes a third of the time."""
    count = math.prod(shape)
    if count * dtype.itemsize < _HUGE:
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")
    return torch.from_numpy(np.empty(count * dtype.itemsize, np.uint8)).view(dtype).view(tuple(shape))


def fresh_zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros on the CPU, in pages that are touched at the first write."""
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(tuple(shape))


def dense(tensor: Tensor) -> Tensor:
    """The values on the CPU, contiguous; without a copy where they are so already."""
    return tensor.resolve_conj().resolve_neg().cpu().contiguous()


def flags(tensor: Tensor) -> Tensor:
    """Whether values are not zero, on the CPU; it may share the memory of `tensor`."""
    values = dense(tensor)
    return values if values.dtype == torch.bool else values != 0


def rows_as_values(tensor: Tensor, dims: int) -> np.ndarray:
    """A view of a dense tensor with `dims` batch dims: each row as one value, [rows]. Rows need a byte or more."""
    raw = _bytes(tensor, dims)
    return raw.view(f"V{raw.shape[1]}").reshape(-1)


def words(tensor: Tensor, dims: int) -> np.ndarray:
    """A view of a dense tensor with `dims` batch dims: its bits as integers, [rows, n]."""
    raw = _bytes(tensor, dims)
    width = next((width for width in (8, 4, 2) if raw.shape[1] % width == 0), 1)
    return raw.view(f"i{width}")


def first_apart(one: Tensor, another: Tensor, passed: np.ndarray) -> int | None:
    """The first row where two tensors of one shape and dtype differ in a bit; rows of `passed`, ascending, may differ."""
    for (start, piece), (_, other) in zip(_pieces(one), _pieces(another), strict=True):
        differs = piece != other
        first, last = np.searchsorted(passed, (start, start + len(piece)))
        differs[passed[first:last] - start] = False
        if differs.any():
            return start + int(differs.any(1).argmax())
    return None


def first_set(rows: Tensor) -> int | None:
    """The first row with a bit that is not zero."""
    return next((start + int(piece.any(1).argmax()) for start, piece in _pieces(rows) if piece.any()), None)


def sizes(lengths: Tensor, item: tuple[int, ...]) -> Tensor:
    """The shapes of the components of a nested tensor, [trajectories, dims]."""
    items = torch.tensor([item], dtype=torch.int64, device="cpu").expand(len(lengths), -1)
    return torch.cat((lengths[:, None], items), 1)


def nested(memory: Tensor, shapes: Tensor) -> Tensor:
    """A nested tensor that shares memory, [rows of all components, ...]."""
    return of_buffer(memory.reshape(-1), shapes)


def components(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of all components of a nested tensor, [rows, ...], and how many each has. Shares memory where it can."""
    if tensor.layout == torch.strided and tensor.size(0) and tensor.is_contiguous():
        shapes = tensor._nested_tensor_size()  # noqa: SLF001  (`unbind` takes microseconds for each component)
        if (shapes[:, 1:] == shapes[0, 1:]).all():
            rows = int(shapes[:, 0].sum())
            item = shapes[0, 1:].tolist()
            return tensor.values()[: rows * math.prod(item)].view(rows, *item), shapes[:, 0]
    parts = tensor.unbind(0)
    if len({part.shape[1:] for part in parts}) > 1:
        raise ValueError("trajectories have rows of different shapes")
    return torch.cat(parts), torch.tensor(list(map(len, parts)), dtype=torch.int64, device="cpu")


def side_by_side(works: Sequence[Callable[[], T]], size: int) -> list[T]:
    """The results of functions that read or write `size` bytes together, in as many threads as torch has."""
    count = min(torch.get_num_threads(), len(works))
    return [work() for work in works] if count < 2 or size < _HUGE else at_once(works, count)


def _pieces(rows: Tensor) -> Iterator[tuple[int, np.ndarray]]:
    """The words of rows in pieces, with the first row of each. Nothing where rows have no bytes."""
    step = max(1, _PIECE * len(rows) // max(rows.nbytes, 1))
    in_place = rows.device.type == "cpu" and rows.is_contiguous()
    all_words = words(dense(rows), 1) if in_place else None
    for start in range(0, len(rows) if rows.nbytes else 0, step):
        yield (
            start,
            words(dense(rows[start : start + step]), 1) if all_words is None else all_words[start : start + step],
        )


def _bytes(tensor: Tensor, dims: int) -> np.ndarray:
    raw: np.ndarray = tensor.reshape(-1).view(torch.uint8).numpy()
    count = tensor.shape[:dims].numel()
    return raw.reshape(count, raw.size // max(count, 1))
