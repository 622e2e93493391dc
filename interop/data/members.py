"""Which members of an ensemble are meant: by an index, or by the index of a sample."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDictBase
from torch import Tensor

from interop.data.class_names import class_of
from interop.data.index import as_int, as_tensor


def of_kind(name: str, given: Sequence[Any], kind: type, but_not: type | None = None) -> tuple[Any, ...]:
    """The members given; TypeError for one of another kind, ValueError for none."""
    if not given:
        raise ValueError(f"an ensemble needs at least one {name}")
    for place, member in enumerate(given):
        if not isinstance(member, kind):
            raise TypeError(f"{name} {place} must be a {kind.__name__}, got {class_of(member)}")
        if but_not is not None and isinstance(member, but_not):
            raise TypeError(f"{name} {place} is an ensemble itself: give its members instead")
    return tuple(given)


def unwrapped(index: Any, name: str) -> Any:
    """What a tuple of one holds; IndexError for longer and empty ones, which index into the members."""
    if not isinstance(index, tuple):
        return index
    if len(index) != 1:
        raise IndexError(f"{name}s have one dim, got an index of {len(index)}")
    return index[0]


def is_all(index: Any) -> bool:
    """Whether index is `:` or `...`."""
    return index is Ellipsis or (isinstance(index, slice) and index == slice(None))


def named(index: Any, count: int) -> int | list[int]:
    """One of `count` places for an int, a list of them for a slice, `...`, list, range, array, mask or tensor.

    IndexError out of range, or where none is named; TypeError for floats and for what is no index; RuntimeError for
    more than one dim.
    """
    single = as_int(index)
    if single is not None:
        return _in_range(single, count)
    if isinstance(index, slice) or index is Ellipsis:
        places = list(range(count))[slice(None) if index is Ellipsis else index]
    else:
        given = as_tensor(index)
        if given.ndim > 1:
            raise RuntimeError(f"an ensemble is indexed with one dim of members, got a tensor of {given.ndim} dims")
        if given.dtype == torch.bool:
            if given.shape[0] != count:
                raise IndexError(f"the mask has {given.shape[0]} entries, the ensemble {count} members")
            given = given.nonzero()[:, 0]
        places = [_in_range(place, count) for place in given.tolist()]
    if not places:
        raise IndexError("the index names no member, an ensemble needs at least one")
    return places


def _in_range(place: int, count: int) -> int:
    if not -count <= place < count:
        raise IndexError(f"index {place} is out of range: the ensemble has {count} members")
    return place % count


def routed(index: Any, widths: Sequence[int]) -> Iterator[tuple[int, Tensor, Tensor]]:
    """For each member that an index of samples names: its place, which of the entries are its own, and their slots.

    Args:
        index: the "index" of a sample: a tensordict with "index" and "buffer_ids", whose entries are counted in order.
        widths: for each member how many numbers make a slot, 0 where a slot is a number.

    TypeError for another index, IndexError for a member that there is not.
    """
    held: dict[int, list[tuple[Tensor, Tensor]]] = {}
    start = 0
    for slots, ids in _pieces(index):
        places = ids.detach().reshape(-1).cpu().numpy()
        if places.size == 0 or slots.numel() == 0:
            continue
        if places.min() < 0 or places.max() >= len(widths):
            wrong = places.min() if places.min() < 0 else places.max()
            raise IndexError(f"the sample is of member {wrong}, the ensemble has {len(widths)}")
        width = max(widths[places[0]], 1)
        slots = slots.reshape(places.size, -1, width)
        for place in np.unique(places).tolist():
            if max(widths[place], 1) != width:
                raise IndexError(f"slots of {width} numbers were given for member {place}, which has {widths[place]}")
            rows = np.flatnonzero(places == place)
            entries = start + (rows[:, None] * slots.shape[1] + np.arange(slots.shape[1])).reshape(-1)
            chosen = slots[torch.from_numpy(rows).to(slots.device)].reshape(-1, width)
            chosen = chosen if widths[place] else chosen[:, 0]
            held.setdefault(place, []).append((torch.from_numpy(entries), chosen))
        start += places.size * slots.shape[1]
    for place, parts in held.items():
        entries_of, slots_of = zip(*parts, strict=True)
        yield place, torch.cat(entries_of), torch.cat(slots_of)


def _pieces(index: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Slots and members, dense; the rows one by one where they are not alike."""
    if isinstance(index, LazyStackedTensorDict):
        for row in index.unbind(0):
            yield from _pieces(row)
        return
    if not isinstance(index, TensorDictBase) or not {"index", "buffer_ids"} <= set(index.keys()):
        raise TypeError(
            'an ensemble needs the "index" that came with a sample, a tensordict of "index" and "buffer_ids"; '
            f"got {type(index).__name__}"
        )
    slots, ids = index.get("index"), index.get("buffer_ids")
    if slots.is_nested:
        yield from zip(slots.unbind(0), ids.unbind(0), strict=True)
    else:
        yield slots, ids


def refuse_unstored(slots: Tensor, storage: Any, place: int) -> None:
    """IndexError for a slot past the items stored."""
    ends = [len(storage)] if storage.ndim == 1 else list(storage.shape or [])
    columns = slots[:, None] if slots.ndim == 1 else slots
    for column, end in zip(columns.unbind(-1), ends, strict=True):
        if column.numel() and int(column.max()) >= end:
            raise IndexError(f"slot {int(column.max())} is out of range: member {place} has {end} of them stored")
