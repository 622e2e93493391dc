"""What calls of buffers ask of an accelerator, counted on the CPU: nothing in them waits for the device."""

import collections
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest
import torch
from tensordict import TensorDict
from torch.utils._python_dispatch import TorchDispatchMode

from interop import (
    LazyTensorStorage,
    PrioritizedSampler,
    ReplayBufferEnsemble,
    TensorDictPrioritizedReplayBuffer,
)
from interop.engine.places import heap
from interop.samplers import prioritized

CAPACITY, BATCH = 1024, 256


class Operations(TorchDispatchMode):
    """The operations of torch that make copies of given tensors."""

    def __init__(self, given: list[torch.Tensor]) -> None:
        super().__init__()
        self.copied: list[str] = []
        self._given = {each.untyped_storage().data_ptr() for each in given}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        name = str(function).removeprefix("aten.").split(".")[0]
        if name in ("clone", "cat", "_to_copy", "copy_") and any(map(self._is_given, args)):
            self.copied.append(name)
        return found

    def _is_given(self, each: Any) -> bool:
        return isinstance(each, torch.Tensor) and each.untyped_storage().data_ptr() in self._given


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> collections.Counter[str]:
    """How often, and how, the host reads values of JAX for which it waits. Buffers take the path of a device.

    It does not wait for values that are copied to it meanwhile.
    """
    found: collections.Counter[str] = collections.Counter()
    kind: Any = type(jax.numpy.zeros(1))
    copied: list[jax.Array] = []

    def counted(name: str) -> Callable[..., Any]:
        original = getattr(kind, name)

        def read(self: jax.Array, *given: Any, **options: Any) -> Any:
            found[name] += not any(self is each for each in copied)
            return original(self, *given, **options)

        return read

    monkeypatch.setattr(kind, "copy_to_host_async", lambda self: copied.append(self))

    for name in ("__array__", "__bool__", "__float__", "__int__", "__index__", "item", "tolist"):
        monkeypatch.setattr(kind, name, counted(name))
    monkeypatch.setattr(heap, "rows_in_jax", lambda device: True)
    monkeypatch.setattr(prioritized, "is_accelerator", lambda device: True)
    monkeypatch.setattr("interop.data.bridge.hand_over", handed_over)
    return found


def handed_over(array: jax.Array, dtype: torch.dtype | None = None) -> torch.Tensor:
    """As on an accelerator."""
    tensor = torch.from_dlpack(array)
    return tensor if dtype is None else tensor.to(dtype)


def rows(count: int, first: int = 0) -> TensorDict:
    obs = torch.arange(first, first + count).float()[:, None].repeat(1, 4)
    after = {"obs": obs + 1, "reward": obs[:, :1].contiguous(), "done": torch.zeros(count, 1, dtype=torch.bool)}
    return TensorDict({"obs": obs, "action": torch.ones(count, dtype=torch.int64), "next": after}, [count])


