"""What is written comes back, bit for bit, and what cannot is refused before anything changes."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fbuf.checkpoint import Columns, Writing
from fbuf.checkpoint.arrays import BY_NAME
from tests.fbuf.checkpoint.trees import TREES, any_array, content, loaded, same, save


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trees")


@given(tree=TREES, over=st.booleans())
def test_any_tree_comes_back(folder: Path, tree: Any, over: bool) -> None:
    path = folder / "any"
    if not over:
        shutil.rmtree(path, ignore_errors=True)
    save(path, tree)
    assert same(loaded(path), tree)
    assert same(loaded(path, "size"), tree)


@given(rows=st.integers(0, 5), more=st.lists(any_array(), max_size=3), capacity=st.none() | st.integers(0, 100))
def test_any_columns_come_back(folder: Path, rows: int, more: list[np.ndarray], capacity: int | None) -> None:
    arrays = [np.broadcast_to(each, (rows, *each.shape)) for each in more]
    tree = {"columns": Columns(arrays, capacity)}
    save(folder / "columns", tree)
    assert same(loaded(folder / "columns"), tree)


@pytest.mark.parametrize("name", BY_NAME)
def test_every_dtype_in_small_and_in_large_arrays(name: str, tmp_path: Path) -> None:
    dtype = BY_NAME[name]
    bits = np.random.default_rng(0).integers(0, 2 if name == "bool" else 256, 300_000 * dtype.itemsize, np.uint8)
    large = bits.view(dtype)
    tree = {
        "large": large,
        "small": large[:7],
        "none": large[:0],
        "one": large[3],
        "rows": Columns([large.reshape(100, -1)]),
    }
    save(tmp_path / "c", tree)
    assert same(loaded(tmp_path / "c"), {**tree, "one": np.asarray(large[3])})


@pytest.mark.parametrize("rows", [0, 1, 2, 1023, 1024, 1025, 5000])
def test_columns_are_cut_into_files_together(rows: int, tmp_path: Path) -> None:
    wide = np.arange(rows * 600, dtype=np.float32).reshape(rows, 20, 30)
    tree = Columns([wide, np.arange(rows), wide[:, :0], wide[:, 0].astype(np.int16)], capacity=5000)
    save(tmp_path / "c", tree)
    assert same(loaded(tmp_path / "c"), tree)
    assert len(tree.parts()) == -(-rows // tree.rows_a_file)
    sizes = [each.stat().st_size for each in sorted(tmp_path.glob("c/data-*/*")) if each.name != "small"]
    assert sum(sizes) == rows * (600 * 4 + 8 + 30 * 2) and len(sizes) == -(-rows // tree.rows_a_file)


@pytest.mark.parametrize(
    ("tree", "error"),
    [
        (object(), TypeError),
        ({1: 2}, TypeError),
        ({"a": {None: 2}}, TypeError),
        (b"bytes", TypeError),
        ({1, 2}, TypeError),
        (1j, TypeError),
        (np.array(["text"]), TypeError),
        (np.array([object()]), TypeError),
        (np.zeros(2, [("a", "i4")]), TypeError),
        (np.zeros(2, "M8[s]"), TypeError),
        (2**64, ValueError),
        (-(2**63) - 1, ValueError),
    ],
)
def test_what_cannot_be_saved_changes_nothing(tree: Any, error: type[Exception], tmp_path: Path) -> None:
    with pytest.raises(error):
        save(tmp_path / "c", {"fine": np.zeros(1_000_000), "not": [tree]})
    assert not (tmp_path / "c").exists()
    save(tmp_path / "c", "old")
    before = content(tmp_path)
    with pytest.raises(error):
        save(tmp_path / "c", {"fine": np.zeros(1_000_000), "not": [tree]})
    assert content(tmp_path) == before


def test_nesting_has_an_end(tmp_path: Path) -> None:
    def nested(depth: int) -> Any:
        tree: Any = 1.5
        for _ in range(depth):
            tree = {"$": tree} if depth % 2 else [tree]
        return tree

    for depth in (200, 201):
        save(tmp_path / "c", nested(depth))
        assert same(loaded(tmp_path / "c"), nested(depth))
    endless: list[Any] = []
    endless.append(endless)
    for tree in (nested(500), nested(100_000), endless):
        with pytest.raises(ValueError, match="nested more than 200 deep"):
            save(tmp_path / "c", tree)
    assert same(loaded(tmp_path / "c"), nested(201))


def test_columns_must_have_the_same_rows() -> None:
    with pytest.raises(ValueError, match="same first dim"):
        Columns([np.zeros(3), np.zeros(4)])
    with pytest.raises(ValueError, match="same first dim"):
        Columns([np.zeros(())])
    with pytest.raises(TypeError, match="cannot be saved"):
        Columns([np.array(["text"])])


def test_an_array_that_is_edited_afterwards_is_saved_as_it_was(tmp_path: Path) -> None:
    array = np.arange(400_000)
    with Writing(tmp_path / "c") as out:
        out.write({"large": array, "small": array[:10]})
        array[:] = -1
    assert same(loaded(tmp_path / "c"), {"large": np.arange(400_000), "small": np.arange(10)})
