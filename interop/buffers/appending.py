"""More values behind text and ragged rows of stored items, such as the next tokens of a rollout that was interrupted."""

from collections.abc import Mapping

import numpy as np
import torch
from tensordict import is_tensor_collection
from torch import Tensor

from interop.data.index import as_int, as_list, as_tensor, in_range
from interop.data.keys import as_path, entries_below
from interop.data.layout import KeyPath
from interop.samplers import Sampler
from interop.storages import Storage, columns
from interop.storages.all_or_nothing import all_or_nothing
from interop.writers import Writer


def append_to(storage: Storage, sampler: Sampler, writer: Writer, index: object, more: object, replace: object) -> None:
    """`ReplayBuffer.append_to`; the lock of the storage is held."""
    storage.guard.recover()
    writer.refuse_write("append_to")
    storage.guard.refuse_forked_child()
    added, others = _entries("more", more), _entries("replace", {} if replace is None else replace)
    if not added:
        raise ValueError("append_to() got no entry to append to: name at least one; nothing was written")
    if both := added.keys() & others.keys():
        raise ValueError(f"{sorted(both)} are in more and in replace; nothing was written")
    places, is_single = places_of(index, storage)
    if is_single:
        added = {path: [value] for path, value in added.items()}
        others = {path: _as_batch(value) for path, value in others.items()}
    others |= _versions(storage, sampler, places, {*added, *others})
    write = storage.contents.appended(places, added, others)
    if len(places[0]):
        all_or_nothing(storage, (), write)


def _entries(name: str, given: object) -> dict[KeyPath, object]:
    if not isinstance(given, Mapping) and not is_tensor_collection(given):
        raise TypeError(f"{name} must be a dict or tensordict of values by key, got {type(given).__name__}")
    return dict(entries_below(given))


def _as_batch(value: object) -> object:
    """A value of one item as that of a batch of one."""
    return value[None] if isinstance(value, Tensor | np.ndarray) else value


def places_of(index: object, storage: Storage) -> tuple[tuple[Tensor, ...], bool]:
    """The items at an index, int64 [n] for each item dim, and whether it names one item without a dim of its own.

    IndexError out of range, TypeError for what is no index, ValueError for an item that is named twice.
    """
    if isinstance(index, tuple) and len(index) == 1:
        [index] = index
    ndim = storage.ndim
    stored = (storage.contents.filled_rows, *(storage.shape or torch.Size([0] * ndim))[1:])
    if ndim == 1:
        parts: list[object] = [index]
    elif isinstance(index, tuple):
        parts = list(index)
    else:
        parts = list(as_tensor(index).unbind(-1))
    if len(parts) != ndim:
        raise IndexError(
            f"append_to() needs coordinates for the {ndim} item dims, [n, {ndim}] or a tuple; got {len(parts)}"
        )
    singles = [as_int(part) for part in parts]
    is_single = None not in singles
    places = tuple(in_range(_numbers(part, length), length) for part, length in zip(parts, stored, strict=True))
    if len({len(place) for place in places}) != 1:
        raise IndexError(f"the coordinates of items have the lengths {[len(place) for place in places]}")
    if len(torch.unique(torch.stack(places), dim=1).T) < len(places[0]):
        raise ValueError(
            "an item is named twice by the index: append all at once, or in two calls; nothing was written"
        )
    return places, is_single


def _numbers(index: object, length: int) -> Tensor:
    """The rows of an index over `length` rows, int64 [n], which may be negative."""
    single = as_int(index)
    if single is not None:
        return torch.tensor([single], device="cpu")
    if not isinstance(index, slice | range) and as_tensor(index).ndim != 1:
        raise IndexError(f"append_to() takes an int or an index with one dim, got one with {as_tensor(index).ndim}")
    return torch.tensor(as_list(index, length), dtype=torch.int64, device="cpu")


def _versions(
    storage: Storage, sampler: Sampler, places: tuple[Tensor, ...], given: set[KeyPath]
) -> dict[KeyPath, Tensor]:
    """The versions of items that are written now, where the sampler knows such and the caller gives none."""
    found: dict[KeyPath, Tensor] = {}
    versions = {key: version for key, version in sampler.draws.versions.items() if as_path(key) not in given}
    if not versions or not len(places[0]):
        return found
    slots = _slots(storage, places)
    for key, version in versions.items():
        if columns.has(storage, key, slots[0]):
            stored = columns.read(storage, key, slots)
            found[as_path(key)] = torch.maximum(stored, torch.full_like(stored, version))
    return found


def _slots(storage: Storage, places: tuple[Tensor, ...]) -> np.ndarray:
    """The flat slots of items."""
    if storage.ndim == 1:
        return places[0].numpy()
    return np.ravel_multi_index([place.numpy() for place in places], tuple(storage.shape or ()))
