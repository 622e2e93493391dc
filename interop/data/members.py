"""Members of an ensemble: by an index, or by the "index" of a sample."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from tensordict import LazyStackedTensorDict, TensorDictBase
from torch import Tensor

from interop.data.arguments import class_of
from interop.data.index import as_int, as_list, as_tensor, is_all

Member = TypeVar("Member")
Whole = TypeVar("Whole")


def of_kind(name: str, members: Sequence[Any], kind: type, but_not: type | None = None) -> tuple[Any, ...]:
    """The members of an ensemble. TypeError for one of another kind, ValueError for none."""
    if not members:
        raise ValueError(f"an ensemble needs at least one {name}")
    for place, member in enumerate(members):
        if but_not is not None and isinstance(member, but_not):
            raise TypeError(f"{name} {place} is an ensemble itself: give its members instead")
        if not isinstance(member, kind):
            raise TypeError(f"{name} {place} must be a {kind.__name__}, got {class_of(member)}")
    return tuple(members)


def picked(
    index: Any, members: Sequence[Member], all_members: Whole, over: Callable[[list[int]], Whole]
) -> Member | Whole:
    """The member at an int, the whole ensemble for `:`, and `over(places)`, an ensemble of some, for any other index.

    IndexError for a tuple of several, which indexes into the members. Otherwise the errors of `named`.
    """
    if isinstance(index, tuple):
        if len(index) != 1:
            raise IndexError(f"members have one dim, got an index of {len(index)}")
        index = index[0]
    if index is Ellipsis or is_all(index):
        return all_members
    places = named(index, len(members))
    return members[places] if isinstance(places, int) else over(places)


def named(index: Any, count: int) -> int | list[int]:
    """One of `count` places for an int; a list of places for a slice, `...`, list, range, array, mask or tensor.

    IndexError out of range or for no place, TypeError for floats and other objects, RuntimeError for several dims.
    """
    single = as_int(index)
    if single is not None:
        return _in_range(single, count)
    selection: Any = slice(None) if index is Ellipsis else index
    if not isinstance(selection, slice) and (selection := as_tensor(selection)).ndim > 1:
        raise RuntimeError(f"an ensemble is indexed with one dim of members, got an index of {selection.ndim} dims")
    places = [_in_range(place, count) for place in as_list(selection, count)]
    if not places:
        raise IndexError("the index names no member, an ensemble needs at least one")
    return places


def _in_range(place: int, count: int) -> int:
    if not -count <= place < count:
        raise IndexError(f"index {place} is out of range: the ensemble has {count} members")
    return place % count


def routed(index: Any, ndims: Sequence[int]) -> Iterator[tuple[int, Tensor, Tensor]]:
    """The part of each member in the "index" of a sample: its place, the numbers of its entries, and their slots.

    Args:
        index: a tensordict with "index" and "buffer_ids", whose entries are numbered in order.
        ndims: the number of item dims of each member.

    TypeError for another index, IndexError for a member that does not exist.
    """
    start = 0
    for slots, ids in _pieces(index):
        places = ids.detach().reshape(-1).cpu()
        if not places.numel() or not slots.numel():
            continue
        if not 0 <= int(places.min()) <= int(places.max()) < len(ndims):
            raise IndexError(f"the sample is of members {places.unique().tolist()}, the ensemble has {len(ndims)}")
        ndim = ndims[int(places[0])]
        columns = slots.reshape(places.numel(), -1, ndim)
        owners = places.repeat_interleave(columns.shape[1])
        flat = columns.reshape(-1, ndim)
        for place in places.unique().tolist():
            if ndims[place] != ndim:
                raise IndexError(f"slots of {ndim} numbers were given for member {place}, which has {ndims[place]}")
            entries = (owners == place).nonzero()[:, 0]
            own = flat[entries.to(flat.device)]
            yield place, start + entries, own[:, 0] if ndim == 1 else own
        start += owners.numel()


def _pieces(index: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Slots and members as dense tensors, in parts where their shapes differ."""
    if isinstance(index, LazyStackedTensorDict):
        for part in index.unbind(0):
            yield from _pieces(part)
        return
    if not isinstance(index, TensorDictBase) or not {"index", "buffer_ids"} <= set(index.keys()):
        raise TypeError(
            'an ensemble needs the "index" that came with a sample, a tensordict of "index" and "buffer_ids"; '
            f"got {type(index).__name__}"
        )
    slots = index.get("index")
    ids = index.get("buffer_ids")
    if slots.is_nested:
        yield from zip(slots.unbind(0), ids.unbind(0), strict=True)
    else:
        yield slots, ids
