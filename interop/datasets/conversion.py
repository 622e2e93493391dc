"""Conversion of upstream files to memory-mapped rows."""

from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from interop.buffers import ReplayBuffer
from interop.datasets.described import MOST_ROWS
from interop.datasets.errors import CorruptDatasetError
from interop.datasets.in_order import Portable, by_processes, portable, rebuilt
from interop.datasets.progress import progress
from interop.datasets.rows import entries, has_ragged
from interop.datasets.source import Part, Source
from interop.storages import LazyMemmapStorage

# Per write, for short episodes.
_ROWS = 4096
_BYTES = 1 << 24


def convert(source: Source, files: Path, folder: Path, workers: int = 0) -> int:
    """Write the rows of a source to a folder, read by `workers` processes. Returns the number of rows.

    Memory holds a few episodes, and two parts per worker. CorruptDatasetError if a part has a wrong number of rows, or rows
    differ in keys, shapes or dtypes. OSError, before the first row is written, if the disk is too small.
    """
    parts = [*source.parts(files)]
    total = sum(part.rows for part in parts)
    if not total:
        raise CorruptDatasetError(f"there are no rows in {files}")
    if total > MOST_ROWS:
        raise CorruptDatasetError(f"{files} announces {total} rows, {MOST_ROWS} at most are read")
    storage = LazyMemmapStorage(total, scratch_dir=folder)
    try:
        with closing(_read(source, parts, workers)) as pieces:
            write(storage, pieces, total, f"Converting {source.dataset_id}")
        if not len(storage):
            raise CorruptDatasetError(f"there are no rows in {files}")
        return len(storage)
    finally:
        storage.close()


def write(
    storage: LazyMemmapStorage, pieces: Iterator[TensorDictBase], total: int, title: str, bar: bool | None = None
) -> None:
    """Append pieces of rows; short ones are joined. If a piece raises, the pieces before it are written."""
    buffer = ReplayBuffer(storage=storage)
    waiting: list[TensorDictBase] = []
    rows = size = 0

    def append() -> None:
        nonlocal waiting, rows, size
        # reset first: an interrupt must not repeat the write
        pieces_to_write = waiting
        waiting = []
        rows = 0
        size = 0
        if pieces_to_write:
            buffer.extend(pieces_to_write[0] if len(pieces_to_write) == 1 else torch.cat(pieces_to_write))

    with progress(title, total, "row", bar) as advance:
        try:
            for piece in pieces:
                if has_ragged(piece):  # torch does not join these
                    append()
                    buffer.extend(piece)
                    advance(len(piece))
                    continue
                waiting += [piece] if len(piece) else []
                rows += len(piece)
                size += _bytes(piece)
                if rows >= _ROWS or size >= _BYTES:
                    append()
                advance(len(piece))
        finally:
            append()


def _bytes(rows: TensorDictBase) -> int:
    """The bytes of the tensors of rows. Those of `rows.bytes()` live on in a cycle until the garbage is collected."""
    return sum(leaf.numel() * leaf.element_size() for _, leaf in entries(rows) if isinstance(leaf, Tensor))


def _read(source: Source, parts: list[Part], workers: int) -> Generator[TensorDictBase, None, None]:
    """Yield the rows of all parts, after validation against each other and the announced number of rows."""
    read: Iterator[Iterable[TensorDictBase]] = map(source.read, parts)
    if workers and not any(part.streamed for part in parts):
        read = (map(rebuilt, pieces) for pieces in by_processes(partial(_whole_part, source), parts, workers))
    first: dict[Any, Any] = {}
    for part, pieces in zip(parts, read, strict=True):
        where = " ".join(map(str, (part.path, *part.which[:1])))
        count = 0
        for piece in agreeing(pieces, where, first):
            count += len(piece)
            if count > part.rows:
                raise CorruptDatasetError(f"{where} has {count} rows or more, {part.rows} were announced")
            yield piece
        if count < part.rows and not part.at_most:
            raise CorruptDatasetError(f"{where} has {count} rows, {part.rows} were announced")


def agreeing(
    pieces: Iterable[TensorDictBase], where: str, first: dict[Any, Any], error: type[Exception] = CorruptDatasetError
) -> Iterator[TensorDictBase]:
    """Yield pieces. Raises `error` if keys, shapes or dtypes differ from `first`, which the first piece fills."""
    for piece in pieces:
        kinds = _kinds(piece)
        if not first:
            first.update(kinds)
        if kinds != first:
            key = next(key for key in {**first, **kinds} if first.get(key) != kinds.get(key))
            there = first.get(key, "missing")
            here = kinds.get(key, "missing")
            raise error(f"{where}: {key} is {here}, in the first rows it is {there}")
        yield piece


def _whole_part(source: Source, part: Part) -> list[Portable]:
    return [portable(piece) for piece in source.read(part)]


def _kinds(rows: TensorDictBase) -> dict[Any, Any]:
    """Dtype and row shape of each entry, or "text"."""
    return {key: _kind(column) if isinstance(column, Tensor) else "text" for key, column in entries(rows)}


def _kind(column: Tensor) -> str:
    ragged = "ragged " if column.is_nested else ""  # whose second dim is the lengths
    return f"{column.dtype} {ragged}{[*column.shape[2 if column.is_nested else 1 :]]}"
