"""What LazyFrameStorage refuses, and that nothing is changed by it: writes elsewhere, data whose frames do not follow."""

import copy
import multiprocessing

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from interop import CheckpointMismatch, LazyFrameStorage, LazyTensorStorage, ReplayBuffer, RoundRobinWriter
from tests.interop.frame_streams import CUT, OPEN, TERMINATED, TRUNCATED, Both, Environment, assert_same, random_kinds


@given(data=st.data())
@settings(max_examples=40)
def test_what_is_refused_for_want_of_room_ends_more_trajectories_than_there_is_room_for_and_changes_nothing(data):
    lanes, capacity, finals = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 8)), data.draw(st.integers(1, 4))
    both = Both(capacity * lanes, ndim=2, finals=finals, stack=2)
    streams, stored = [Environment(2, first=1 + 500 * lane) for lane in range(lanes)], np.zeros((lanes, 0), np.int64)
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    for count in data.draw(st.lists(st.integers(1, 10), min_size=1, max_size=12)):
        chance = data.draw(st.sampled_from([0.1, 0.4, 0.9]))
        kinds = np.stack([random_kinds(rng, count, chance) for _ in streams])
        ahead, after = copy.deepcopy(streams), np.concatenate([stored, kinds], 1)[:, -capacity:]
        rows = torch.stack([stream.steps(each) for stream, each in zip(ahead, kinds, strict=True)])
        try:
            both.frames.extend(rows.clone())
        except RuntimeError as error:
            assert f"more than finals={finals}; nothing was written" in str(error)
            assert np.count_nonzero(after) > finals
        else:
            room = finals + capacity * lanes - len(both.frames) + 2 * lanes  # with that for frames before and behind
            assert np.count_nonzero(after) <= room
            both.whole.extend(rows)
            streams, stored = ahead, after
        both.check()


def test_an_unwritten_storage_is_not_handed_to_a_worker():
    with pytest.raises(RuntimeError, match="Cowardly refusing to share a LazyFrameStorage"):
        multiprocessing.get_context("spawn").Process(target=len, args=(LazyFrameStorage(6),)).start()


@pytest.mark.parametrize("check", [True, False])
def test_a_trajectory_that_goes_on_behind_the_end_of_another_is_refused(check):
    """Step by step of two environments: the end of one says nothing of the other, whose frames are not in the row before."""
    rows = TensorDict(
        {
            "obs": torch.tensor([[1, 1], [7, 7], [1, 2]]),
            "traj_ids": torch.tensor([0, 1, 0]),
            "next": {"obs": torch.tensor([[1, 2], [7, 8], [2, 3]]), "done": torch.tensor([[False], [True], [False]])},
        },
        [3],
    )
    storage = LazyFrameStorage(6, obs_key="obs", stack=2, stack_dim=-1, check=check)
    buffer = ReplayBuffer(storage=storage)
    buffer.extend(rows[:2])
    with pytest.raises(ValueError, match="row 0 of the data continues a trajectory with rows of others in between"):
        buffer.extend(rows[2:])
    assert len(buffer) == 2
    with pytest.raises(ValueError, match="row 2 of the data continues a trajectory with rows of others in between"):
        ReplayBuffer(storage=LazyFrameStorage(6, obs_key="obs", stack=2, stack_dim=-1, check=check)).extend(rows)


# ---------------------------------------------------------------------- writes elsewhere


@pytest.fixture
def filled():
    both = Both(5)
    both.extend(Environment().steps([OPEN, TERMINATED, OPEN, OPEN, TRUNCATED, OPEN, OPEN]))
    return both


def test_other_entries_can_be_edited(filled):
    for buffer in (filled.frames, filled.whole):
        buffer.set_("action", buffer[:]["action"] * 2)
        buffer.update_({("next", "reward"): torch.arange(5.0)[:, None]})
        buffer.set_at_("action", torch.tensor([8, 9]), [0, 4])
        buffer[0:2]["action"].zero_()  # a view
    filled.check()
    assert filled.whole[:]["action"][:2].tolist() == [0, 0]


@pytest.mark.parametrize("key", ["pixels", ("next", "pixels"), ("next", "done"), ("next", "truncated")])
def test_writes_elsewhere_and_edits_of_frames_and_ends_are_refused(filled, key):
    before = filled.frames[:].clone()
    for index in (3, slice(0, 2), [4, 1]):
        with pytest.raises(RuntimeError, match=r"the next row to write is 2.*nothing was written"):
            filled.frames[index] = before[index]
    with pytest.raises(RuntimeError, match=r"cannot be edited.*nothing was written"):
        filled.frames.set_(key, ~before[key])
    with pytest.raises(RuntimeError, match="cannot be edited"):
        filled.frames.update_(TensorDict({"action": before["action"] + 1, key: before[key]}, [5]))
    assert_same(filled.frames[:], before)


