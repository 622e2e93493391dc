"""A stream as transitions of n steps: however it comes in pieces, in buffers, saved, and refused."""

import copy
import io
import itertools
import pickle

import pytest
import torch
from tensordict import NonTensorData, TensorDict

from interop import LazyTensorStorage, ListStorage, ReplayBuffer, TensorDictReplayBuffer
from interop.postprocs import MultiStep
from interop.transforms import MultiStepTransform, Reward2GoTransform
from tests.interop.postprocs.rollouts import assert_as_by_loop, rollout
from tests.interop.transforms.every_transform import same


def stream(transform, pieces):
    """The stored parts of pieces, in one."""
    found = [made for made in map(transform.inv, pieces) if made is not None]
    return torch.cat(found, -1) if found else None


@pytest.mark.parametrize(
    ("batch", "agents", "n", "every"), [((8,), (), 1, 7), ((8,), (), 3, 7), ((2, 8), (), 3, 1), ((2, 8), (3,), 2, 5)]
)
def test_every_way_to_cut_a_stream_stores_the_same(batch, agents, n, every):
    data = rollout(*batch, seed=1, agents=agents)
    complete = MultiStepTransform(n, 0.9).inv(data)
    assert complete.shape[-1] == 8 - n
    assert_as_by_loop(complete, data, 0.9, n, agents=len(agents))
    for cuts in range(0, 2**7, every):
        places = [0, *(i + 1 for i in range(7) if cuts >> i & 1), 8]
        pieces = [data[..., a:b] for a, b in itertools.pairwise(places)]
        same(stream(MultiStepTransform(n, 0.9), pieces), complete)


def test_a_flush_gives_the_waiting_frames_as_the_end_of_the_stream():
    data, transform = rollout(2, 8, seed=2), MultiStepTransform(3, 0.9)
    first = transform.inv(data)
    with pytest.raises(ValueError, match="all dims but the last"):
        transform.inv(rollout(4))  # other dims than the waiting frames
    same(torch.cat([first, transform.flush()], -1), MultiStep(0.9, 3)(data))
    assert transform.flush() is None
    same(transform.inv(data), first)


def test_waiting_frames_share_no_memory():
    data, transform = rollout(8), MultiStepTransform(3, 0.9)
    before = data.clone()
    assert transform.inv(data[:0]) is None and transform.inv(data[:3]) is None
    data.zero_()
    second = transform.inv(before[3:])
    same(second, MultiStepTransform(3, 0.9).inv(before))
    for leaf in second.values(True, True):
        leaf.zero_()
    same(transform.flush(), MultiStep(0.9, 3)(before)[5:])
    rb = ReplayBuffer(storage=ListStorage(10), transform=MultiStepTransform(4, 0.9), collate_fn=list)
    for frame in before:
        rb.add(frame)
    for row in rb.storage:
        for key in ("observation", "action", ("next", "observation")):
            assert row[key].untyped_storage().nbytes() == row[key].nbytes


def test_steps_may_be_set_later():
    data, transform = rollout(12), MultiStepTransform(3, 0.9)
    transform.inv(data[:4])
    transform.n_steps = 5
    assert transform.inv(data[4:5]) is None
    same(transform.inv(data[5:8]), MultiStepTransform(5, 0.9).inv(data[1:8]))
    transform.n_steps = 1
    same(transform.inv(data[8:8]), MultiStepTransform(1, 0.9).inv(data[3:8]))
    same(transform.inv(data[8:]), MultiStepTransform(1, 0.9).inv(data[7:]))
    for wrong, error in ((0, ValueError), (1.5, TypeError)):
        with pytest.raises(error, match="n_steps"):
            transform.n_steps = wrong


def test_it_goes_on_where_it_was_saved_and_copied(tmp_path):
    data = rollout(2, 12, seed=5, agents=(3,))[0]
    for part in (data, data["next"]):
        part["team"] = TensorDict({"seen": torch.rand(12, 3)}, [12, 3])

    def fresh(n=3, gamma=0.9):
        return TensorDictReplayBuffer(storage=LazyTensorStorage(20), transform=MultiStepTransform(n, gamma))

    rb, loaded, third = fresh(), fresh(2, 0.5), fresh()
    rb.extend(data[:7])
    rb.transform[0].n_steps, rb.transform[0].gamma = 4, 0.75  # since the last write
    rb.dumps(tmp_path)
    loaded.loads(tmp_path)
    file = io.BytesIO()
    torch.save(rb.transform.state_dict(), file)
    file.seek(0)
    third.transform.load_state_dict(torch.load(file, weights_only=True))
    transforms = [each.transform[0] for each in (rb, loaded, third)]
    transforms += [copy.deepcopy(transforms[0]), pickle.loads(pickle.dumps(transforms[0])), transforms[0].clone()]
    ends = [(each.inv(data[7:]), each.flush()) for each in transforms]
    for each in ends[1:]:
        for one, other in zip(ends[0], each, strict=True):
            same(one, other)
            assert other["team"].batch_size == other["next", "team"].batch_size == (*other.batch_size, 3)
    loaded.transform.load_state_dict(fresh(4).transform.state_dict())
    assert loaded.transform[0].n_steps == 4 and loaded.transform[0].flush() is None
    assert repr(loaded.transform[0]) == "MultiStepTransform(n_steps=4, gamma=0.9)"


