"""What is kept of a stream between writes: in memory of its own, through interrupts, devices and checkpoints."""

import pytest
import torch
from tensordict import TensorDict

from interop import LazyTensorStorage, ListStorage, ReplayBuffer, TensorDictReplayBuffer
from interop.postprocs import MultiStep
from interop.transforms import MultiStepTransform, Reward2GoTransform
from tests.interop.postprocs.rollouts import rollout


def same(one, other):
    assert set(one.keys(True, True)) == set(other.keys(True, True))
    for key in one.keys(True, True):
        assert torch.equal(one[key], other[key]), key


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


def test_frames_kept_do_not_hold_the_rollout():
    transform = MultiStepTransform(2, 0.9)
    transform.inv(rollout(64))
    assert all(leaf.untyped_storage().nbytes() == leaf.nbytes for leaf in transform._frames.entries.values())


def test_a_write_broken_off_after_its_rows_is_part_of_the_stream(monkeypatch):
    data = rollout(12, seed=3)
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(20), transform=MultiStepTransform(3, 0.9))
    rb.extend(data[:6])
    writer = rb._writer

    def broken_off(rows, count, fresh):
        writer._cursor = writer._cursor + fresh
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(writer, "_advance", broken_off)
        with pytest.raises(KeyboardInterrupt):
            rb.extend(data[6:8])
    rb.extend(data[8:])
    same(rb[:].exclude("index"), MultiStepTransform(3, 0.9).inv(data))


def test_frames_kept_follow_new_ones_to_their_device():
    transform = MultiStepTransform(5, 0.9)
    transform.inv(rollout(3))
    assert transform.inv(rollout(1).to("meta")) is None
    assert {leaf.device.type for leaf in transform._frames.entries.values()} == {"meta"}
    assert transform._frames.count == 4


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
    frames = transform._frames
    for wrong in (
        {"gamma": 2.0},
        {"n_steps": 0},
        {"batch": []},
        {"batch": [4]},
        {"frames": [{"path": ["a"], "values": 1}]},
    ):
        with pytest.raises((TypeError, ValueError)):
            transform.set_extra_state({**good, **wrong})
        assert (transform.n_steps, transform.gamma, transform._frames) == (3, 0.9, frames)


def test_what_rewards_were_is_that_of_this_transform():
    data = rollout(8)
    data["next", "original_reward"] = torch.full((8, 1), 7.0)
    assert torch.equal(MultiStepTransform(2, 0.9).inv(data)["next", "original_reward"], data["next", "reward"][:6])
    assert torch.equal(MultiStep(0.9, 2)(data)["next", "original_reward"], data["next", "reward"])


@pytest.mark.parametrize("transform", [MultiStepTransform(2, 0.9), Reward2GoTransform(0.9)])
def test_a_buffer_whose_time_is_not_the_last_dim_is_refused(transform):
    data = rollout(5, 3)
    rb = ReplayBuffer(storage=LazyTensorStorage(40, ndim=2), dim_extend=0, transform=transform)
    with pytest.raises(ValueError, match=r"dim 0 of 2.*dim_extend=1"):
        rb.extend(data)
    assert len(rb) == 0
