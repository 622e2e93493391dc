"""Writes and draws that wait for each other: Reverb's rule, in threads and processes, over kills and restarts."""

import contextlib
import copy
import json
import os
import re
import threading
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from tensordict import TensorDict

import interop
from fbuf.checkpoint import CheckpointCorrupt
from interop import (
    HERReplayBuffer,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedReplayBuffer,
    PromptGroupSampler,
    RateLimitedReplayBuffer,
    RateLimiter,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    Storage,
    TensorDictMaxValueWriter,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from interop.buffers.rate_counts import RateCounts, refuse_endless
from interop.transforms import Transform
from tests.faults.interrupts import Interrupt, Tracer
from tests.faults.signatures import signature

CAPACITY = 24


def rows(count: int, lanes: int = 1) -> TensorDict:
    shape = (count,) if lanes == 1 else (lanes, count)
    return TensorDict({"x": torch.arange(count * lanes).reshape(shape), "reward": torch.rand(shape)}, shape)


def reward_of(path: str) -> tuple[str, str]:
    return ("next", path)


def limited(
    limiter: RateLimiter | None, storage: Storage | None = None, batch_size: int | None = 4, **given_: Any
) -> TensorDictReplayBuffer:
    return TensorDictReplayBuffer(
        storage=LazyTensorStorage(CAPACITY) if storage is None else storage,
        batch_size=batch_size,
        generator=torch.Generator().manual_seed(0),
        limiter=limiter,
        **given_,
    )


class Reverb:
    """`CanInsert` and `CanSample` of Reverb's C++ (reverb/cc/rate_limiter.cc), with fractions in the place of doubles."""

    def __init__(self, limiter: RateLimiter) -> None:
        self.rule = limiter.rule
        self.ratio = Fraction(str(self.rule.samples_per_insert or 1))
        self.inserts = self.samples = self.size = 0

    def can_insert(self, count: int) -> bool:
        after = (self.inserts + count) * self.ratio - self.samples
        return self.size + 1 <= self.rule.min_size or after <= self.rule.max_diff

    def can_sample(self, count: int) -> bool:
        return self.size >= self.rule.min_size and (
            self.inserts * self.ratio - self.samples - count >= self.rule.min_diff
        )


LIMITS = [(None, 7, None), (4, 5, 60), (0.5, 9, 12), (2.5, 1, (0, 80)), (1, 1, (0, 24))]
STORAGES: dict[str, Callable[[], Storage]] = {
    "list": lambda: ListStorage(CAPACITY),
    "tensor": lambda: LazyTensorStorage(CAPACITY),
    "memmap": lambda: LazyMemmapStorage(CAPACITY),
    "lanes": lambda: LazyTensorStorage(CAPACITY, ndim=2),
}


@pytest.mark.parametrize("kind", STORAGES)
@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_calls_are_allowed_as_in_reverb(kind: str, limits: tuple[Any, Any, Any]) -> None:
    """Random histories; a call that is refused changes nothing, and one that is allowed is counted."""
    lanes = 2 if kind == "lanes" else 1

    @settings(max_examples=12, deadline=None)
    @given(st.lists(st.tuples(st.sampled_from("iisse"), st.integers(1, 6)), max_size=25))
    def histories(history: list[tuple[str, int]]) -> None:
        limiter = RateLimiter(*limits, timeout=0)
        rb, model = limited(limiter, STORAGES[kind](), batch_size=None), Reverb(limiter)
        for call, count in history:
            if call == "i":
                items = count * lanes
                allowed = model.can_insert(items)
                assert limiter.can_insert(items) == allowed
                with contextlib.nullcontext() if allowed else pytest.raises((TimeoutError, ValueError)):
                    rb.extend(rows(count, lanes))
                if allowed:
                    model.inserts += items
                    model.size = min(model.size + items, CAPACITY)
            elif call == "s":
                allowed = model.can_sample(count)
                assert limiter.can_sample(count) == allowed
                before = rb.generator.get_state()  # type: ignore[union-attr]
                with contextlib.nullcontext() if allowed else pytest.raises(TimeoutError):
                    assert len(rb.sample(count)) == count
                model.samples += count * allowed
                assert allowed or torch.equal(rb.generator.get_state(), before)  # type: ignore[union-attr]
            elif rb.storage.ring.count:
                rb.empty()
                model.inserts = model.samples = model.size = 0
            assert (limiter.inserted, limiter.sampled, len(rb)) == (model.inserts, model.samples, model.size)

    histories()


ANSWERS = json.loads((Path(__file__).parents[1] / "fbuf" / "reverb_answers.json").read_text())["tables"]


@pytest.mark.parametrize("table", ANSWERS, ids=lambda table: str(table["limits"]))
def test_the_answers_of_reverb(table: dict[str, Any]) -> None:
    """As the package `dm-reverb` has given them, for one item and for several."""
    ratio, least, buffer = table["limits"]
    limiter = RateLimiter(ratio, least, tuple(buffer) if isinstance(buffer, list) else buffer, timeout=0)
    rb = ReplayBuffer(storage=LazyTensorStorage(CAPACITY), limiter=limiter)
    for step in table["steps"].split():
        if step == "i":
            rb.add(torch.tensor(1.0))
        elif step == "s":
            rb.sample(1)
        else:
            count, answers = int(step[1:-4]), [each == "y" for each in step[-4:]]
            found = [limiter.can_insert(), limiter.can_sample(), limiter.can_insert(count), limiter.can_sample(count)]
            begins_below = len(rb) < least < len(rb) + count  # see `fbuf.RateLimiter`
            assert found == answers or (
                begins_below and found[2] and found[:2] + found[3:] == answers[:2] + answers[3:]
            )


@pytest.mark.parametrize(
    "make",
    [
        lambda limiter: ReplayBuffer(storage=ListStorage(9), batch_size=2, limiter=limiter),
        lambda limiter: PrioritizedReplayBuffer(
            alpha=1.0, beta=1.0, storage=ListStorage(9), batch_size=2, limiter=limiter
        ),
        lambda limiter: TensorDictPrioritizedReplayBuffer(
            alpha=1.0, beta=1.0, storage=LazyTensorStorage(9), batch_size=2, limiter=limiter
        ),
        lambda limiter: HERReplayBuffer(lambda data: data, storage=LazyTensorStorage(9), batch_size=2, limiter=limiter),
    ],
)
def test_every_buffer_takes_one(make: Callable[[RateLimiter], ReplayBuffer]) -> None:
    rb = make(RateLimiter(min_size=3, timeout=0))
    with pytest.raises(TimeoutError, match="3 more are needed for min_size=3"):
        rb.sample()
    rb.add(rows(1)[0])
    assert rb.limiter is not None and rb.limiter.inserted == 1 and rb.stats()["limiter/inserted"] == 1
    assert "limiter" in str(rb.describe())


def test_a_writer_that_refuses_items_counts_those_that_it_keeps() -> None:
    writer = TensorDictMaxValueWriter(rank_key="reward")
    rb = limited(RateLimiter(1, 1, 60, timeout=0), LazyTensorStorage(4), writer=writer)
    for value in (1.0, 5.0, 3.0, 2.0, 0.5, 4.0):  # of which 0.5 is not kept
        rb.add(TensorDict({"reward": torch.tensor(value)}, []))
    rb.extend(TensorDict({"reward": torch.tensor([0.1, 9.0, 0.2])}, [3]))
    assert rb.limiter is not None and rb.limiter.inserted == 6


def test_the_last_batch_of_an_epoch_counts_as_what_it_has() -> None:
    rb = limited(RateLimiter(min_size=1), sampler=SamplerWithoutReplacement())
    rb.extend(rows(10))
    sizes = [len(rb.sample()) for _ in range(3)]
    assert sizes == [4, 4, 2] and rb.limiter is not None and rb.limiter.sampled == 10


class Counting(Transform):
    """Keeps how many batches came in."""

    keeps_state = True
    count = 0

    def inv(self, data: Any) -> Any:
        self.count += 1
        return data


def test_a_write_that_waits_is_that_of_a_buffer_without_a_limiter() -> None:
    """Data that can be read once, and transforms, are used once, or put back."""
    limiter = RateLimiter(1, 1, (0, 4), timeout=5)
    rb = ReplayBuffer(storage=ListStorage(9), batch_size=1, collate_fn=list, limiter=limiter)
    rb.extend(iter([1, 2, 3, 4]))
    drawing = threading.Timer(0.05, lambda: [rb.sample() for _ in range(4)])
    drawing.start()
    rb.extend(iter([5, 6, 7]))
    drawing.join()
    assert rb[:] == [1, 2, 3, 4, 5, 6, 7] and limiter.stats()["limiter/extend_waits"] == 1


# ------------------------------------------------------------------ threads


def test_threads_wait_for_each_other() -> None:
    """Three actors and two learners: the band holds at every moment, and the ratio at the end."""
    limiter = RateLimiter(4, 20, 60, timeout=30)
    rb = limited(limiter, LazyTensorStorage(1_000), batch_size=8)
    seen: list[float] = []
    done = threading.Event()

    def act() -> None:
        with contextlib.suppress(RuntimeError):
            while not done.is_set():
                rb.extend(rows(3))

    def learn() -> None:
        for _ in range(150):
            rb.sample()
            with rb.storage.lock.held():
                seen.append(limiter.diff)

    actors = [threading.Thread(target=act) for _ in range(3)]
    learners = [threading.Thread(target=learn) for _ in range(2)]
    for thread in (*actors, *learners):
        thread.start()
    for thread in learners:
        thread.join()
    done.set()
    limiter.stop()
    for thread in actors:
        thread.join()
    assert limiter.sampled == 2 * 150 * 8 and limiter.inserted == rb.write_count
    assert min(seen) >= limiter.rule.min_diff and max(seen) <= limiter.rule.max_diff
    assert abs(limiter.sampled / limiter.inserted - 4) < 0.6
    with pytest.raises(RuntimeError, match="was stopped"):
        while True:
            rb.extend(rows(3))
    limiter.restart()
    assert limiter.diff == limiter.rule.samples_per_insert * 20  # type: ignore[operator]


def test_the_error_says_who_waits_for_whom() -> None:
    rb = limited(RateLimiter(2, 10, 20, timeout=0.01))
    rb.extend(rows(10))
    rb.extend(rows(5))
    text = (
        "extend() of 8 items has waited .* s for sample() of another thread or process: 15 items were inserted and 0 "
        "sampled, 15 are stored, so diff = inserted * 2 - sampled = 30; a write of 8 needs a diff of at most 40 - 8 * 2: 6 "
        "more items must be sampled. Nothing was written"
    )
    with pytest.raises(TimeoutError, match=re.escape(text).replace(r"\.\*", ".*")):
        rb.extend(rows(8))
    for _ in range(7):
        rb.sample()
    text = "needs a diff of at least 0 + 4: 1 more items must be inserted. Nothing was drawn"
    with pytest.raises(TimeoutError, match=re.escape(text)):
        rb.sample()
    rb.extend(rows(1))
    assert len(rb.sample()) == 4


def test_a_thread_that_holds_the_lock_does_not_wait() -> None:
    rb = limited(RateLimiter(min_size=5))
    with rb.storage.lock.held(), pytest.raises(RuntimeError, match="this thread holds the lock"):
        rb.sample()


# ------------------------------------------------------------------ processes


def _child(act: Callable[[], None]) -> int:
    child = os.fork()
    if child == 0:
        try:
            act()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return child


@pytest.mark.parametrize("kind", ["memmap", "shared"])
def test_processes_wait_for_each_other(in_a_fork: Any, kind: str) -> None:
    """An actor in a child, the learner here; then the actor is killed while it waits, and the learner says so."""
    in_a_fork(f"""
        import os, re, signal, time, torch
        from tensordict import TensorDict
        from interop import LazyMemmapStorage, LazyTensorStorage, RateLimiter, TensorDictReplayBuffer

        limiter = RateLimiter(4, 16, 64, timeout=20)
        storage = LazyMemmapStorage(100) if {kind == "memmap"} else LazyTensorStorage(100)
        rb = TensorDictReplayBuffer(storage=storage, batch_size=8, limiter=limiter, shared=True)
        child = os.fork()
        if child == 0:
            while True:
                rb.extend(TensorDict({{"x": torch.arange(2)}}, [2]))
        for _ in range(100):
            rb.sample()
            assert limiter.rule.min_diff <= limiter.diff <= limiter.rule.max_diff
        while limiter.can_insert(2):
            time.sleep(0.01)
        inserted = limiter.inserted
        time.sleep(0.05)  # the child waits
        assert limiter.sampled == 800 and limiter.inserted == inserted == rb.write_count
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        limiter.timeout = 0.05
        drawn = 0
        try:
            while True:
                rb.sample()
                drawn += 8
        except TimeoutError as error:
            assert re.search("for extend.. of another thread or process", str(error)), error
        assert limiter.inserted == inserted and limiter.sampled == 800 + drawn
        rb.extend(TensorDict({{"x": torch.arange(4)}}, [4]))
        rb.sample()
    """)


def test_a_kill_at_any_moment_counts_what_was_written(in_a_fork: Any) -> None:
    """`inserted` is the number of stored items, and `sampled` a number of whole batches, whenever the actor is killed."""
    in_a_fork("""
        import os, random, signal, time, torch
        from tensordict import TensorDict
        from interop import LazyMemmapStorage, RateLimiter, TensorDictReplayBuffer

        limiter = RateLimiter(1, 4, 40, timeout=20)
        rb = TensorDictReplayBuffer(storage=LazyMemmapStorage(32), batch_size=3, limiter=limiter)
        rb.extend(TensorDict({"x": torch.arange(4)}, [4]))
        for turn in range(25):
            child = os.fork()
            if child == 0:
                while True:
                    rb.extend(TensorDict({"x": torch.arange(3)}, [3]))
                    rb.sample()
            time.sleep(random.uniform(0.002, 0.03))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            with rb.storage.lock.held():
                assert limiter.inserted == rb.write_count == rb.storage.ring.written, turn
                assert limiter.sampled % 3 == 0 and limiter.inserted % 3 == 1
                assert limiter.rule.min_diff <= limiter.diff <= limiter.rule.max_diff
        assert limiter.inserted > 30
    """)


# ------------------------------------------------------------------ restarts


def _used(rb: TensorDictReplayBuffer) -> TensorDictReplayBuffer:
    rb.extend(rows(12))
    for _ in range(5):
        rb.sample()
    rb.extend(rows(3))
    return rb


@pytest.mark.parametrize("by", ["dumps", "state_dict", "deepcopy"])
def test_a_checkpoint_goes_on(by: str, tmp_path: Path) -> None:
    rb = _used(limited(RateLimiter(4, 8, 32, timeout=0)))
    if by == "deepcopy":
        other = copy.deepcopy(rb)
    else:
        other = limited(RateLimiter(4, 8, 32, timeout=0))
        if by == "dumps":
            rb.dumps(tmp_path / "rb")
            other.loads(tmp_path / "rb")
        else:
            other.load_state_dict(rb.state_dict())
    for each in (rb, other):
        assert each.limiter is not None
        assert (each.limiter.inserted, each.limiter.sampled, each.limiter.diff) == (15, 20, 40)
        drawn = 0
        with contextlib.suppress(TimeoutError):
            while True:
                each.sample()
                drawn += 1
        assert drawn == 10
    assert signature(rb.state_dict()) == signature(other.state_dict())


def test_a_folder_of_a_memory_map_has_the_counters(tmp_path: Path) -> None:
    rb = _used(limited(RateLimiter(4, 8, 32), LazyMemmapStorage(CAPACITY, scratch_dir=tmp_path / "rows")))
    rb.storage.close()  # type: ignore[attr-defined]
    again = limited(RateLimiter(4, 8, 32), LazyMemmapStorage.open(tmp_path / "rows"))
    assert again.limiter is not None and (again.limiter.inserted, again.limiter.sampled) == (15, 20)


def test_what_was_filled_without_a_limiter_begins_in_balance(tmp_path: Path) -> None:
    for limits in ((4, 8, 16), (2, 4, (0, 9)), (None, 3, None)):
        rb = limited(None)
        rb.extend(rows(20))
        rb.dumps(tmp_path / "rb")
        beside = limited(RateLimiter(*limits), rb.storage)
        loaded = limited(RateLimiter(*limits))
        loaded.loads(tmp_path / "rb")
        for each in (beside, loaded):
            limiter = each.limiter
            assert limiter is not None and limiter.inserted == 20
            assert limiter.can_sample(4) and (limits[2] == (0, 9) or limiter.can_insert(3))


def test_another_rule_begins_in_balance_after_a_load(tmp_path: Path) -> None:
    _used(limited(RateLimiter(4, 8, 32))).dumps(tmp_path / "rb")
    other = limited(RateLimiter(1, 8, 32))
    other.loads(tmp_path / "rb")
    assert other.limiter is not None and other.limiter.inserted == 15 and other.limiter.diff == 8
    plain = limited(None)
    plain.loads(tmp_path / "rb")  # the rows are those of a buffer without one
    assert len(plain) == 15
    state = _used(limited(RateLimiter(4, 8, 32))).state_dict()
    state["_limiter"]["sampled"] = -3
    before = signature(other.state_dict())
    with pytest.raises(CheckpointCorrupt, match="sampled"):
        other.load_state_dict(state)
    assert signature(other.state_dict()) == before


def test_the_counters_stay_when_the_capacity_changes() -> None:
    rb = _used(limited(RateLimiter(4, 8, 32, timeout=0)))
    rb.resize(10)
    assert rb.limiter is not None and (rb.limiter.inserted, rb.limiter.sampled) == (15, 20)
    with pytest.raises(ValueError, match="min_size=8 items are never stored"):
        rb.resize(5)
    assert rb.storage.max_size == 10 and len(rb) == 10
    rb.empty(empty_write_count=False)
    assert (rb.limiter.inserted, rb.limiter.sampled, len(rb)) == (15, 20, 0) and not rb.limiter.can_sample()
    rb.empty()
    assert (rb.limiter.inserted, rb.limiter.sampled) == (0, 0)


# ------------------------------------------------------------------ signals


@pytest.mark.parametrize("call", ["sample", "extend", "add"])
@pytest.mark.parametrize("kind", ["tensor", "memmap"])
def test_an_interrupt_at_any_step_counts_what_was_done(call: str, kind: str) -> None:
    def left(at: int | None) -> tuple[str, int, str]:
        rb = _used(limited(RateLimiter(4, 8, 32, timeout=0), STORAGES[kind]()))
        calls: dict[str, Callable[[], Any]] = {
            "sample": rb.sample,
            "extend": lambda: rb.extend(rows(2).fill_(("x"), 7).fill_("reward", 0)),
            "add": lambda: rb.add(rows(1)[0].fill_("reward", 0)),
        }
        torch.manual_seed(0)
        rb.storage.set(slice(0, 15), rows(15).fill_("reward", 0).set("index", torch.arange(15)))
        with contextlib.suppress(Interrupt), Tracer(-1 if at is None else at, looks=True) as tracer:
            if at is not None:
                calls[call]()
        state = rb.state_dict()
        assert state["_limiter"]["inserted"] == rb.write_count
        return signature([state["_limiter"], rb.write_count, rb.generator.get_state()]), tracer.count, tracer.where  # type: ignore[union-attr]

    known = {left(at)[0] for at in (None, -1)}
    assert len(known) == 2
    count = left(-1)[1]
    assert count > 50
    for at in range(0, count, 3):
        found, _, where = left(at)
        assert found in known, where


# ------------------------------------------------------------------ refused


def test_what_could_wait_without_end_is_refused() -> None:
    with pytest.raises(ValueError, match="narrower than 2 \\* max"):
        RateLimiter(4, 10, 3)
    with pytest.raises(ValueError, match="never stored: the storage has room for 24"):
        limited(RateLimiter(min_size=25))
    with pytest.raises(ValueError, match="draws of 64 items a call need 68"):
        limited(RateLimiter(4, 10, 30), batch_size=64)
    rb = limited(RateLimiter(4, 10, 30))
    rb.extend(rows(20))  # below min_size writes are free
    with pytest.raises(ValueError, match="writes of 20 with draws of 4 items a call need 84"):
        rb.extend(rows(20))
    while rb.limiter is not None and rb.limiter.can_sample(4):
        rb.sample()
    with pytest.warns(UserWarning, match="batch_size=60"), pytest.raises(ValueError, match="draws of 60"):
        rb.sample(60)
    with pytest.raises(ValueError, match="timeout must be at least 0"):
        RateLimiter(timeout=-1)
    with pytest.raises(TypeError, match="limiter must be a RateLimiter, got fbuf"):
        limited(interop.RateLimiter().rule)  # type: ignore[arg-type]


def test_batches_of_groups_that_differ_in_size_stay_in_the_band() -> None:
    """A draw is allowed by the completions that the batch may have, not by its number of groups."""

    def write(prompt: int, tries: int) -> None:
        sizes = torch.full((tries,), tries)
        rb.extend(TensorDict({"prompt_id": torch.full((tries,), prompt), "tries": sizes}, batch_size=[tries]))

    limiter = RateLimiter(1, 1, (0, 24), timeout=0)
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(100), sampler=PromptGroupSampler(size_key="tries"), batch_size=2, limiter=limiter
    )
    for step, tries in enumerate((5, 5, 5, 1, 1, 5, 2, 8)):
        write(step, tries)
        assert limiter.diff <= 24
        while True:
            sizes = sorted(group.rows for group in rb.sampler.groups())[-2:]
            allowed = len(sizes) == 2 and limiter.diff >= sum(sizes)
            try:
                rb.sample()
            except (TimeoutError, RuntimeError):
                assert not allowed
                break
            assert allowed and limiter.diff >= 0
    assert limiter.sampled > 0
    rb.empty()
    write(0, 20)
    write(1, 4)
    assert len(rb.sample()) == 24
    with pytest.raises(ValueError, match="with draws of 24 items a call need 25"):
        rb.sample()


