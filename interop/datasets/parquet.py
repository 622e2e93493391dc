"""A safe reader of Parquet files: what a row group announces is compared with its bytes before it is decoded.

A run of a billion equal values takes ten bytes, and a value of a dictionary may be repeated in each row. pyarrow decodes
both to memory of the full size. The headers of the pages say how much that is, and are read here before.
"""

import contextlib
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from interop.data.arguments import required
from interop.datasets import allowance
from interop.datasets.arrow_columns import faults
from interop.datasets.errors import CorruptDatasetError

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8, "BYTE_ARRAY": 8}
# Kinds of pages.
_DATA = 0
_DICTIONARY = 2
_DATA_2 = 3
_DELTAS = 7  # an encoding whose values repeat the beginning of the value before: their size is not known before
_MOST_HEADER = 1 << 20  # bytes of the header of a page
_MOST_VALUES = 1 << 40


@contextlib.contextmanager
def opened(path: Path) -> Iterator["RowGroups"]:
    """Open a Parquet file. CorruptDatasetError names it, also for other errors of pyarrow in the block."""
    with faults(f"{path} is missing or not a Parquet file: it"), path.open("rb") as plain:
        parquet = required("pyarrow.parquet", "datasets")
        with parquet.ParquetFile(path) as file:
            groups = [file.metadata.row_group(place) for place in range(file.metadata.num_row_groups)]
            text = [
                file.schema.column(place).path
                for place in range(len(file.schema))
                if file.schema.column(place).physical_type == "BYTE_ARRAY"
                and any(group.column(place).has_dictionary_page for group in groups)
            ]
            schema = _without_views(file.schema_arrow)
        with parquet.ParquetFile(path, read_dictionary=text) as file:
            yield RowGroups(path, plain, file, schema)


