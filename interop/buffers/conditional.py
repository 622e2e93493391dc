"""Updates of stored items that were not overwritten since they were sampled."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from tensordict import is_tensor_collection
from tensordict.utils import NestedKey
from torch import Tensor

from interop.data.keys import as_path, entries_below
from interop.storages import Storage, TensorStorage
from interop.writers import Writer


@dataclasses.dataclass(frozen=True, eq=False)
class ConditionalUpdateResult:
    """The result of `update_if_present`, in the order of its index; bool tensors on the CPU."""

    updated: Tensor  # [n]: items that were written
    version_rejected: Tensor | None = None  # [n]: items kept because of their version; None without versions

    @property
    def updated_count(self) -> int:
        """Number of items that were written."""
        return int(self.updated.sum())

    @property
    def version_rejected_count(self) -> int:
        """Number of items that were kept because of their version."""
        return 0 if self.version_rejected is None else int(self.version_rejected.sum())

    @property
    def stale_count(self) -> int:
        """Number of items that were overwritten since."""
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
    storage.guard.recover()
    if not isinstance(storage, TensorStorage):
        raise RuntimeError(f"update_if_present() needs a storage of tensors by key, got {type(storage).__name__}")
    if not writer.tracks_generations:
        raise RuntimeError(f"{type(writer).__name__} tracks no generations: build it with track_generations=True")
    storage.guard.refuse_forked_child()
    places, inside = _places(index, storage)
    generation = _integers("generation", generation)
    count = inside.numel()
    if generation.shape != inside.shape:
        raise ValueError(f"there are {count} indices and {generation.numel()} generations: one each is needed")
    entries = _checked(storage, patch, count)
    versions = _versions(storage, entries, version_key, version, count)

    # Of several patches of one item the last one wins, or the last of the highest version.
    present = chosen = inside & (generation >= 0) & (writer.generations_of(places[0]) == generation)
    order = np.arange(count)
    if versions is not None:
        column = _column(storage, as_path(version_key))
        stored = column[tuple(coordinates.to(column.device) for coordinates in places)].reshape(-1).cpu()
        chosen = present & (versions > stored if require_newer else versions >= stored)
        order = np.lexsort((order, versions.numpy()))
        entries = {**entries, as_path(version_key): versions}
    order = order[chosen.numpy()[order]][::-1]
    winners = torch.from_numpy(order.copy())
    if len(winners) and storage.shape is not None:
        slots = np.ravel_multi_index([coordinates.numpy()[order] for coordinates in places], tuple(storage.shape))
        winners = winners[torch.from_numpy(np.unique(slots, return_index=True)[1])]
        at = [coordinates[winners] for coordinates in places]
        for path, values in entries.items():
            column = _column(storage, path)
            values = values.detach()[winners.to(values.device)].to(column.device)
            column[tuple(coordinates.to(column.device) for coordinates in at)] = values.reshape(
                len(winners), *column.shape[len(at) :]
            )
        storage.contents.edited(at[0].numpy())
    if versions is None:
        return ConditionalUpdateResult(chosen)
    written = torch.zeros_like(present)
    written[winners] = True
    return ConditionalUpdateResult(written, present & ~written)


def _places(index: Any, storage: TensorStorage) -> tuple[list[Tensor], Tensor]:
    """Coordinates, int64 [n] for each item dim, 0 for items that cannot be stored; and which ones can."""
    parts = [_integers("index", part) for part in (index if isinstance(index, tuple) else (index,))]
    if len(parts) == 1 and storage.ndim > 1 and parts[0].ndim == 2:
        parts = list(parts[0].unbind(-1))
    if len(parts) != storage.ndim or any(part.ndim != 1 or part.shape != parts[0].shape for part in parts):
        shapes = [list(part.shape) for part in parts]
        raise ValueError(f"index must be [n] integers, or coordinates for {storage.ndim} item dims, got {shapes}")
    inside = torch.ones_like(parts[0], dtype=torch.bool)
    for part, length in zip(parts, storage.shape or [0] * storage.ndim, strict=True):
        inside &= (part >= 0) & (part < length)
    return [torch.where(inside, part, 0) for part in parts], inside


def _integers(name: str, value: Any) -> Tensor:
    integers = torch.as_tensor(value, device="cpu")
    if not isinstance(value, Tensor) and not integers.numel():
        integers = integers.to(torch.int64)
    if integers.dtype == torch.bool or integers.is_floating_point() or integers.is_complex():
        raise TypeError(f"{name} must be integers, got {integers.dtype}")
    return integers.to(torch.int64)


def _checked(storage: TensorStorage, patch: Any, count: int) -> dict[tuple[Any, ...], Tensor]:
    """The tensors of a patch by path. The errors of `update_if_present`."""
    if not isinstance(patch, Mapping) and not is_tensor_collection(patch):
        raise TypeError(f"patch must be a dict or tensordict of tensors by key, got {type(patch).__name__}")
    entries = dict(entries_below(patch))
    storage.contents.refuse_edit(entries)
    for path, values in entries.items():
        column = _column(storage, path)
        if not isinstance(values, Tensor):
            raise TypeError(f"{path} must be a tensor, got {type(values).__name__}")
        shape = (count, *column.shape[storage.ndim :])
        if tuple(values.shape) != shape or values.dtype != column.dtype:
            raise ValueError(
                f"{path} must be {column.dtype} of shape {list(shape)} for {count} items, got {values.dtype} of shape "
                f"{list(values.shape)}"
            )
    return entries


def _versions(storage: TensorStorage, entries: Any, key: NestedKey, version: Any, count: int) -> Tensor | None:
    """One version for each item in the stored dtype; None without versions."""
    if (key is None) != (version is None):
        raise ValueError("version_key and version must be given together")
    if key is None:
        return None
    if as_path(key) in entries:
        raise ValueError(f"version_key {key!r} is in the patch too: give its values as version")
    column = _column(storage, as_path(key))
    if column.numel() != column.shape[: storage.ndim].numel() or column.dtype == torch.bool or column.is_complex():
        raise ValueError(
            f"version_key {key!r} must hold one number an item, it holds {list(column.shape)} of {column.dtype}"
        )
    versions = torch.as_tensor(version, device="cpu").detach()
    if versions.ndim and versions.numel() != count:
        raise ValueError(f"version must be one number, or one for each of {count} items, got {list(versions.shape)}")
    exact = versions.to(column.dtype)
    if versions.dtype == torch.bool or versions.is_complex() or not torch.equal(exact.to(versions.dtype), versions):
        raise ValueError(
            f"version_key {key!r} holds {column.dtype}, which cannot hold the given version ({versions.dtype})"
        )
    return exact.reshape(-1).expand(count)


def _column(storage: TensorStorage, path: tuple[Any, ...]) -> Tensor:
    column = storage.contents.column(path)
    if column is None:
        raise RuntimeError(f"update_if_present() cannot see into a {type(storage).__name__} whose get() is replaced")
    return column
