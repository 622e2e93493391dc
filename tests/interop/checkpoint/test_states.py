"""What samplers and writers save is all that decides what they do next, and nothing else gets into them."""

import contextlib
import copy
import warnings
from typing import Any

import jax
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fbuf.checkpoint import CheckpointError, CheckpointMismatch
from interop import (
    ConsumingSampler,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    RoundRobinWriter,
    Sampler,
    SamplerEnsemble,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    StalenessAwareSampler,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    WriterEnsemble,
)
from interop.buffers.fused import reserved
from interop.checkpoint.rule import Rule
from tests.interop.checkpoint.resuming import go_on, joined, same
from tests.interop.checkpoint.saved_trees import damaged, through_json
from tests.interop.pair_history import BATCH, CELLS, LAYOUTS, SAMPLERS, WRITERS, Cell, items, parts

OFTEN = {("LazyTensorStorage", 1), ("LazyTensorStorage", 2), ("ListStorage", 1)}


def put_into(target: Any, saved: Any) -> None:
    """Load a sampler or a writer."""
    target._restoring(through_json(saved))()


def twin_of(buffer: Any, cell: Cell) -> Any:
    """A buffer on a copy of the storage, with a fresh sampler and writer that were given what those of `buffer` saved."""
    saved = through_json(buffer.sampler._saved()), through_json(buffer.writer._saved())
    generator = torch.Generator("cpu")
    generator.set_state(buffer._rng.get_state())
    storage = copy.deepcopy(buffer.storage)
    _, sampler, writer = parts(cell)
    twin = TensorDictReplayBuffer(
        storage=storage, sampler=sampler, writer=writer, batch_size=BATCH, generator=generator
    )
    puts = [sampler._restoring(saved[0]), writer._restoring(saved[1])]
    for put in puts:
        put()
    return twin


def check_goes_on(cell: Cell, before: int, draws: int = 10) -> None:
    buffer = joined(cell, 0)
    if buffer is not None:
        go_on(buffer, cell, 0, before)
        twin = twin_of(buffer, cell)
        assert same(go_on(buffer, cell, before, draws), go_on(twin, cell, before, draws))


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("writer", WRITERS)
def test_a_pair_goes_on_from_what_it_saved(writer: str, sampler: str) -> None:
    for layout in OFTEN:
        check_goes_on(Cell(*layout, sampler, writer, "TensorDictReplayBuffer"), 9 if layout[1] == 1 else 5)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [each for each in LAYOUTS if each not in OFTEN])
def test_every_other_pair_goes_on_from_what_it_saved(layout: tuple[str, int]) -> None:
    for cell in CELLS:
        if (cell.storage, cell.ndim) == layout and cell.buffer == "TensorDictReplayBuffer":
            check_goes_on(cell, 9)


# ------------------------------------------------------------------ priorities: the rebuilt tree has the same bits


def bits(state: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)]


slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("alpha", "dtype", "within", "turns"),
    [
        (0.6, torch.float32, False, 2000),
        (1.3, torch.float64, True, 300),
        pytest.param(1.3, torch.float64, False, 5000, marks=slow),
        pytest.param(0.7, torch.float64, True, 5000, marks=slow),
        pytest.param(0.7, torch.float32, True, 5000, marks=slow),
    ],
)
def test_sums_of_priorities_are_the_same_bits_after_thousands_of_updates(
    alpha: float, dtype: torch.dtype, within: bool, turns: int
) -> None:
    def make() -> PrioritizedSampler:
        return PrioritizedSampler(500, alpha, 0.5, dtype=dtype, max_priority_within_buffer=within)

    sampler, storage, draw = make(), LazyTensorStorage(500), np.random.default_rng(1)
    storage.set(slice(0, 480), torch.arange(480))
    sampler.mark_update(np.arange(480), storage=storage)
    for turn in range(turns):
        count = int(draw.choice([1, 3, 32, 90]))
        sampler.update_priority(draw.integers(0, 480, count), 10 ** draw.uniform(-9, 9, count), storage=storage)
        if turn % 9 == 0:
            sampler.mark_update(draw.integers(0, 480, int(draw.choice([1, 7, 40]))), storage=storage)
        if turn == turns // 2:
            sampler.alpha = 0.7 * alpha
    twin = make()
    with pytest.warns(UserWarning, match="alpha="):
        put_into(twin, sampler._saved())
    one, other = sampler.state, twin.state
    assert one is not None and other is not None
    assert bits(one.tree) == bits(other.tree) and bits(one.ranks) == bits(other.ranks)
    assert bits(one) == bits(other)


