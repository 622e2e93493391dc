"""A stream as transitions of n steps: however it comes in pieces, in buffers, saved, and refused."""

import copy
import io
import itertools
import pickle

import pytest
import torch
from tensordict import NonTensorData, TensorDict

from interop import (
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    TensorDictReplayBuffer,
)
from interop.postprocs import MultiStep
from interop.transforms import Compose, Reward2GoTransform
from interop.transforms.multi_step import MultiStepTransform
from tests.interop.postprocs.rollouts import assert_as_by_loop, rollout


def stream(transform, pieces):
    """What is stored of pieces, in one."""
    found = [made for made in map(transform.inv, pieces) if made is not None]
    return torch.cat(found, -1) if found else None


def same(one, other):
    assert set(one.keys(True, True)) == set(other.keys(True, True))
    assert one.batch_size == other.batch_size
    for key in one.keys(True, True):
        assert torch.equal(one[key], other[key]), key


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("batch", [(8,), (2, 8)])
def test_every_way_to_cut_a_stream_stores_the_same(batch, n):
    data = rollout(*batch, seed=1)
    whole = MultiStepTransform(n, 0.9).inv(data)
    assert whole.shape[-1] == 8 - n
    assert_as_by_loop(whole, data, 0.9, n)
    for cuts in range(0, 2**7, 1 if (batch, n) == ((2, 8), 3) else 7):
        places = [0, *(i + 1 for i in range(7) if cuts >> i & 1), 8]
        pieces = [data[..., a:b] for a, b in itertools.pairwise(places)]
        same(stream(MultiStepTransform(n, 0.9), pieces), whole)


def test_a_stream_of_agents_in_pieces():
    data = rollout(2, 16, seed=8, agents=(3,))
    whole = MultiStepTransform(2, 0.9).inv(data)
    assert_as_by_loop(whole, data, 0.9, 2, agents=1)
    for size in (1, 2, 5, 7):
        same(stream(MultiStepTransform(2, 0.9), data.split(size, 1)), whole)


def test_a_flush_gives_what_is_kept_as_the_end_of_the_stream():
    data = rollout(2, 8, seed=2)
    transform = MultiStepTransform(3, 0.9)
    first = transform.inv(data)
    rest = transform.flush()
    same(torch.cat([first, rest], -1), MultiStep(0.9, 3)(data))
    assert transform.flush() is None
    same(transform.inv(data), first)


def test_what_is_kept_is_no_memory_of_the_caller_and_what_is_stored_none_of_what_is_kept():
    data = rollout(8)
    transform, before = MultiStepTransform(3, 0.9), data.clone()
    first = transform.inv(data[:4]).clone()
    data.zero_()
    second = transform.inv(before[4:])
    same(torch.cat([first, second]), MultiStepTransform(3, 0.9).inv(before))
    for leaf in second.values(True, True):
        leaf.zero_()
    same(transform.flush(), MultiStep(0.9, 3)(before)[5:])


def test_steps_may_be_set_later():
    data = rollout(12)
    transform = MultiStepTransform(3, 0.9)
    transform.inv(data[:4])
    transform.n_steps = 5
    assert transform.inv(data[4:5]) is None
    made = transform.inv(data[5:8])
    same(made, MultiStepTransform(5, 0.9).inv(data[1:8]))
    transform.n_steps = 1
    same(transform.inv(data[8:8]), MultiStepTransform(1, 0.9).inv(data[3:8]))
    same(transform.inv(data[8:]), MultiStepTransform(1, 0.9).inv(data[7:]))
    for wrong, error in ((0, ValueError), (1.5, TypeError)):
        with pytest.raises(error, match="n_steps"):
            transform.n_steps = wrong


def test_it_goes_on_where_it_was_saved(tmp_path):
    data = rollout(12, seed=5)

    def fresh():
        return TensorDictReplayBuffer(storage=LazyTensorStorage(20), transform=MultiStepTransform(3, 0.9), batch_size=2)

    rb = fresh()
    rb.extend(data[:7])
    rb.dumps(tmp_path)
    other = fresh()
    other.loads(tmp_path)
    third = fresh()
    file = io.BytesIO()
    torch.save(rb._transform.state_dict(), file)
    file.seek(0)
    third._transform.load_state_dict(torch.load(file, weights_only=True))
    for each in (rb, other, third):
        each.extend(data[7:])
    whole = MultiStepTransform(3, 0.9).inv(data)
    same(rb[:].exclude("index"), whole)
    same(other[:].exclude("index"), whole)
    same(third[:].exclude("index"), whole[4:])


