"""`PromptGroupSampler` with the arguments of torchrl: as many items of each of several groups."""

import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from scipy import stats
from tensordict import TensorDict

import interop
from interop import PromptGroupSampler

REWARDS = [3.0, 9.0, 1.0, 5.0, 2.0, 8.0, 7.0, 7.0, 0.0, 4.0, 6.0, 6.0]


def buffer(batch_size=6, ids=(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2), capacity=20, **choices):
    rb = interop.ReplayBuffer(
        storage=interop.LazyTensorStorage(capacity), sampler=PromptGroupSampler(**choices), batch_size=batch_size
    )
    count = len(ids)
    rewards = torch.tensor(REWARDS[:count])[:, None]
    rb.extend(TensorDict({"query": torch.tensor(ids), "i": torch.arange(count), "next": {"reward": rewards}}, [count]))
    return rb


def groups(batch, size=3):
    assert (batch["query"].reshape(-1, size) == batch["query"].reshape(-1, size)[:, :1]).all()
    return [tuple(each) for each in batch["i"].reshape(-1, size).tolist()]


def test_the_law_of_random_draws():
    rb = buffer(num_groups=2)
    pairs, subsets = Counter(), Counter()
    for _ in range(1500):
        batch = rb.sample()
        pairs[tuple(sorted(batch["query"].reshape(2, 3)[:, 0].tolist()))] += 1
        subsets.update(tuple(sorted(group)) for group in groups(batch))
    assert len(pairs) == 3 and len(subsets) == 12
    assert stats.chisquare(list(pairs.values())).pvalue > 1e-4
    assert stats.chisquare(list(subsets.values())).pvalue > 1e-4


@pytest.mark.parametrize("strategy", ["recency", "reward", "variance"])
def test_strategies(strategy):
    rewards = np.array(REWARDS)
    value = {
        "recency": lambda places: sum(places),
        "reward": lambda places: rewards[list(places)].sum(),
        "variance": lambda places: (round(rewards[list(places)].var(), 9), rewards[list(places)].sum()),
    }[strategy]
    for group in groups(buffer(9, samples_per_group=3, strategy=strategy).sample()):
        first = group[0] // 4 * 4
        best = max(itertools.combinations(range(first, first + 4), 3), key=value)
        assert value(group) == value(best)


def test_recency_follows_the_ring():
    rb = buffer(3, num_groups=1, strategy="recency", capacity=12)
    more = {"query": torch.full((14,), 7), "i": torch.arange(14), "next": {"reward": torch.zeros(14, 1)}}
    rb.extend(TensorDict(more, [14]))
    assert groups(rb.sample()) == [(11, 12, 13)]


def test_small_groups_are_completed_with_replacement():
    rb = buffer(8, ids=(0, 0, 1), num_groups=4)
    with pytest.warns(UserWarning, match="with replacement"):
        batch = rb.sample()
    assert set(batch["query"].tolist()) == {0, 1}
    assert {0, 1} <= set(batch["i"].tolist())
    rb.sample()  # without another warning


def test_edits_change_groups():
    rb = buffer(4, ids=(0, 0, 0, 1, 1, 1), num_groups=2)
    assert {group[0] // 3 for group in groups(rb.sample(), 2)} == {0, 1}
    rb.set_at_("query", torch.tensor([5, 5]), torch.tensor([0, 3]))
    found = {tuple(sorted(group)) for _ in range(20) for group in groups(rb.sample(), 2)}
    assert found == {(0, 3), (1, 2), (4, 5)}


def test_text_is_a_key():
    sampler = PromptGroupSampler(num_groups=1, group_key="prompt")
    rb = interop.ReplayBuffer(storage=interop.LazyStackStorage(9), sampler=sampler, batch_size=2)
    for number, prompt in enumerate(["a", "b", "a", "b"]):
        row = TensorDict({"i": torch.tensor(number)})
        row.set_non_tensor("prompt", prompt)
        rb.add(row)
    found = {tuple(sorted(rb.sample()["i"].tolist())) for _ in range(20)}
    assert found == {(0, 2), (1, 3)}


def test_open_builds_it_again(tmp_path):
    buffer(num_groups=2, strategy="reward").dumps(tmp_path / "saved")
    again = interop.open(tmp_path / "saved")
    assert (again.sampler.num_groups, again.sampler.strategy) == (2, "reward")


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: PromptGroupSampler(num_groups=2, samples_per_group=3), TypeError),
        (lambda: PromptGroupSampler(), TypeError),
        (lambda: PromptGroupSampler(4, num_groups=2), TypeError),
        (lambda: PromptGroupSampler(num_groups=0), ValueError),
        (lambda: PromptGroupSampler(num_groups=2, strategy="best"), ValueError),
        (lambda: buffer(7, num_groups=2), ValueError),
        (lambda: buffer(6, num_groups=2, group_key="no").sample(), KeyError),
        (lambda: buffer(6, num_groups=2, strategy="reward", reward_key="no").sample(), KeyError),
    ],
)
def test_refusals(make, error):
    with pytest.raises(error):
        make()
