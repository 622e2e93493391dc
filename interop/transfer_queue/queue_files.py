"""The rows of a queue on files: what was put survives every kill, until it is cleared."""

import contextlib
import dataclasses
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import index as as_int
from pathlib import Path
from typing import Any

from torch import Tensor

from fbuf.checkpoint import CheckpointCorrupt
from interop.transfer_queue.log import Log, flush_folder
from interop.transfer_queue.queue_rows import QueueRows, Row, RowPart
from interop.transfer_queue.segments import Field, Segment, SegmentContents, read_field, write_segment

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
        self._described_segments: dict[str, SegmentContents] = {}  # of files that were read
        self._unneeded: set[str] = set()  # files to be removed

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
            indexes: called once with the stored rows, under the lock of the folder; returns an index for each of them, an
                integer of Python, NumPy or torch.
            flush, allow_pickle: as of the class.

        Returns:
            The generation of the run, and the stored rows by their new indexes. A killed call has changed nothing.

        Raises:
            CheckpointCorrupt: the log, or what a file says about its rows, is missing or damaged. Nothing was removed.
            ValueError: the rows did not get as many different indexes.
        """
        folder = Path(path)
        (folder / "segments").mkdir(parents=True, exist_ok=True)
        log = Log(folder)
        try:
            with log.held() as before:
                files = cls(folder, before.generation, flush, allow_pickle)
                stored, missing = files._described(before.stored)
                files._refuse_missing(missing)
                fresh = [as_int(index) for index in indexes(stored)] if stored else []
                if not len(set(fresh)) == len(fresh) == len(stored):
                    raise ValueError(
                        f"{len(stored)} rows need as many different indexes, got {len(set(fresh))} in {len(fresh)}"
                    )
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
            TypeError: a value is neither tensor, array nor plain value, and `allow_pickle` is not set; or a partition, a key
                or the name of a field is no text.
            ValueError: the sizes of fields, keys or tags differ from that of the indexes, or an index is there twice.
            OSError: the disk is full, for example. After every error the rows are as before.
        """
        indexes = [as_int(index) for index in indexes]
        keys = [None] * len(indexes) if keys is None else list(keys)
        tags = [{}] * len(indexes) if tags is None else list(tags)
        _check_put(partition, indexes, fields, keys, tags)
        segment = f"{self._generation}-{uuid.uuid4().hex}"
        path = self._segment_path(segment)
        write_segment(path, fields, keys, tags, self._allow_pickle, self._flush)
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
        except BaseException as error:
            if not committed:
                path.unlink(missing_ok=True)
            self._unneeded.add(segment)  # the log says whether it is
            if isinstance(error, OSError):
                self._free(set())  # at once: the disk may be full
            raise
        self._free(replaced if indexes else {segment})

    def get(self, indexes: Sequence[int], fields: Sequence[str]) -> dict[str, tuple[str, Any]]:
        """Fields of rows: for each ("tensor", a tensor) or ("values", a list with one value a row).

        Tensors are nested with the layout jagged, where the shapes allow it; those of scalars are dense, [rows]. They may be
        views of the files: to write to them changes nothing that is stored. Of no rows a field is ("values", []).

        Raises:
            KeyError: a row is not stored, or has not all fields.
            CheckpointCorrupt: a file was removed or damaged. This object checks the values of a field of a put when it reads
                some of them first: O(bytes of all of them).
        """
        indexes = [as_int(index) for index in indexes]
        missing: set[str] = set()
        while True:
            with self._log.rows() as rows:
                parts = {field: [_part(rows, index, field) for index in indexes] for field in fields}
            names = {part.segment for each in parts.values() for part in each}
            self._refuse_missing(names & missing)  # the log was read after the file was missing, and still needs it
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
        indexes = [as_int(index) for index in indexes]
        with self._log.held() as rows:
            self._check_generation(rows)
            there = [index for index in indexes if index in rows.stored]
            freed = rows.segments_of(there)
            if there:
                self._log.append({"clear": there}, self._flush)
        self._free(freed)

    def stored(self) -> list[Stored]:
        """All stored rows. O(rows). CheckpointCorrupt where what a file says about its rows is missing or damaged."""
        missing: set[str] = set()
        while True:
            with self._log.rows() as rows:
                there = dict(rows.stored)
            self._refuse_missing({row.parts[-1].segment for row in there.values()} & missing)
            found, missing = self._described(there)
            if not missing:  # else a row was cleared or put again after the log was read
                return found

    def close(self) -> None:
        """Close the files. Tensors that were read stay valid."""
        self._log.close()

    def _described(self, rows: Mapping[int, Row]) -> tuple[list[Stored], set[str]]:
        """The rows in their order, without those of missing segments; and these segments. Each file is opened once."""
        of_segment: dict[str, list[int]] = {}
        for index, row in rows.items():
            of_segment.setdefault(row.parts[-1].segment, []).append(index)
        found, missing = {}, set()
        for name, indexes in of_segment.items():
            try:
                segment = self._segment(name)
            except FileNotFoundError:
                missing.add(name)
                continue
            for index in indexes:
                row = rows[index]
                key, tags = segment.key_and_tags(row.parts[-1].position)
                found[index] = Stored(index, row.partition, key, tuple(sorted(row.fields)), tags)
        return [found[index] for index in rows if index in found], missing

    def _refuse_missing(self, segments: set[str]) -> None:
        if segments:
            raise CheckpointCorrupt(f"{self._segment_path(min(segments))}: this file has stored rows, and is missing")

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
        """Remove those of the segments that no row needs. What cannot be removed is left to the next call.

        A killed call leaves them to the next run. What the caller has committed stays so, whatever happens here.
        """
        self._unneeded.update(candidates)
        if not self._unneeded:
            return
        with contextlib.suppress(OSError), self._log.held() as rows:
            waiting = set(self._unneeded)
            if rows.generation == self._generation:
                for name in waiting - rows.needed(waiting):
                    self._segment_path(name).unlink(missing_ok=True)
            self._unneeded -= waiting

    def _remove_unused(self, rows: QueueRows) -> None:
        """Remove what killed processes left. For the holder of the lock, after it has begun a run."""
        there = {path.name for path in (self._path / "segments").iterdir()}
        for name in there - rows.needed(there):
            self._segment_path(name).unlink(missing_ok=True)


