"""Parts of a saved list storage that are checked on the way back: its setting, its ring, and the place of the last write."""

from typing import Any

import numpy as np
import torch

from fbuf.checkpoint import CheckpointCorrupt, CheckpointMismatch, Fields
from interop.checkpoint.plain_values import opened
from interop.data.index import as_int, as_list


def check_setting(fields: Fields, setting: dict[str, Any], where: str) -> None:
    """CheckpointMismatch where a storage was built with other arguments than the one that was saved."""
    kind = fields.text("storage")
    if kind != setting["storage"]:
        raise CheckpointMismatch(f"{where} is of a {kind[:40]}, to be loaded into a {setting['storage']}")
    differences = [
        f"{name} is {str(fields.any(name))[:40]}, in the storage {mine}"
        for name, mine in sorted(setting.items())
        if type(fields.any(name)) is not type(mine) or fields.any(name) != mine
    ]
    if differences:
        raise CheckpointMismatch(f"{where} does not fit: {'; '.join(differences)}. Build it with the same arguments")


def items_of(state: Any, capacity: int, has_metadata: bool, where: str) -> tuple[list[Any], int, int]:
    """Copies of the items of a `state_dict`, with metadata where there are some, and how many were written and the end.

    TypeError for an item that is neither a tensor, a plain value nor the state of something.
    """
    if not isinstance(state, dict):
        raise TypeError(f"{where}: expected a dict, got {type(state).__name__}")
    fields = Fields(state, where)
    items = [opened(item, f"{where}, item {n}") for n, item in enumerate(fields.items("_storage"))]
    if ("_metadata" in state) != has_metadata:
        raise CheckpointMismatch(f"{where}: {'_metadata'!r} is what a CompressedListStorage has, and no other")
    if has_metadata:
        metadata = fields.items("_metadata", len(items))
        items = [
            (each, opened(of, f"{where}, item {n}")) for n, (each, of) in enumerate(zip(items, metadata, strict=True))
        ]
    if len(items) > capacity:
        raise CheckpointMismatch(f"{where} has {len(items)} items, the storage a capacity of {capacity}")
    if "_ring" not in state:
        return items, len(items), len(items) % capacity
    ring = fields.fields("_ring")
    if ring.whole("capacity", 1) != capacity:
        raise CheckpointMismatch(
            f"{where} is of a capacity of {ring.whole('capacity')}, the storage has {capacity}: build it with the same "
            "max_size"
        )
    return items, ring.whole("written"), ring.whole("end", 0, capacity)


def saved_cursor(cursor: Any, length: int) -> Any:
    """The place of the last write: None, an int, [start, stop, step] of a slice, or an array of places.

    None too where the list was emptied and these places are gone.
    """
    single = None if cursor is None else as_int(cursor)
    if isinstance(cursor, slice):
        return [None if each is None else int(each) for each in (cursor.start, cursor.stop, cursor.step)]
    if cursor is None or single is not None:
        return single if single is not None and -length <= single < length else None
    places = np.array(as_list(cursor, length), np.int64)
    return places if not places.size or -length <= places.min() <= places.max() < length else None


def cursor_of(fields: Fields, length: int) -> Any:
    """The cursor again, in a list of that length."""
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
