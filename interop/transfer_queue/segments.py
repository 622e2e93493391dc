"""A segment: the file of one put. It is written once, read through a memory map, and never changed."""

import dataclasses
import json
import mmap
import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from torch import Tensor

from fbuf.checkpoint import CheckpointCorrupt
from fbuf.checkpoint.files import opened
from interop.transfer_queue.field_bytes import Column, Layout, batched, column_bytes, row_count

_MAGIC = b"fbuf-seg"
_ALIGNED = 64
_MOST = 1 << 30  # bytes of one call of write: Linux writes 2 GiB at most
Field = Tensor | Sequence[Any]
_TAIL = 16 + len(_MAGIC)  # the length and the checksum of the description, and the mark


@dataclasses.dataclass(frozen=True, slots=True)
class Region:
    """Where a field, or the tags, of all rows lie in the file: `size` bytes from `start` on, with this checksum."""

    layout: Layout
    start: int
    size: int
    checksum: int

    def check(self, memory: memoryview, where: str) -> None:
        if zlib.crc32(memory[self.start : self.start + self.size]) != self.checksum:
            raise CheckpointCorrupt(f"{where} are damaged: their checksum is another")


@dataclasses.dataclass(frozen=True, slots=True)
class SegmentContents:
    """What a segment says about its rows. `checked` names the fields whose checksum was that of their bytes."""

    keys: list[str | None]
    tags: Region
    fields: dict[str, Region]
    checked: set[str] = dataclasses.field(default_factory=set)

    def text(self) -> bytes:
        regions = {name: dataclasses.astuple(region) for name, region in self.fields.items()}
        return json.dumps({"keys": self.keys, "tags": dataclasses.astuple(self.tags), "fields": regions}).encode()

    @classmethod
    def of(cls, text: bytes, path: Path) -> Self:
        """CheckpointCorrupt for one whose parts have not as many rows as it has keys."""
        try:
            parts = json.loads(text)
            fields = {name: Region(*region) for name, region in parts["fields"].items()}
            found = cls(parts["keys"], Region(*parts["tags"]), fields)
            sizes = {"the tags": found.tags} | {f"field {name!r}": region for name, region in fields.items()}
            counts = {name: row_count(region.layout, region.size) for name, region in sizes.items()}
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointCorrupt(f"{path}: the description is not one of a segment: {error!r}") from error
        for name, count in counts.items():
            if count not in (None, len(found.keys)):
                raise CheckpointCorrupt(f"{path}: {name} of {count} rows, but there are {len(found.keys)} keys")
        return found


class Segment:
    """The rows of one put, mapped. Tensors that are read are views of this map: to write to them does not change the file.

    Map the file for each reader, so that none sees what another has written to its tensors. A view is valid after the file
    was unlinked. `described` has the keys and layouts of an earlier map of the file, which are not read again.
    """

    def __init__(self, path: Path, allow_pickle: bool = False, described: SegmentContents | None = None) -> None:
        """FileNotFoundError where its rows were cleared. CheckpointCorrupt where it was cut, or its description damaged."""
        self._path, self._allow_pickle = path, allow_pickle
        with opened(path) as (handle, size):
            if size < _TAIL:
                raise CheckpointCorrupt(f"{path}: {size} bytes are no segment")
            self._memory = mmap.mmap(handle, 0, access=mmap.ACCESS_COPY)
        tail = self._memory[size - _TAIL :]
        length, checksum = (int.from_bytes(tail[place : place + 8], "little") for place in (0, 8))
        if tail[16:] != _MAGIC or length > size - _TAIL:
            raise CheckpointCorrupt(f"{path}: the end of the file is missing or damaged")
        if described is None:
            text = self._memory[size - _TAIL - length : size - _TAIL]
            if zlib.crc32(text) != checksum:
                raise CheckpointCorrupt(f"{path}: the description of the rows is damaged: its checksum is another")
            described = SegmentContents.of(text, path)
        self.described = described
        self._tags: Column | None = None
        self._columns: dict[str, Column] = {}

    def key_and_tags(self, position: int) -> tuple[str | None, dict[str, Any]]:
        """Those of a row, as the put had them. CheckpointCorrupt where the tags of any row are damaged."""
        self._check_position(position)
        if self._tags is None:
            self._tags = self._checked(self.described.tags, f"the tags of {self._path}")
        return self.described.keys[position], self._tags.row(position)

    def column(self, field: str, first: int, stop: int) -> Column:
        """The values of a field, which has rows `first` to `stop`. CheckpointCorrupt where those of any row are damaged."""
        self._check_position(stop - 1)
        if field not in self._columns:
            where = f"the values of field {field!r} of {self._path}"
            region = self.described.fields.get(field)
            if region is None:
                raise CheckpointCorrupt(f"{where} are missing: the file has the fields {sorted(self.described.fields)}")
            self._columns[field] = (
                self._column(region, where) if field in self.described.checked else self._checked(region, where)
            )
            self.described.checked.add(field)
        return self._columns[field]

    def _checked(self, region: Region, where: str) -> Column:
        with memoryview(self._memory) as memory:
            region.check(memory, where)
        return self._column(region, where)

    def _column(self, region: Region, where: str) -> Column:
        return Column(region.layout, self._memory, region.start, where, self._allow_pickle)

    def _check_position(self, position: int) -> None:
        if position >= len(self.described.keys):
            raise CheckpointCorrupt(
                f"{self._path}: row {position} was put there, but the file has {len(self.described.keys)} rows"
            )