def test_priorities_that_wait_are_saved_as_they_are_given() -> None:
    sampler, storage = PrioritizedSampler(12, 1, 1), LazyTensorStorage(12)
    storage.set(slice(0, 4), torch.arange(4))
    sampler.mark_update(np.arange(4), storage=storage)
    sampler.update_priority([0, 1, 2], [5.0, 0.0, 2.0])
    twin = PrioritizedSampler(12, 1, 1)
    put_into(twin, sampler._saved())
    assert twin.priorities.tolist() == [5, 0, 2, 1] and twin.default_priority == 5
    assert torch.equal(twin.priorities, sampler.priorities)


@pytest.mark.parametrize("capacity", [4, 6, 20])
def test_priorities_fit_another_capacity_if_every_item_does(capacity: int) -> None:
    sampler, storage = PrioritizedSampler(12, 1, 1), LazyTensorStorage(12)
    storage.set(slice(0, 6), torch.arange(6))
    sampler.mark_update(np.arange(6), storage=storage)
    sampler.update_priority(np.arange(6), np.arange(6.0) + 1)
    twin = PrioritizedSampler(capacity, 1, 1)
    if capacity < 6:
        with pytest.raises(CheckpointMismatch, match="max_capacity"):
            put_into(twin, sampler._saved())
        assert twin.state is None
        return
    put_into(twin, sampler._saved())
    assert twin.priorities.tolist() == [1, 2, 3, 4, 5, 6]
    room = LazyTensorStorage(capacity)
    room.set(slice(0, 6), torch.arange(6))
    assert twin.sample(room, 100)[0].max() < 6
    if capacity > 6:
        room.set(slice(6, 7), torch.arange(1))
        twin.mark_update(6, storage=room)
        assert len(twin.priorities) == 7


def test_a_sampler_that_was_loaded_grows_to_its_storage() -> None:
    sampler = PrioritizedSampler(4, 1, 1)
    storage = LazyTensorStorage(4)
    storage.set(slice(0, 4), torch.arange(4))
    sampler.mark_update(np.arange(4), storage=storage)
    sampler.update_priority([0, 3], [3.0, 2.0])
    other = PrioritizedSliceSampler(4, 1, 1, slice_len=1)
    for twin in (PrioritizedSampler(4, 1, 1), other):
        saved = dict(sampler._saved())
        if twin is other:
            saved["slices"] = None
        twin._restoring(saved)()
        twin.mark_update(4, storage=_of(5))
        assert twin.priorities.tolist() == [3, 1, 1, 2, 3]


def _of(count: int) -> LazyTensorStorage:
    storage = LazyTensorStorage(count)
    storage.set(slice(0, count), items(np.arange(count), False))
    return storage


def test_priorities_of_other_items_than_are_stored_are_not_drawn_by() -> None:
    sampler = PrioritizedSampler(12, 1, 1)
    sampler.mark_update(np.arange(6), storage=_of(6))
    twin = PrioritizedSampler(12, 1, 1)
    put_into(twin, sampler._saved())
    with pytest.raises(RuntimeError, match="priorities of 6 items, and 4 items are stored"):
        twin.sample(_of(4), 2)


# ------------------------------------------------------------------ what does not go into each other


