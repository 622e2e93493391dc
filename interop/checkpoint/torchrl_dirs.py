"""What `dumps` of a torchrl buffer wrote, as a checkpoint of ours: read without running, writing or following anything."""

import contextlib
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fbuf.checkpoint import CheckpointCorrupt, CheckpointMismatch, Fields, manifest
from interop.checkpoint.checkpointers import Together, abandoned_on_error
from interop.checkpoint.component import described
from interop.checkpoint.layouts import saved_layout
from interop.checkpoint.list_states import restoring_list
from interop.checkpoint.rule import EXACT, Rule
from interop.checkpoint.torchrl_dirs_compressed import read_items
from interop.checkpoint.torchrl_dirs_entries import Held, read_entries
from interop.checkpoint.torchrl_dirs_files import Folder, Tensor
from interop.checkpoint.torchrl_dirs_samplers import SamplerState, read_sampler, read_torch_file
from interop.checkpoint.torchrl_dirs_states import of_each, sampler_tree, writer_tree
from interop.checkpoint.torchrl_dirs_storages import Rows, read_rows
from interop.checkpoint.torchrl_dirs_writers import RoundRobin, WriterState, read_writer
from interop.checkpoint.values import encode
from interop.storages import CompressedListStorage, LazyFrameStorage, StorageEnsemble, TensorStorage

_BUFFER = "buffer_metadata.json"


def is_torchrl_dump(path: str | os.PathLike[str]) -> bool:
    """Whether torchrl wrote the folder: it has no manifest, and what a buffer of torchrl writes."""
    top = os.fspath(path)
    if not os.path.isdir(top) or os.path.lexists(os.path.join(top, manifest.NAME)):
        return False
    return os.path.isdir(os.path.join(top, "storage")) or os.path.isfile(os.path.join(top, _BUFFER))


def restoring_dump(buffer: Any, path: str | os.PathLike[str], rule: Rule = EXACT) -> Callable[[], None]:
    """Check what torchrl's `dumps` wrote against a buffer, and read it; what is returned puts it in.

    The sizes of all files are compared with what they should hold: there are no checksums in such a folder. What torchrl
    does not save is as it is in the buffer. Batches that were drawn ahead are pickled there: others are drawn.

    Args:
        buffer: built like the one that was saved, its lock held.
        path: the folder.
        rule: what may differ.

    Raises:
        CheckpointCorrupt: a file is missing or damaged; the message names it.
        CheckpointMismatch: it was saved from something else, or with what only pickle can read.
    """
    top = os.path.abspath(os.fspath(path))
    with Folder(top) as folder:
        rest = {
            "batch_size": Fields(folder.json(_BUFFER), folder.where(_BUFFER)).any("batch_size"),
            "transforms": _transforms(folder, "transform.t"),
            "generator": _generator(folder),
            "prefetch": None,
        }
        sampler, writer = read_sampler(folder), read_writer(folder)
        with folder.folder("storage") as inner:
            return _restoring(buffer, inner, sampler, writer, rest, top, rule)


def _restoring(
    buffer: Any,
    folder: Folder | None,
    sampler: SamplerState,
    writer: WriterState,
    rest: dict[str, Any],
    where: str,
    rule: Rule,
) -> Callable[[], None]:
    """The same for a buffer whose storage wrote a folder, None where it was never written to.

    `rest` has the entries of its saved tree but three.
    """
    held = buffer.__dict__
    names: tuple[str, ...] = ("sampler", "writer")
    ready: list[Callable[[], None]] = []
    with abandoned_on_error(ready):
        if isinstance(held["_storage"], StorageEnsemble) and folder is not None:
            names = ("sampler",)  # each member has its writer; what members are chosen by is not saved
            rest = {**rest, "sampler": described(held["_sampler"], buffer._saved_sampler())}
            ready += _restoring_members(buffer._members, folder, sampler, writer, where, rule)
        else:
            drawn = sampler_tree(sampler, held["_sampler"], f"{where}, sampler")
            rest = {**rest, "sampler": drawn, "writer": writer_tree(writer, held["_writer"], f"{where}, writer")}
        restored: Callable[[], None] = buffer._restoring_rest(Fields(rest, where), names, where, rule)
        if not ready:  # rows are the last to be read, for they take the most memory, and the first to be put in
            storage = held["_storage"]
            rows = storage._empty if folder is None else _restoring_storage(folder, storage, writer, rule)
            ready += [buffer._drop_ahead, rows]
        return Together([*ready, restored])


