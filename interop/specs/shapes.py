"""Shape functions for specs. A size of -1 is a dynamic dim: it differs between values."""

import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Size, Tensor


def as_shape(given: Any) -> Size:
    """A shape from an int or a sequence of ints. TypeError for anything else, ValueError for a size below -1."""
    if type(given) is Size:
        return given
    try:
        sizes = [operator.index(given)] if hasattr(given, "__index__") else [operator.index(each) for each in given]
    except TypeError:
        raise TypeError(f"a shape is an int or a sequence of ints, got {given!r}") from None
    if any(size < -1 for size in sizes):
        raise ValueError(f"sizes are at least 0, or -1 for a dynamic one, got {sizes}")
    return Size(sizes)


def of_arguments(given: Sequence[Any]) -> Size:
    """The shape from a method's arguments: one sequence, or one size per argument."""
    return as_shape(given[0] if len(given) == 1 and not hasattr(given[0], "__index__") else given)


def leading(shape: Any) -> Size:
    """Leading dims for values. TypeError for an int, which could mean a size or a number of values."""
    if shape is None:
        return Size()
    if hasattr(shape, "__index__"):
        raise TypeError(f"the leading dims must be a sequence of sizes, got {shape!r}: write ({shape},)")
    return as_shape(shape)


def concrete(shape: Sequence[int]) -> Size:
    """The shape with 1 for each dynamic dim."""
    return Size([1 if size == -1 else size for size in shape]) if -1 in shape else Size(shape)


def fits(shape: Size, value: Size) -> bool:
    """Whether a value's shape, without leading dims, matches the shape of a spec."""
    tail = value[len(value) - len(shape) :] if len(value) >= len(shape) else None
    return tail == shape or (
        -1 in shape and tail is not None and all(want in (-1, got) for want, got in zip(shape, tail, strict=True))
    )


def dim_of(dim: int, ndim: int) -> int:
    """The non-negative number of a dim. IndexError if it is out of range."""
    if not -ndim <= dim < ndim:
        raise IndexError(f"Dimension out of range (expected to be in range of [{-ndim}, {ndim - 1}], but got {dim})")
    return dim % ndim


def expanded(shape: Size, new: Size) -> Size:
    """The shape after `expand`. ValueError if an existing size other than 1 changes."""
    tail = new[len(new) - len(shape) :] if len(new) >= len(shape) else None
    if tail is None or any(size not in (old, -1 if old == -1 else size if old == 1 else old)
                           for old, size in zip(shape, tail, strict=True)):  # fmt: skip
        text = (
            f"The last {len(shape)} of the expanded shape {list(new)} must match the shape of the spec, {list(shape)}"
        )
        raise ValueError(f"{text}: only a size of 1 can be expanded")
    return new


def unsqueezed(shape: Size, dim: int) -> Size:
    """The shape with a new dim of size 1."""
    ndim = len(shape)
    if not -ndim - 1 <= dim <= ndim:
        raise ValueError(f"Dimension out of range, expected value in the range [{-ndim - 1}, {ndim}], got {dim}")
    at = dim % (ndim + 1)
    return Size([*shape[:at], 1, *shape[at:]])


def squeezed(shape: Size, dim: int | None) -> Size:
    """The shape after `squeeze` of one dim, or of all dims of size 1; without `dim`, [1] stays [1]."""
    if dim is None:
        return shape if list(shape) == [1] else Size([size for size in shape if size != 1])
    at = dim_of(dim, len(shape))
    return without(shape, at) if shape[at] == 1 else shape


def without(shape: Size, at: int) -> Size:
    """The shape without a dim."""
    return Size([*shape[:at], *shape[at + 1 :]])


