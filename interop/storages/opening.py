"""Storages that are in folders, taken up by another process, or only read."""

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fbuf.checkpoint import CheckpointCorrupt
from interop.checkpoint.layouts import layout_of
from interop.data.layout import Layout
from interop.host.maps import bytes_of, file_names, from_file
from interop.host.rows import TorchRows
from interop.shared.files import Files, check_folders
from interop.shared.folder import (
    DESCRIPTION,
    LOCK,
    PRIORITIES,
    STATE,
    VALUES,
    Owner,
    check_size,
    description,
    files_below,
    reserve_again,
)
from interop.shared.journal import Journal, ReadOnly
from interop.shared.memory import Memory
from interop.storages.priorities import KeptPriorities

if TYPE_CHECKING:
    from interop.storages.memmap import LazyMemmapStorage


def opened(kind: type[Any], root: Path, writes: bool) -> Any:
    """`LazyMemmapStorage.open`."""
    if writes:
        description(root)  # or there is nothing to be locked
        return _opened(kind, root, Owner(root))
    while True:
        description(root)
        with open(root / DESCRIPTION, "rb") as held:  # while it is open no other file has its number
            before = os.fstat(held.fileno())
            try:
                storage = _opened(kind, root, None)
            except (CheckpointCorrupt, OSError, RuntimeError, ValueError):
                if _stays(root, before):
                    raise
            else:
                if _stays(root, before):
                    return storage


def _stays(root: Path, before: os.stat_result) -> bool:
    """Whether the storage is the same one; while a new one is put in its place there is no description."""
    try:
        return os.path.samestat(os.stat(root / DESCRIPTION), before)
    except FileNotFoundError:
        return False


def opened_again(kind: type[Any], folder: str, before: os.stat_result) -> Any:
    """In a worker, a storage that another process has open to be read."""
    storage = opened(kind, Path(folder), False)
    if not os.path.samestat(storage.journal.file, before):
        raise RuntimeError(
            f"{folder} holds another storage by now than the one that this worker was given: it was renamed"
        )
    return storage


def _opened(kind: type[Any], root: Path, owner: Owner | None) -> Any:
    writes = owner is not None
    try:
        fields = description(root)
        layout, lanes = layout_of(fields.any("layout"), str(root / DESCRIPTION)), fields.wholes("lanes")
        rows, files = fields.whole("rows"), fields.fields("files")
        capacity = fields.whole("capacity", 1)
        storage = kind(capacity, scratch_dir=root, ndim=fields.whole("ndim", 1, 64))
        names = _names(layout, root)
        shapes = [(rows, *lanes, *spec.shape) for spec in layout.leaves]
        if len(lanes) != storage.ndim - 1 or rows != -(-capacity // max(math.prod(lanes), 1)):
            raise CheckpointCorrupt(f"{root / DESCRIPTION}: {rows} rows of {lanes} do not make up the capacity")
        for name, shape, spec in zip(names, shapes, layout.leaves, strict=True):
            if files.whole(name) != bytes_of(shape, spec.dtype):
                raise files.wrong(name, f"{bytes_of(shape, spec.dtype)} bytes", files.any(name))
            if math.prod(max(size, 1) for size in shape) * spec.dtype.itemsize >= 2**63:  # rows of nothing, if any
                raise CheckpointCorrupt(f"{root / DESCRIPTION}: no memory has the shape {shape} of {name}")
            check_folders(root, name)
            check_size(root / name, files.whole(name))
        state = files.whole(STATE, Journal.size(1, 1, 1, 1))
        check_size(root / STATE, state if layout.leaves else max(state, os.path.getsize(root / STATE)))
        if owner is not None:
            for name in (*names, STATE, *([PRIORITIES] if os.path.lexists(root / PRIORITIES) else [])):
                reserve_again(root / name)
            storage.files = Files(root / VALUES)
            storage.files.adopt(files_below(root, {*owner.listed, LOCK}))
        tensors = [
            from_file(root / name, shape, spec.dtype, private=not writes)
            for name, shape, spec in zip(names, shapes, layout.leaves, strict=True)
        ]
        # Without leaves: killed when it had given up its memory for items of another kind.
        held = TorchRows(tensors, lanes, mapped=True) if tensors else None
        _take_up(storage, owner, layout, held, root)
    except BaseException:
        if owner is not None:
            owner.close()
        raise
    return storage


def _names(layout: Layout, root: Path) -> list[str]:
    try:
        return file_names(layout.leaves)
    except ValueError as error:
        raise CheckpointCorrupt(f"{root / DESCRIPTION}: {error}") from error


def _take_up(
    storage: "LazyMemmapStorage", owner: Owner | None, layout: Layout, rows: TorchRows | None, root: Path
) -> None:
    """Put rows into a storage, with the counters and priorities that are in its folder."""
    storage.journal, storage.reopened = Journal(), True
    if rows is not None:
        storage.adopt(layout, rows)
    size, found = KeptPriorities.size(storage.max_size), storage.new_journal()
    if os.path.lexists(root / PRIORITIES):
        check_size(root / PRIORITIES, size)
        memory = Memory(size, root / PRIORITIES, private=owner is None)
        storage.priorities = KeptPriorities(memory, storage.per_row, storage.ring, owner, opened=True)
    state = Memory((root / STATE).stat().st_size, root / STATE, private=owner is None)
    if owner is None:
        if storage.layout is not None and storage.layout.values is not None:
            storage.layout.values.map()
        found.resume(storage.ring, state, storage.row_capacity(None), storage.guarded())
        storage.journal = ReadOnly(str(root), found)
        return
    found.resume(storage.ring, state, storage.row_capacity(None), storage.guarded())
    storage.journal, storage.owner = found, owner
    storage.lock.hooked = True  # an unfinished write is rolled back first
    storage.close_at_end()