def _check_put(
    partition: str,
    indexes: Sequence[int],
    fields: Mapping[str, Field],
    keys: Sequence[str | None],
    tags: Sequence[Mapping[str, Any]],
) -> None:
    """Refuse a put that could not be read: before anything of it is written."""
    if len(set(indexes)) != len(indexes):
        raise ValueError("indexes must be all different: of a row that is there twice no value is the last")
    for what, texts in (("partition", [partition]), ("name of a field", fields), ("key", keys)):
        for text in texts:
            if not (isinstance(text, str) or (text is None and what == "key")):
                raise TypeError(f"a {what} must be a str, got {text!r}")
    for tag in tags:
        if not isinstance(tag, Mapping):
            raise TypeError(f"the tags of a row must be a dict, got {tag!r}")
    # no len() of some nested tensors
    sizes = {f"field {n!r}": v.size(0) if isinstance(v, Tensor) else len(v) for n, v in fields.items()}
    for where, count in {**sizes, "keys": len(keys), "tags": len(tags)}.items():
        if count != len(indexes):
            raise ValueError(f"{where}: {count} rows, {len(indexes)} indexes were given")


def _part(rows: QueueRows, index: int, field: str) -> RowPart:
    row = rows.stored.get(index)
    if row is None:
        raise KeyError(f"row {index} is not stored: it was cleared, or never put")
    part = row.part_of(field)
    if part is None:
        raise KeyError(f"row {index} of {row.partition!r} has no field {field!r}; it has {sorted(row.fields)}")
    return part