def test_an_update_of_what_is_still_there_leaves_frames_as_they_are():
    buffer = ReplayBuffer(storage=LazyFrameStorage(5), writer=RoundRobinWriter(track_generations=True))
    buffer.extend(Environment().steps([OPEN, TERMINATED, OPEN, OPEN]))
    before = buffer[:].clone()
    call = {"index": torch.tensor([1, 2]), "generation": buffer.writer.generations_of(torch.tensor([1, 2]))}
    for key in ("pixels", ("next", "pixels"), ("next", "done")):
        with pytest.raises(RuntimeError, match="cannot be edited"):
            buffer.update_if_present(**call, patch={key: ~before[key][1:3]})
    assert_same(buffer[:], before)
    result = buffer.update_if_present(**call, patch={"action": torch.tensor([70, 80])})
    assert result.updated_count == 2 and buffer[:]["action"][1:3].tolist() == [70, 80]


# ---------------------------------------------------------------------- data that does not fit


def test_an_observation_that_does_not_follow_is_refused_and_fixes_nothing():
    stream = Environment(stack=2)
    good, more = stream.steps([OPEN, TERMINATED, OPEN, OPEN]), stream.steps([OPEN])
    for change, says in [
        (lambda rows: rows["pixels"][3].add_(1), r"row 3 of the data 'pixels' is not the next observation"),
        (
            lambda rows: rows["pixels"][2, :1].add_(1),
            "begins a trajectory, and its older frames are not its newest",
        ),
        (lambda rows: rows["next", "pixels"][1, :1].add_(1), r"\('next', 'pixels'\) does not begin with the last 1 fr"),
        (lambda rows: rows["next", "done"].zero_(), "Mark where"),
    ]:
        buffer, bad = ReplayBuffer(storage=LazyFrameStorage(9, stack=2)), good.clone()
        bad["next", "truncated"].zero_()
        change(bad)
        for _ in range(2):
            with pytest.raises(ValueError, match=says):
                buffer.extend(bad)
            assert len(buffer) == 0 and not buffer.storage.initialized
        buffer.extend(good)
        with pytest.raises(ValueError, match="row 0 of the data"):
            buffer.extend(good[1:])
        buffer.extend(more)
        assert len(buffer) == 5


def test_without_a_check_data_is_read_as_if_it_followed():
    buffer = ReplayBuffer(storage=LazyFrameStorage(9, stack=1, check=False))
    rows = Environment(stack=1).steps([CUT, OPEN])
    buffer.extend(rows)
    assert torch.equal(buffer[0]["next", "pixels"], rows[1]["pixels"])
    assert torch.equal(buffer[1]["next", "pixels"], rows[1]["next", "pixels"])


def test_bits_are_compared_and_kept():
    frames = torch.tensor([0.0, -0.0, float("nan"), 1e-45, float("inf"), 3])[:, None]
    frames[2] = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)
    for dtype in (torch.float32, torch.bfloat16, torch.complex128, torch.bool):
        given = frames.to(dtype) if dtype != torch.bool else frames > 0
        done = torch.zeros(5, 1, dtype=torch.bool)
        rows = TensorDict({"pixels": given[:-1], "next": {"pixels": given[1:], "done": done}}, [5])
        buffer = ReplayBuffer(storage=LazyFrameStorage(5, stack=1))
        buffer.extend(rows)
        assert_same(buffer[:], rows)


GOOD = Environment().steps([OPEN, OPEN])


@pytest.mark.parametrize(
    ("options", "data", "error", "says"),
    [
        ({}, GOOD.exclude(("next", "pixels")), KeyError, r"\('next', 'pixels'\) is not a tensor of the data"),
        ({}, GOOD.exclude(("next", "done"), ("next", "truncated")), KeyError, "give end_keys or traj_key"),
        ({"end_keys": ["end"]}, GOOD, KeyError, "'end' is not a tensor"),
        ({"end_keys": [("next", "reward")]}, GOOD, TypeError, "must be bool or integers"),
        ({"traj_key": "pixels"}, GOOD, RuntimeError, "must be one value an item"),
        ({"stack": 3}, GOOD, RuntimeError, "stack_dim=-3 of it must hold the 3 frames"),
        ({}, GOOD.clone().set(("next", "pixels"), torch.zeros(2, 4, 2, 2)), RuntimeError, "must be alike"),
    ],
)
def test_data_without_the_frames_that_were_named_is_refused_and_fixes_nothing(options, data, error, says):
    buffer = ReplayBuffer(storage=LazyFrameStorage(9, **options))
    with pytest.raises(error, match=says):
        buffer.extend(data)
    assert not buffer.storage.initialized


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"padding": "reset"}, ValueError, "'first' or 'zero'"),
        ({"stack_dim": 1.5}, TypeError, "stack_dim must be an int"),
        ({"obs_key": ["a", "a"]}, ValueError, "each once"),
        ({"obs_key": 1.5}, TypeError, "a name or a tuple of names"),
    ],
)
def test_options_that_could_not_be_are_refused(options, error, says):
    with pytest.raises(error, match=says):
        LazyFrameStorage(9, **options)


def test_states_of_other_storages_are_a_mismatch(filled):
    other = LazyTensorStorage(6)
    other.set(range(2), filled.frames[:2])
    for target, state in ((filled.frames.storage, other.state_dict()), (other, filled.frames.storage.state_dict())):
        before = target.get(slice(None)).clone()
        with pytest.raises(CheckpointMismatch, match="it is the state of"):
            target.load_state_dict(state)
        assert_same(target.get(slice(None)), before)