def write_segment(
    path: Path,
    fields: Mapping[str, Field],
    keys: Sequence[str | None],
    tags: Sequence[Mapping[str, Any]],
    allow_pickle: bool = False,
    flush: bool = False,
) -> None:
    """Write a segment to a path that does not exist. After an error there is no file.

    Args:
        fields: by name a tensor [rows, ...], a nested tensor or a sequence of values.
        keys, tags: one a row.
        allow_pickle: pickle values that are neither tensors, arrays nor plain values.
        flush: wait until the file is on the disk.

    Raises:
        TypeError: a value of another kind, without `allow_pickle`. Nothing was written.
    """
    encoded = {name: column_bytes(values, f"field {name!r}", allow_pickle) for name, values in fields.items()}
    tags_layout, tags_pieces = column_bytes([dict(each) for each in tags], "the tags", allow_pickle)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        try:
            place, regions = 0, {}
            for name, (layout, pieces) in encoded.items():
                regions[name] = region = _region(layout, pieces, place)
                _written(handle, pieces)
                place = region.start + region.size + _written(handle, [bytes(-region.size % _ALIGNED)])
            _written(handle, tags_pieces)
            text = SegmentContents(list(keys), _region(tags_layout, tags_pieces, place), regions).text()
            _written(handle, [text, *(each.to_bytes(8, "little") for each in (len(text), zlib.crc32(text))), _MAGIC])
            if flush:
                os.fsync(handle)
        finally:
            os.close(handle)
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def read_field(refs: Sequence[tuple[Segment, int]], field: str) -> tuple[str, Any]:
    """The rows of one field, each in a segment at a position: ("tensor", tensor) or ("values", list).

    Tensors are nested with the layout jagged; those of scalars are dense, [rows]. Consecutive rows of one put that differ in
    their length alone are a view of the file; others are copied.
    """
    if not refs:
        return "values", []
    segment, first = refs[0]
    if all(each == (segment, first + number) for number, each in enumerate(refs)):
        run = segment.column(field, first, first + len(refs)).run(first, first + len(refs))
        if run is not None:
            return "tensor", run
    return batched([segment.column(field, position, position + 1).row(position) for segment, position in refs])


def _region(layout: Layout, pieces: Sequence[np.ndarray | bytes], start: int) -> Region:
    size = checksum = 0
    for piece in pieces:
        memory = _bytes_of(piece)
        size, checksum = size + memory.nbytes, zlib.crc32(memory, checksum)
    return Region(layout, start, size, checksum)


def _written(handle: int, pieces: Sequence[np.ndarray | bytes]) -> int:
    """Write all of the pieces. Returns the number of their bytes."""
    written = 0
    for piece in pieces:
        rest = _bytes_of(piece)
        while rest:
            count = os.write(handle, rest[:_MOST])
            rest, written = rest[count:], written + count
    return written


def _bytes_of(piece: np.ndarray | bytes) -> memoryview:
    return memoryview(piece.data if isinstance(piece, np.ndarray) else piece)
