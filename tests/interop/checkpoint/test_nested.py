"""What is saved of trajectories beside their rows; the rest is in test_flat.py."""

from pathlib import Path

import numpy as np
import pytest

from fbuf.checkpoint import load
from interop import CheckpointCorrupt, NestedStorageCheckpointer
from tests.interop.checkpoint.ted_buffers import buffer_of, extended, put, rewritten, steps
from tests.interop.ted.model import laid_out


@pytest.mark.parametrize(("count", "lanes"), [(3, ()), (4, (2,)), (8, (2,))])
def test_the_rows_of_each_trajectory_are_saved(tmp_path: Path, count: int, lanes: tuple[int, ...]) -> None:
    buffer = extended(buffer_of(NestedStorageCheckpointer(), lanes), steps(count, lanes))
    buffer.storage.dumps(tmp_path / "saved")
    tree = load(tmp_path / "saved", lambda source: source.tree["content"])
    kept = steps(min(count, 5), lanes)
    if count <= 5:
        _, expected = laid_out(kept)
        assert list(zip(np.asarray(tree["lengths"]), np.asarray(tree["ended"]), strict=True)) == expected
    assert np.asarray(tree["lengths"]).sum() == len(buffer)


@pytest.mark.parametrize("name", ["lengths", "ended"])
def test_other_trajectories(tmp_path: Path, name: str) -> None:
    checkpointer = NestedStorageCheckpointer()
    source = extended(buffer_of(checkpointer), steps(4))
    rewritten(tmp_path / "saved", checkpointer, source.storage, put(name, lambda array: array ^ array.dtype.type(1)))
    with pytest.raises(CheckpointCorrupt, match=f"'{name}' are not those of the trajectories"):
        buffer_of(NestedStorageCheckpointer()).storage.loads(tmp_path / "saved")
