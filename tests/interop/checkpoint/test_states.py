"""What samplers and writers save is all that decides what they do next."""

import copy
from typing import Any

import numpy as np
import pytest
import torch

from fbuf.checkpoint import CheckpointMismatch
from interop import (
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    RoundRobinWriter,
    Sampler,
    SamplerEnsemble,
    SliceSamplerWithoutReplacement,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
)
from tests.interop.checkpoint.resuming import same
from tests.interop.checkpoint.saved_trees import put_into, through_json
from tests.interop.pair_history import items

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
    put_into(twin.sampler, buffer.sampler.state())
    put_into(twin.writer, buffer.writer.state())
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
    put_into(other.writer, one.writer.state())
    assert (other.writer.cursor, other.write_count) == (5, 17)
    assert other.writer.generations_of(torch.arange(12)).tolist() == [1] * 5 + [0] * 7
    assert other.extend(torch.arange(2)).tolist() == [5, 6]
    with pytest.raises(CheckpointMismatch, match="track_generations is True there and False here"):
        ReplayBuffer(storage=LazyTensorStorage(12)).writer.with_state(one.writer.state())
    with pytest.raises(CheckpointMismatch, match="track_generations is False there"):
        one.writer.with_state(ReplayBuffer(storage=LazyTensorStorage(12)).writer.state())


@pytest.mark.parametrize(("written", "capacity", "cursor"), [(5, 9, 5), (9, 20, 9), (5, 5, 0), (9, 9, 0), (0, 3, 0)])
def test_a_ring_that_was_not_gone_around_may_have_another_capacity(written: int, capacity: int, cursor: int) -> None:
    one, other = (ReplayBuffer(storage=ListStorage(size)) for size in (9, capacity))
    if written:
        one.extend(list(range(written)))
    put_into(other.writer, one.writer.state())
    assert other.writer.cursor == cursor


@pytest.mark.parametrize(("written", "capacity"), [(12, 20), (12, 5), (7, 5)])
def test_a_ring_that_was_gone_around_may_not(written: int, capacity: int) -> None:
    one, other = (ReplayBuffer(storage=ListStorage(size)) for size in (9, capacity))
    one.extend(list(range(written)))
    with pytest.raises(CheckpointMismatch, match=f"around 9 rows, here there are {capacity}"):
        other.writer.with_state(one.writer.state())


def test_a_writer_of_the_highest_goes_on_ranking() -> None:
    def make() -> Any:
        return TensorDictReplayBuffer(storage=LazyTensorStorage(4), writer=TensorDictMaxValueWriter("x"))

    one = make()
    one.extend(items(np.array([5, 1, 9, 3, 7]), False))
    twin = TensorDictReplayBuffer(storage=copy.deepcopy(one.storage), writer=TensorDictMaxValueWriter("x"))
    put_into(twin.writer, one.writer.state())
    for each in (one, twin):
        assert each.extend(items(np.array([2, 4, 11]), False)).tolist() == [-1, 3, 0] or each.write_count == 7
    assert same(one[:], twin[:]) and one.write_count == twin.write_count
    with pytest.raises(CheckpointMismatch, match="room for 3"):
        TensorDictReplayBuffer(storage=LazyTensorStorage(3), writer=TensorDictMaxValueWriter("x")).writer.with_state(
            one.writer.state()
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


def test_a_sampler_of_ones_own_saves_what_its_state_dict_says() -> None:
    one, other = InTurn(), InTurn()
    one.place = torch.tensor(5)
    saved = through_json(one.state())
    put_into(other, saved)
    assert other.place == 5
    one.place = torch.tensor(-5)
    with pytest.raises(CheckpointMismatch, match="a place is not negative"):
        other.with_state(through_json(one.state()))
    with pytest.raises(CheckpointMismatch, match="a place is not negative"):
        SamplerEnsemble(other).load_state_dict({"0": {"place": torch.tensor(-1)}})
    assert other.place == 5
    assert Plain().state() == {} and Plain().state_dict() == {}
    assert one.state_dict()["place"] == one.place == -5
    put_into(Plain(), {})


class OfArguments(Plain):
    """Its attribute is an argument, which never changes."""

    stateless = True

    def __init__(self, step: int) -> None:
        self.step = step


def test_a_stateless_class_of_ones_own_saves_the_state_of_the_class_of_the_library() -> None:
    assert OfArguments(3).state() == {}
    put_into(OfArguments(4), OfArguments(3).state())

    class WithName(SliceSamplerWithoutReplacement):
        stateless = True

    one, other = WithName(slice_len=2), WithName(slice_len=2, drop_last=True)
    other.name = "other"
    assert one.state().keys() == SliceSamplerWithoutReplacement(slice_len=2).state().keys()
    with pytest.warns(UserWarning, match="drop_last=False instead of True"):
        other.load_state_dict(one.state_dict())
    assert not other.drop_last and other.name == "other"


def test_a_state_dict_of_ones_own_may_have_any_keys() -> None:
    class Given(InTurn):
        def state_dict(self) -> dict[str, Any]:
            return {"given": {"place": self.place}}

        def load_state_dict(self, state_dict: Any) -> None:
            super().load_state_dict(state_dict["given"])

    one, other, third = Given(), Given(), Given()
    one.place = torch.tensor(5)
    other.with_state(one.state_dict())()
    put_into(third, one.state())
    assert other.place == third.place == 5
