"""Writing to stored items only where they are still those that were sampled."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from tensordict import is_tensor_collection
from torch import Tensor

from interop.buffers.turn import turn
from interop.data.keys import as_path, entries_below
from interop.host.device_rows import JaxRows
from interop.storages import Storage, TensorStorage, columns


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


def update_if_present(
    self: Any,
    *,
    index: Any,
    generation: Any,
    patch: Any,
    version_key: Any = None,
    version: Any = None,
    require_newer: bool = False,
) -> ConditionalUpdateResult:
    """Write entries of stored items, where the rows still hold what they held at these generations.

    Several rows of the patch may be for one item: the last wins, or with versions the one of the highest version. Needs a
    writer with `track_generations=True`. What is written is what is stored: transforms are not run. O(items).

    Args:
        index: of the items, as from `extend` or in a sample under "index": [n], or coordinates [n, ndim] or a tuple.
        generation: of their rows, [n], as in a sample under "index_generation".
        patch: a dict or tensordict of tensors [n, ...] by key.
        version_key: an integer or real entry of one value an item, which is not in the patch; items are then written only
            where `version` is not lower than what they have under it, and get it.
        version: one for all or one for each, [n].
        require_newer: write only where `version` is higher.

    Raises, before anything is written: RuntimeError for a storage of other things than tensors by key, or a writer that
    tracks no generations; KeyError for a key that is not stored; ValueError for another shape or dtype, and for one of
    `version_key` and `version` without the other; TypeError for what is no tensor.
    """
    with turn(self):
        storage = self._storage
        storage.recover()
        if not isinstance(storage, TensorStorage):
            raise RuntimeError(f"update_if_present() needs a storage of tensors by key, got {type(storage).__name__}")
        if not self._writer.tracks_generations:
            raise RuntimeError(
                f"{type(self._writer).__name__} tracks no generations: build it with track_generations=True"
            )
        storage.refuse_a_stranger()
        slots, rows = _slots(index, storage)
        generation = _integers("generation", generation)
        if generation.shape != rows.shape:
            raise ValueError(
                f"there are {rows.numel()} indices and {generation.numel()} generations: one each is needed"
            )
        entries = _planned(storage, patch, rows.numel())
        present = (self._writer.generations_of(rows) == generation) & (generation >= 0) & (slots >= 0)
        versions = _versions(storage, entries, version_key, version, rows.numel())
        rejected = None
        chosen = present
        if versions is not None:
            held = _at(storage, version_key, torch.where(present, slots, 0)).reshape(-1).cpu()
            accepted = versions > held if require_newer else versions >= held
            chosen = present & accepted
            wins = _highest(slots, versions, chosen)
            rejected, chosen = present & ~wins, wins
            entries = {**entries, as_path(version_key): versions}
        written = _last(slots, chosen)
        if len(written):
            _write(storage, slots[written], {key: values[written.to(values.device)] for key, values in entries.items()})
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
    held = columns.memory(storage, path)
    if held is None:
        raise RuntimeError(f"update_if_present() cannot see into a {type(storage).__name__} whose get() is replaced")
    return held


# ------------------------------------------------------------------ what is written


def _highest(slots: Tensor, versions: Tensor, chosen: Tensor) -> Tensor:
    """Of the chosen entries for one slot only the last of those with the highest version."""
    order = np.lexsort((np.arange(len(slots)), versions.numpy(), slots.numpy()))
    order = order[chosen.numpy()[order]]
    wins = np.zeros(len(slots), bool)
    if order.size:
        at = slots.numpy()[order]
        wins[order[np.append(at[1:] != at[:-1], True)]] = True
    return torch.from_numpy(wins)


def _last(slots: Tensor, chosen: Tensor) -> Tensor:
    """Where the last chosen entry for each slot is."""
    at = chosen.nonzero().reshape(-1)
    _, from_the_end = np.unique(slots[at].flip(0).numpy(), return_index=True)
    return at[torch.from_numpy(at.shape[0] - 1 - from_the_end)]


def _at(storage: TensorStorage, key: Any, slots: Tensor) -> Tensor:
    return columns.read(storage, as_path(key), slots.numpy())


def _write(storage: TensorStorage, slots: Tensor, entries: Mapping[tuple[Any, ...], Tensor]) -> None:
    """Write entries of items at different slots."""
    assert storage.shape is not None
    places = torch.unravel_index(slots, storage.shape)
    for path, values in entries.items():
        held = _held(storage, path)
        values = values.detach().to(held.device).reshape(len(slots), *held.shape[storage.ndim :])
        held[tuple(place.to(held.device) for place in places)] = values
    if isinstance(storage.rows, JaxRows):
        storage.rows._settle()
    storage.ring.edited(places[0].numpy())
