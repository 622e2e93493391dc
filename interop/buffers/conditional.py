"""Writing to stored items only where they are still those that were sampled."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from tensordict import is_tensor_collection
from torch import Tensor

from interop.data.keys import as_path, entries_below
from interop.storages import Storage, TensorStorage, columns
from interop.writers import Writer


@dataclasses.dataclass(frozen=True, eq=False)
class ConditionalUpdateResult:
    """What `update_if_present` did, in the order of its index; bool tensors on the CPU."""

    updated: Tensor  # [n]: which items were written
    version_rejected: Tensor | None = None  # [n]: which were there, with a version that was not older; None without one

    @property
    def updated_count(self) -> int:
        """How many items were written."""
        return int(self.updated.sum())

    @property
    def version_rejected_count(self) -> int:
        """How many items kept what they had because of their version."""
        return 0 if self.version_rejected is None else int(self.version_rejected.sum())

    @property
    def stale_count(self) -> int:
        """How many items were not there any more."""
        return self.updated.numel() - self.updated_count - self.version_rejected_count


def update_rows(
    storage: Storage,
    writer: Writer,
    index: Any,
    generation: Any,
    patch: Any,
    version_key: Any,
    version: Any,
    require_newer: bool,
) -> ConditionalUpdateResult:
    """`ReplayBuffer.update_if_present`; the lock of the storage is held."""
    storage.recover()
    if not isinstance(storage, TensorStorage):
        raise RuntimeError(f"update_if_present() needs a storage of tensors by key, got {type(storage).__name__}")
    if not writer.tracks_generations:
        raise RuntimeError(f"{type(writer).__name__} tracks no generations: build it with track_generations=True")
    storage.refuse_forked_child()
    slots, rows = _slots(index, storage)
    generation = _integers("generation", generation)
    if generation.shape != rows.shape:
        raise ValueError(f"there are {rows.numel()} indices and {generation.numel()} generations: one each is needed")
    entries = _planned(storage, patch, rows.numel())
    versions = _versions(storage, entries, version_key, version, rows.numel())
    chosen = present = (writer.generations_of(rows) == generation) & (generation >= 0) & (slots >= 0)
    rejected = None
    order = np.arange(len(slots))  # of two patches of one item the later one wins
    if versions is not None:
        held = columns.read(storage, as_path(version_key), torch.where(present, slots, 0).numpy()).reshape(-1).cpu()
        chosen = present & (versions > held if require_newer else versions >= held)
        order = np.lexsort((order, versions.numpy()))
        entries = {**entries, as_path(version_key): versions}
    winners = _last_of_each(slots, chosen, order)
    if versions is not None:
        chosen = torch.zeros_like(present)
        chosen[winners] = True
        rejected = present & ~chosen
    if len(winners):
        _write(storage, slots[winners], {key: values[winners.to(values.device)] for key, values in entries.items()})
    return ConditionalUpdateResult(chosen, rejected)


# ------------------------------------------------------------------ what is given


def _slots(index: Any, storage: TensorStorage) -> tuple[Tensor, Tensor]:
    """Flat slots, -1 for what cannot be stored, and rows, int64 [n] each, on the CPU."""
    parts = index if isinstance(index, tuple) else (index,)
    held = [_integers("index", part) for part in parts]
    if len(held) == 1 and storage.ndim > 1 and held[0].ndim == 2:
        held = list(held[0].unbind(-1))
    if len(held) != storage.ndim or any(part.ndim != 1 or part.shape != held[0].shape for part in held):
        raise ValueError(
            f"index must be [n] integers, or coordinates for {storage.ndim} item dims, got {[list(p.shape) for p in held]}"
        )
    shape = storage.shape if storage.shape is not None else torch.Size([0] * storage.ndim)
    slots, inside = torch.zeros_like(held[0]), torch.ones_like(held[0], dtype=torch.bool)
    for part, length in zip(held, shape, strict=True):
        inside &= (part >= 0) & (part < length)
        slots = slots * length + part
    return torch.where(inside, slots, -1), held[0]


def _integers(name: str, given: Any) -> Tensor:
    held = given if isinstance(given, Tensor) else torch.as_tensor(given, device="cpu")
    if not isinstance(given, Tensor) and not held.numel():
        held = held.to(torch.int64)
    if held.dtype == torch.bool or held.is_floating_point() or held.is_complex():
        raise TypeError(f"{name} must be integers, got {held.dtype}")
    return held.detach().cpu().to(torch.int64)


def _planned(storage: TensorStorage, patch: Any, count: int) -> dict[tuple[Any, ...], Tensor]:
    """The tensors to write by path, which fit."""
    if not isinstance(patch, Mapping) and not is_tensor_collection(patch):
        raise TypeError(f"patch must be a dict or tensordict of tensors by key, got {type(patch).__name__}")
    entries = dict(entries_below(patch))
    storage.refuse_edit(entries)
    for path, values in entries.items():
        held = _held(storage, path)
        if not isinstance(values, Tensor):
            raise TypeError(f"{path} must be a tensor, got {type(values).__name__}")
        wanted = (count, *held.shape[storage.ndim :])
        if tuple(values.shape) != wanted:
            raise ValueError(f"{path} must have the shape {list(wanted)} for {count} items, got {list(values.shape)}")
        if values.dtype != held.dtype:
            raise ValueError(f"{path} is stored as {held.dtype}, got {values.dtype}")
    return entries


def _versions(storage: TensorStorage, entries: Any, key: Any, version: Any, count: int) -> Tensor | None:
    """One version for each item in the dtype that is stored; None without any."""
    if (key is None) != (version is None):
        raise ValueError("version_key and version must be given together")
    if key is None:
        return None
    if as_path(key) in entries:
        raise ValueError(f"version_key {key!r} is in the patch too: give its values as version")
    held = _held(storage, as_path(key))
    if held.numel() != held.shape[: storage.ndim].numel() or held.dtype == torch.bool or held.is_complex():
        raise ValueError(
            f"version_key {key!r} must hold one number an item, it holds {list(held.shape)} of {held.dtype}"
        )
    given = version.detach().cpu() if isinstance(version, Tensor) else torch.as_tensor(version, device="cpu")
    if given.ndim and given.numel() != count:
        raise ValueError(f"version must be one number, or one for each of {count} items, got {list(given.shape)}")
    exact = given.to(held.dtype)
    if given.dtype == torch.bool or given.is_complex() or not torch.equal(exact.to(given.dtype), given):
        raise ValueError(f"version_key {key!r} holds {held.dtype}, which cannot hold the given version ({given.dtype})")
    return exact.reshape(-1).expand(count) if given.ndim == 0 else exact.reshape(-1)


def _held(storage: Storage, path: tuple[Any, ...]) -> Tensor:
    """The memory of an entry. RuntimeError where nothing is stored, or not by key."""
    held = storage.column(path)
    if held is None:
        raise RuntimeError(f"update_if_present() cannot see into a {type(storage).__name__} whose get() is replaced")
    return held


# ------------------------------------------------------------------ what is written


def _last_of_each(slots: Tensor, chosen: Tensor, order: np.ndarray) -> Tensor:
    """The chosen entries that come last in this order among those for one slot."""
    order = order[chosen.numpy()[order]][::-1]
    _, first = np.unique(slots.numpy()[order], return_index=True)
    return torch.from_numpy(order[first].copy())


def _write(storage: TensorStorage, slots: Tensor, entries: Mapping[tuple[Any, ...], Tensor]) -> None:
    """Write entries of items at different slots."""
    assert storage.shape is not None
    places = torch.unravel_index(slots, storage.shape)
    for path, values in entries.items():
        held = _held(storage, path)
        values = values.detach().to(held.device).reshape(len(slots), *held.shape[storage.ndim :])
        held[tuple(place.to(held.device) for place in places)] = values
    storage.edited(places[0].numpy())
