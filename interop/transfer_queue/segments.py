"""A segment: the file of one put. It is written once, read through a memory map, and never changed."""

import json
import mmap
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from fbuf.checkpoint import CheckpointCorrupt
from fbuf.checkpoint.files import opened
from interop.transfer_queue.field_bytes import Column, batched, column_bytes

_MAGIC = b"fbuf-seg"
_ALIGNED = 64
_MOST = 1 << 30  # bytes of one call of write: Linux writes 2 GiB at most
Field = Tensor | Sequence[Any]
Description = dict[str, Any]


class Segment:
    """The rows of one put, mapped. Tensors that are read are views of this map: to write to them does not change the file.

    Map the file for each reader, so that none sees what another has written to its tensors. A view is valid after the file
    was unlinked. `described` has the keys and layouts of an earlier map of the file, which are not read again.
    """

    def __init__(self, path: Path, allow_pickle: bool = False, described: Description | None = None) -> None:
        """FileNotFoundError where its rows were cleared. CheckpointCorrupt where it was cut."""
        with opened(path) as (handle, size):
            if size < len(_MAGIC) + 8:
                raise CheckpointCorrupt(f"{path}: {size} bytes are no segment")
            self._memory = mmap.mmap(handle, 0, access=mmap.ACCESS_COPY)
        tail = self._memory[size - len(_MAGIC) - 8 :]
        foot = int.from_bytes(tail[:8], "little")
        if tail[8:] != _MAGIC or foot > size - len(tail):
            raise CheckpointCorrupt(f"{path}: the end of the file is missing or damaged")
        described = described or json.loads(self._memory[size - len(tail) - foot : size - len(tail)])
        self.described = described
        self.keys: list[str | None] = described["keys"]
        self._tags = Column(
            described["tags"], self._memory, described["tags_start"], f"the tags of {path}", allow_pickle
        )
        self._columns = {
            name: Column(layout, self._memory, start, f"field {name!r} of {path}", allow_pickle)
            for name, (layout, start) in described["fields"].items()
        }

    def tags(self, position: int) -> dict[str, Any]:
        """The tags of a row, as the put had them."""
        return self._tags.row(position)

    def column(self, field: str) -> Column:
        return self._columns[field]


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
            place, starts = 0, {}
            for name, (_, pieces) in encoded.items():
                starts[name] = place
                place = _aligned(handle, _written(handle, pieces, place))
            foot = json.dumps(
                {
                    "keys": list(keys),
                    "tags": tags_layout,
                    "tags_start": place,
                    "fields": {name: [layout, starts[name]] for name, (layout, _) in encoded.items()},
                }
            ).encode()
            place = _written(handle, tags_pieces, place)
            _written(handle, [foot, len(foot).to_bytes(8, "little"), _MAGIC], place)
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
    segment, first = refs[0]
    if all(each == (segment, first + number) for number, each in enumerate(refs)):
        run = segment.column(field).run(first, first + len(refs))
        if run is not None:
            return "tensor", run
    return batched([segment.column(field).row(position) for segment, position in refs])


def _written(handle: int, pieces: Sequence[np.ndarray | bytes], place: int) -> int:
    for piece in pieces:
        rest = memoryview(piece.data if isinstance(piece, np.ndarray) else piece)
        while rest:
            count = os.write(handle, rest[:_MOST])
            rest, place = rest[count:], place + count
    return place


def _aligned(handle: int, place: int) -> int:
    return _written(handle, [bytes(-place % _ALIGNED)], place)
