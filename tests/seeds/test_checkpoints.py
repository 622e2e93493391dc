"""The checkpoint examples of the documents."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from interop import (
    Flat2TED,
    FlatStorageCheckpointer,
    H5StorageCheckpointer,
    LazyMemmapStorage,
    LazyTensorStorage,
    NestedStorageCheckpointer,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    TED2Flat,
    TensorDictReplayBuffer,
)
from tests.seeds.stream import cart_pole


@pytest.mark.parametrize("prioritized", [True, False])
def test_dumps_and_loads(prioritized: bool) -> None:
    size = 1_000_000

    def made() -> TensorDictReplayBuffer:
        sampler = PrioritizedSampler(size, 1.1, 1.0) if prioritized else RandomSampler()
        return TensorDictReplayBuffer(storage=LazyMemmapStorage(size), sampler=sampler)

    rb = made()
    for _ in range(100):
        td = TensorDict(
            {"obs": torch.randn(100, 3, 4), "next": {"obs": torch.randn(100, 3, 4)}, "td_error": torch.rand(100)}, [100]
        )
        rb.extend(td if prioritized else td.exclude("td_error"))
        sample = rb.sample(32)
        if prioritized:
            rb.update_tensordict_priority(sample)
    with tempfile.TemporaryDirectory() as tmpdir:
        rb.dumps(tmpdir)
        rb_load = made()
        rb_load.loads(tmpdir)
        assert len(rb) == len(rb_load)
        assert (rb[:] == rb_load[:]).all()
        for other in ("save", "dump"):
            getattr(rb, other)(Path(tmpdir) / other)
            made().load(Path(tmpdir) / other)


@pytest.mark.parametrize("kind", [H5StorageCheckpointer, FlatStorageCheckpointer, NestedStorageCheckpointer])
@pytest.mark.parametrize("storage", [LazyMemmapStorage, LazyTensorStorage])
def test_collected_data_through_a_checkpointer(kind: Any, storage: Any, tmp_path: Path) -> None:
    collector = cart_pole(24, envs=3)
    rb = ReplayBuffer(storage=storage(100, ndim=2))
    rb_test = ReplayBuffer(storage=storage(100, ndim=2))
    rb.storage.checkpointer = kind()
    rb_test.storage.checkpointer = kind()
    for _ in range(9):
        rb.extend(next(collector))
        assert rb._storage.max_size == 102
        rb.dumps(tmp_path / "checkpoint")
        rb_test.loads(tmp_path / "checkpoint")
        assert (rb_test[:] == rb[:]).all()
        assert len(rb_test) == len(rb)


def test_hooks_of_the_utilities(tmp_path: Path) -> None:
    def made() -> ReplayBuffer:
        rb = ReplayBuffer(storage=LazyTensorStorage(100))
        rb.register_save_hook(TED2Flat())
        rb.register_load_hook(Flat2TED())
        return rb

    rb, rb_test = made(), made()
    for data, _ in zip(cart_pole(22), range(7), strict=False):
        rb.extend(data)
        rb.dumps(tmp_path / "checkpoint")
        rb_test.loads(tmp_path / "checkpoint")
        assert (rb_test[:] == rb[:]).all()


def test_state_dicts_are_saved_by_torch(tmp_path: Path) -> None:
    def made() -> TensorDictReplayBuffer:
        return TensorDictReplayBuffer(
            storage=LazyTensorStorage(50), sampler=PrioritizedSampler(50, 0.7, 0.5), batch_size=8
        )

    rb, rb_test = made(), made()
    rb.extend(TensorDict({"obs": torch.randn(70, 3), "td_error": torch.rand(70)}, [70]))
    rb.update_tensordict_priority(rb.sample())
    torch.save(rb.state_dict(), tmp_path / "rb.pt")
    rb_test.load_state_dict(torch.load(tmp_path / "rb.pt", weights_only=True))
    assert (rb_test[:] == rb[:]).all()
    torch.manual_seed(0)
    expected = rb.sample()
    torch.manual_seed(0)
    assert (rb_test.sample() == expected).all()