def test_what_it_cannot_count_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="prefetch and limiter exclude"):
        limited(RateLimiter(), prefetch=2)
    limiter = RateLimiter()
    rb = limited(limiter)
    with pytest.raises(ValueError, match="belongs to another buffer"):
        limited(limiter, LazyTensorStorage(CAPACITY))
    with pytest.raises(ValueError, match="another buffer limits this storage"):
        limited(RateLimiter(min_size=3), rb.storage)
    second = limited(RateLimiter(), rb.storage)  # an equal rule: one count for both
    second.extend(rows(2))
    assert limiter.inserted == 2
    with pytest.raises(ValueError, match="a member has a limiter"):
        ReplayBufferEnsemble(rb, limited(None))
    kept = LazyMemmapStorage(CAPACITY, scratch_dir=tmp_path / "rows")
    limited(None, kept).extend(rows(3))
    kept.close()
    with pytest.raises(RuntimeError, match="can only be read"):
        limited(RateLimiter(), LazyMemmapStorage.open(tmp_path / "rows", mode="r"))


# ------------------------------------------------------------------ with the arguments of torchrl


def test_the_buffer_of_torchrl() -> None:
    """What torchrl documents of `RateLimitedReplayBuffer`."""
    rb = RateLimitedReplayBuffer(storage=LazyTensorStorage(8), batch_size=2, samples_per_insert=1.5)
    with pytest.raises(RuntimeError, match="With wait=True it waits"):
        rb.sample()
    rb.extend(torch.arange(3))  # 4.5 items may be drawn
    assert rb.can_sample() and rb.can_sample(4) and not rb.can_sample(5)
    assert rb.sample(wait=True, timeout=1.0).shape == (2,) and len(rb.sample(return_info=True)) == 2
    assert not rb.can_sample() and rb.stats()["sample_budget"] == 0
    with pytest.raises(TimeoutError, match=re.escape("within 0.02 s")):
        rb.sample(wait=True, timeout=0.02)
    event = threading.Event()
    threading.Timer(0.05, event.set).start()
    with pytest.raises(RuntimeError, match="was cancelled"):
        rb.sample(wait=True, cancel_event=event)
    writing = threading.Timer(0.05, lambda: rb.extend(torch.arange(20)))
    writing.start()
    assert rb.sample(wait=True).shape == (2,)
    writing.join()
    numbers = rb.stats()
    assert (numbers["target_samples_per_insert"], numbers["sample_budget"]) == (1.5, 34 - 6)
    other = RateLimitedReplayBuffer(storage=LazyTensorStorage(8), batch_size=2, samples_per_insert=1.5)
    other.load_state_dict(rb.state_dict())
    assert other.stats()["sample_budget"] == 28
    with pytest.raises(ValueError, match="prefetch and limiter exclude"):
        RateLimitedReplayBuffer(samples_per_insert=1, batch_size=2, prefetch=2)
    with pytest.raises(ValueError, match="above 0"):
        RateLimitedReplayBuffer(samples_per_insert=0)


