"""What is loaded goes on as what was saved does: in another process, with another seed, bit for bit."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from interop import LazyTensorStorage, PrioritizedSampler, SamplerWithoutReplacement, TensorDictReplayBuffer
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
