"""Parquet files as others write them come back as pyarrow reads them; damaged ones raise the typed error."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from interop.datasets import parquet
from interop.datasets.errors import CorruptDatasetError


def table(rows: int = 3000) -> pa.Table:
    random = np.random.default_rng(0)
    words = ["", "grün", "a" * 300, *map(str, range(50))]
    text = [words[place] for place in random.integers(len(words), size=rows)]
    return pa.table({
        "number": random.random(rows),
        "small": random.integers(0, 3, rows).astype(np.int8),
        "flag": random.random(rows) < 0.5,
        "constant": np.zeros(rows, np.int64),
        "text": text,
        "other text": [f"{place} {each}" for place, each in enumerate(text)],
        "bytes": [each.encode() for each in text],
        "large": pa.array(text, pa.large_string()),
        "image": pa.FixedSizeListArray.from_arrays(random.integers(0, 255, rows * 12).astype(np.uint8), 12),
        "words": pa.array([text[:place % 4] for place in range(rows)]),
        "nested": pa.array([{"a": each, "b": {"c": [1.5, 2.5]}} for each in text]),
        "gaps": pa.array([None if place % 3 else float(place) for place in range(rows)]),
        "moment": pa.array(np.arange(rows), pa.timestamp("ns")),
        "decimal": pa.array([None] * rows, pa.decimal128(20, 3)),
    })  # fmt: skip


def read(path: Path) -> pa.Table:
    with parquet.opened(path) as file:
        return pa.concat_tables([file.read(place) for place in range(len(file.rows()))])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"compression": "none", "use_dictionary": False},
        {"compression": "zstd", "row_group_size": 700},
        {"compression": "gzip", "data_page_version": "2.0"},
        {"data_page_size": 500, "write_statistics": True, "write_page_index": True, "write_page_checksum": True},
        {"dictionary_pagesize_limit": 200},
        {"use_dictionary": ["text"], "column_encoding": {"other text": "DELTA_LENGTH_BYTE_ARRAY"}},
        {"use_deprecated_int96_timestamps": True},
        {"store_schema": False},
    ],
    ids=str,
)
def test_files_of_every_kind(options: dict[str, Any], tmp_path: Path) -> None:
    pq.write_table(table(), tmp_path / "a.parquet", **options)
    found, expected = read(tmp_path / "a.parquet"), pq.read_table(tmp_path / "a.parquet")
    assert found.schema.equals(expected.schema) and found.equals(expected)


def test_views(tmp_path: Path) -> None:
    text = ["a", "b" * 40, "a"]
    kinds = {"text": pa.string_view(), "bytes": pa.binary_view(), "struct": pa.struct([("x", pa.string_view())])}
    held = {"text": text, "bytes": [each.encode() for each in text], "struct": [{"x": each} for each in text]}
    views = pa.table({name: pa.array(each, kinds[name]) for name, each in held.items()})
    pq.write_table(views, tmp_path / "a.parquet")
    assert pq.read_schema(tmp_path / "a.parquet").types == [*kinds.values()]
    assert read(tmp_path / "a.parquet").to_pydict() == held


@pytest.mark.parametrize("columns", [["text"], ["nested", "number"], ["words", "small"]])
def test_columns_of_files(columns: list[str], tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(table(), path, row_group_size=700)
    with parquet.opened(path) as file:
        found = file.table(columns)
    expected = pq.read_table(path, columns=columns)
    assert found.num_columns == len(columns) and found.equals(expected)


@pytest.mark.parametrize("statistics", [True, False])
@pytest.mark.parametrize("least", [-5, 0, 699, 700, 1500, 2999, 3000])
@pytest.mark.parametrize("count", [1, 700, 5000])
def test_rows_between_bounds(least: int, count: int, statistics: bool, tmp_path: Path) -> None:
    path, most = tmp_path / "a.parquet", least + count - 1
    pq.write_table(
        table().append_column("row", pa.array(range(3000))), path, row_group_size=700, write_statistics=statistics
    )
    with parquet.opened(path) as file:
        found = file.table(["row", "text"], ("row", least, most))
    expected = pq.read_table(path, columns=["row", "text"], filters=[("row", ">=", least), ("row", "<=", most)])
    assert found.equals(expected)


def test_other_columns_are_not_checked(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    encoding = {"use_dictionary": False, "column_encoding": {"other text": "DELTA_BYTE_ARRAY"}}
    pq.write_table(table().select(["number", "other text"]), path, **encoding)
    with parquet.opened(path) as file:
        with pytest.raises(CorruptDatasetError, match="other text: a page announces"):
            file.read(0)
        assert file.read(0, ["number"])["number"].equals(table()["number"])
        assert len(file.read(0, [])) == len(table())


def test_a_file_without_rows(tmp_path: Path) -> None:
    pq.write_table(table()[:0], tmp_path / "a.parquet")
    with parquet.opened(tmp_path / "a.parquet") as file:
        assert sum(file.rows()) == 0


def test_damaged_bytes(tmp_path: Path) -> None:
    path, random, refused = tmp_path / "a.parquet", np.random.default_rng(0), 0
    pq.write_table(table(200), path)
    whole = np.frombuffer(path.read_bytes(), np.uint8)
    for number in range(150):
        damaged = whole.copy()
        damaged[random.integers(len(whole), size=4)] = random.integers(256, size=4)
        path.write_bytes(damaged[: len(whole) if number % 3 else random.integers(len(whole))].tobytes())
        try:
            read(path)
        except CorruptDatasetError as error:
            refused += 1
            assert str(path) in str(error)
    assert refused > 50
