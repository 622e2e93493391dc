"""Copies between host and GPU, without a GPU: how often calls wait, and that each copy has a block of its own.

`OnCard` stands for a tensor on a GPU. When torch gives a block of pinned memory out again cannot be tested here.
"""

import collections
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from interop import LazyMemmapStorage, LazyTensorStorage, TensorDictPrioritizedReplayBuffer
from interop.data import bridge, staging
from interop.samplers import item_priorities, prioritized
from interop.storages.batches import info_on

CAPACITY, BATCH = 512, 128
CARD = torch.device("cuda", 0)


class OnCard(torch.Tensor):
    """Memory of the CPU that says it is on a GPU, and counts what waits for it."""

    waits: collections.Counter[str] = collections.Counter()

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return CARD

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return False

    def cpu(self, *given: Any, **options: Any) -> torch.Tensor:
        self.waits["cpu"] += 1
        return self.as_subclass(torch.Tensor)

    def numpy(self, *given: Any, **options: Any) -> Any:
        raise TypeError("can't convert a tensor on a GPU")


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> collections.Counter[str]:
    """How often the host waits for the GPU, and how many blocks there are."""
    OnCard.waits = collections.Counter()
    live: list[torch.Tensor] = []

    def pinned(shape: Any, dtype: torch.dtype) -> torch.Tensor:
        OnCard.waits["blocks"] += 1
        live.append(torch.full(tuple(shape), 77).to(dtype))
        return live[-1]

    def wait(device: torch.device) -> None:
        assert device == CARD
        OnCard.waits["wait"] += 1

    monkeypatch.setattr(staging, "pinned", pinned)
    monkeypatch.setattr(staging, "wait", wait)
    return OnCard.waits


def on_card(tensor: torch.Tensor) -> OnCard:
    return tensor.clone().as_subclass(OnCard)


def rows(first: int = 0) -> TensorDict:
    obs = torch.arange(first, first + BATCH).float()[:, None].repeat(1, 4)
    return TensorDict({"obs": obs, "reward": obs[:, 0].clone()}, [BATCH])


def test_tensors_of_a_card_come_to_the_host_after_one_wait(counts: collections.Counter[str]) -> None:
    here = torch.arange(3)
    found = staging.to_host([on_card(torch.arange(4)), here, on_card(torch.ones(2, 3))])
    assert [each.tolist() for each in found] == [[0, 1, 2, 3], [0, 1, 2], [[1.0] * 3] * 2] and found[1] is here
    assert counts == {"blocks": 2, "wait": 1}
    assert staging.to_host([here])[0] is here and counts["wait"] == 1


def test_a_large_tensor_of_a_card_is_not_pinned(counts: collections.Counter[str], monkeypatch: Any) -> None:
    monkeypatch.setattr(staging, "_LARGEST", 8)
    [found] = staging.to_host([on_card(torch.arange(4))])
    assert found.tolist() == [0, 1, 2, 3] and counts["blocks"] == 0 and counts["cpu"] == 1


def test_info_of_a_batch_crosses_with_one_wait_and_each_tensor_once(counts: collections.Counter[str]) -> None:
    slots = on_card(torch.arange(4))
    info = {"index": (slots, slots), "weight": on_card(torch.ones(4)), "kept": torch.zeros(4), "name": "a"}
    found = info_on(info, torch.device("cpu"))
    assert counts == {"blocks": 2, "wait": 1}
    assert found["index"][0] is found["index"][1] and found["index"][0].tolist() == [0, 1, 2, 3]
    assert found["kept"] is info["kept"] and found["name"] == "a" and list(found) == list(info)
    assert all(type(each) is torch.Tensor for each in (*found["index"], found["weight"]))


@pytest.fixture
def calls(
    request: pytest.FixtureRequest, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, counts: collections.Counter[str]
) -> dict[str, Callable[[], Any]]:
    """Calls of a buffer with rows on the host and priorities on a card."""
    monkeypatch.setattr(item_priorities, "is_accelerator", lambda device: True)
    take = bridge.Crossing.take
    monkeypatch.setattr(bridge.Crossing, "take", lambda self, arrays: list(map(on_card, take(self, arrays))))
    storage = LazyMemmapStorage(CAPACITY, scratch_dir=tmp_path) if request.param else LazyTensorStorage(CAPACITY)
    rb = TensorDictPrioritizedReplayBuffer(alpha=0.6, beta=0.4, storage=storage, batch_size=BATCH)
    for first in range(0, CAPACITY + BATCH, BATCH):
        rb.extend(rows(first))
    sample = rb.sample()

    def checked() -> None:
        batch = rb.sample()
        assert all(type(batch[key]) is torch.Tensor for key in ("index", "priority_weight", "obs"))
        assert torch.equal(batch["obs"], rb[:]["obs"][batch["index"]])
        assert (batch["priority_weight"] > 0).all()

    return {
        "extend": lambda: rb.extend(rows(7)),
        "sample": checked,
        "update_priority": lambda: rb.update_priority(
            on_card(sample["index"]) if request.param else sample["index"], on_card(torch.rand(BATCH))
        ),
    }


@pytest.mark.parametrize("calls", [False, True], indirect=True, ids=["memory", "files"])
def test_a_sample_of_rows_on_the_host_waits_once(
    calls: dict[str, Callable[[], Any]], counts: collections.Counter[str]
) -> None:
    for name, most in {"extend": 0, "sample": 1}.items():
        counts.clear()
        calls[name]()
        assert counts["wait"] == most and not counts["cpu"], (name, counts)


@pytest.mark.parametrize("calls", [True], indirect=True)
def test_index_and_priorities_for_a_file_cross_with_one_wait(
    calls: dict[str, Callable[[], Any]], counts: collections.Counter[str]
) -> None:
    counts.clear()
    calls["update_priority"]()
    assert counts == {"blocks": 2, "wait": 1}


def test_a_batch_of_a_card_is_written_to_the_host_after_one_wait(counts: collections.Counter[str]) -> None:
    storage = LazyTensorStorage(CAPACITY)
    storage.set(range(BATCH), rows())
    table_rows = storage.table.rows
    assert table_rows is not None
    new = rows(1000)
    leaves = [on_card(leaf) for leaf in (new["obs"], new["reward"])]
    counts.clear()
    table_rows.write_run(64, leaves)
    assert counts == {"blocks": 2, "wait": 1}
    assert torch.equal(storage[64 : 64 + 64]["obs"], new["obs"][:64])
    table_rows.write_at(torch.arange(BATCH), leaves)
    assert counts == {"blocks": 4, "wait": 2}
    assert torch.equal(storage[:BATCH]["obs"], new["obs"])


def test_the_host_knows_the_highest_priority_without_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(item_priorities, "is_accelerator", lambda device: True)
    rb = TensorDictPrioritizedReplayBuffer(alpha=0.6, beta=0.4, storage=LazyTensorStorage(CAPACITY), batch_size=8)
    sampler = rb.sampler
    assert isinstance(sampler, prioritized.PrioritizedSampler)
    rb.extend(rows())
    assert sampler.default_priority == 1
    for priority, highest in ((0.3, 1.0), (5.7, 5.7), (2.0, 5.7)):
        rb.update_priority(torch.tensor([1]), priority)  # the host checks it
        state = sampler.functional_state
        assert state is not None
        assert sampler.default_priority == float(state.highest) == pytest.approx(highest)
    rb.update_priority(torch.tensor([1, 2]), torch.tensor([9.0, 1.0]))  # the device checks it
    assert sampler.default_priority == 9
    rb.extend(rows())
    assert sampler.default_priority == 9
    rb.empty()
    assert sampler.default_priority == 1