class RowGroups:
    """The row groups of an open file.

    Args:
        path: for messages.
        plain: the file.
        file: the same as a `pyarrow.parquet.ParquetFile`, which reads text as dictionaries.
        schema: the columns without that, and their types. Views are text and bytes.
    """

    def __init__(self, path: Path, plain: BinaryIO, file: "pq.ParquetFile", schema: "pa.Schema") -> None:
        self._path = path
        self._plain = plain
        self._file = file
        self.schema = schema
        self._size = os.fstat(plain.fileno()).st_size

    def rows(self) -> list[int]:
        """The rows of each group."""
        counts = [self._file.metadata.row_group(place).num_rows for place in range(self._file.metadata.num_row_groups)]
        for place, count in enumerate(counts):
            if not 0 <= count <= _MOST_VALUES:
                raise CorruptDatasetError(f"{self._path}, row group {place}: it announces {count} rows")
        return counts

    def read(self, number: int, columns: Collection[str] | None = None) -> "pa.Table":
        """A row group, a `pyarrow.Table`: these columns, each of which the schema has once, or all.

        CorruptDatasetError, before it is decoded, if it announces more than it has.
        """
        self._check(number, columns)
        table = self._file.read_row_group(number, columns=columns, use_threads=False)
        schema = self.schema
        where = f"{self._path}, row group {number}"
        most = allowance.unpacked(self._stored(number))
        allowance.check(sum(_text_bytes(column) for column in table.columns), most, f"{where}, its text")
        if columns is not None:
            table = table.select([place for place, name in enumerate(table.column_names) if name in columns])
            fields = [schema.field(name) for name in table.column_names]
            schema = required("pyarrow", "datasets").schema(fields, schema.metadata)
        return table.cast(schema) if table.num_columns else table  # a cast would forget its number of rows

    def table(self, columns: Collection[str] | None = None, bounds: tuple[str, int, int] | None = None) -> "pa.Table":
        """The rows of all groups, a `pyarrow.Table`, as `read`.

        Args:
            columns: as for `read`.
            bounds: the name of one of these columns, of integers, and its least and largest value in the rows to read.
        """
        pyarrow = required("pyarrow", "datasets")
        compute = required("pyarrow.compute", "datasets")
        tables = []
        for number in range(len(self.rows())):
            if bounds is None or self._may_have(number, *bounds):
                table = self.read(number, columns)
                if bounds is not None:
                    name, least, most = bounds
                    inside = compute.and_(
                        compute.greater_equal(table[name], least), compute.less_equal(table[name], most)
                    )
                    table = table.filter(inside)
                tables.append(table)
        if tables:
            return pyarrow.concat_tables(tables)
        fields = [*self.schema] if columns is None else [self.schema.field(name) for name in columns]
        return pyarrow.schema(fields, self.schema.metadata).empty_table()

    def _may_have(self, number: int, name: str, least: int, most: int) -> bool:
        """Whether a row group may have values between these, by its statistics."""
        group = self._file.metadata.row_group(number)
        for place in range(group.num_columns):
            statistics = group.column(place).statistics if group.column(place).path_in_schema == name else None
            if statistics is not None and statistics.has_min_max:
                return bool(statistics.max >= least and statistics.min <= most)
        return True

    def _stored(self, number: int) -> int:
        group = self._file.metadata.row_group(number)
        return sum(group.column(place).total_compressed_size for place in range(group.num_columns))

    def _check(self, number: int, columns: Collection[str] | None) -> None:
        group = self._file.metadata.row_group(number)
        schema = self._file.schema
        decoded = 0
        for place in range(group.num_columns):
            if columns is not None and not _is_in(group.column(place).path_in_schema, columns):
                continue
            column = group.column(place)
            where = f"{self._path}, row group {number}, {group.column(place).path_in_schema}"
            start = column.data_page_offset
            if column.has_dictionary_page:
                start = min(start, column.dictionary_page_offset)
            end = start + column.total_compressed_size
            if not (0 < start <= end <= self._size and 0 <= column.num_values <= _MOST_VALUES):
                raise CorruptDatasetError(f"{where}: lies outside of the file")
            pages, has_dictionary = self._pages(start, end, column.num_values, where)
            if has_dictionary and not column.has_dictionary_page:
                raise CorruptDatasetError(f"{where}: has a dictionary that is not announced")
            decoded += pages
            width = _WIDTHS.get(column.physical_type) or max(schema.column(place).length, 1)
            decoded += column.num_values * width
        allowance.check(decoded, allowance.unpacked(self._stored(number)), f"{self._path}, row group {number}")

    def _pages(self, place: int, end: int, values: int, where: str) -> tuple[int, bool]:
        """The bytes of the pages of a column, decompressed, and whether there is a dictionary.

        CorruptDatasetError unless they hold so many values.
        """
        total = 0
        counted = 0
        has_dictionary = False
        while place < end and counted < values:
            self._plain.seek(place)
            header = _Header(self._plain.read(min(end - place, _MOST_HEADER)), where)
            about = header.struct()
            kind, size, stored = (_not_negative(about.get(field), where) for field in (1, 2, 3))
            inner = about.get({_DATA: 5, _DICTIONARY: 7, _DATA_2: 8}.get(kind, -1))
            inner = inner if isinstance(inner, dict) else {}
            if kind in (_DATA, _DATA_2):
                count = _not_negative(inner.get(1), where)
                encoding = inner.get(2 if kind == _DATA else 4)
                if count > values - counted or encoding == _DELTAS:
                    raise CorruptDatasetError(f"{where}: a page announces {count} values, in the encoding {encoding}")
                counted += count
            elif kind == _DICTIONARY and _not_negative(inner.get(1), where) > size + 1:
                raise CorruptDatasetError(f"{where}: a dictionary announces {inner[1]} values in {size} bytes")
            has_dictionary |= kind == _DICTIONARY
            total += size
            place += header.place + stored
        if counted != values:
            raise CorruptDatasetError(f"{where}: its pages hold {counted} values, {values} are announced")
        return total, has_dictionary


