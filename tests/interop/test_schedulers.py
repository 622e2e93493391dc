"""Schedulers of a sampler's numbers."""

import json
import math

import pytest

from fbuf.checkpoint import CheckpointError
from interop import (
    LazyTensorStorage,
    PrioritizedReplayBuffer,
    RandomSampler,
)
from interop.schedulers import LambdaScheduler, LinearScheduler, SchedulerList, StepScheduler
from tests.interop.rows import plain_tensor


class Knobs(RandomSampler):
    """A sampler with numbers of its own."""

    def __init__(self, beta=0.6, count=10):
        self.beta = beta
        self.count = count
        self._positive = 1.0

    @property
    def positive(self):
        return self._positive

    @positive.setter
    def positive(self, value):
        if value < 0:
            raise ValueError(f"negative: {value}")
        self._positive = value

    @property
    def fixed(self):
        return 1.0


def values(scheduler, name, steps):
    found = []
    for _ in range(steps):
        scheduler.step()
        found.append(getattr(scheduler.sampler, name))
    return found


def test_a_function_multiplies_the_value_at_construction():
    seen = []
    found = values(LambdaScheduler(Knobs(), "beta", lambda step: seen.append(step) or step + 1), "beta", 3)
    assert found == pytest.approx([1.2, 1.8, 2.4]) and seen == [1, 2, 3]
    bounded = LambdaScheduler(Knobs(), "beta", lambda step: step * 2, min_value=1.5, max_value=2.0)
    assert values(bounded, "beta", 3) == pytest.approx([1.5, 2.0, 2.0])


def test_steps_multiply_or_add_to_the_value_of_the_moment():
    assert values(StepScheduler(Knobs(), "beta", 0.5, n_steps=3), "beta", 7) == pytest.approx(
        [0.6, 0.6, 0.3, 0.3, 0.3, 0.15, 0.15]
    )
    sampler = Knobs()
    added = StepScheduler(sampler, "beta", 0.1, mode="additive", max_value=1.0)
    assert values(added, "beta", 6) == pytest.approx([0.7, 0.8, 0.9, 1, 1, 1])
    sampler.beta = 0.2
    added.step()
    assert sampler.beta == pytest.approx(0.3)
    assert values(StepScheduler(Knobs(), "beta", min_value=0.5), "beta", 3) == pytest.approx([0.54, 0.5, 0.5])


def test_ints_stay_ints_where_they_can():
    found = values(LinearScheduler(Knobs(count=10), "count", 6, 8), "count", 8)
    assert found == [9.5, 9, 8.5, 8, 7.5, 7, 6.5, 6] and [type(each) for each in found] == [float, int] * 4


def test_the_exponents_of_a_prioritized_buffer():
    buffer = PrioritizedReplayBuffer(alpha=0.5, beta=0.4, eps=0.0, storage=LazyTensorStorage(4))
    buffer.extend(plain_tensor([0, 1]))
    buffer.update_priority([0, 1], [1.0, 4.0])
    both = SchedulerList([LinearScheduler(buffer, "alpha", 1.0, 2), LinearScheduler(buffer.sampler, "beta", 1.0, 3)])
    assert len(both) == 2
    both.step()
    both.step()
    assert buffer.sampler.alpha == 1.0 and buffer.sampler.beta == pytest.approx(0.8)
    drawn = buffer.sample(4000, return_info=True)[1]["index"]
    assert abs(drawn.float().mean().item() - 0.8) < 5 * math.sqrt(0.16 / 4000)  # alpha counts for what is stored


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda s: LinearScheduler(s, "gamma", 1.0, 4), ValueError, "gamma"),
        (lambda s: LinearScheduler(s, "fixed", 1.0, 4), ValueError, "fixed"),
        (lambda s: LinearScheduler(3, "beta", 1.0, 4), TypeError, "int"),
        (lambda s: LinearScheduler(s, "beta", 1.0, 0), ValueError, "num_steps"),
        (lambda s: LinearScheduler(s, "beta", math.nan, 4), ValueError, "final_value"),
        (lambda s: LambdaScheduler(s, "beta", 3.0), TypeError, "lambda_fn"),
        (lambda s: LambdaScheduler(s, "beta", float, min_value=2, max_value=1), ValueError, "min_value"),
        (lambda s: StepScheduler(s, "beta", max_value=math.inf), ValueError, "max_value"),
        (lambda s: StepScheduler(s, "beta", mode="divide"), ValueError, "mode"),
        (lambda s: SchedulerList([]).append(s), TypeError, "Knobs"),
    ],
)
def test_what_cannot_be_scheduled_is_refused_at_once(make, error, match):
    sampler = Knobs()
    with pytest.raises(error, match=match):
        make(sampler)
    assert (sampler.beta, sampler.count) == (0.6, 10)


