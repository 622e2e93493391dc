"""What is loaded goes on as what was saved does: in another process, with another seed, bit for bit."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from interop import (
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from tests.interop.checkpoint.resuming import cells, same, save_all
from tests.interop.pair_history import WRITERS

ELSEWHERE = """
import pathlib, warnings
from tests.interop.checkpoint.resuming import differences
warnings.simplefilter("error")
print(*differences(pathlib.Path(folder)), sep="\\n")
"""


def test_a_storage_of_each_kind_goes_on(tmp_path: Path, in_a_fork: Callable[..., str]) -> None:
    kinds = (("LazyTensorStorage", 1), ("LazyMemmapStorage", 2), ("LazyStackStorage", 1))
    every = [cell for cell in cells(("TensorDictRoundRobinWriter",)) if cell[:2] in kinds]
    # All samplers in memory, every third one elsewhere.
    chosen = [cell for i, cell in enumerate(every) if cell.storage == "LazyTensorStorage" or i % 3 == 0]
    assert save_all(tmp_path, iter(chosen), draws=10) > 15
    assert in_a_fork(ELSEWHERE, folder=str(tmp_path)) == "\n"


@pytest.mark.slow
def test_every_pair_goes_on(tmp_path: Path, in_a_fork: Callable[..., str]) -> None:
    assert save_all(tmp_path, cells(tuple(WRITERS))) > 160
    assert in_a_fork(ELSEWHERE, folder=str(tmp_path)) == "\n"


# ------------------------------------------------------------------ with batches drawn ahead


def _rows(count: int, start: int = 0) -> TensorDict:
    ids = torch.arange(start, start + count)
    return TensorDict({"id": ids, "obs": torch.randn(count, 3)}, [count])


def _ahead(prioritized: bool, seed: int, prefetch: int | None = 3) -> TensorDictReplayBuffer:
    return TensorDictReplayBuffer(
        storage=LazyTensorStorage(100),
        sampler=PrioritizedSampler(100, 0.7, 0.9) if prioritized else SamplerWithoutReplacement(),
        batch_size=10,
        prefetch=prefetch,
        generator=torch.Generator().manual_seed(seed),
    )


def _drawn(buffer: Any, count: int) -> list[Any]:
    return [buffer.sample().clone() for _ in range(count)]


@pytest.mark.parametrize("prioritized", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_what_was_drawn_ahead_is_drawn_again(prioritized: bool, tmp_path: Path, in_a_fork: Callable[..., str]) -> None:
    buffer = _ahead(prioritized, 0)
    buffer.extend(_rows(70))
    buffer.extend(_rows(60, 70))
    if prioritized:
        buffer.update_priority(torch.arange(100), torch.rand(100))
    _drawn(buffer, 2)
    buffer.dumps(tmp_path / "one")
    counts = buffer.write_count, buffer.writer._cursor, buffer.sampler.default_priority
    expected = _drawn(buffer, 5)
    code = """
        import torch
        from tests.interop.checkpoint import test_resuming as this
        torch.manual_seed(99)
        buffer = this._ahead(prioritized, 5)
        buffer.loads(folder + "/one")
        counts = buffer.write_count, buffer.writer._cursor, buffer.sampler.default_priority
        torch.save((counts, this._drawn(buffer, 5)), folder + "/drawn.pt")
        buffer.extend(this._rows(15, 200))
        buffer.dumps(folder + "/two")
        torch.save((buffer[:], this._drawn(buffer, 5)), folder + "/after.pt")
    """
    in_a_fork(code, prioritized=prioritized, folder=str(tmp_path))
    other, drawn = torch.load(tmp_path / "drawn.pt", weights_only=False)
    assert other == counts
    assert same(expected, drawn)
    again = _ahead(prioritized, 1)
    again.loads(tmp_path / "two")
    rows, drawn = torch.load(tmp_path / "after.pt", weights_only=False)
    assert same(rows, again[:])
    assert same(drawn, _drawn(again, 5))


def test_prefetch_is_no_state(tmp_path: Path) -> None:
    buffer = _ahead(True, 0)
    buffer.extend(_rows(50))
    _drawn(buffer, 2)
    buffer.dumps(tmp_path / "c")
    for depth in (None, 1, 7):
        target = _ahead(True, 1, depth)
        target.loads(tmp_path / "c")
        assert same(target[:], buffer[:])
        _drawn(target, 3)


@pytest.mark.filterwarnings("ignore:.*fork.*")  # of threads that the child does not have, and does not need
def test_killed_while_saving_the_one_before_can_be_loaded(tmp_path: Path) -> None:
    buffer = _ahead(True, 0, None)
    buffer.extend(_rows(70))
    buffer.dumps(tmp_path / "c")
    before = buffer[:].clone()
    buffer.extend(_rows(20, 300))
    buffer.sample()  # what waits comes into the tree, for which a fork would need JAX
    for after in (0.0, 0.002, 0.005, 0.01, 0.02):
        child = os.fork()
        if not child:
            signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            signal.setitimer(signal.ITIMER_REAL, max(after, 1e-6))
            try:
                while True:
                    buffer.dumps(tmp_path / "c")
            finally:
                os._exit(1)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
        target = _ahead(True, 1, None)
        target.loads(tmp_path / "c")
        assert same(target[:], before) or same(target[:], buffer[:])


def test_a_folder_that_was_used_shows_no_old_rows(tmp_path: Path) -> None:
    first = ReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=tmp_path / "rows"))
    first.extend(torch.ones(10))
    del first
    second = ReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=tmp_path / "rows", existsok=True))
    assert len(second) == 0
    second.extend(torch.zeros(2))
    assert second[:].tolist() == [0, 0]
