"""The rows of a queue on files: what was put survives every kill, until it is cleared."""

import contextlib
import dataclasses
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from fbuf.checkpoint import CheckpointCorrupt
from interop.transfer_queue.log import Log, flush_folder
from interop.transfer_queue.queue_rows import QueueRows, Row, RowPart
from interop.transfer_queue.segments import Description, Field, Segment, read_field, write_segment

_DESCRIBED = 1000  # descriptions of files that are kept


class OtherRunError(RuntimeError):
    """The folder of a queue was opened by a later run: this process belongs to an earlier one and may not write."""


@dataclasses.dataclass(frozen=True, slots=True)
class Stored:
    """A stored row: its index, partition and fields, and the key and tags of the put that was the last."""

    index: int
    partition: str
    key: str | None
    fields: tuple[str, ...]
    tags: dict[str, Any]


class QueueFiles:
    """Rows by index, of any number of fields, in a folder that all processes of a run share.

    A put is one file, and one line in a log, which commits it: it is whole or not there. It is committed when `put` returns.
    Then a kill of any process, or of all, does not lose it; with `flush`, neither does a loss of power. Any thread of any
    process may call any method. Reads take no lock, and copy nothing where rows of one put are read in order.

    Args:
        path: the folder, on a file system that all machines of the run see.
        generation: the number of the run, which `begin` returned: later ones may write, earlier ones may not.
        flush: wait for the disk at each commit.
        allow_pickle: pickle values that are neither tensors, arrays nor plain values, and unpickle them. Unpickling may run
            code: allow it for folders that you trust.
    """

    def __init__(self, path: str | Path, generation: int, flush: bool = False, allow_pickle: bool = False) -> None:
        self._path, self._generation, self._flush, self._allow_pickle = Path(path), generation, flush, allow_pickle
        self._log = Log(self._path)
        self._described_segments: dict[str, Description] = {}  # of files that were read

    @classmethod
    def begin(
        cls,
        path: str | Path,
        indexes: Callable[[Sequence[Stored]], Sequence[int]],
        flush: bool = False,
        allow_pickle: bool = False,
    ) -> tuple[int, list[Stored]]:
        """Open a folder for a new run. The stored rows get new indexes; earlier runs may not write any more.

        Args:
            path: the folder. It is made where there is none.
            indexes: called once with the stored rows, under the lock of the folder; returns an index for each of them.
            flush, allow_pickle: as of the class.

        Returns:
            The generation of the run, and the stored rows by their new indexes. A killed call has changed nothing.
        """
        folder = Path(path)
        (folder / "segments").mkdir(parents=True, exist_ok=True)
        log = Log(folder)
        try:
            with log.held() as before:
                files = cls(folder, before.generation, flush, allow_pickle)
                stored = [files._described(index, row) for index, row in before.stored.items()]
                fresh = list(indexes(stored)) if stored else []
                if len(set(fresh)) != len(stored):
                    raise ValueError(f"{len(stored)} rows need as many different indexes, got {len(set(fresh))}")
                rows = QueueRows(before.generation + 1, dict(zip(fresh, before.stored.values(), strict=True)))
                log.replace(rows, flush)
                files._remove_unused(rows)
        finally:
            log.close()
        return rows.generation, [
            dataclasses.replace(each, index=index) for each, index in zip(stored, fresh, strict=True)
        ]

    def put(
        self,
        partition: str,
        indexes: Sequence[int],
        fields: Mapping[str, Field],
        keys: Sequence[str | None] | None = None,
        tags: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """Commit fields of rows. A row that has them already gets the new values; its other fields stay.

        Args:
            partition: of the rows.
            indexes: one a row, all different.
            fields: by name a tensor [rows, ...], a nested tensor or a sequence of values.
            keys, tags: one a row; None stands for none.

        Raises:
            OtherRunError: a later run has opened the folder.
            TypeError: a value is neither tensor, array nor plain value, and `allow_pickle` is not set.
            ValueError: sizes differ, or an index is there twice.
            OSError: the disk is full, for example. After every error the rows are as before.
        """
        indexes = [int(index) for index in indexes]
        if len(set(indexes)) != len(indexes):
            raise ValueError("indexes must be all different: of a row that is there twice no value is the last")
        for name, values in fields.items():
            count = values.size(0) if isinstance(values, Tensor) else len(values)  # no len() of some nested tensors
            if count != len(indexes):
                raise ValueError(f"field {name!r} has {count} rows, {len(indexes)} indexes were given")
        segment = f"{self._generation}-{uuid.uuid4().hex}"
        path = self._segment_path(segment)
        write_segment(
            path,
            fields,
            keys or [None] * len(indexes),
            tags or [{}] * len(indexes),
            self._allow_pickle,
            self._flush,
        )
        committed = False
        try:
            if self._flush:
                flush_folder(path.parent)
            with self._log.held() as rows:
                self._check_generation(rows)
                replaced = rows.segments_of(indexes)
                entry = {"put": segment, "partition": partition, "indexes": indexes, "fields": list(fields)}
                committed = True  # from here on the log decides: the file stays, and the next run removes it if unused
                self._log.append(entry, self._flush)
        finally:
            if not committed:
                path.unlink(missing_ok=True)
        self._free(replaced)

    def get(self, indexes: Sequence[int], fields: Sequence[str]) -> dict[str, tuple[str, Any]]:
        """Fields of rows: for each ("tensor", a tensor) or ("values", a list with one value a row).

        Tensors are nested with the layout jagged, where the shapes allow it; those of scalars are dense, [rows]. They may be
        views of the files: to write to them changes nothing that is stored.

        Raises:
            KeyError: a row is not stored, or has not all fields.
            CheckpointCorrupt: a file was removed or damaged.
        """
        missing: set[str] = set()
        while True:
            with self._log.rows() as rows:
                parts = {field: [_part(rows, index, field) for index in indexes] for field in fields}
            names = {part.segment for each in parts.values() for part in each}
            if gone := names & missing:  # the log was read after the file was missing, and still needs it
                raise CheckpointCorrupt(f"{self._segment_path(min(gone))}: this file has stored rows, and is missing")
            segments = self._segments(names)
            missing = names - segments.keys()
            if not missing:  # else a row was cleared or put again after the log was read
                break
        return {
            field: read_field([(segments[part.segment], part.position) for part in each], field)
            for field, each in parts.items()
        }

    def clear(self, indexes: Iterable[int]) -> None:
        """Remove rows, all their fields. Indexes without a row are skipped. Files that no row needs are removed."""
        with self._log.held() as rows:
            self._check_generation(rows)
            there = [index for index in map(int, indexes) if index in rows.stored]
            if not there:
                return
            freed = rows.segments_of(there)
            self._log.append({"clear": there}, self._flush)
        self._free(freed)

    def stored(self) -> list[Stored]:
        """All stored rows. O(rows)."""
        with self._log.rows() as rows:
            return [self._described(index, row) for index, row in rows.stored.items()]

    def close(self) -> None:
        """Close the files. Tensors that were read stay valid."""
        self._log.close()

    def _described(self, index: int, row: Row) -> Stored:
        last = row.parts[-1]
        segment = self._segment(last.segment)
        fields = tuple(sorted(row.fields))
        return Stored(index, row.partition, segment.keys[last.position], fields, segment.tags(last.position))

    def _check_generation(self, rows: QueueRows) -> None:
        if rows.generation != self._generation:
            raise OtherRunError(
                f"{self._path} belongs to run {rows.generation}, this process to run {self._generation}: it has outlived "
                "its controller. End it, and start it again in the new run"
            )

    def _segment_path(self, name: str) -> Path:
        return self._path / "segments" / name

    def _segment(self, name: str) -> Segment:
        found = Segment(self._segment_path(name), self._allow_pickle, self._described_segments.get(name))
        if len(self._described_segments) > _DESCRIBED:
            self._described_segments = {}
        self._described_segments[name] = found.described
        return found

    def _segments(self, names: Iterable[str]) -> dict[str, Segment]:
        """Segments by name, without those that were removed."""
        found = {}
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                found[name] = self._segment(name)
        return found

    def _free(self, candidates: set[str]) -> None:
        """Remove those of the segments that no row needs. A killed call leaves them to the next run."""
        with self._log.held() as rows:
            if rows.generation == self._generation and candidates:
                for name in candidates - rows.needed(candidates):
                    self._segment_path(name).unlink(missing_ok=True)

    def _remove_unused(self, rows: QueueRows) -> None:
        """Remove what killed processes left. For the holder of the lock, after it has begun a run."""
        there = {path.name for path in (self._path / "segments").iterdir()}
        for name in there - rows.needed(there):
            self._segment_path(name).unlink(missing_ok=True)


def _part(rows: QueueRows, index: int, field: str) -> RowPart:
    row = rows.stored.get(index)
    if row is None:
        raise KeyError(f"row {index} is not stored: it was cleared, or never put")
    part = row.part_of(field)
    if part is None:
        raise KeyError(f"row {index} of {row.partition!r} has no field {field!r}; it has {sorted(row.fields)}")
    return part