TIGHT = [
    (ratio, inserts, samples)
    for ratio in (0.1, 0.2, 0.3, 0.4, 0.6, 0.7, 0.8, 1.1, 1.2, 2.4, 1 / 3, 2 / 3, 0.123456789)
    for inserts in (1, 2, 4, 5, 8, 10, 16, 32)
    for samples in (1, 2, 4, 8, 16, 32, 64)
]


@pytest.mark.parametrize("min_size", [1, 10, 100])
def test_no_counters_refuse_both_sides_with_a_band_that_is_just_wide_enough(min_size: int) -> None:
    accepted = 0
    for ratio, inserts, samples in TIGHT:
        try:
            rule = RateLimiter(ratio, min_size, (inserts * ratio + samples) / 2).rule
            refuse_endless(rule, inserts, samples)
        except ValueError:
            continue
        accepted += 1
        for inserted in range(0, 24 * inserts, inserts):
            last = round(inserted * ratio - rule.max_diff + inserts * ratio)  # about the most draws that refuse a write
            for sampled in range(max(last - 1, 0), last + 2):
                counts = RateCounts(inserted, sampled, size=min_size)
                sides = counts.allow(rule, "extend", inserts), counts.allow(rule, "sample", samples)
                assert any(sides), (rule, inserts, samples, counts)
    assert accepted > 500


def test_the_missing_items_of_a_refusal_are_those_that_lift_it() -> None:
    rule = RateLimiter(0.1, 1, 4.1).rule
    for inserted in range(0, 200, 3):
        for sampled in range(60):
            counts = RateCounts(inserted, sampled, size=9)
            for call, items in (("extend", 2), ("sample", 8)):
                if counts.allow(rule, call, items):  # type: ignore[arg-type]
                    continue
                found = re.search(r"(\d+) more items must be", counts.account(rule, call, items))  # type: ignore[arg-type]
                assert found
                for lacking in (int(found[1]) - 1, int(found[1])):
                    more = (inserted, sampled + lacking) if call == "extend" else (inserted + lacking, sampled)
                    after = RateCounts(*more, size=9)
                    assert after.allow(rule, call, items) == (lacking == int(found[1]))  # type: ignore[arg-type]