def test_a_step_that_is_refused_changes_nothing():
    sampler = Knobs()
    scheduler = StepScheduler(sampler, "positive", -1.5, mode="additive")
    with pytest.raises(ValueError, match="negative"):
        scheduler.step()
    assert sampler.positive == 1.0 and scheduler.step_count == 0
    for returned, error in ((None, TypeError), (math.nan, ValueError), (1e308 * 10, ValueError)):
        wrong = LambdaScheduler(sampler, "beta", lambda step, returned=returned: returned)
        with pytest.raises(error, match="lambda_fn"):
            wrong.step()
        assert sampler.beta == 0.6 and wrong.step_count == 0


def test_a_list_steps_as_a_whole_or_not_at_all():
    sampler = Knobs()
    fine = LinearScheduler(sampler, "beta", 1.0, 4)
    again = StepScheduler(sampler, "beta", 2.0)
    both = SchedulerList([fine, again, StepScheduler(sampler, "positive", -0.6, mode="additive")])
    both.step()
    assert sampler.beta == pytest.approx(1.4) and sampler.positive == pytest.approx(0.4)
    with pytest.raises(ValueError, match="negative"):
        both.step()
    assert sampler.beta == pytest.approx(1.4) and sampler.positive == pytest.approx(0.4)
    assert [each.step_count for each in both.schedulers] == [1, 1, 1]


MAKERS = [
    lambda s: LinearScheduler(s, "beta", 1.0, 5),
    lambda s: LambdaScheduler(s, "beta", lambda step: 1 / step, min_value=0.1),
    lambda s: StepScheduler(s, "beta", 0.5, n_steps=2, max_value=9),
    lambda s: SchedulerList([StepScheduler(s, "count", 2), LinearScheduler(s, "beta", 0.0, 3)]),
]


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("done", [0, 1, 3])
def test_a_state_goes_on_where_it_was_taken(make, done):
    one, other = Knobs(), Knobs()
    first = make(one)
    for _ in range(done):
        first.step()
    state = json.loads(json.dumps(first.state_dict()))
    other.beta, other.count = one.beta, one.count
    second = make(other)
    second.load_state_dict(state)
    assert second.state_dict() == first.state_dict()
    for _ in range(4):
        first.step()
        second.step()
        assert (other.beta, other.count) == (one.beta, one.count)


@pytest.mark.parametrize(
    "change",
    [
        {"param_name": "count"},
        {"step_count": -1},
        {"final_value": "1"},
        {"gamma": 1.0},
        None,
    ],
)
def test_a_state_that_does_not_fit_is_refused(change):
    scheduler = LinearScheduler(Knobs(), "beta", 1.0, 5)
    scheduler.step()
    several = SchedulerList([scheduler, LinearScheduler(Knobs(), "beta", 2.0, 5)])
    whole = several.state_dict()
    wrong = {} if change is None else {**whole["0"], **change}
    for target, state in ((scheduler, wrong), (several, {"0": {**whole["0"], "step_count": 4}, "1": wrong})):
        with pytest.raises(CheckpointError):
            target.load_state_dict(state)
        assert several.state_dict() == whole
    with pytest.raises(CheckpointError):
        several.load_state_dict({"0": whole["0"]})
