"""Indices that users pass: ints, slices, masks, arrays and tensors, over rows and lanes."""

import math
import operator
from typing import Any

import numpy as np
import torch
from torch import Tensor


def as_int(index: Any) -> int | None:
    """A Python int for ints, NumPy ints and 0-d integer tensors; None for any other index."""
    if isinstance(index, int | np.integer) and not isinstance(index, bool | np.bool_):
        return int(index)
    if isinstance(index, Tensor | np.ndarray) and index.ndim == 0 and _integral(index):
        return int(index.item())
    return None


def as_list(index: Any, length: int) -> list[int]:
    """The places of a slice, range, list, array, mask or tensor over `length` items. TypeError for floats."""
    if isinstance(index, slice):
        return list(range(*index.indices(length)))
    if isinstance(index, range):
        return list(index)
    tensor = as_tensor(index)
    if tensor.dtype == torch.bool:
        if tensor.shape != (length,):
            raise IndexError(f"the mask has shape {list(tensor.shape)}, there are {length} items")
        tensor = tensor.nonzero()
    return tensor.reshape(-1).tolist()


def as_tensor(index: Any) -> Tensor:
    """An int64 or bool tensor for a list, range, array or tensor. TypeError for anything else, floats included."""
    if not isinstance(index, Tensor | np.ndarray | list | range):
        raise TypeError(f"cannot index with {type(index).__name__}")
    tensor = index if isinstance(index, Tensor) else torch.as_tensor(np.asarray(index, order="C"), device="cpu")
    if tensor.numel() == 0 and (tensor.is_floating_point() or not isinstance(index, Tensor)):
        return tensor.to(torch.int64)  # such as torch.tensor([]): an index of nothing has no dtype of its own
    if tensor.dtype == torch.bool and tensor.ndim:
        return tensor
    if _integral(tensor):
        return tensor.to(torch.int64)
    raise TypeError(f"an index must be of integers, or of a bool for each row, got {tensor.dtype}: {index!r}")


def is_basic(index: Any) -> bool:
    """Whether indexing with it gives a view: ints, slices, Ellipsis, None and tuples of them."""
    if isinstance(index, tuple):
        return all(is_basic(part) for part in index)
    return index is Ellipsis or index is None or isinstance(index, slice) or as_int(index) is not None


def spelled_out(index: tuple[Any, ...], dims: int) -> tuple[Any, ...]:
    """The index with slices in the place of its Ellipsis, for an array whose first `dims` dims are indexed."""
    at = [place for place, part in enumerate(index) if part is Ellipsis]
    if len(at) != 1:
        return index
    used = sum(part.ndim if _is_mask(part) else 1 for part in index if part is not None and part is not Ellipsis)
    return (*index[: at[0]], *(slice(None) for _ in range(dims - used)), *index[at[0] + 1 :])


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor | np.ndarray) and index.dtype in (torch.bool, np.bool_)


def indexed(shape: tuple[int, ...], index: Any) -> tuple[int, ...]:
    """The shape that an index gives on an array of `shape`. IndexError out of range, except for an int."""
    if isinstance(index, int):
        return shape[1:]
    if isinstance(index, slice):
        return (len(range(*index.indices(shape[0]))), *shape[1:])
    if isinstance(index, Tensor) and index.dtype == torch.int64:  # torch would gather, in threads
        return (*in_range(index, shape[0]).shape, *shape[1:])
    return tuple(torch.empty((), dtype=torch.bool, device="cpu").expand(shape)[index].shape)


def in_range(index: Tensor, filled: int, capacity: int | None = None) -> Tensor:
    """The index without negative entries, which count from the end of the filled rows. IndexError out of range.

    The range ends with the filled rows or, where `capacity` is given, with all rows.
    """
    if index.numel():
        low, high = torch.aminmax(index)
        end = filled if capacity is None else capacity
        if high >= end or low < -filled:
            wrong = int(high) if high >= end else int(low)
            raise IndexError(f"index {wrong} is out of range: {filled} rows are stored")
        if low < 0:
            index = torch.where(index < 0, index + filled, index)
    return index


# ------------------------------------------------------------------ where to write


