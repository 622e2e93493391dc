"""Training steps under `torch.compile`: calls of a buffer have the same effect as without it."""

import shutil
from collections.abc import Callable

import pytest
import torch
import torch._inductor.config as inductor
from tensordict import TensorDict
from torch import Tensor

from interop import (
    LazyTensorStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    Sampler,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
)

pytestmark = pytest.mark.filterwarnings("ignore:update_priority:UserWarning")  # not every sampler has them
CAPACITY = 32
SAMPLERS: dict[str, Callable[[], Sampler]] = {
    "random": RandomSampler,
    "without_replacement": SamplerWithoutReplacement,
    "prioritized": lambda: PrioritizedSampler(CAPACITY, 0.6, 0.4),
    "slices": lambda: SliceSampler(slice_len=4, traj_key="episode"),
    "slices_without_replacement": lambda: SliceSamplerWithoutReplacement(slice_len=4, traj_key="episode"),
    "prioritized_slices": lambda: PrioritizedSliceSampler(CAPACITY, 0.6, 0.4, slice_len=4, traj_key="episode"),
}
HARDEST = "prioritized_slices"  # has all state of the others


def steps(name: str, compilable: bool, backend: str | None) -> list[float]:
    """The results of three training steps that call every method a step may call."""
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(CAPACITY, compilable=compilable),
        sampler=SAMPLERS[name](),
        batch_size=8,
        priority_key="td_error",
        generator=torch.Generator().manual_seed(0),
        compilable=compilable,
    )
    weights = torch.ones(3)

    def step(rows: TensorDict) -> Tensor:
        buffer.add(rows[0])
        index = buffer.extend(rows * 2)
        batch, info = buffer.sample(return_info=True)
        error = (batch["obs"] * weights).sum(-1).abs()
        batch.set("td_error", error)
        buffer.update_tensordict_priority(batch)
        buffer.update_priority(index, error.mean() + 1)
        for other in buffer:
            error = error + other["obs"].sum()
            break
        return error.sum() + len(buffer) + buffer[:4]["obs"].sum() + len(info) + buffer.write_count

    torch.compiler.reset()
    called = step if backend is None else torch.compile(step, backend=backend)
    found = []
    for number in range(3):
        rows = {"obs": torch.arange(24.0).view(8, 3) + number, "episode": torch.full((8,), number)}
        found.append(float(called(TensorDict({**rows, "td_error": torch.ones(8)}, [8]))))
    buffer.empty()
    return found


def test_a_compiled_step_equals_the_uncompiled_one() -> None:
    assert steps(HARDEST, False, "aot_eager") == steps(HARDEST, True, None)


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLERS)
def test_a_compiled_step_with_each_sampler(name: str) -> None:
    assert steps(name, True, "eager") == steps(name, False, None)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.parametrize("name", SAMPLERS)
def test_a_step_for_inductor(name: str) -> None:
    with inductor.patch(compile_threads=1):
        assert steps(name, False, "inductor") == pytest.approx(steps(name, False, None))