def made() -> dict[str, Any]:
    """One of each, with something to remember."""
    found: dict[str, Any] = {}
    for name in SAMPLERS:
        cell = Cell("LazyTensorStorage", 1, name, "RoundRobinWriter", "TensorDictReplayBuffer")
        buffer = joined(cell, 0)
        go_on(buffer, cell, 0, 6)
        if name.endswith("WithoutReplacement"):
            reserved(buffer.sampler, buffer.storage, 4)
        found[name] = buffer.sampler
        found["RoundRobinWriter"] = buffer.writer
        found[f"buffer of {name}"] = buffer
    cell = Cell("LazyTensorStorage", 1, "RandomSampler", "TensorDictMaxValueWriter", "TensorDictReplayBuffer")
    buffer = joined(cell, 0)
    go_on(buffer, cell, 0, 6)
    found["TensorDictMaxValueWriter"] = buffer.writer
    counting = ReplayBuffer(storage=LazyTensorStorage(12), writer=RoundRobinWriter(track_generations=True))
    counting.extend(torch.arange(12))
    found["counting writer"] = counting.writer
    found["SamplerEnsemble"] = SamplerEnsemble(
        found["PrioritizedSampler"], found["SamplerWithoutReplacement"], p=[1, 3], num_buffer_sampled=5
    )
    found["WriterEnsemble"] = WriterEnsemble(counting.writer, found["TensorDictMaxValueWriter"])
    found["buffers"] = [counting, *(found.pop(name) for name in list(found) if name.startswith("buffer of")), buffer]
    return found


@pytest.fixture(scope="module")
def kinds() -> dict[str, Any]:
    return made()


PARTS = [
    *SAMPLERS,
    "RoundRobinWriter",
    "TensorDictMaxValueWriter",
    "counting writer",
    "SamplerEnsemble",
    "WriterEnsemble",
]


# Of which state dicts say the same.
ALIKE = [{"RandomSampler", "SliceSampler"}, {"PrioritizedSampler", "PrioritizedSliceSampler"}]


@pytest.mark.parametrize("name", PARTS)
def test_a_state_goes_into_nothing_else(name: str, kinds: dict[str, Any]) -> None:
    saved, before = kinds[name]._saved(), {other: kinds[other].state_dict() for other in PARTS}
    for other in PARTS:
        if type(kinds[other]) is not type(kinds[name]):
            with pytest.raises(CheckpointError):
                kinds[other]._restoring(through_json(saved))
            if {name, other} not in ALIKE:
                with pytest.raises(CheckpointError):
                    kinds[other].load_state_dict(before[name])
            assert repr(kinds[other].state_dict()) == repr(before[other])


@pytest.mark.parametrize("name", PARTS)
def test_damage_is_found_and_changes_nothing(name: str, kinds: dict[str, Any]) -> None:
    part = kinds[name]
    saved = through_json(part._saved())
    before, accepted = repr(part._saved()), 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for where, changed in damaged(saved):
            try:
                put = part._restoring(changed)
            except CheckpointError:
                pass
            except Exception as error:
                raise AssertionError(f"{where}: {type(error).__name__}: {error}") from error
            else:
                accepted += 1  # it is another state
                assert callable(put)
    assert repr(part._saved()) == before


@pytest.mark.parametrize("name", [name for name in SAMPLERS if name != "ConsumingSampler"])
@given(data=st.data())
@settings(max_examples=15)
def test_what_is_accepted_can_be_used(name: str, data: st.DataObject) -> None:
    cell = Cell("LazyTensorStorage", 1, name, "RoundRobinWriter", "TensorDictReplayBuffer")
    buffer = joined(cell, 0)
    go_on(buffer, cell, 0, 6)
    changes = list(damaged(through_json(buffer.sampler._saved())))
    if not changes:
        return
    _, changed = data.draw(st.sampled_from(changes))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with contextlib.suppress(CheckpointError):
            buffer.sampler._restoring(changed)()
        with contextlib.suppress(ValueError, RuntimeError, KeyError):  # parameters may not go with what is stored
            go_on(buffer, cell, 6, 3)