def _without_views(schema: "pa.Schema") -> "pa.Schema":
    """A schema with text and bytes in the place of their views, to which pyarrow casts no dictionaries."""
    pyarrow = required("pyarrow", "datasets")
    types = pyarrow.types

    def plain(kind: "pa.DataType") -> "pa.DataType":
        if types.is_string_view(kind):
            return pyarrow.string()
        if types.is_binary_view(kind):
            return pyarrow.binary()
        if types.is_struct(kind):
            return pyarrow.struct([field.with_type(plain(field.type)) for field in kind])
        if types.is_fixed_size_list(kind):
            return pyarrow.list_(kind.value_field.with_type(plain(kind.value_type)), kind.list_size)
        if types.is_list(kind) or types.is_large_list(kind):
            make = pyarrow.list_ if types.is_list(kind) else pyarrow.large_list
            return make(kind.value_field.with_type(plain(kind.value_type)))
        return kind

    return pyarrow.schema([field.with_type(plain(field.type)) for field in schema], schema.metadata)


def _is_in(path: str, columns: Collection[str]) -> bool:
    """Whether pyarrow reads a leaf for columns of these names: it is one of them, or below one."""
    parts = path.split(".")
    return any(".".join(parts[:count]) in columns for count in range(1, len(parts) + 1))


def _not_negative(value: object, where: str) -> int:
    """A number of the header of a page."""
    if not isinstance(value, int) or value < 0:
        raise CorruptDatasetError(f"{where}: the header of a page has {value!r} where a number or size is needed")
    return value


def _text_bytes(column: "pa.ChunkedArray") -> int:
    """The bytes of the text in a column, written out."""
    pyarrow = required("pyarrow", "datasets")
    compute = required("pyarrow.compute", "datasets")
    types = pyarrow.types
    total = 0
    for chunk in column.chunks if isinstance(column, pyarrow.ChunkedArray) else [column]:
        kind = chunk.type
        if types.is_dictionary(kind):
            lengths = compute.binary_length(chunk.dictionary).cast("int64")
            total += (compute.sum(lengths.take(chunk.indices)).as_py() or 0) if len(lengths) else 0
        elif types.is_struct(kind):
            total += sum(map(_text_bytes, chunk.flatten()))
        elif types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
            total += _text_bytes(chunk.flatten())
    return total


class _Header:
    """The header of a page: a struct in the compact protocol of Thrift. `place` is the byte behind what was read."""

    def __init__(self, data: bytes, where: str) -> None:
        self._data = data
        self._where = where
        self.place = 0

    def struct(self, depth: int = 0) -> dict[int, Any]:
        """The fields by id: integers, structs, and None for others."""
        if depth > 8:
            raise self._damaged()
        fields: dict[int, Any] = {}
        field = 0
        while head := self._byte():
            field = field + (head >> 4) if head >> 4 else self._signed()
            fields[field] = self._value(head & 15, depth)
        return fields

    def _value(self, kind: int, depth: int) -> Any:
        if kind in (1, 2):  # True, False
            return None
        if kind == 3:
            return self._byte()
        if kind in (4, 5, 6):
            return self._signed()
        if kind == 7:
            return self._skip(8)
        if kind == 8:
            return self._skip(self._unsigned())
        if kind == 12:
            return self.struct(depth + 1)
        raise self._damaged()  # lists and maps, which headers of pages do not have

    def _byte(self) -> int:
        if self.place >= len(self._data):
            raise self._damaged()
        self.place += 1
        return self._data[self.place - 1]

    def _unsigned(self) -> int:
        value = 0
        for shift in range(0, 70, 7):
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise self._damaged()

    def _signed(self) -> int:
        value = self._unsigned()
        return (value >> 1) ^ -(value & 1)

    def _skip(self, count: int) -> None:
        if count > len(self._data) - self.place:
            raise self._damaged()
        self.place += count

    def _damaged(self) -> CorruptDatasetError:
        return CorruptDatasetError(f"{self._where}: the header of a page is damaged")
