"""The content of list storages as a saved tree and as a `state_dict`, and back."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from fbuf.checkpoint import CheckpointCorrupt, CheckpointMismatch, Fields
from interop.checkpoint.lists import load_items, save_items
from interop.checkpoint.plain_values import opened, plain
from interop.checkpoint.rule import Rule
from interop.data.index import as_int, as_list


def saved_list(storage: Any, allow_pickle: bool) -> dict[str, Any]:
    """The items of a list storage, and where its ring begins. TypeError for an item that cannot be saved."""
    return {
        **storage._setting(),
        **_ring(storage),
        "cursor": _saved_cursor(storage._last_cursor, len(storage)),
        "items": save_items(storage._held(), allow_pickle, unnamed=storage._AROUND),
    }


def restoring_list(storage: Any, saved: Any, rule: Rule, given: list[Any] | None = None) -> Callable[[], None]:
    """Check saved items, or those given in their place, against a storage, and read them; what is returned puts them in."""
    where = f"the checkpoint of a {type(storage).__name__}"
    fields = Fields(saved, where)
    setting, kind = storage._setting(), fields.text("storage")
    if kind != setting["storage"]:
        raise CheckpointMismatch(f"{where} is of a {kind[:40]}, to be loaded into a {setting['storage']}")
    setting["capacity"] = storage.max_size
    differences = [
        f"{name} is {str(fields.any(name))[:40]}, in the storage {mine}"
        for name, mine in sorted(setting.items())
        if type(fields.any(name)) is not type(mine) or fields.any(name) != mine
    ]
    if differences:
        raise CheckpointMismatch(f"{where} does not fit: {'; '.join(differences)}. Build it with the same arguments")
    written, end = fields.whole("written"), fields.whole("end", 0, storage.max_size)
    if given is None:
        items = storage._checked(load_items(fields.any("items"), rule, where, storage._home(), storage.max_size), where)
    else:
        items = _kept(storage, given, where)
    return _putting(storage, items, written, end, _cursor(fields, len(items)))


def _kept(storage: Any, given: Any, where: str) -> list[Any]:
    """What a storage keeps of items that a load hook made."""
    if not isinstance(given, list) or len(given) > storage.max_size:
        what = f"{len(given)} items" if isinstance(given, list) else type(given).__name__
        raise CheckpointMismatch(f"{where}: a list of at most {storage.max_size} items is to be loaded, got {what}")
    try:
        return [storage._to_keep(item) for item in given]
    except (TypeError, ValueError, RuntimeError) as error:
        raise CheckpointMismatch(f"{where}: what was loaded cannot be stored: {error}") from error


def state_of(storage: Any) -> dict[str, Any]:
    """Copies of the items as tensors and plain values. TypeError for an item that these cannot say."""
    return {"_storage": [plain(item, f"item {n}") for n, item in enumerate(storage._storage)], "_ring": _ring(storage)}


def restoring_state(storage: Any, state: Any) -> Callable[[], None]:
    """Check a `state_dict`; what is returned puts a copy of it in.

    TypeError for an item that is neither a tensor, a plain value nor the state of something.
    """
    where = f"the state_dict of a {type(storage).__name__}"
    if not isinstance(state, dict):
        raise TypeError(f"{where}: expected a dict, got {type(state).__name__}")
    fields = Fields(state, where)
    items = [opened(item, f"{where}, item {n}") for n, item in enumerate(fields.items("_storage"))]
    if ("_metadata" in state) != (storage._setting()["storage"] == "compressed list"):
        raise CheckpointMismatch(f"{where}: {'_metadata'!r} is what a CompressedListStorage has, and no other")
    if "_metadata" in state:
        told = [opened(item, f"{where}, metadata {n}") for n, item in enumerate(fields.items("_metadata", len(items)))]
        items = list(zip(items, told, strict=True))
    capacity = storage.max_size
    if len(items) > capacity:
        raise CheckpointMismatch(f"{where} has {len(items)} items, the storage a capacity of {capacity}")
    written, end = len(items), len(items) % capacity
    if "_ring" in state:
        ring = fields.fields("_ring")
        if ring.whole("capacity", 1) != capacity:
            raise CheckpointMismatch(
                f"{where} is of a capacity of {ring.whole('capacity')}, the storage has {capacity}: build it with the same "
                "max_size"
            )
        written, end = ring.whole("written"), ring.whole("end", 0, capacity)
    return _putting(storage, storage._checked(items, where), written, end, None)


def _putting(storage: Any, items: Any, written: int, end: int, cursor: Any) -> Callable[[], None]:
    def put() -> None:
        storage._hold(items)
        storage._ledger.restored(written, end)
        storage._last_cursor = cursor

    return put


def _ring(storage: Any) -> dict[str, Any]:
    return {"capacity": storage.max_size, "written": storage._ledger.written, "end": storage._ledger.end}


def _saved_cursor(cursor: Any, length: int) -> Any:
    """The place of the last write: None, an int, [start, stop, step] of a slice, or an array of places.

    None too where these are there no more, since the list was emptied.
    """
    single = None if cursor is None else as_int(cursor)
    if isinstance(cursor, slice):
        return [None if each is None else int(each) for each in (cursor.start, cursor.stop, cursor.step)]
    if cursor is None or single is not None:
        return single if single is not None and -length <= single < length else None
    places = np.array(as_list(cursor, length), np.int64)
    return places if not places.size or -length <= places.min() <= places.max() < length else None


def _cursor(fields: Fields, length: int) -> Any:
    cursor = fields.any("cursor")
    if cursor is None:
        return None
    if isinstance(cursor, list):
        bounds = fields.items("cursor", 3)
        if not all(each is None or type(each) is int for each in bounds) or bounds[2] == 0:
            raise fields.wrong("cursor", "the bounds of a slice", cursor)
        return slice(*bounds)
    if type(cursor) is int:
        return fields.whole("cursor", -length, max(length - 1, 0))
    places = np.array(fields.array("cursor", np.int64, (None,)))
    if places.size and not (-length <= places.min() and places.max() < length):
        raise CheckpointCorrupt("the last write of a list was beyond its end")
    return torch.from_numpy(places)
