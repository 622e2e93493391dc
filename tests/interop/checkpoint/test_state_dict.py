"""State dicts of samplers and writers: documented keys, copies of plain values and tensors, all or nothing."""

import io
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from fbuf.checkpoint import CheckpointError, CheckpointMismatch
from interop import (
    LazyStackStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    ReplayBufferEnsemble,
    SamplerEnsemble,
    SamplerWithoutReplacement,
    StalenessAwareSampler,
    TensorDictReplayBuffer,
)
from interop.transforms.chain import Compose
from tests.interop.checkpoint.resuming import go_on, joined
from tests.interop.checkpoint.saved_trees import through_json
from tests.interop.pair_history import PRIORITIZED, SAMPLERS, Cell
from tests.interop.rows import check_same

EPOCH = {"len_storage", "_sample_list", "drop_last", "_ran_out"}
TREES = {"_schema_version", "_alpha", "_beta", "_eps", "_max_priority", "_sum_tree", "_min_tree"}
DOCUMENTED: dict[str, set[str]] = {
    "RandomSampler": set(),
    "SliceSampler": set(),
    "SamplerWithoutReplacement": EPOCH,
    "SliceSamplerWithoutReplacement": EPOCH,
    "PrioritizedSampler": TREES,
    "PrioritizedSliceSampler": TREES,
}


