"""The files of a LeRobot dataset (v3.0) as they are written: numbered Parquet files and videos, each closed at a size."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from interop.data.arguments import required
from interop.datasets.video import VideoWriter

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

_MIB = 1 << 20


@dataclass(frozen=True)
class Numbered:
    """Names the files of one kind: `file_index` of `chunk_index`, so many files a chunk.

    Args:
        folder: of the dataset.
        form: the path of a file, with `{chunk_index}`, `{file_index}` and perhaps `{video_key}`.
        chunks_size: files a chunk.
        video_key: of a video.
    """

    folder: Path
    form: str
    chunks_size: int
    video_key: str = ""

    def path(self, at: tuple[int, int]) -> Path:
        """The path of a file, whose folder is made."""
        path = self.folder / self.form.format(chunk_index=at[0], file_index=at[1], video_key=self.video_key)
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def after(self, at: tuple[int, int] | None) -> tuple[int, int]:
        """The number behind that of a file, or the first one."""
        if at is None:
            return 0, 0
        chunk, file = at
        return (chunk + 1, 0) if file >= self.chunks_size - 1 else (chunk, file + 1)


class Tables:
    """Parquet files that tables are appended to. A file is closed, at the next `begin`, when it has `most` MiB.

    Args:
        numbered: names the files.
        last: the number of the last file that is there; files get higher ones.
        most: the size of a file in MiB.
    """

    def __init__(self, numbered: Numbered, last: tuple[int, int] | None, most: float) -> None:
        self._numbered = numbered
        self._most = most * _MIB
        self._writer: pq.ParquetWriter | None = None
        self._size = 0
        self.at = numbered.after(last)
        """The number of the file that is written."""
        self._used = False

    def begin(self) -> tuple[int, int]:
        """Start something that lies in one file. Returns the number of the file."""
        if self._size >= self._most:
            self.close()
            self.at = self._numbered.after(self.at)
        return self.at

    def append(self, table: "pa.Table") -> None:
        """Append a table as a row group, to the file of the last `begin`."""
        if self._writer is None:
            path = self._numbered.path(self.at)
            self._writer = required("pyarrow.parquet", "datasets").ParquetWriter(
                path, table.schema, compression="snappy", write_page_checksum=True
            )
        self._writer.write_table(table)
        self._size += table.nbytes

    def close(self) -> None:
        """Write the end of the open file."""
        writer = self._writer
        self._writer = None
        self._size = 0
        if writer is not None:
            writer.close()


class Videos:
    """Videos of one feature, as `Tables`. An episode starts behind the others in its file."""

    def __init__(
        self,
        numbered: Numbered,
        last: tuple[int, int] | None,
        most: float,
        codec: str,
        fps: int,
        size: tuple[int, int],
        crf: int,
    ) -> None:
        self._numbered = numbered
        self._most = most * _MIB
        self._how = codec, fps, *size, crf
        self._fps = fps
        self._writer: VideoWriter | None = None
        self._at = numbered.after(last)
        self._start = 0

    def begin(self) -> None:
        """Start an episode."""
        if self._writer is not None and self._writer.size >= self._most:
            self.close()
            self._at = self._numbered.after(self._at)
        if self._writer is None:
            self._writer = VideoWriter(self._numbered.path(self._at), *self._how)
        self._start = self._writer.frames

    def append(self, frames: np.ndarray) -> None:
        """Append frames [n, H, W, 3] to the episode."""
        assert self._writer is not None, "begin() comes first"
        self._writer.append(frames)

    def end(self) -> dict[str, Any]:
        """End the episode. Returns the columns of `meta/episodes` that say where it is."""
        assert self._writer is not None, "begin() comes first"
        prefix = f"videos/{self._numbered.video_key}"
        return {
            f"{prefix}/chunk_index": self._at[0],
            f"{prefix}/file_index": self._at[1],
            f"{prefix}/from_timestamp": self._start / self._fps,
            f"{prefix}/to_timestamp": self._writer.frames / self._fps,
        }

    def close(self) -> None:
        """Write the end of the open file."""
        writer = self._writer
        self._writer = None
        if writer is not None:
            writer.close()


class EpisodeList:
    """The table `meta/episodes`, of one row an episode, which is written a few hundred rows at a time.

    Args:
        tables: its files.
        schema: that of files which are there; rows get its columns. None where there are none.
    """

    AT_ONCE = 256

    def __init__(self, tables: Tables, schema: "pa.Schema | None") -> None:
        self._tables = tables
        self._schema = schema
        self._rows: list[Mapping[str, Any]] = []

    def append(self, row: Mapping[str, Any]) -> None:
        """Append the row of an episode, without the number of the file that the row itself is in."""
        if not self._rows:
            self._tables.begin()
        chunk, file = self._tables.at
        self._rows.append({**row, "meta/episodes/chunk_index": chunk, "meta/episodes/file_index": file})
        if len(self._rows) >= self.AT_ONCE:
            self._flush()

    def close(self) -> None:
        """Write all rows, and the end of the file."""
        self._flush()
        self._tables.close()

    def _flush(self) -> None:
        if self._rows:
            table = _fitted(self._rows, self._schema)
            self._schema = table.schema
            self._tables.append(table)
            self._rows = []


def _fitted(rows: Sequence[Mapping[str, Any]], schema: "pa.Schema | None") -> "pa.Table":
    """Rows as a table with the columns of a schema; what they lack is missing there."""
    pa = required("pyarrow", "datasets")
    table = pa.Table.from_pylist([*map(dict, rows)])
    if schema is None:
        return table
    columns = [
        table[field.name].cast(field.type) if field.name in table.column_names else pa.nulls(len(table), field.type)
        for field in schema
    ]
    return pa.table(columns, schema=schema)
