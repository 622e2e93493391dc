"""A storage that is loaded by itself: its writers go on where the ring was written last."""

import pytest
import torch
from tensordict import TensorDict

from interop import LazyMemmapStorage, LazyStackStorage, LazyTensorStorage, SliceSampler, TensorDictReplayBuffer

ROWS = 100


def rows(first, count):
    time = torch.arange(first, first + count)
    return TensorDict({"time": time, ("next", "done"): ((time + 1) % 40 == 0)[:, None]}, [count])


def written(storage):
    rb = TensorDictReplayBuffer(
        storage=storage(ROWS), sampler=SliceSampler(slice_len=5, end_key=("next", "done")), batch_size=500
    )
    for first in (0, 50, 100):
        rb.extend(rows(first, 50))
    rb.extend(rows(150, 7))
    return rb


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage, LazyStackStorage])
def test_the_rows_of_a_whole_buffer(storage, tmp_path):
    saved = written(storage)
    saved.dumps(tmp_path / "buffer")
    rb = TensorDictReplayBuffer(storage=storage(ROWS), batch_size=7)  # another sampler: rb.loads() refuses it
    rb.storage.loads(tmp_path / "buffer")
    assert rb[:]["time"].tolist() == saved[:]["time"].tolist()
    assert rb.extend(rows(157, 3)).tolist() == [57, 58, 59]
