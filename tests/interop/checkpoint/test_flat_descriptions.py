"""Checkpoints of TED data whose description does not fit, though its sums are right: nothing is loaded."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from interop import (
    CheckpointCorrupt,
    CheckpointMismatch,
    FlatStorageCheckpointer,
    H5StorageCheckpointer,
    NestedStorageCheckpointer,
)
from tests.interop.checkpoint.ted_buffers import buffer_of, extended, put, rewritten, state, steps

KINDS = [FlatStorageCheckpointer, NestedStorageCheckpointer, H5StorageCheckpointer]


def cut(array: np.ndarray) -> np.ndarray:
    return array[:-1]


def drop(name: str) -> Any:
    return lambda tree: tree.pop(name)


DAMAGE = {
    "no layout": drop("layout"),
    "no ring": drop("ring"),
    "no keys": drop("keys"),
    "keys of another kind": put("keys", "done", "done"),
    "keys that are numbers": put("keys", "done", [[1]]),
    "another end": put("keys", "episodes", ["obs"]),
    "an end that is not there": put("keys", "episodes", ["nowhere"]),
    "a flag": put("keys", "closed", 1),
    "other names": put("keys", "done", [["done"]]),
    "an end beyond": put("ring", "end", 99),
    "more rows": put("ring", "filled", 5),
    "fewer rows": put("ring", "filled", 2),
    "other lanes": put("ring", "lanes", [3]),
    "another dtype": put("layout", "leaves", 0, 2, "float64"),
    "another shape": put("layout", "leaves", 0, 1, [7]),
}
DAMAGE_OF_ARRAYS = {
    "no arrays": drop("arrays"),
    "an array less": put("arrays", lambda arrays: arrays[1:]),
    "an array twice": put("arrays", lambda arrays: [*arrays[1:], arrays[1]]),
    "an array cut": put("arrays", 3, 1, cut),
    "an array of text": put("arrays", 3, 1, "text"),
    "no list": put("arrays", 3, "text"),
    "a path of numbers": put("arrays", 3, 0, [1]),
    "an empty path": put("arrays", 3, 0, []),
    "a strange path": put("arrays", 3, 0, ["nowhere"]),
    "another array": put("arrays", 3, 1, lambda array: array.astype(np.float16)),
}


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        *((FlatStorageCheckpointer, what) for what in (*DAMAGE, *DAMAGE_OF_ARRAYS)),
        *((H5StorageCheckpointer, what) for what in DAMAGE),
    ],
)
def test_descriptions_that_do_not_fit_together(tmp_path: Path, kind: Any, what: str) -> None:
    checkpointer = kind()
    source = extended(buffer_of(checkpointer, (2,)), steps(3, (2,)))
    rewritten(tmp_path / "saved", checkpointer, source.storage, (DAMAGE | DAMAGE_OF_ARRAYS)[what])
    for target in (buffer_of(kind(), (2,)), extended(buffer_of(kind(), (2,)), steps(7, (2,), seed=8))):
        before = state(target)
        with pytest.raises((CheckpointCorrupt, CheckpointMismatch)):
            target.storage.loads(tmp_path / "saved")
        assert state(target) == before


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 2**62),
    st.floats(allow_nan=False),
    st.text(max_size=3),
    st.just([]),
    st.just({}),
)


@given(st.data())
def test_descriptions_with_anything_in_them(tmp_path_factory: pytest.TempPathFactory, draws: st.DataObject) -> None:
    """Any entry replaced by anything: it is loaded as it was, or an error of checkpoints."""
    path = tmp_path_factory.mktemp("saved")
    kind = draws.draw(st.sampled_from(KINDS))
    checkpointer = kind()
    source = extended(buffer_of(checkpointer, (2,)), steps(8, (2,)))

    def change(tree: Any) -> None:
        while True:
            keys = [*tree] if isinstance(tree, dict) else [*range(len(tree))]
            key = draws.draw(st.sampled_from(keys))
            if not isinstance(tree[key], dict | list) or not tree[key] or draws.draw(st.integers(0, 3)) == 0:
                tree[key] = draws.draw(VALUES)
                return
            tree = tree[key]

    rewritten(path, checkpointer, source.storage, change)
    target = extended(buffer_of(kind(), (2,)), steps(7, (2,), seed=8))
    before = state(target)
    try:
        target.storage.loads(path)
    except (CheckpointCorrupt, CheckpointMismatch):
        assert state(target) == before
    else:
        assert len(target) <= target.storage.max_size