def test_the_state_of_one_that_keeps_nothing_and_copies():
    transform = MultiStepTransform(4, 0.9)
    other = MultiStepTransform(2, 0.9)
    other.inv(rollout(5))
    other.load_state_dict(transform.state_dict())
    assert other.n_steps == 4
    assert other.flush() is None
    data = rollout(8)
    transform.inv(data[:5])
    wanted = copy.deepcopy(transform).inv(data[5:])
    for each in (pickle.loads(pickle.dumps(transform)), transform.clone()):
        same(each.inv(data[5:]), wanted)
    assert repr(transform) == "MultiStepTransform(n_steps=4, gamma=0.9)"
    with pytest.raises(TypeError, match="n_steps, gamma, batch, frames and nested"):
        transform.set_extra_state({})
    same(transform.inv(data[5:]), wanted)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda data: data.exclude("action"), KeyError, "action"),
        (lambda data: data.set("more", torch.zeros(4)), KeyError, "more"),
        (lambda data: data.set("action", data["action"].double()), TypeError, "'action'.*float64"),
        (lambda data: data.set("action", data["action"][:, :2]), ValueError, r"'action'.*\[2\].*\[3\]"),
        (lambda data: rollout(2, 4), ValueError, "all dims but the last"),
        (lambda data: data.exclude(("next", "reward")), KeyError, "reward"),
        (lambda data: data.set("note", NonTensorData("a", batch_size=[4])), TypeError, "'note'.*no tensor"),
        (lambda data: data[0], ValueError, "last dim is time"),
        (lambda data: {}, TypeError, "takes a tensordict"),
    ],
)
def test_frames_that_do_not_follow_are_refused_and_those_kept_stay(change, error, text):
    data = rollout(8)
    transform = MultiStepTransform(3, 0.9)
    first = transform.inv(data[:4])
    with pytest.raises(error, match=text):
        transform.inv(change(data[4:].clone()))
    same(torch.cat([first, transform.inv(data[4:])]), MultiStepTransform(3, 0.9).inv(data))


def test_nothing_is_kept_of_a_first_write_that_is_refused():
    transform, data = MultiStepTransform(3, 0.9), rollout(8)
    for few in (2, 8):
        for wrong, error, text in (
            (data.exclude(("next", "reward")), KeyError, "'reward'"),
            (data.clone().set(("next", "reward"), torch.zeros(8, dtype=torch.complex64)), TypeError, "complex64"),
            (data.clone().set(("next", "done"), torch.zeros(8, 3, 1)), RuntimeError, "has to begin with"),
            (data.clone().set("mask", torch.zeros(8, 3)), RuntimeError, "'mask'"),
        ):
            with pytest.raises(error, match=text):
                transform.inv(wrong[:few])
            assert transform.flush() is None


@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
@pytest.mark.parametrize("is_terminal", [False, True])
@pytest.mark.parametrize("splits", [[7], [1] * 7, [4, 3], [2, 5]], ids=repr)
def test_targets_of_an_episode_that_was_truncated_or_terminated(splits, is_terminal, storage):
    """n = 3, gamma = 0.5: rewards 1, 1, 1, 1, the end, and an episode with rewards of 100."""
    end = torch.tensor([0, 0, 0, 1, 0, 0, 0], dtype=torch.bool)[:, None]
    reward = torch.tensor([1.0, 1, 1, 1, 100, 100, 100])[:, None]
    flags = {"done": end, "terminated": end & is_terminal, "truncated": end & (not is_terminal)}
    after = torch.tensor([1.0, 2, 3, 99, 11, 12, 13])  # 99 is the final observation
    data = TensorDict({"next": TensorDict({"obs": after, "reward": reward, **flags}, [7])}, [7])
    transform = MultiStepTransform(3, 0.5, last_flags=True)
    rb = ReplayBuffer(storage=storage(10), transform=transform, collate_fn=torch.stack)
    for piece in data.split(splits):
        if len(piece) == 1:
            rb.add(piece[0])
        else:
            rb.extend(piece)
    module = MultiStep(0.5, 3, last_flags=True)
    for found in (rb[:], module(data)[:4]):
        assert found["next", "reward"].flatten().tolist() == [1.75, 1.75, 1.5, 1]
        assert found["steps_to_next_obs"].tolist() == [3, 3, 2, 1]
        assert found["next", "obs"].tolist() == [3, 99, 99, 99]
        assert found["next", "done"].flatten().tolist() == [False, True, True, True]
        left = found["gamma"] * ~found["next", "terminated"].flatten()
        assert left.tolist() == ([0.125, 0, 0, 0] if is_terminal else [0.125, 0.125, 0.25, 0.5])
    assert repr(module) == "MultiStep(gamma=0.5, n_steps=3, last_flags=True)"


