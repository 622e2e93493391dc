"""Transforms that keep something from one write to the next: in turn, in checkpoints, and back after an error."""

import copy
import gc
from functools import partial

import pytest
import torch
from tensordict import TensorDict

from interop import LazyTensorStorage, ReplayBuffer
from interop.transforms import Compose, MultiStepTransform, Transform
from tests.interop.test_threads import together


class Delay(Transform):
    """Stores what came with the write before."""

    keeps = True

    def __init__(self):
        super().__init__()
        self.held = None

    def _inv_call(self, tensordict):
        if "fail" in tensordict:
            self.held = None
            raise ValueError("no such data")
        before, self.held = self.held, tensordict
        return before

    def forward(self, tensordict):
        return tensordict

    def snapshot(self):
        return (self.held,)

    def restore(self, snapshot):
        (self.held,) = snapshot

    def get_extra_state(self):
        return None if self.held is None else {"a": self.held["a"]}

    def set_extra_state(self, state):
        self.held = None if state is None else TensorDict(state, state["a"].shape[:1])


def rows(*numbers, **extra):
    return TensorDict({"a": torch.tensor(numbers, dtype=torch.float32), **extra}, [len(numbers)])


def test_a_write_that_fails_takes_nothing():
    rb = ReplayBuffer(storage=LazyTensorStorage(8), transform=Delay())
    rb.extend(rows(0))
    rb.extend(rows(1))
    with pytest.raises(ValueError, match="no such data"):
        rb.extend(rows(5, fail=torch.zeros(1)))
    rb.extend(rows(2, b=torch.zeros(1)))  # stores row 1, keeps what does not fit
    with pytest.raises(KeyError, match="unknown"):
        rb.extend(rows(3))
    with pytest.raises(KeyError, match="unknown"):
        rb.extend(rows(4))
    rb.transform[0].held = rb.transform[0].held.exclude("b")
    rb.extend(rows(3))
    assert rb[:]["a"].tolist() == [0, 1, 2]


def test_each_buffer_needs_its_own():
    delay = Delay()
    rb = ReplayBuffer(storage=LazyTensorStorage(8), transform=delay)
    with pytest.raises(ValueError, match=r"Delay keeps state between writes.*clone\(\)"):
        ReplayBuffer(storage=LazyTensorStorage(8), transform=delay)
    with pytest.raises(ValueError, match="Compose keeps"):
        ReplayBuffer(storage=LazyTensorStorage(8), transform=rb.transform)
    with pytest.raises(ValueError, match="keeps state between writes"):
        ReplayBuffer(storage=LazyTensorStorage(8)).append_transform(rb.transform)
    other = ReplayBuffer(storage=LazyTensorStorage(8), transform=delay.clone())
    other.extend(rows(0))
    assert delay.held is None
    del rb
    gc.collect()  # errors hold what they are about
    ReplayBuffer(storage=LazyTensorStorage(8), transform=delay)  # free again


def test_it_is_refused_twice_in_a_chain_and_inverted():
    delay = Delay()
    with pytest.raises(ValueError, match="twice in the chain"):
        Compose(delay, delay)
    rb = ReplayBuffer(storage=LazyTensorStorage(8))
    with pytest.raises(ValueError, match="cannot be inverted"):
        rb.append_transform(delay, invert=True)
    assert len(rb.transform) == 0
    rb.append_transform(Compose(delay))
    assert rb.transform[0] is delay and rb.transform.keeps


def test_rows_are_not_edited_through_it():
    rb = ReplayBuffer(storage=LazyTensorStorage(8), transform=Delay())
    rb.extend(rows(0, 1))
    rb.extend(rows(2))
    with pytest.raises(TypeError, match=r"rb.storage\[...\]"):
        rb[0] = rows(7)[0]
    assert rb.transform[0].held["a"].tolist() == [2]


def steps(first, count):
    time = torch.arange(first, first + count, dtype=torch.float32)
    done = torch.zeros(count, 1, dtype=torch.bool)
    after = TensorDict({"a": time + 1, "reward": time[:, None], "done": done}, [count])
    return TensorDict({"a": time, "next": after}, [count])


def test_what_waits_is_forgotten_with_the_rest():
    rb = ReplayBuffer(storage=LazyTensorStorage(20), transform=MultiStepTransform(3, 0.5))
    rb.extend(steps(0, 10))
    rb.empty()
    assert rb.extend(steps(100, 3)).shape == (0, 1)
    rb.extend(steps(103, 4))
    assert rb[:]["a"].tolist() == [100, 101, 102, 103]


def test_the_state_is_saved_loaded_and_copied(tmp_path):
    rb, loaded, stated = (ReplayBuffer(storage=LazyTensorStorage(8), transform=Delay()) for _ in range(3))
    rb.extend(rows(0))
    rb.extend(rows(1))
    rb.dumps(tmp_path)
    loaded.loads(tmp_path)
    stated.load_state_dict(rb.state_dict())
    for each in (copy.deepcopy(rb), loaded, stated, rb):
        each.extend(rows(2))
        assert each[:]["a"].tolist() == [0, 1]


def test_threads_write_one_by_one():
    rb = ReplayBuffer(storage=LazyTensorStorage(4000), transform=Delay())

    def write(first):
        for number in range(200):
            rb.extend(rows(first + number, first + number))

    assert together(*(partial(write, 1000 * each) for each in range(4))) == []
    stored = rb[:]["a"].reshape(-1, 2)
    assert len(stored) == 4 * 200 - 1 and (stored[:, 0] == stored[:, 1]).all()
    left = {float(rb.transform[0].held["a"][0])}
    assert set(stored[:, 0].tolist()) | left == {1000.0 * each + n for each in range(4) for n in range(200)}
