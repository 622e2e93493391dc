"""What calls of buffers ask of an accelerator, counted on the CPU: one program each, and nothing waits for the device."""

import collections
import cProfile
import pstats
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch.utils._python_dispatch import TorchDispatchMode

from interop import (
    LazyTensorStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from interop.data.tensordicts import of_entries
from interop.engine.places import heap
from interop.host import compiled, device_writes
from interop.samplers import item_priorities

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
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers take the path of a device."""
    monkeypatch.setattr(heap, "rows_in_jax", lambda device: True)
    monkeypatch.setattr(item_priorities, "is_accelerator", lambda device: True)
    monkeypatch.setattr("interop.data.bridge.hand_over", handed_over)


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> collections.Counter[str]:
    """How many programs run, and how many NumPy arrays they get: each is a copy from the host."""
    found: collections.Counter[str] = collections.Counter()

    def counted(program: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            found["programs"] += 1
            found["NumPy arguments"] += sum(
                isinstance(each, np.ndarray | np.generic) for each in jax.tree.leaves(given)
            )
            return program(*given)

        return run

    for name, each in vars(compiled).items():
        if hasattr(each, "lower") and hasattr(each, "trace"):
            monkeypatch.setattr(compiled, name, counted(each))
    return found


@pytest.fixture
def reads(on_device: None, monkeypatch: pytest.MonkeyPatch) -> collections.Counter[str]:
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
    return found


def handed_over(array: jax.Array, dtype: torch.dtype | None = None) -> torch.Tensor:
    """As on an accelerator."""
    tensor = torch.from_dlpack(array)
    return tensor if dtype is None else tensor.to(dtype)


def rows(count: int, first: int = 0) -> TensorDict:
    obs = torch.arange(first, first + count).float()[:, None].repeat(1, 4)
    ends = {"done": torch.zeros(count, 1, dtype=torch.bool), "terminated": torch.ones(count, 1, dtype=torch.bool)}
    after = {"obs": obs + 1, "reward": obs[:, :1].contiguous(), **ends}
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
def test_a_call_is_one_program_that_waits_for_nothing_and_copies_nothing(
    with_error: bool, reads: collections.Counter[str], programs: collections.Counter[str]
) -> None:
    rb, given, calls = made(with_error)
    for name, call in calls.items():
        call()
        reads.clear()
        programs.clear()
        with Operations(given) as operations:
            call()
        assert not +reads and not operations.copied, (name, reads, operations.copied)
        arrays = 0 if name.startswith("update") else 1
        assert programs == {"programs": 1, "NumPy arguments": arrays}, name
    assert len(rb) == CAPACITY


# Of six leaves and 256 rows, a little above what was counted when they were set.
MOST = {"extend": 285, "add": 400, "sample": 130, "update_priority": 125, "update_tensordict_priority": 172}
WITH_ERRORS = {**MOST, "extend": 350, "add": 475}


@pytest.mark.parametrize(("with_error", "most"), [(False, MOST), (True, WITH_ERRORS)])
def test_a_call_takes_few_steps_of_python(with_error: bool, most: dict[str, int], on_device: None) -> None:
    _rb, _given, calls = made(with_error)
    counted = {}
    for name, call in calls.items():
        for _ in range(2):
            call()
        profile = cProfile.Profile()
        profile.runcall(call)
        counted[name] = pstats.Stats(profile).total_calls  # type: ignore[attr-defined]  # not in its stubs
    assert all(counted[name] <= limit for name, limit in most.items()), counted


def test_all_samplers_of_a_storage_are_in_the_program_of_a_write(
    on_device: None, programs: collections.Counter[str]
) -> None:
    storage = LazyTensorStorage(CAPACITY)
    first, second = (
        TensorDictReplayBuffer(storage=storage, sampler=PrioritizedSampler(CAPACITY, 0.6, 0.4)) for _ in range(2)
    )
    new = rows(BATCH)
    new["td_error"] = torch.rand(BATCH) + 2
    for _ in range(2):
        first.extend(new)
    programs.clear()
    slots = first.extend(new)
    assert programs == {"programs": 1, "NumPy arguments": 1}
    assert isinstance(first.sampler, PrioritizedSampler) and isinstance(second.sampler, PrioritizedSampler)
    assert torch.equal(first.sampler.priorities[slots], new["td_error"])
    assert (second.sampler.priorities[slots] == 1).all() and torch.equal(storage[slots]["obs"], new["obs"])


@pytest.mark.parametrize("form", [TensorDictReplayBuffer, ReplayBuffer])
def test_slots_stay_on_the_host_until_the_samplers_have_them(
    form: type[ReplayBuffer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Data that names an accelerator: to read slots from there would wait for it."""
    moved, marked = [], []

    class Noting(PrioritizedSampler):
        def mark_update(self, index: Any, *, storage: Any = None) -> None:
            assert not moved and index.is_cpu
            marked.append(index)
            super().mark_update(index, storage=storage)

    def placed(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        moved.append((tensor, device))
        return tensor

    monkeypatch.setattr("interop.data.staging.to_device", placed)
    rb = form(storage=LazyTensorStorage(CAPACITY), sampler=Noting(CAPACITY, 0.6, 0.4))
    rb.extend(rows(BATCH))
    new = rows(BATCH)
    entries = {"obs": new["obs"], "action": new["action"], "next": new["next"]}
    slots = rb.extend(of_entries(entries, new.batch_size, torch.device("cuda")))
    [(at, device)] = moved
    assert at is slots and device.type == "cuda" and torch.equal(marked[-1], slots)


def test_no_slice_begins_where_an_item_that_begins_none_is_overwritten_by_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last items of episodes, in the same slots in each round of the ring."""
    results = []
    for on_device in (False, True):
        monkeypatch.setattr(item_priorities, "is_accelerator", lambda device, held=on_device: held)
        sampler = PrioritizedSliceSampler(12, 1.0, 1.0, slice_len=2)
        generator = torch.Generator().manual_seed(0)
        rb = TensorDictReplayBuffer(storage=LazyTensorStorage(12), sampler=sampler, batch_size=64, generator=generator)
        for first in range(0, 36, 12):
            step = torch.arange(first, first + 12)
            rb.extend(TensorDict({"step": step, "next": {"done": (step % 4 == 3)[:, None]}}, [12]))
            results.append(rb.sample()["step"])
    assert all(len(each) == 64 for each in results)
    assert all(map(torch.equal, results[:3], results[3:]))


@pytest.mark.parametrize("rows_there", [False, True])
def test_rows_and_priorities_may_be_in_different_places(rows_there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One on the device, the other on the host: as both on the host."""
    results = []
    for is_mixed in (False, True):
        monkeypatch.setattr(heap, "rows_in_jax", lambda device, held=is_mixed and rows_there: held)
        monkeypatch.setattr(item_priorities, "is_accelerator", lambda device, held=is_mixed and not rows_there: held)
        torch.manual_seed(0)
        rb, _given, calls = made(with_error=True)
        for _ in range(3):
            for call in calls.values():
                call()
        assert isinstance(rb.sampler, PrioritizedSampler)
        results.append((rb.sampler.priorities, rb[:]["obs"]))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize(
    ("batch", "most_stored"),
    [
        pytest.param(batch, most_stored, marks=() if (number % 2 == 0) == most_stored else pytest.mark.slow)
        for number, batch in enumerate((1, 5, 16, 40))
        for most_stored in (False, True)
    ],
)
def test_one_program_gives_the_bits_of_several(
    batch: int, most_stored: bool, on_device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = device_writes.DeviceWrites.together
    results = []
    for is_together in (True, False):
        monkeypatch.setattr(
            device_writes.DeviceWrites, "together", together if is_together else lambda self, write: write()
        )
        generator = torch.Generator().manual_seed(1)
        sampler = PrioritizedSampler(32, 0.6, 0.4, dtype=torch.float64, max_priority_within_buffer=most_stored)
        rb = TensorDictReplayBuffer(
            storage=LazyTensorStorage(32), sampler=sampler, batch_size=8, generator=torch.Generator().manual_seed(2)
        )
        seen = []
        for step in range(8):
            new = rows(batch, 100 * step)
            new["wide"] = torch.rand(batch, 2, dtype=torch.float64, generator=generator)
            new["whole"] = 2**62 + torch.arange(batch)
            if step % 2:
                new["td_error"] = torch.rand(batch, generator=generator)
            else:
                new["td_error"] = torch.full((batch,), float("nan") if step == 4 else 0.5)
            rb.extend(new)
            jax.block_until_ready(sampler.state)
            try:
                sample = rb.sample()
            except ValueError:  # of the update that was refused
                sample = rb.sample()
            seen += [sampler.priorities, *(sample[key] for key in ("index", "priority_weight", "wide", "whole", "obs"))]
        results.append(seen)
    assert all(map(torch.equal, *results))


def test_what_a_call_has_recorded_is_written_before_it_is_read(on_device: None) -> None:
    storage, seen = LazyTensorStorage(CAPACITY), []
    rb = TensorDictPrioritizedReplayBuffer(alpha=0.6, beta=0.4, storage=storage, batch_size=BATCH)

    class Reader:
        def mark_update(self, index: torch.Tensor) -> None:
            assert isinstance(rb.sampler, PrioritizedSampler)
            seen.append((storage[index]["obs"][:, 0], rb.sampler.priorities[index], rb.sampler.default_priority))

    reader = Reader()
    storage.attach(reader)
    for first in (0, 1000):
        rb.extend(rows(BATCH, first))
        obs, priorities, highest = seen.pop()
        assert obs.tolist() == list(range(first, first + BATCH)) and (priorities == highest).all()


@pytest.mark.parametrize("comes", ["before", "after"])
def test_an_interrupted_program_is_run_again(comes: str, on_device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    rb, given, calls = made(with_error=True)
    make, times = device_writes.make, 0

    def interrupted(changes: Any) -> None:
        nonlocal times
        times += 1
        if times == 1 and comes == "before":
            raise KeyboardInterrupt
        make(changes)
        if times == 1:
            raise KeyboardInterrupt

    given[2].fill_(7)  # the priorities
    written = rb.write_count
    monkeypatch.setattr(device_writes, "make", interrupted)
    with pytest.raises(KeyboardInterrupt):
        calls["extend"]()
    assert times == 2 and rb.write_count == written + BATCH
    assert isinstance(rb.sampler, PrioritizedSampler)
    assert (rb.sampler.priorities[newest_rows(rb)] == 7).all() and rb.sampler.default_priority == 7
    calls["extend"]()


def test_an_error_of_a_follower_leaves_rows_and_samplers_as_the_ring_says(on_device: None) -> None:
    rb, _given, calls = made(with_error=False)

    class Refusing:
        def mark_update(self, index: torch.Tensor) -> None:
            raise ArithmeticError

    refusing = Refusing()
    rb.storage.attach(refusing)
    new = rows(BATCH, 5000)
    with pytest.raises(ArithmeticError):
        rb.extend(new)
    assert torch.equal(rb[newest_rows(rb)]["obs"], new["obs"])
    rb.storage.detach(refusing)
    calls["extend"]()


def test_threads_that_read_priorities_see_them_before_or_after_a_write(on_device: None) -> None:
    rb, _given, calls = made(with_error=False)
    sampler, over, errors = rb.sampler, threading.Event(), []
    assert isinstance(sampler, PrioritizedSampler)

    def read() -> None:
        while not over.is_set():
            try:
                assert len(sampler.priorities) == CAPACITY and sampler.default_priority >= 1
                sampler.alpha = 1.1 - sampler.alpha
            except Exception as error:  # for the main thread
                errors.append(error)
                return

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(30):
        for call in calls.values():
            call()
    over.set()
    reader.join()
    assert not errors


def test_a_view_keeps_its_values_when_rows_are_written(on_device: None) -> None:
    rb, _given, _calls = made(with_error=False)
    view, sample = rb[:], rb.sample()
    before = [each["obs"].clone() for each in (view, sample)]
    rb.extend(rows(CAPACITY, 9000))
    assert all(map(torch.equal, [each["obs"] for each in (view, sample)], before))


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
