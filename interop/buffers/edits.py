"""Edits in place of stored tensordicts, by key: planned as a whole, so that nothing is written if one does not fit."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, is_tensor_collection, lazy_stack
from torch import Tensor

from interop.data.index import as_int, as_list
from interop.data.keys import as_path

Path = tuple[str, ...]


def planned(
    held: Any, given: Any, index: Any = ..., path: Path = (), unknown: dict[Path, Any] | None = None
) -> Iterator[tuple[Tensor, Any, Tensor]]:
    """Each stored tensor that is to be written, where in it, and what with. Of a lazy stack the index names items.

    What is not stored goes into `unknown`, where that is given.

    KeyError for a key that is not stored, TypeError for what is no tensor, IndexError out of range, RuntimeError for
    another shape or dtype. A number fills the tensor.
    """
    if not is_tensor_collection(held):
        yield held, index, _fitting(held[index], given, path)
        return
    if not isinstance(given, Mapping) and not is_tensor_collection(given):
        raise TypeError(f"{_name(path)}: a tensordict is stored, got {type(given).__name__}; nothing was written")
    stored = {as_path(key) for key in held.keys(include_nested=True)}
    for key, value in given.items():
        below = as_path(key)
        if below not in stored and unknown is not None:
            unknown[path + below] = value
            continue
        if below not in stored:
            raise KeyError(f"{_name(path + below)} is not stored; stored are {', '.join(sorted(map(_name, stored)))}")
        if not isinstance(held, LazyStackedTensorDict):
            yield from planned(held.get(below), value, index, path + below, unknown)
            continue
        entries = [item.get(below) for item in held.tensordicts]  # the stack itself would give copies
        if is_tensor_collection(entries[0]):
            yield from planned(lazy_stack(entries, held.stack_dim), value, index, path + below, unknown)
            continue
        for entry, part in _shared_out(entries, held.stack_dim, value, index, path + below):
            yield entry, ..., _fitting(entry, part, path + below)


def chosen(given: Any, keys: Sequence[Any]) -> dict[Path, Any]:
    """The entries of a dict or tensordict that `keys` name. KeyError for one that it does not have."""
    every = given.items(include_nested=True) if is_tensor_collection(given) else given.items()
    entries = {as_path(key): value for key, value in every}
    missing = [key for key in keys if as_path(key) not in entries]
    if missing:
        raise KeyError(f"keys_to_update names {missing}, which the given data does not have")
    return {as_path(key): entries[as_path(key)] for key in keys}


def _shared_out(entries: list[Any], dim: int, value: Any, index: Any, path: Path) -> Iterator[tuple[Tensor, Any]]:
    """The entries that an index names, each with its part of a value that is stacked along dim, or is a number."""
    single = as_int(index)
    if single is not None:
        yield entries[single], value
        return
    entries = entries if index is Ellipsis else [entries[place] for place in as_list(index, len(entries))]
    if isinstance(value, np.ndarray):
        value = torch.as_tensor(value, device="cpu")
    if isinstance(value, Tensor) or is_tensor_collection(value):
        parts = value.unbind(dim) if value.ndim > dim else ()
    else:
        parts = value if isinstance(value, list | tuple) else [value] * len(entries)
    if len(parts) != len(entries):
        raise RuntimeError(f"{_name(path)}: got {len(parts)} values for {len(entries)} items; nothing was written")
    yield from zip(entries, parts, strict=True)


def _fitting(place: Tensor, value: Any, path: Path) -> Tensor:
    """The value as a tensor that can be copied to the place."""
    if not isinstance(value, Tensor | np.ndarray):
        value = _of_numbers(value, path)
        if not torch.can_cast(value.dtype, place.dtype):
            raise RuntimeError(f"{_name(path)}: stored are {place.dtype}, got {value.dtype}; nothing was written")
        value = value.to(place.dtype).expand(place.shape) if value.ndim == 0 else value.to(place.dtype)
    value = value.detach() if isinstance(value, Tensor) else torch.as_tensor(value, device="cpu")
    if value.shape != place.shape or value.dtype != place.dtype or value.layout != place.layout or value.is_meta:
        raise RuntimeError(
            f"{_name(path)}: stored are {list(place.shape)} of {place.dtype}, got {list(value.shape)} of {value.dtype} "
            f"({value.layout}, on {value.device}); nothing was written"
        )
    return value.to(place.device)


def _of_numbers(value: Any, path: Path) -> Tensor:
    try:
        if not is_tensor_collection(value):
            return torch.as_tensor(value, device="cpu")
        cause = None
    except (TypeError, ValueError, RuntimeError) as error:
        cause = error
    raise TypeError(f"{_name(path)}: a tensor is stored, got {type(value).__name__}; nothing was written") from cause


def _name(path: Path) -> str:
    return repr(path[0]) if len(path) == 1 else repr(path) if path else "the data"
