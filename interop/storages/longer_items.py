"""Items of a list with more behind their entries: new items, since the stored ones may be in the hands of readers."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, is_tensor_collection
from torch import Tensor

from interop.data.fitting import fitting, shown_path
from interop.data.layout import KeyPath


def with_more(
    items: Sequence[object], slots: Sequence[int], more: Mapping[KeyPath, object], replace: Mapping[KeyPath, object]
) -> list[object]:
    """Copies of items, each with more behind some entries and with other values of others. The items do not change.

    Entries that grow are tensors and arrays, along their first dim, and text, bytes and lists. Entries that stay are
    shared with the items.

    Args:
        items: tensordicts, or dicts with text keys.
        slots: of the items, for messages.
        more: by path, for each item what is put behind its value: a tensor [n, ...], dense or jagged, or a sequence.
        replace: by path the new values of other entries, [n, ...]; a number, text or None is for all.

    Raises: KeyError for an entry that an item does not have; TypeError for an item of another kind, and for a value that
    cannot be put behind a stored one; RuntimeError for another dtype, shape or number of values.
    """
    values = {path: _by_item(data, len(items), path) for path, data in more.items()}
    others = {path: _by_item(data, len(items), path, alike=True) for path, data in replace.items()}
    made = []
    for number, (slot, item) in enumerate(zip(slots, items, strict=True)):
        for path, of_items in values.items():
            item = _changed(item, path, slot, path, of_items[number], grows=True)
        for path, of_items in others.items():
            item = _changed(item, path, slot, path, of_items[number], grows=False)
        made.append(item)
    return made


def _by_item(data: object, count: int, path: KeyPath, alike: bool = False) -> Sequence[object]:
    """The values of each of `count` items."""
    if isinstance(data, Tensor | np.ndarray) and data.ndim:
        parts: Sequence[object] = data.unbind() if isinstance(data, Tensor) else list(data)
    elif isinstance(data, list | tuple):
        parts = data
    elif alike:
        parts = [data] * count
    else:
        raise TypeError(
            f"{shown_path(path)}: {count} values are needed, one an item, got {type(data).__name__}; nothing was written"
        )
    if len(parts) != count:
        raise RuntimeError(f"{shown_path(path)}: got {len(parts)} values for {count} items; nothing was written")
    return parts


def _changed(entry: object, left: KeyPath, slot: int, path: KeyPath, value: object, grows: bool) -> object:
    """The entry, which is an item or a part of one, with another value at the rest of a path."""
    if not left:
        return _longer(entry, value, path) if grows else _other(entry, value, path)
    if not isinstance(entry, dict) and not is_tensor_collection(entry):
        raise TypeError(
            f"{shown_path(path)}: only entries of tensordicts and dicts grow, the item in slot {slot} is or has a "
            f"{type(entry).__name__}; nothing was written"
        )
    entries: Any = entry
    [name, *below] = left
    if name not in entries.keys():  # noqa: SIM118  # of a tensordict
        raise KeyError(f"{shown_path(path)} is not stored in slot {slot}; nothing was written")
    held = entries.get(name)
    if isinstance(held, NonTensorData):
        changed: object = NonTensorData(_changed(held.data, tuple(below), slot, path, value, grows), held.batch_size)
    else:
        changed = _changed(held, tuple(below), slot, path, value, grows)
    twin = copy.copy(entries) if isinstance(entry, dict) else entries.copy().unlock_()
    if isinstance(entry, dict):
        twin[name] = changed
    else:
        twin.set(name, changed)
    return twin


def _longer(held: object, more: object, path: KeyPath) -> object:
    """A stored value with more behind it."""
    if isinstance(held, Tensor | np.ndarray):
        before = torch.as_tensor(held)
        behind = torch.as_tensor(more, device=before.device).detach()
        if not before.ndim or before.is_nested or behind.dtype != before.dtype or behind.shape[1:] != before.shape[1:]:
            raise RuntimeError(
                f"{shown_path(path)}: stored are {list(before.shape)} of {before.dtype}, got {list(behind.shape)} of "
                f"{behind.dtype} to put behind: only the first dim grows, a value without dims is passed in replace=; "
                "nothing was written"
            )
        whole = torch.cat([before, behind])
        return whole if isinstance(held, Tensor) else whole.numpy()
    if type(held) is not type(more) or type(held) not in (str, bytes, list):
        raise TypeError(
            f"{shown_path(path)}: a {type(held).__name__} is stored, to which a {type(more).__name__} cannot be added: "
            "tensors, arrays, text, bytes and lists grow by more of the same; nothing was written"
        )
    return held + more  # type: ignore[operator]  # both are of one of these types


def _other(held: object, value: object, path: KeyPath) -> object:
    """A value in the place of a stored one: of the same shape and dtype, or of the same type."""
    if isinstance(held, Tensor):
        return fitting(held, value, path).clone()
    if isinstance(value, Tensor) and not value.ndim and isinstance(held, int | float):
        value = value.item()
    if isinstance(held, np.ndarray) or type(held) is not type(value):
        raise TypeError(
            f"{shown_path(path)}: a {type(held).__name__} is stored, got a {type(value).__name__}; nothing was written"
        )
    return value