def test_all_differences_are_listed() -> None:
    sampler, storage = PrioritizedSampler(12, 1, 1, max_priority_within_buffer=True), LazyTensorStorage(12)
    storage.set(slice(0, 12), torch.arange(12))
    sampler.mark_update(np.arange(12), storage=storage)
    with pytest.raises(CheckpointMismatch, match=r"float32.*float64.*within_buffer is True.*max_capacity of 12"):
        PrioritizedSampler(4, 1, 1, dtype=torch.float64)._restoring(through_json(sampler._saved()))


def test_priorities_of_another_dtype_are_cast_where_that_is_asked_for() -> None:
    sampler, storage = PrioritizedSampler(12, 1, 1, dtype=torch.float64), LazyTensorStorage(12)
    storage.set(slice(0, 2), torch.arange(2))
    sampler.mark_update([0, 1], storage=storage)
    sampler.update_priority([0], [0.1])
    twin = PrioritizedSampler(12, 1, 1)
    with pytest.raises(CheckpointMismatch, match="cast=True"):
        twin._restoring(sampler._saved())
    twin._restoring(sampler._saved(), Rule(cast=True))()
    assert torch.equal(twin.priorities, torch.tensor([0.1, 1.0]))
    sampler.update_priority([0], [1e200])
    with pytest.raises(CheckpointMismatch, match="not finite in float32"):
        twin._restoring(sampler._saved(), Rule(cast=True))


PARAMETERS = [
    (PrioritizedSampler(12, 0.5, 0.4), PrioritizedSampler(12, 0.6, 0.4), "alpha=0.5 instead of 0.6"),
    (PrioritizedSampler(12, 0.5, 0.4, eps=1e-3), PrioritizedSampler(12, 0.5, 0.4), "eps="),
    (PrioritizedSampler(12, 1, 1, reduction="min"), PrioritizedSampler(12, 1, 1), "reduction='min'"),
    (SamplerWithoutReplacement(drop_last=True), SamplerWithoutReplacement(), "drop_last=True instead of False"),
    (SamplerWithoutReplacement(shuffle=False), SamplerWithoutReplacement(), "shuffle"),
    (SliceSampler(slice_len=2), SliceSampler(num_slices=2), "num_slices=None instead of 2, slice_len=2"),
    (SliceSampler(slice_len=2, traj_key=("a", "b")), SliceSampler(slice_len=2), r"traj_key=\('a', 'b'\)"),
    (SliceSampler(slice_len=4, span=(True, 2)), SliceSampler(slice_len=4), "span"),
    (ConsumingSampler(3), ConsumingSampler(1), "max_sample_count=3"),
    (StalenessAwareSampler(4, version_key="v"), StalenessAwareSampler(), "max_staleness=4.*version_key='v'"),
    (TensorDictMaxValueWriter("a", "max"), TensorDictMaxValueWriter(), "rank_key='a'.*reduction='max'"),
    (
        SamplerEnsemble(RandomSampler(), RandomSampler(), p=[1, 1]),
        SamplerEnsemble(RandomSampler(), RandomSampler(), num_buffer_sampled=7),
        r"p=\[0.5, 0.5\].*num_buffer_sampled=None instead of 7",
    ),
]


@pytest.mark.parametrize(("saved", "target", "words"), PARAMETERS)
def test_parameters_of_the_checkpoint_count_with_a_warning(saved: Any, target: Any, words: str) -> None:
    with pytest.warns(UserWarning, match=words) as told:
        put = target._restoring(through_json(saved._saved()))
    assert len(told) == 1
    put()
    assert repr(target) == repr(saved) and target.state_dict().keys() == saved.state_dict().keys()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        target._restoring(through_json(saved._saved()))