def reshaped(shape: Size, new: Size) -> Size:
    """The shape after `reshape`; one -1 is inferred. RuntimeError if the number of elements differs."""
    if new == shape:
        return new
    items, known = math.prod(concrete(shape)), math.prod(size for size in new if size != -1)
    if new.count(-1) == 1 and -1 not in shape and known and items % known == 0:
        return Size([items // known if size == -1 else size for size in new])
    if sorted(size for size in shape if size == -1) != [size for size in new if size == -1] or (
        items != math.prod(concrete(new))
    ):
        raise RuntimeError(f"a spec of shape {list(shape)} cannot be reshaped to {list(new)}")
    return new


def flattened(shape: Size, start: int, end: int) -> Size:
    """The shape after `flatten`: dims `start` to `end` become one."""
    if not shape:
        return Size([1])
    first, last = dim_of(start, len(shape)), dim_of(end, len(shape))
    if first > last:
        raise ValueError(f"flatten needs start_dim <= end_dim, got {start} and {end}")
    middle = shape[first : last + 1]
    return Size([*shape[:first], -1 if -1 in middle else math.prod(middle), *shape[last + 1 :]])


def unflattened(shape: Size, dim: int, sizes: Sequence[int]) -> Size:
    """The shape after `unflatten`: one dim becomes several."""
    at = dim_of(dim, len(shape))
    return Size([*shape[:at], *reshaped(Size([shape[at]]), as_shape(sizes)), *shape[at + 1 :]])


# ---------------------------------------------------------------------- indices


def normalized(shape: Size, index: Any) -> tuple[Any, ...]:
    """Normalize an index to a tuple with one element per dim, and None for new dims; ranges and lists become arrays.

    IndexError for an index that is out of range, has too many elements, or contains bools or strings.
    """
    parts = [_part(each) for each in (index if isinstance(index, tuple) else (index,))]
    used = sum(dims_of(each) for each in parts if each is not Ellipsis)
    if sum(each is Ellipsis for each in parts) > 1:
        raise IndexError("an index can only have a single ellipsis ('...')")
    if used > len(shape):
        raise IndexError(f"too many indices: the shape {list(shape)} has {len(shape)} dims, {used} were indexed")
    rest = [slice(None)] * (len(shape) - used)
    at = next((place for place, each in enumerate(parts) if each is Ellipsis), None)
    return (*parts, *rest) if at is None else (*parts[:at], *rest, *parts[at + 1 :])


def _part(part: Any) -> Any:
    if part is None or part is Ellipsis or isinstance(part, slice):
        return part
    if isinstance(part, Tensor):
        part = part.cpu().numpy()
    elif isinstance(part, range | list | tuple):
        if any(isinstance(each, bool | str) for each in _flat(part)):
            raise IndexError(f"indices are integers, got {part!r}")
        part = np.asarray(part if len(part) else [], dtype=np.int64)
    elif isinstance(part, bool | str) or not (isinstance(part, np.ndarray) or hasattr(part, "__index__")):
        raise IndexError(f"an index is made of integers, slices, ranges, lists, arrays, None and '...', got {part!r}")
    if not isinstance(part, np.ndarray):
        return operator.index(part)
    if part.dtype.kind not in "iub":
        raise IndexError(f"index arrays hold integers, got {part.dtype}")
    return int(part) if not part.ndim else part


def _flat(values: Iterable[Any]) -> Iterable[Any]:
    for each in values:
        if isinstance(each, list | tuple | range):
            yield from _flat(each)
        else:
            yield each


def indexed(shape: Size, index: tuple[Any, ...]) -> Size:
    """The shape after indexing with a normalized index, with torch's rules."""
    if -1 not in shape:
        return _shape_of(shape, index)
    index = first_of_dynamic(shape, index)
    one, two = (_shape_of(Size([each if size == -1 else size for size in shape]), index) for each in (1, 2))
    return Size([-1 if a != b else a for a, b in zip(one, two, strict=True)])


def first_of_dynamic(shape: Size, index: tuple[Any, ...]) -> tuple[Any, ...]:
    """The index with integers at dynamic dims replaced by 0. IndexError for anything else there but ':'."""
    at, parts = 0, []
    for part in index:
        is_dynamic = part is not None and shape[at] == -1
        if is_dynamic and not isinstance(part, int) and not (isinstance(part, slice) and part == slice(None)):
            raise IndexError(f"dim {at} is dynamic (-1): it takes an integer or ':', for its size is not known")
        parts.append(0 if is_dynamic and isinstance(part, int) else part)
        at += dims_of(part)
    return tuple(parts)


def dims_of(part: Any) -> int:
    """The number of dims that an element of an index consumes."""
    is_mask = isinstance(part, np.ndarray | Tensor) and part.dtype in (np.bool_, torch.bool)
    return part.ndim if is_mask else 0 if part is None else 1


def _shape_of(shape: Size, index: tuple[Any, ...]) -> Size:
    whole: np.ndarray = np.ndarray(
        tuple(shape), np.int8, b"0", strides=(0,) * len(shape)
    )  # one byte of memory for any shape
    return Size(_index_array(whole, index).shape)


def _index_array(whole: np.ndarray, index: tuple[Any, ...]) -> np.ndarray:
    """Index an array with torch's order of dims: integers are applied before arrays."""
    if any(isinstance(part, np.ndarray) for part in index):
        first: list[Any] = []
        for part in index:
            first += [part] if isinstance(part, int) else [slice(None)] * dims_of(part)
        whole, index = whole[tuple(first)], tuple(part for part in index if not isinstance(part, int))
    return whole[index]


def select(tensor: Tensor, index: tuple[Any, ...]) -> Tensor:
    """Apply a normalized index to the first dims of a tensor."""
    if not any(isinstance(part, np.ndarray) or (isinstance(part, slice) and (part.step or 1) < 0) for part in index):
        return tensor[index]
    ndim = sum(map(dims_of, index))
    places = _index_array(np.arange(tensor.shape[:ndim].numel()).reshape(tensor.shape[:ndim]), index)
    return tensor.flatten(0, ndim - 1)[torch.as_tensor(places.copy(), device=tensor.device)]