@pytest.mark.parametrize(
    "wrong", [{"gamma": 2.0}, {"frames": {"batch": [9], "entries": {"a": torch.ones(1)}}}, {"more": 1}]
)
def test_a_wrong_state_is_refused_and_changes_nothing(wrong):
    transform, data = MultiStepTransform(3, 0.9), rollout(8)
    first = transform.inv(data[:4])
    with pytest.raises((TypeError, ValueError)):
        transform.set_extra_state({**transform.get_extra_state(), **wrong})
    same(torch.cat([first, transform.inv(data[4:])]), MultiStepTransform(3, 0.9).inv(data))


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda data: data.exclude("action"), KeyError, "action"),
        (lambda data: data.set("action", data["action"].double()), TypeError, "'action'.*float64"),
        (lambda data: data.set("action", data["action"][:, :2]), ValueError, r"'action'.*\[2\].*\[3\]"),
        (lambda data: rollout(2, 4), ValueError, "all dims but the last"),
        (lambda data: data.exclude(("next", "reward")), KeyError, "reward"),
        (lambda data: data.set("note", NonTensorData("a", batch_size=[4])), TypeError, "'note'.*no tensor"),
    ],
)
def test_frames_that_do_not_follow_are_refused_and_the_waiting_ones_stay(change, error, text):
    data, transform = rollout(8), MultiStepTransform(3, 0.9)
    first = transform.inv(data[:4])
    with pytest.raises(error, match=text):
        transform.inv(change(data[4:].clone()))
    same(torch.cat([first, transform.inv(data[4:])]), MultiStepTransform(3, 0.9).inv(data))


@pytest.mark.parametrize("count", [2, 8])
@pytest.mark.parametrize(
    ("key", "value", "error", "text"),
    [
        (("next", "reward"), None, KeyError, "'reward'"),
        (("next", "done"), torch.zeros(8, 3, 1), RuntimeError, "has to begin with"),
    ],
)
def test_a_first_write_that_is_refused_leaves_nothing(key, value, error, text, count):
    transform, data = MultiStepTransform(3, 0.9), rollout(8)
    data = data.exclude(key) if value is None else data.set(key, value)
    with pytest.raises(error, match=text):
        transform.inv(data[:count])
    assert transform.flush() is None


@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
@pytest.mark.parametrize("is_terminal", [False, True])
@pytest.mark.parametrize("splits", [[7], [1] * 7, [2, 5]], ids=repr)
def test_targets_of_an_episode_that_was_truncated_or_terminated(splits, is_terminal, storage):
    """n = 3, gamma = 0.5: rewards 1, 1, 1, 1, the end, and an episode with rewards of 100."""
    end = torch.tensor([0, 0, 0, 1, 0, 0, 0], dtype=torch.bool)[:, None]
    reward = torch.tensor([1.0, 1, 1, 1, 100, 100, 100])[:, None]
    flags = {"done": end, "terminated": end & is_terminal, "truncated": end & (not is_terminal)}
    after = torch.tensor([1.0, 2, 3, 99, 11, 12, 13])  # 99 is the final observation
    data = TensorDict({"next": TensorDict({"obs": after, "reward": reward, **flags}, [7])}, [7])
    rb = ReplayBuffer(
        storage=storage(10), transform=MultiStepTransform(3, 0.5, last_flags=True), collate_fn=torch.stack
    )
    for piece in data.split(splits):
        rb.add(piece[0]) if len(piece) == 1 else rb.extend(piece)
    for found in (rb[:], MultiStep(0.5, 3, last_flags=True)(data)[:4]):
        assert found["next", "reward"].flatten().tolist() == [1.75, 1.75, 1.5, 1]
        assert found["steps_to_next_obs"].tolist() == [3, 3, 2, 1]
        assert found["next", "obs"].tolist() == [3, 99, 99, 99]
        assert found["next", "done"].flatten().tolist() == [False, True, True, True]
        left = found["gamma"] * ~found["next", "terminated"].flatten()
        assert left.tolist() == ([0.125, 0, 0, 0] if is_terminal else [0.125, 0.125, 0.25, 0.5])


def test_it_acts_on_writes_only_and_waiting_frames_follow_to_the_device():
    data, transform = rollout(4), MultiStepTransform(5, 0.9)
    assert transform(data) is data
    with pytest.raises(ValueError, match="not in environments"):
        transform.on_step(data)
    transform.inv(data)
    assert transform.inv(data[:1].to("meta")) is None
    assert transform.get_extra_state()["frames"]["entries"]["action"].is_meta


@pytest.mark.parametrize("transform", [MultiStepTransform(2, 0.9), Reward2GoTransform(0.9)])
def test_a_buffer_whose_time_is_not_the_last_dim_is_refused(transform):
    rb = ReplayBuffer(storage=LazyTensorStorage(40, ndim=2), dim_extend=0, transform=transform)
    with pytest.raises(ValueError, match=r"dim 0 of 2.*dim_extend=1"):
        rb.extend(rollout(5, 3))
    assert len(rb) == 0
