"""A sampler of the user's, the one of docs/do/extending.md: its state follows writes, also those that fail."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from tensordict import TensorDict

from fbuf.checkpoint import CheckpointMismatch
from interop import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBufferEnsemble,
    Sampler,
    SamplerWithoutReplacement,
    Storage,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
)
from tests.faults.interrupts import Interrupt, Tracer
from tests.faults.signatures import signature
from tests.interop.page import names_of
from tests.interop.rows import check_same


@pytest.fixture(scope="module")
def recent() -> Any:
    """The class of the page."""
    return names_of("class RecentSampler")["RecentSampler"]


def rows(count: int, start: int = 0) -> TensorDict:
    return TensorDict({"x": torch.arange(start, start + count), "y": torch.ones(count, 3)}, [count])


def build(sampler: Any, storage: Storage | None = None, prefetch: int | None = None, **more: Any) -> Any:
    return TensorDictReplayBuffer(
        storage=LazyTensorStorage(50) if storage is None else storage,
        sampler=sampler,
        batch_size=16,
        prefetch=prefetch,
        generator=torch.Generator().manual_seed(3),
        **more,
    )


def same_draws(one: Any, other: Any, count: int = 3) -> None:
    for _ in range(count):
        check_same(one.sample(), other.sample())


def test_an_item_is_drawn_half_as_often_after_as_many_writes(recent: Any) -> None:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(50), sampler=recent(10), batch_size=20_000)
    buffer.extend(rows(70))
    drawn = torch.bincount(buffer.sample()["x"], minlength=70).double()
    expected = 0.5 ** (torch.arange(69, -1, -1).double() / 10)
    expected[:20] = 0  # overwritten
    expected *= 20_000 / expected.sum()
    assert drawn[:20].sum() == 0
    assert ((drawn - expected)[20:].square() / expected[20:]).sum() < 90  # chi-square, 49 degrees: 1 in 3000


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage, ListStorage])
def test_prefetched_and_saved_draws_are_the_same(storage: Any, recent: Any, tmp_path: Path) -> None:
    ahead, plain = (build(recent(10), storage(50), prefetch) for prefetch in (3, None))
    for buffer in (ahead, plain):
        buffer.extend(rows(70))
    same_draws(ahead, plain)
    ahead.dumps(tmp_path / "c")
    loaded, given = build(recent(10), storage(50), 2), build(recent(10), storage(50))
    loaded.loads(tmp_path / "c")
    given.load_state_dict(ahead.state_dict())
    for _ in range(2):
        batch = plain.sample()
        for buffer in (ahead, loaded, given):
            check_same(buffer.sample(), batch)
        for buffer in (plain, ahead, loaded, given):
            buffer.drop_prefetched()
            buffer.extend(rows(5, 100))


class CountingWriter(TensorDictRoundRobinWriter):
    """Counts its items."""

    counted = 0

    def extend(self, data: Any) -> Any:
        slots = super().extend(data)
        self.counted += len(data)
        return slots


class CountingStorage(LazyTensorStorage):
    """Counts its writes."""

    writes = 0

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        super().set(cursor, data, set_cursor=set_cursor)
        self.writes += 1


def failing(recent: Any, error: type[BaseException], times: list[int]) -> Any:
    """A sampler on the same storage, that raises after a write was reported to the samplers before it."""

    class Failing(recent):  # type: ignore[misc]
        def mark_update(self, index: Any, *, storage: Any = None) -> None:
            super().mark_update(index, storage=storage)
            if times[0]:
                times[0] -= 1
                raise error("as a handler may")

    return Failing(10)


@pytest.mark.parametrize("times", [1, 10])  # an interrupt; an error that comes again
def test_a_write_that_raises_is_counted_once(times: int, recent: Any) -> None:
    left = [0]
    storage, writer = CountingStorage(50), CountingWriter()
    first = build(recent(10), storage, writer=writer)
    second = build(failing(recent, KeyboardInterrupt, left), storage)
    first.extend(rows(10))
    left[0] = times
    with pytest.raises(KeyboardInterrupt):
        first.extend(rows(4, 100))
    left[0] = 0
    assert len(first) == first.sampler.count == writer.counted == 14
    assert storage.writes == 2
    assert first.sampler.number.tolist() == list(range(14))
    if times == 1:
        assert second.sampler.count == 14
    expected = build(recent(10))
    for start, count in ((0, 10), (100, 4)):
        expected.extend(rows(count, start))
    same_draws(first, expected)


class Writes(Sampler):
    """Counts the writes of each slot, in one array that is changed in place."""

    stateless = True

    def __init__(self) -> None:
        self.counts = torch.zeros(50, dtype=torch.int64)
        self.done: list[Any] = []

    def before_write(self) -> dict[str, Any]:
        self.done = []
        return {}

    def put_back(self, before: dict[str, Any]) -> None:
        while self.done:
            self.counts[self.done.pop()] -= 1

    def mark_update(self, index: Any, *, storage: Any = None) -> None:
        self.done.append(index)
        self.counts[index] += 1

    def draw(self, storage: Any, batch_size: int, key: Any) -> Any:
        return self.counts[: len(storage)].argmax().expand(batch_size), {}


@pytest.mark.parametrize("times", [1, 10])
def test_large_memory_is_put_back_by_methods_of_the_class(times: int, recent: Any) -> None:
    left = [0]
    storage = LazyTensorStorage(50)
    first, _second = build(Writes(), storage), build(failing(recent, KeyboardInterrupt, left), storage)
    first.extend(rows(10))
    left[0] = times
    with pytest.raises(KeyboardInterrupt):
        first.extend(rows(45, 100))
    assert first.sampler.counts.tolist() == [2] * 5 + [1] * 45
    assert first.sample()["index"].unique().numel() == 1


def test_a_method_that_is_replaced_in_the_class_is_called(recent: Any) -> None:
    buffer = build(recent(10))
    buffer.extend(rows(40))
    for name in ("draw", "sample"):
        with mock.patch.object(recent, name, lambda self, storage, size, *key: (torch.full((size,), 7), {})):
            assert (buffer.sample()["index"] == 7).all()
        assert buffer.sample()["index"].unique().numel() > 1


class Logs(SamplerWithoutReplacement):
    """Logs its calls in a list that is changed in place, with two counts around it; draws from an epoch of the library."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[Any] = []
        self.begun = self.ended = 0

    def note(self, *what: Any) -> None:
        self.begun += 1
        self.log.append([torch.as_tensor(each).tolist() for each in what])
        self.ended += 1

    def mark_update(self, index: Any, *, storage: Any = None) -> None:
        self.note(index)

    def update_priority(self, index: Any, priority: Any, *, storage: Any = None) -> None:
        self.note(index, priority)

    def draw(self, storage: Any, batch_size: int, key: Any) -> Any:
        index, info = super().draw(storage, batch_size, key)
        self.note(index)
        return index, info

    def _empty(self) -> None:
        super()._empty()
        self.note()

    def before_write(self) -> dict[str, Any]:
        return {"log": len(self.log), "counts": (self.begun, self.ended)}

    def put_back(self, before: dict[str, Any]) -> None:
        del self.log[before["log"] :]
        self.begun, self.ended = before["counts"]

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "log": self.log, "begun": self.begun, "ended": self.ended}

    def load_state_dict(self, state_dict: Any) -> None:
        given = dict(state_dict)
        self.log, self.begun, self.ended = (given.pop(name) for name in ("log", "begun", "ended"))
        super().load_state_dict(given)