def resolved(index: Any, filled: int, end: int, lead: tuple[int, ...]) -> Any:
    """The places of an index over [rows, *lanes] = `lead`: rows alone, or a tuple of rows and lanes.

    Rows become an int, a slice or an int64 tensor on the CPU, without negative numbers, which count from the end of the
    filled rows. They may lie beyond the filled rows; a slice without a stop ends at `end`. IndexError out of range,
    TypeError for what is no index.
    """
    if isinstance(index, int) and not isinstance(index, bool):
        return _row(index, filled, lead[0])
    first, *rest = spelled_out((index or (Ellipsis,)) if isinstance(index, tuple) else (index,), len(lead))
    rows: tuple[Any, ...]
    if isinstance(first, slice):
        start = _bound(first.start, 0, filled)
        stop = _bound(first.stop, end, filled)
        rows = (slice(min(start, lead[0]), min(stop, lead[0]), first.step),)
    elif (single := as_int(first)) is not None:
        rows = (_row(single, filled, lead[0]),)
    else:
        place = as_tensor(first).cpu()
        if place.dtype == torch.bool:
            if place.shape[0] not in (filled, lead[0]) or place.shape[1:] != lead[1 : place.ndim]:
                raise IndexError(
                    f"the mask has shape {list(place.shape)}, {filled} rows are stored; nothing was written"
                )
            rows = place.nonzero(as_tuple=True)
        else:
            rows = (in_range(place, filled, lead[0]),)
    places = (*rows, *(_lane(part) for part in rest))
    if any(isinstance(lane, int) for lane in places) and any(isinstance(lane, Tensor) for lane in places):
        # NumPy and torch order the dims of such an index differently, those of coordinates alike.
        return torch.unravel_index(torch.from_numpy(slots_of_places(places, lead[1:])), lead)
    return places if len(places) > 1 else places[0]


def _lane(index: Any) -> Any:
    single = as_int(index)
    return single if single is not None else index if is_basic(index) else as_tensor(index).cpu()


def _row(row: int, filled: int, capacity: int) -> int:
    if not -filled <= row < capacity:
        raise IndexError(f"index {row} is out of range for {filled} rows; nothing was written")
    return row + filled if row < 0 else row


def _bound(bound_value: Any, default: int, filled: int) -> int:
    bound = default if bound_value is None else operator.index(bound_value)
    return max(bound + filled, 0) if bound < 0 else bound


def reach(places: Any, filled: int) -> tuple[int, bool]:
    """One past the last row of resolved places, and whether they cover all rows from `filled` to there, in all lanes."""
    if isinstance(places, int):
        return places + 1, places <= filled
    rows = places[0] if isinstance(places, tuple) else places
    if isinstance(rows, Tensor):
        stop = int(rows.max()) + 1 if rows.numel() else 0
        new = rows[rows >= filled].unique().numel() if stop > filled else 0
    else:
        named = range(rows, rows + 1) if isinstance(rows, int) else range(rows.start, rows.stop, rows.step or 1)
        stop = named[-1] + 1 if named else 0
        new = min(len(named), (stop - 1 - filled) // named.step + 1) if stop > filled else 0
    return stop, stop <= filled or (new == stop - filled and whole_rows(places))


def whole_rows(places: Any) -> bool:
    """Whether resolved places have all lanes of their rows."""
    return all(map(is_all, places[1:] if isinstance(places, tuple) else ()))


def is_all(index: Any) -> bool:
    """Whether an index is `:`."""
    return isinstance(index, slice) and index == slice(None)


def slots_of_places(places: Any, lanes: tuple[int, ...]) -> np.ndarray:
    """The flat slots of resolved places over [rows, *lanes], in the shape of data there. O(rows)."""
    first, *rest = places if isinstance(places, tuple) else (places,)
    if isinstance(first, slice):
        rows = torch.arange(first.start, max(first.start, first.stop), first.step or 1, device="cpu")
        local: Any = slice(None)
    else:
        named = torch.as_tensor(first, device="cpu")
        rows = named.reshape(-1)
        local = torch.arange(named.numel(), device="cpu").reshape(named.shape)
    per_row = math.prod(lanes)
    slots = rows.reshape(-1, *(1 for _ in lanes)) * per_row + torch.arange(per_row, device="cpu").reshape(lanes)
    return slots[(local, *rest)].numpy()


def _integral(index: Any) -> bool:
    if isinstance(index, np.ndarray):
        return bool(np.issubdtype(index.dtype, np.integer))
    return not (index.is_floating_point() or index.is_complex() or index.dtype == torch.bool)
