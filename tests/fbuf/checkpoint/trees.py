"""Saved trees of every kind, and whether one came back as it was."""

import math
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from fbuf.checkpoint import Columns, StoredColumns, Writing, load
from fbuf.checkpoint.arrays import BY_NAME

_SHAPES = arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)


@st.composite
def any_array(draw: st.DrawFn) -> np.ndarray:
    """Any bits, as any dtype and shape, in one piece or not, of either byte order."""
    dtype = BY_NAME[draw(st.sampled_from(sorted(BY_NAME)))]
    shape = draw(_SHAPES)
    size = math.prod(shape) * dtype.itemsize
    content = draw(st.binary(min_size=size, max_size=size))
    array = np.frombuffer(bytearray(content), np.uint8).view(dtype).reshape(shape)
    if dtype == np.bool_:
        array = array.view(np.uint8) % 2 == 1
    how = draw(st.sampled_from(["plain", "reversed", "transposed", "swapped"]))
    if how == "reversed" and array.ndim:
        return array[::-1]
    if how == "swapped" and dtype.kind in "iufc" and dtype.itemsize > 1:
        return array.astype(dtype.newbyteorder())
    return array.T if how == "transposed" else array


KEYS = st.text(max_size=4) | st.sampled_from(
    ["$", "$dict", "$float", "$array", "$column", "$columns", "", "a.b", "\ud800"]
)
NUMBERS = st.integers(-(2**63), 2**64 - 1) | st.floats() | st.sampled_from([-0.0, 1e308, -1.79e308, 5e-324])
PLAIN = st.none() | st.booleans() | NUMBERS | st.text(max_size=6) | st.sampled_from(["$float", "NaN", "\ud800"])
TREES: st.SearchStrategy[Any] = st.recursive(
    PLAIN | any_array(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)


def save(path: Path, tree: Any, previous: Any = ()) -> None:
    """Save a tree."""
    with Writing(path, previous) as out:
        out.write(tree)


def loaded(path: Path, verify: Any = "full") -> Any:
    """A saved tree again, its arrays read."""
    return load(path, lambda source: held(source.tree), verify)


def held(tree: Any) -> Any:
    """A tree with all its arrays in memory."""
    if isinstance(tree, dict):
        return {key: held(each) for key, each in tree.items()}
    if isinstance(tree, list | tuple):
        return [held(each) for each in tree]
    if isinstance(tree, StoredColumns):
        return tree.read()
    if isinstance(tree, Columns):
        return tree.arrays
    return np.asarray(tree) if hasattr(tree, "dtype") else tree


def same(one: Any, other: Any) -> bool:
    """Whether two trees are equal bit for bit, types included."""
    one, other = held(one), held(other)
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        one, other = (each.astype(each.dtype.newbyteorder("=")) for each in (one, other))
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return [*one] == [*other] and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return one.hex() == other.hex() if isinstance(one, float) else bool(one == other)


def content(path: Path) -> dict[str, tuple[int, bytes]]:
    """Every file below a folder: its inode and its bytes."""
    files = [each for each in sorted(path.rglob("*")) if not each.is_dir()]
    return {str(each.relative_to(path)): (each.lstat().st_ino, each.read_bytes()) for each in files}
