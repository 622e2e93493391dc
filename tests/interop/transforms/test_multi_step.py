"""A stream as transitions of n steps: however it comes in pieces, in buffers, saved, and refused."""

import copy
import io
import itertools
import pickle
import threading

import pytest
import torch
from tensordict import NonTensorData, TensorDict

from interop import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    TensorDictReplayBuffer,
)
from interop.postprocs import MultiStep, returns
from interop.transforms import Compose
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


def test_lengths_of_pieces_share_programs():
    transform = MultiStepTransform(6, 0.9)
    for count in (6, 10):  # with those kept 16 frames at the second
        transform.inv(rollout(count))
    before = returns._few._cache_size()
    for count in range(4, 11):
        transform.inv(rollout(count))
    assert returns._few._cache_size() == before


def test_five_frames_by_hand():
    at = torch.arange(5.0)
    done = torch.zeros(5, 1, dtype=torch.bool)
    data = TensorDict({"o": at, "next": {"o": at + 1, "reward": torch.ones(5, 1), "done": done}}, [5])
    rb = ReplayBuffer(storage=LazyTensorStorage(10), transform=MultiStepTransform(3, 0.9))
    stored = [rb.extend(piece).shape for piece in (data[:2], data[2:3], data[3:])]
    assert stored == [(0, 1), (0, 1), (2,)]
    assert rb[:]["o"].tolist() == [0, 1]
    assert rb[:]["next", "o"].tolist() == [3, 4]
    added = {"steps_to_next_obs", "gamma", "nonterminal", ("next", "original_reward")}
    assert set(rb[:].keys(True, True)) == {*data.keys(True, True), *added}


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


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage, ListStorage])
@pytest.mark.parametrize("buffer", [ReplayBuffer, TensorDictReplayBuffer])
def test_single_frames_that_are_added(buffer, storage):
    data = rollout(8, seed=3)
    rb = buffer(storage=storage(10), transform=MultiStepTransform(3, 0.9), collate_fn=torch.stack, batch_size=4)
    for frame in data:
        rb.add(frame)
    assert len(rb) == 5
    stored = rb[:].exclude("index")
    same(stored, MultiStepTransform(3, 0.9).inv(data))
    assert rb.sample()["steps_to_next_obs"].shape == (4,)


def test_a_storage_of_lanes_and_time():
    data = rollout(2, 8, seed=4)
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(20, ndim=2), transform=MultiStepTransform(3, 0.9), dim_extend=1
    )
    for piece in data.split(4, 1):
        rb.extend(piece)
    whole = MultiStepTransform(3, 0.9).inv(data)
    same(rb.storage[:].exclude("index").transpose(0, 1), whole)


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


def failing(value):
    raise OSError("no room")


def test_a_write_that_fails_loses_no_frames(monkeypatch):
    data = rollout(12, seed=6)
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(20), transform=MultiStepTransform(3, 0.9))
    rb.extend(data[:6])
    with monkeypatch.context() as patched:
        patched.setattr(rb._writer, "extend", failing)
        with pytest.raises(OSError, match="no room"):
            rb.extend(data[6:8])
    rb.extend(data[6:])
    same(rb[:].exclude("index"), MultiStepTransform(3, 0.9).inv(data))


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


@pytest.mark.parametrize("keys", [{}, {"mask_key": "valid"}])
def test_padding_is_told_by_a_mask(keys):
    data = rollout(6, ends=0.0).set(keys.get("mask_key", "mask"), torch.tensor([True, True, True, False, False, False]))
    made = MultiStepTransform(2, 0.9, **keys).inv(data)
    assert made["steps_to_next_obs"].tolist() == [2, 2, 1, 2]
    assert made["nonterminal"].tolist() == [True, True, False, False]


def test_keys_of_agents():
    data = rollout(8, agents=(2,))
    data["next", "team"] = TensorDict({"gain": data["next", "reward"], "over": data["next", "done"]}, [8])
    told = {
        "reward_keys": [("team", "gain")],
        "done_key": ("team", "over"),
        "done_keys": ["done", "truncated", "terminated"],
    }
    made = MultiStepTransform(3, 0.9, **told).inv(data)
    plain = MultiStepTransform(3, 0.9).inv(data)
    assert torch.equal(made["next", "team", "gain"], plain["next", "reward"])
    assert torch.equal(made["next", "observation"], plain["next", "observation"])
    assert torch.equal(made["next", "original_reward"], data["next", "reward"][:5])


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


def test_threads_do_not_tear_what_is_kept():
    data = rollout(2, 4)
    transform = MultiStepTransform(2, 0.9)
    found = []

    def write():
        found.extend([transform.inv(data) for _ in range(20)])

    threads = [threading.Thread(target=write) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stored = torch.cat([each for each in found if each is not None], -1)
    assert stored.shape == (2, 3 * 20 * 4 - 2)
    again = torch.cat([data] * 60, -1)
    same(transform.flush(), MultiStep(0.9, 2)(again)[:, -2:])
    counts = stored["observation"][0, :, 0].long().bincount()
    assert counts.tolist() == [60, 60, 59, 59]