def made(
    with_error: bool,
) -> tuple[TensorDictPrioritizedReplayBuffer, list[torch.Tensor], dict[str, Callable[[], Any]]]:
    """A full buffer, the tensors that the calls get, and the calls."""
    rb = TensorDictPrioritizedReplayBuffer(
        alpha=0.6, beta=0.4, storage=LazyTensorStorage(CAPACITY), priority_key="td_error", batch_size=BATCH
    )
    new, error = rows(BATCH), torch.rand(BATCH) + 1e-3
    if with_error:
        new["td_error"] = error
    for _ in range(CAPACITY // BATCH + 1):
        rb.extend(new)
    sample, one = rb.sample(), new[3]
    index = sample["index"].clone()
    sample["td_error"] = error
    calls = {
        "extend": lambda: rb.extend(new),
        "add": lambda: rb.add(one),
        "sample": rb.sample,
        "update_priority": lambda: rb.update_priority(index, error),
        "update_tensordict_priority": lambda: rb.update_tensordict_priority(sample),
    }
    return rb, [new["obs"], new["next", "reward"], error, index, sample["index"]], calls


def newest_rows(rb: TensorDictPrioritizedReplayBuffer) -> slice:
    stop = (rb.write_count - 1) % CAPACITY + 1
    return slice(stop - BATCH, stop)


@pytest.mark.parametrize("with_error", [False, True])
def test_no_call_waits_for_the_device_or_copies_what_it_was_given(
    with_error: bool, reads: collections.Counter[str]
) -> None:
    rb, given, calls = made(with_error)
    for name, call in calls.items():
        call()
        reads.clear()
        with Operations(given) as operations:
            call()
        assert not +reads and not operations.copied, (name, reads, operations.copied)
    assert len(rb) == CAPACITY


def test_the_caller_may_write_to_its_tensors_once_a_call_has_returned(reads: collections.Counter[str]) -> None:
    rb, given, calls = made(with_error=True)
    for _ in range(10):
        for each in given:
            each.copy_(torch.rand(each.shape) * 100)  # the data of the next call
        wanted = [each.clone() for each in given]
        calls["extend"]()
        for each in given:
            each.fill_(-1)
        newest = rb[newest_rows(rb)]
        for held, each in zip((newest["obs"], newest["next", "reward"], newest["td_error"]), wanted, strict=False):
            assert torch.equal(held, each)


@pytest.mark.parametrize("priority", [float("nan"), -1.0])
def test_an_item_with_a_bad_priority_is_written_once_and_a_later_call_raises(
    priority: float, reads: collections.Counter[str]
) -> None:
    rb, _given, calls = made(with_error=True)
    item, written = rows(BATCH)[0].clone(), rb.write_count
    item["td_error"] = torch.tensor(priority)
    at = rb.add(item)
    assert rb.write_count == written + 1
    assert isinstance(rb.sampler, PrioritizedSampler)
    jax.block_until_ready(rb.sampler.functional_state)
    assert rb.sampler.priorities[at] == rb.sampler.default_priority
    with pytest.raises(ValueError, match="data that was written"):
        calls["add"]()
    calls["add"]()
    assert rb.write_count == written + 2


@pytest.mark.parametrize("by_sample", [False, True])
def test_an_update_of_an_ensemble_raises_before_any_member_changes(
    by_sample: bool, reads: collections.Counter[str]
) -> None:
    (a, _, _), (b, _, _) = made(with_error=True), made(with_error=True)
    both = ReplayBufferEnsemble(a, b, batch_size=8, sample_from_all=True)
    sample = both.sample()
    b.update_priority(torch.tensor([0]), torch.tensor([float("nan")]))
    assert isinstance(a.sampler, PrioritizedSampler) and isinstance(b.sampler, PrioritizedSampler)
    jax.block_until_ready(b.sampler.functional_state)
    before = a.sampler.priorities, b.sampler.priorities
    sample["td_error"] = torch.full(sample.batch_size, 5.0)
    with pytest.raises(ValueError, match="refused"):
        if by_sample:
            both.update_tensordict_priority(sample)
        else:
            both.update_priority(sample["index"], 5.0)
    assert torch.equal(a.sampler.priorities, before[0]) and torch.equal(b.sampler.priorities, before[1])


@pytest.mark.parametrize("drop", ["nothing", "dumps", "alpha"])
def test_a_prefetched_draw_does_not_take_the_error_of_an_update(
    drop: str, reads: collections.Counter[str], tmp_path: Path
) -> None:
    rb = TensorDictPrioritizedReplayBuffer(
        alpha=0.6, beta=0.4, storage=LazyTensorStorage(CAPACITY), batch_size=BATCH, prefetch=2
    )
    rb.extend(rows(BATCH))
    for _ in range(3):
        rb.sample()
        rb.update_priority(torch.tensor([0]), torch.tensor([float("nan")]))
        assert isinstance(rb.sampler, PrioritizedSampler)
        jax.block_until_ready(rb.sampler.functional_state)
        if drop == "dumps":
            rb.dumps(tmp_path / "a")
        elif drop == "alpha":
            rb.sampler.alpha = rb.sampler.alpha / 2
        with pytest.raises(ValueError, match="refused"):
            rb.sample()
        rb.sample()


def test_bad_priorities_in_data_are_an_error_of_a_later_call(reads: collections.Counter[str]) -> None:
    rb, _given, calls = made(with_error=True)
    new = rows(BATCH)
    new["td_error"] = torch.full((BATCH,), float("nan"))
    written = rb.write_count
    rb.extend(new)
    sampler, newest = rb.sampler, newest_rows(rb)
    assert isinstance(sampler, PrioritizedSampler)
    jax.block_until_ready(sampler.functional_state)
    before = rb.write_count, sampler.priorities
    assert before[0] == written + BATCH and (before[1][newest] == sampler.default_priority).all()
    for name in ("extend", "update_priority", "sample"):
        with pytest.raises(ValueError, match="data that was written"):
            calls[name]()
        assert rb.write_count == before[0] and torch.equal(sampler.priorities, before[1])
        calls["sample"]()  # the error came once
        rb.extend(new)
        jax.block_until_ready(sampler.functional_state)
        before = rb.write_count, sampler.priorities