def test_flags_of_the_last_step_in_pieces_and_for_agents():
    data = rollout(2, 16, seed=9, agents=(3,))
    data["next", "over"] = data["next", "terminated"].clone()
    told = {"done_key": "done", "done_keys": ["done", "terminated", "truncated", "over"]}
    whole = MultiStepTransform(4, 0.9, last_flags=True, **told).inv(data)
    last = torch.arange(12)[:, None] + whole["steps_to_next_obs"][..., 0] - 1
    for key in ("done", "terminated", "truncated", "over"):
        assert torch.equal(whole["next", key][..., 0], data["next", key][..., 0].gather(1, last)), key
    for size in (1, 3, 5):
        pieces = data.split(size, 1)
        same(stream(MultiStepTransform(4, 0.9, last_flags=True, **told), pieces), whole)
    without = MultiStepTransform(4, 0.9, **told).inv(data)
    assert torch.equal(without["next", "over"], data["next", "over"][:, :12])


def test_it_acts_on_writes_only():
    data, transform = rollout(4), MultiStepTransform(3, 0.9)
    assert transform(data) is data
    assert Compose(transform).keeps
    with pytest.raises(ValueError, match="in no environment"):
        transform._call(data)


def test_frames_after_an_empty_write_are_no_memory_of_the_caller():
    data, transform = rollout(8), MultiStepTransform(3, 0.9)
    assert transform.inv(data[:0]) is None
    first = data[:3].clone()
    assert transform.inv(first) is None
    first.zero_()
    same(transform.inv(data[3:]), MultiStepTransform(3, 0.9).inv(data))


def test_a_row_that_is_added_holds_no_frames_but_its_own():
    rb = ReplayBuffer(storage=ListStorage(10), transform=MultiStepTransform(4, 0.9), collate_fn=list)
    for frame in rollout(8):
        rb.add(frame)
    for row in rb.storage:
        for key in ("observation", "action", ("next", "observation")):
            assert row[key].untyped_storage().nbytes() == row[key].nbytes


def test_frames_kept_follow_new_ones_to_their_device():
    transform = MultiStepTransform(5, 0.9)
    transform.inv(rollout(3))
    assert transform.inv(rollout(1).to("meta")) is None
    assert {leaf.device.type for leaf in transform._waiting.values(True, True)} == {"meta"}
    assert transform._waiting.shape == (4,)


def test_a_buffer_that_is_loaded_goes_on_in_the_middle_of_a_stream(tmp_path):
    data = rollout(2, 12, seed=5, agents=(3,))[0]
    for part in (data, data["next"]):
        part["team"] = TensorDict({"seen": torch.rand(12, 3)}, [12, 3])
    transforms = MultiStepTransform(2, 0.5), MultiStepTransform(3, 0.9)
    buffers = [TensorDictReplayBuffer(storage=LazyTensorStorage(20), transform=each) for each in transforms]
    buffers[0].extend(data[:7])
    transforms[0].n_steps, transforms[0].gamma = 4, 0.75  # since the last write
    buffers[0].dumps(tmp_path)
    buffers[1].loads(tmp_path)
    for each in buffers:
        each.extend(data[7:])
    one, other = ((each[:], transform.flush()) for each, transform in zip(buffers, transforms, strict=True))
    for left, right in zip(one, other, strict=True):
        same(left, right)
        for each in (left, right):
            assert each["team"].batch_size == each["next", "team"].batch_size == (*each.batch_size, 3)


def test_a_state_that_is_none_is_refused_and_changes_nothing():
    transform = MultiStepTransform(3, 0.9)
    transform.inv(rollout(4))
    good = transform.get_extra_state()
    frames = transform._waiting
    for wrong in (
        {"gamma": 2.0},
        {"n_steps": 0},
        {"batch": []},
        {"batch": [4]},
        {"frames": [{"path": ["a"], "values": 1}]},
    ):
        with pytest.raises((TypeError, ValueError)):
            transform.set_extra_state({**good, **wrong})
        assert (transform.n_steps, transform.gamma, transform._waiting) == (3, 0.9, frames)


@pytest.mark.parametrize("transform", [MultiStepTransform(2, 0.9), Reward2GoTransform(0.9)])
def test_a_buffer_whose_time_is_not_the_last_dim_is_refused(transform):
    data = rollout(5, 3)
    rb = ReplayBuffer(storage=LazyTensorStorage(40, ndim=2), dim_extend=0, transform=transform)
    with pytest.raises(ValueError, match=r"dim 0 of 2.*dim_extend=1"):
        rb.extend(data)
    assert len(rb) == 0