@pytest.mark.parametrize(("saved", "target", "words"), PARAMETERS[:2])
def test_a_warning_that_is_an_error_comes_before_anything_changes(saved: Any, target: Any, words: str) -> None:
    before = repr(PARAMETERS[0][1]._saved())
    other = PrioritizedSampler(12, 0.6, 0.4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match=words):
            other._restoring(through_json(saved._saved()))
    assert repr(other._saved()) == repr(PrioritizedSampler(12, 0.6, 0.4)._saved()) and before


def test_given_ends_of_trajectories_are_not_saved_and_have_to_be_given_again() -> None:
    ends = torch.tensor([False, True, False, True])
    given_ends = SliceSampler(slice_len=2, ends=ends, cache_values=True)
    put_into(SliceSampler(slice_len=2, ends=ends, cache_values=True), given_ends._saved())
    with pytest.raises(CheckpointMismatch, match="only one"):
        SliceSampler(slice_len=2)._restoring(given_ends._saved())


# ------------------------------------------------------------------ slices without replacement


@pytest.mark.parametrize("change", ["nothing", "write", "mark", "reward"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_epoch_of_trajectories_is_over_where_it_would_have_been(change: str, when: str) -> None:
    def make() -> Any:
        storage = LazyTensorStorage(24)
        sampler = SliceSamplerWithoutReplacement(slice_len=2, strict_length=False)
        buffer = TensorDictReplayBuffer(
            storage=storage, sampler=sampler, batch_size=4, generator=torch.Generator().manual_seed(0)
        )
        buffer.extend(items(np.arange(24), False))
        return buffer

    def alter(each: Any) -> None:
        if change == "write":
            each.extend(items(np.arange(100, 104), False))  # as many trajectories as before
        elif change == "mark":
            each[3:4] = each[3:4].clone().set("episode", torch.tensor([77]))
        elif change == "reward":
            each.set_at_("x", torch.tensor([5]), torch.tensor([2]))

    def drawn(each: Any) -> list[Any]:
        return [each.sample().exclude("index") for _ in range(8)]

    buffer = make()
    buffer.sample()
    if when == "before":
        alter(buffer)
    twin = TensorDictReplayBuffer(
        storage=copy.deepcopy(buffer.storage),
        sampler=SliceSamplerWithoutReplacement(slice_len=2, strict_length=False),
        batch_size=4,
        generator=torch.Generator(),
    )
    put_into(twin.sampler, buffer.sampler._saved())
    put_into(twin.writer, buffer.writer._saved())
    twin._rng.set_state(buffer._rng.get_state())
    if when == "after" and change == "write":  # edits are noticed from the first draw on
        alter(buffer)
        alter(twin)
    assert same(drawn(buffer), drawn(twin))


# ------------------------------------------------------------------ writers


def test_cursor_count_and_generations_go_on() -> None:
    def make() -> Any:
        return ReplayBuffer(storage=LazyTensorStorage(12), writer=RoundRobinWriter(track_generations=True))

    one, other = make(), make()
    one.extend(torch.arange(17))
    other.extend(torch.arange(3))
    put_into(other.writer, one.writer._saved())
    assert (other.writer._cursor, other.write_count) == (5, 17)
    assert other.writer.generations_of(torch.arange(12)).tolist() == [1] * 5 + [0] * 7
    assert other.extend(torch.arange(2)).tolist() == [5, 6]
    with pytest.raises(CheckpointMismatch, match="track_generations is True there and False here"):
        ReplayBuffer(storage=LazyTensorStorage(12)).writer._restoring(one.writer._saved())
    with pytest.raises(CheckpointMismatch, match="track_generations is False there"):
        one.writer._restoring(ReplayBuffer(storage=LazyTensorStorage(12)).writer._saved())


@pytest.mark.parametrize(("written", "capacity", "cursor"), [(5, 9, 5), (9, 20, 9), (5, 5, 0), (9, 9, 0), (0, 3, 0)])
def test_a_ring_that_was_not_gone_around_may_have_another_capacity(written: int, capacity: int, cursor: int) -> None:
    one, other = (ReplayBuffer(storage=ListStorage(size)) for size in (9, capacity))
    if written:
        one.extend(list(range(written)))
    put_into(other.writer, one.writer._saved())
    assert other.writer._cursor == cursor


@pytest.mark.parametrize(("written", "capacity"), [(12, 20), (12, 5), (7, 5)])
def test_a_ring_that_was_gone_around_may_not(written: int, capacity: int) -> None:
    one, other = (ReplayBuffer(storage=ListStorage(size)) for size in (9, capacity))
    one.extend(list(range(written)))
    with pytest.raises(CheckpointMismatch, match=f"around 9 rows, here there are {capacity}"):
        other.writer._restoring(one.writer._saved())


def test_a_writer_of_the_highest_goes_on_ranking() -> None:
    def make() -> Any:
        return TensorDictReplayBuffer(storage=LazyTensorStorage(4), writer=TensorDictMaxValueWriter("x"))

    one = make()
    one.extend(items(np.array([5, 1, 9, 3, 7]), False))
    twin = TensorDictReplayBuffer(storage=copy.deepcopy(one.storage), writer=TensorDictMaxValueWriter("x"))
    put_into(twin.writer, one.writer._saved())
    for each in (one, twin):
        assert each.extend(items(np.array([2, 4, 11]), False)).tolist() == [-1, 3, 0] or each.write_count == 7
    assert same(one[:], twin[:]) and one.write_count == twin.write_count
    with pytest.raises(CheckpointMismatch, match="room for 3"):
        TensorDictReplayBuffer(storage=LazyTensorStorage(3), writer=TensorDictMaxValueWriter("x")).writer._restoring(
            one.writer._saved()
        )


# ------------------------------------------------------------------ samplers of the user's


class Plain(Sampler):
    """Nothing to remember."""

    def sample(self, storage: Any, batch_size: int) -> tuple[Any, dict[Any, Any]]:
        return torch.randint(len(storage), (batch_size,), generator=self._rng), {}


class InTurn(Plain):
    """Remembers where it is."""

    def __init__(self) -> None:
        self.place = torch.tensor(0)

    def sample(self, storage: Any, batch_size: int) -> tuple[Any, dict[Any, Any]]:
        self.place = self.place + 1
        return (torch.arange(batch_size) + self.place) % len(storage), {}

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state_dict: Any) -> None:
        if state_dict["place"] < 0:
            raise ValueError("a place is not negative")
        self.place = state_dict["place"].clone()


class Doubled(PrioritizedSampler):
    """One of the library's with something more."""

    factor = 1

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "factor": self.factor}

    def load_state_dict(self, state_dict: Any) -> None:
        rest = dict(state_dict)
        self.factor = rest.pop("factor")
        super().load_state_dict(rest)


def test_a_sampler_of_ones_own_saves_what_its_state_dict_says() -> None:
    one, other = InTurn(), InTurn()
    one.place = torch.tensor(5)
    saved = through_json(one._saved())
    put_into(other, saved)
    assert other.place == 5
    one.place = torch.tensor(-5)
    with pytest.raises(CheckpointMismatch, match="a place is not negative"):
        other._restoring(through_json(one._saved()))
    with pytest.raises(CheckpointMismatch, match="a place is not negative"):
        SamplerEnsemble(other).load_state_dict({"0": {"place": torch.tensor(-1)}})
    assert other.place == 5
    assert Plain()._saved() == {} and Plain().state_dict() == {}
    put_into(Plain(), {})


def test_a_sampler_may_add_to_what_one_of_the_librarys_saves() -> None:
    one, other = Doubled(9, 1, 1), Doubled(9, 1, 1)
    one.mark_update(np.arange(4), storage=_of(4))
    one.update_priority([1], [7.0])
    one.factor = 3
    put_into(other, one._saved())
    assert other.factor == 3 and torch.equal(other.priorities, one.priorities)