def through_torch(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def buffer_with(sampler: str, writer: str = "RoundRobinWriter", turns: int = 7) -> tuple[Any, Cell]:
    cell = Cell("LazyTensorStorage", 1, sampler, writer, "TensorDictReplayBuffer")
    buffer = joined(cell, 0)
    go_on(buffer, cell, 0, turns)
    return buffer, cell


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_state_dict_is_a_copy_that_weights_only_reads_and_that_goes_on(sampler: str) -> None:
    buffer, cell = buffer_with(sampler)
    state = buffer.sampler.state_dict()
    assert DOCUMENTED.get(sampler, set()) <= set(state) and (state or sampler in ("RandomSampler", "SliceSampler"))
    kept = through_torch(state)
    check_same(kept, state)
    go_on(buffer, cell, 7, 4)
    check_same(state, kept)  # later writes and draws do not change it
    twin, _ = buffer_with(sampler, turns=9)
    twin.sampler.load_state_dict(kept)
    if sampler in PRIORITIZED:
        kept["_priorities"].fill_(77)
    check_same(twin.sampler.state_dict(), state)


@pytest.mark.parametrize("writer", ["RoundRobinWriter", "TensorDictRoundRobinWriter", "TensorDictMaxValueWriter"])
def test_state_dicts_of_writers(writer: str) -> None:
    buffer, cell = buffer_with("RandomSampler", writer)
    state = buffer.writer.state_dict()
    assert "_write_count" in state
    kept = through_torch(state)
    go_on(buffer, cell, 7, 4)
    check_same(state, kept)
    twin, _ = buffer_with("RandomSampler", writer, 3)
    twin.writer.load_state_dict(kept)
    check_same(twin.writer.state_dict(), kept)


def test_the_trees_of_a_prioritized_sampler_are_its_weights() -> None:
    sampler, storage = PrioritizedSampler(6, 0.5, 1.0, eps=0.5), LazyTensorStorage(6)
    storage.set(slice(0, 3), torch.arange(3))
    sampler.mark_update([0, 1, 2], storage=storage)
    sampler.update_priority([0, 2], [3.5, 0.0])
    state = sampler.state_dict()
    top = torch.finfo(torch.float32).max
    assert torch.allclose(state["_sum_tree"], torch.tensor([2.0, 1.5**0.5, 0.5**0.5, 0, 0, 0]))
    assert torch.allclose(state["_min_tree"], torch.tensor([2.0, 1.5**0.5, 0.5**0.5, top, top, top]))
    assert state["_max_priority"] == [3.5, None]


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_weights_alone_are_turned_back_into_priorities(alpha: float) -> None:
    """As others write them."""
    sampler, storage = PrioritizedSampler(6, alpha, 1.0, eps=0.5), LazyTensorStorage(6)
    storage.set(slice(0, 4), torch.arange(4))
    sampler.mark_update([0, 1, 2, 3], storage=storage)
    sampler.update_priority([0, 2, 3], [3.5, 0.0, 1.0])
    state = {key: value for key, value in sampler.state_dict().items() if key in TREES}
    twin = PrioritizedSampler(6, alpha, 1.0, eps=0.5)
    twin.load_state_dict(through_torch(state))
    assert len(twin.priorities) == 4 and twin.default_priority == 3.5
    if alpha:
        assert torch.allclose(twin.priorities, sampler.priorities, atol=1e-6)
    weights = twin.state_dict()["_sum_tree"]
    assert torch.allclose(weights, state["_sum_tree"])


def test_what_is_left_of_an_epoch_is_enough() -> None:
    sampler, storage = SamplerWithoutReplacement(), LazyTensorStorage(10)
    storage.set(slice(0, 10), torch.arange(10))
    sampler.load_state_dict(
        {"len_storage": 10, "_sample_list": torch.tensor([7, 1, 4]), "drop_last": False, "_ran_out": False}
    )
    first, second = sampler.sample(storage, 2)[0].tolist(), sampler.sample(storage, 2)[0].tolist()
    assert sorted(first + second) == [1, 4, 7] and len(first) == 2 and sampler.ran_out
    assert sorted(sampler.sample(storage, 20)[0].tolist()) == list(range(10))
    before = repr(sampler.state_dict())
    for left in ([1, 1], [10], [-1], [1.0]):
        with pytest.raises(CheckpointError):
            sampler.load_state_dict(
                {"len_storage": 10, "_sample_list": torch.tensor(left), "drop_last": False, "_ran_out": False}
            )
    assert repr(sampler.state_dict()) == before


def test_ensembles_have_the_states_of_their_members() -> None:
    def make() -> SamplerEnsemble:
        return SamplerEnsemble(PrioritizedSampler(6, 0.5, 1.0), StalenessAwareSampler(), p=[1, 3])

    one, other = make(), make()
    storage = LazyTensorStorage(6)
    storage.set(slice(0, 3), torch.arange(3))
    one[0].mark_update([0, 1], storage=storage)
    one[0].update_priority([1], [9.0])
    one[1].consumer_version = 5
    state = through_torch(one.state_dict())
    assert {"0", "1"} <= set(state)
    other.load_state_dict(state)
    assert other[0].priorities.tolist() == [1, 9] and other[1].consumer_version == 5
    before = repr(other.state_dict())
    for wrong in ({}, {"0": state["0"]}, {**state, "1": state["0"]}, {**state, "2": {}}, {**state, "x": 1}, []):
        with pytest.raises(CheckpointError):
            other.load_state_dict(wrong)  # type: ignore[arg-type]
    assert repr(other.state_dict()) == before
    with pytest.warns(UserWarning, match="num_buffer_sampled=3"):
        one.num_buffer_sampled = 3
        other.load_state_dict(one.state_dict())
    assert other.num_buffer_sampled == 3


# ------------------------------------------------------------------ schedulers and transforms


class Scaled(torch.nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.tensor([factor]), requires_grad=False)
        self.register_buffer("seen", torch.zeros(2, dtype=torch.bfloat16))

    def forward(self, data: Any) -> Any:
        return data * self.factor


class Counted(Scaled):
    count = 0

    def get_extra_state(self) -> Any:
        return {"count": self.count}

    def set_extra_state(self, state: Any) -> None:
        if state["count"] < 0:
            raise ValueError("less than nothing was counted")
        self.count = state["count"]


def test_the_state_of_transforms_is_that_of_their_modules() -> None:
    one, other = (Compose(lambda data: data, Scaled(factor), Counted(factor)) for factor in (2.0, 3.0))
    one.transforms[2].function.count = 8
    saved = through_json(one.state())
    assert Compose(lambda data: data).state() == Compose().state()
    put = other.with_state(saved)
    assert other.transforms[1].function.factor.item() == 3
    put()
    assert other.transforms[1].function.factor.item() == 2 and other.transforms[2].function.count == 8
    one.transforms[2].function.count = -1
    before = repr(other.state_dict())
    with pytest.raises(CheckpointMismatch, match="less than nothing"):
        other.with_state(through_json(one.state()))
    with pytest.raises(CheckpointMismatch, match="only in the checkpoint"):
        Compose(Scaled(1.0)).with_state(saved)
    wide = Scaled(1.0)
    wide.factor = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    with pytest.raises(CheckpointMismatch, match=r"of shape \[1\], here .* of shape \[3\]"):
        Compose(lambda data: data, wide, Counted(1.0)).with_state(saved)
    assert repr(other.state_dict()) == before


@pytest.mark.parametrize("kind", [LazyTensorStorage, LazyStackStorage])
@pytest.mark.parametrize("in_ensemble", [False, True])
def test_a_buffer_goes_on_from_a_state_in_memory(kind: Any, in_ensemble: bool) -> None:
    def made() -> Any:
        members = []
        for _ in range(2 if in_ensemble else 1):
            storage, sampler = kind(8), PrioritizedSampler(8, 0.5, 0.4)
            members.append(TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=4))
            members[-1].set_rng(torch.Generator())
        if not in_ensemble:
            return members[0]
        return ReplayBufferEnsemble(*members, batch_size=4, generator=torch.Generator())

    one, other = made(), made()
    for buffer in one.members if in_ensemble else [one]:
        buffer.extend(TensorDict({"x": torch.arange(11)}, [11]))
        buffer.sampler.update_priority([1, 3], [5.0, 7.0])
    put = other.with_state(one.state())
    assert not any(map(len, other.members if in_ensemble else [other]))
    put()
    assert all((one.sample() == other.sample()).all() for _ in range(3))
    with pytest.raises(CheckpointError):
        other.with_state({**one.state(), "sampler": {"class": "RandomSampler", "state": {}}})
    assert (one.sample() == other.sample()).all()