def filled(count: int = 40, start: int = 0) -> LazyTensorStorage:
    storage = LazyTensorStorage(50)
    build(Logs(), storage).extend(rows(count, start))
    return storage


BEFORE = -1
INTERRUPTED: dict[str, Callable[[Any, Any], Any]] = {
    "set_sampler": lambda buffer, _: buffer.set_sampler(Logs()),
    "set_storage": lambda buffer, _: buffer.set_storage(filled(7, 100)),
    "empty": lambda buffer, _: buffer.empty(),
    "sample": lambda buffer, _: buffer.sample(),
    "mark_update": lambda buffer, _: buffer.mark_update(torch.tensor([1, 3])),
    "update_priority": lambda buffer, _: buffer.update_priority(torch.tensor([1, 3]), torch.tensor([0.5, 2.0])),
    "load beside it": lambda _, other: other.load_state_dict(other.state_dict()),
}


@pytest.mark.parametrize("call", INTERRUPTED)
def test_what_a_class_of_the_users_changes_in_an_interrupted_call_is_changed_once_or_not_at_all(call: str) -> None:
    def after(at: int | None) -> tuple[str, int]:
        """What the call leaves that is interrupted there, and its steps."""
        storage = filled()
        buffer, other = build(Logs(), storage), build(Logs(), storage)
        for _ in range(2):
            buffer.sample()
        with Tracer(-1 if at is None else at, looks=False) as tracer:
            try:
                if at != BEFORE:
                    INTERRUPTED[call](buffer, other)
            except Interrupt:
                pass
            else:
                assert at in (None, BEFORE)
        left = signature((buffer.state_dict(), other.sampler.state_dict(), len(buffer)))
        return left, tracer.count

    done, steps = after(None)
    known = {done, after(BEFORE)[0]}
    assert len(known) == 2
    found = {at: after(at)[0] for at in range(steps // 40 // 2, steps, max(1, steps // 40))}
    assert not {at for at, left in found.items() if left not in known}
    assert set(found.values()) == known


def test_a_write_that_is_refused_changes_nothing(recent: Any) -> None:
    buffer, expected = (build(recent(10), prefetch=prefetch) for prefetch in (2, None))
    for each in (buffer, expected):
        each.extend(rows(10))
    for wrong in (rows(4).exclude("y"), TensorDict({"x": torch.arange(3), "y": torch.ones(3, 4)}, [3])):
        with pytest.raises((KeyError, RuntimeError), match="nothing was written"):
            buffer.extend(wrong)
    assert buffer.sampler.count == 10
    same_draws(buffer, expected)


def test_it_draws_in_an_ensemble_that_is_saved(recent: Any, tmp_path: Path) -> None:
    def ensemble() -> ReplayBufferEnsemble:
        generator = torch.Generator()
        return ReplayBufferEnsemble(build(recent(5)), build(recent(20)), batch_size=16, generator=generator)

    saved, loaded, given = ensemble(), ensemble(), ensemble()
    saved[0].extend(rows(20))
    saved[1].extend(rows(60, 100))
    saved.sample()
    saved.dumps(tmp_path / "c")
    loaded.loads(tmp_path / "c")
    given.load_state_dict(saved.state_dict())
    for _ in range(3):
        batch = saved.sample()
        check_same(loaded.sample(), batch)
        check_same(given.sample(), batch)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda new: build(new(10), LazyTensorStorage(50, ndim=2)), ValueError, "one item dim, got ndim=2"),
        (lambda new: build(new(10)).sample(), RuntimeError, "Cannot sample from an empty storage"),
        (
            lambda new: build(new(10)).load_state_dict(without_half_life(build(new(10)))),
            CheckpointMismatch,
            "half_life",
        ),
    ],
)
def test_what_it_cannot_do_is_refused(
    call: Callable[[Any], object], error: type[Exception], message: str, recent: Any
) -> None:
    with pytest.raises(error, match=message):
        call(recent)


def without_half_life(buffer: Any) -> dict[str, Any]:
    """A state with an entry of the sampler missing."""
    buffer.extend(rows(3))
    state: dict[str, Any] = buffer.state_dict()
    del state["_sampler"]["half_life"]
    return state