def _restoring_members(
    members: Sequence[Any], folder: Folder, sampler: SamplerState, writer: WriterState, where: str, rule: Rule
) -> list[Callable[[], None]]:
    """Check what the members of an ensemble wrote, each against its buffer."""
    parts = [of_each(each, len(members), where) for each in (sampler, writer)]
    empty: list[Any] = []
    if folder.kind("metadata.json"):  # later versions name the members that were never written
        empty = Fields(folder.json("metadata.json"), folder.where("metadata.json")).items("empty_members")
    found = [place for place in range(len(members)) if place in empty or folder.kind(str(place))]
    if len(found) < len(members) or folder.kind(str(len(members))):
        raise CheckpointMismatch(f"{where}: was not saved from an ensemble of {len(members)} buffers")
    ready: list[Callable[[], None]] = []
    with abandoned_on_error(ready):
        for place, (member, of, by) in enumerate(zip(members, *parts, strict=True)):
            transforms = _transforms(folder, f"{place}_transform.pt")
            rest = {"batch_size": member._batch_size, "transforms": transforms, "generator": None, "prefetch": None}
            with contextlib.nullcontext() if place in empty else folder.folder(str(place)) as inner:
                ready.append(_restoring(member, inner, of, by, rest, f"{where}, member {place}", rule))
    return ready


# ---------------------------------------------------------------------- storages


def _restoring_storage(folder: Folder, storage: Any, writer: WriterState, rule: Rule) -> Callable[[], None]:
    """Check what a storage wrote against one, and read it; what is returned puts it in."""
    if isinstance(storage, CompressedListStorage):
        return _restoring_items(storage, read_items(folder, storage), writer, folder.where(), rule)
    if not isinstance(storage, TensorStorage) or isinstance(storage, LazyFrameStorage):
        raise CheckpointMismatch(f"{folder.where()}: nothing that torchrl writes fits a {type(storage).__name__}")
    rows = read_rows(folder, storage.ndim, storage._layout)
    ring = _ring(rows, storage, writer, folder.where())
    return storage._restoring({"layout": saved_layout(rows.layout), "ring": ring, "columns": rows}, rule)


def _ring(rows: Rows, storage: Any, writer: WriterState, where: str) -> dict[str, Any]:
    end, written = _ring_end(rows.rows, rows.room, writer, where)
    ring = {"ndim": storage.ndim, "lanes": list(rows.lanes), "capacity": rows.room, "filled": rows.rows}
    return {**ring, "written": written, "end": end}


def _ring_end(rows: int, room: int, writer: WriterState, where: str) -> tuple[int, int]:
    """The row that is written next, and how many were written."""
    if not isinstance(writer, RoundRobin):
        return rows % room, rows
    if not writer.cursor <= min(rows, room - 1):
        raise CheckpointCorrupt(
            f"{where}: the cursor of the writer, {writer.cursor}, is not in the {rows} rows of {room}"
        )
    return writer.cursor, max(writer.write_count or 0, rows)


def _restoring_items(storage: Any, items: list[Any], writer: WriterState, where: str, rule: Rule) -> Callable[[], None]:
    if len(items) > storage.max_size:
        raise CheckpointMismatch(f"{where}: {len(items)} items do not fit a storage of max_size={storage.max_size}")
    end, written = _ring_end(len(items), storage.max_size, writer, where)
    ring = {"capacity": storage.max_size, "written": written, "end": end, "cursor": None}
    return restoring_list(storage, {**storage._setting(), **ring}, rule, items)


# ---------------------------------------------------------------------- the rest of a buffer


def _transforms(folder: Folder, name: str) -> Any:
    """The saved tree of transforms, whose state torchrl writes where there is any."""
    return encode(read_torch_file(folder, name) if folder.kind(name) else {}, folder.where(name))


def _generator(folder: Folder) -> dict[str, Any] | None:
    if not folder.kind("rng_state"):
        return None
    with folder.folder("rng_state") as inner:
        held = read_entries(inner)
    state = held.entries.get("rng_state") if isinstance(held, Held) else None
    if not isinstance(state, Tensor) or state.dtype != np.uint8 or len(state.shape) != 1:
        raise CheckpointCorrupt(f"{folder.where('rng_state')}: no state of a generator")
    return {"state": state.read(), "device": "cpu"}
