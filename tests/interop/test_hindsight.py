"""HERReplayBuffer: goals that were reached, against a walk over what was written."""

import numpy as np
import pytest
import torch
from scipy import stats
from tensordict import TensorDict

from interop import (
    ConsumingSampler,
    HERReplayBuffer,
    HindsightStrategy,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    RoundRobinWriter,
    Sequence,
    Transition,
)
from tests.interop.rows import check_same, refused


def walked(times, ends, *, root=True, after=True, flags=("done", "terminated")):
    """One step a time: from where one is at a time to where one is at the next; episodes end at `ends`."""
    times = torch.as_tensor(times)
    ended = torch.isin(times, torch.as_tensor(sorted(ends), dtype=torch.int64))[:, None]
    place = times[:, None].float()
    aim = torch.full_like(place, -1.0)
    later = {name: ended.clone() for name in flags} | {"reward": aim.clone()}
    if after:
        later |= {"achieved_goal": place + 1, "desired_goal": aim.clone()}
    now = {"desired_goal": aim, "time": times.clone()} | ({"achieved_goal": place} if root else {})
    return TensorDict({**now, "next": TensorDict(later, times.shape)}, times.shape)


def arrived(td):
    return (td["next", "achieved_goal"] == td["desired_goal"]).float()


def buffer_of(count, ends, capacity=20, storage=LazyTensorStorage, seed=0, **choices):
    choices = {"reward_fn": arrived, "her_ratio": 1.0, **choices}
    buffer = HERReplayBuffer(storage=storage(capacity), generator=torch.Generator().manual_seed(seed), **choices)
    buffer.extend(walked(range(count), ends))
    return buffer


def goals_of(buffer, count):
    """Pairs of the time of a transition and the time at which its goal was reached."""
    batch = buffer.sample(count)
    check_same(batch["desired_goal"], batch["next", "desired_goal"])
    check_same(batch["next", "reward"], arrived(batch))
    return list(zip(batch["time"].tolist(), (batch["desired_goal"][:, 0] - 1).long().tolist(), strict=True))


# ------------------------------------------------------------------ strategies


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage, ListStorage])
@pytest.mark.parametrize("strategy", list(HindsightStrategy))
def test_a_goal_is_one_that_the_strategy_allows(strategy, storage):
    ends = [2, 6]  # episodes 0-2, 3-6 and 7-9, of which the last goes on
    episode = {time: range(3) if time < 3 else range(3, 7) if time < 7 else range(7, 10) for time in range(10)}
    allowed = {
        HindsightStrategy.FUTURE: lambda time: [later for later in episode[time] if later >= time],
        HindsightStrategy.FINAL: lambda time: [episode[time][-1]],
        HindsightStrategy.EPISODE: lambda time: episode[time],
        HindsightStrategy.RANDOM: lambda time: range(10),
    }[strategy]
    buffer = buffer_of(10, ends, storage=storage, strategy=strategy.value)
    found = [pair for _ in range(4) for pair in goals_of(buffer, 500)]
    wanted = {(time, goal) for time in range(10) for goal in allowed(time)}
    assert set(found) == wanted
    counts = np.array([found.count(pair) for pair in sorted(wanted)])
    chances = np.array([1 / 10 / len(allowed(time)) for time, _ in sorted(wanted)])
    assert stats.chisquare(counts, chances * len(found)).pvalue > 1e-4


def test_the_first_part_of_a_batch_is_relabelled():
    size = 100
    for ratio, wanted in ((0.8, 80), (0.29, 29), (0.299, 29), (0.0, 0), (1.0, 100), (0.009, 0)):
        batch = buffer_of(10, [4], her_ratio=ratio).sample(size)
        assert ((batch["desired_goal"] != -1).sum(), (batch["next", "reward"] != -1).sum()) == (wanted, wanted)
        check_same(batch["desired_goal"] != -1, torch.arange(size)[:, None] < wanted)
        check_same(batch["desired_goal"], batch["next", "desired_goal"])


def test_keys_may_be_others():
    buffer = HERReplayBuffer(
        lambda td: (td["next", "obs", "at"] == td["obs", "aim"]).double(),
        her_ratio=1.0,
        strategy="final",
        goal_key=("obs", "aim"),
        achieved_goal_key=("obs", "at"),
        reward_key="gain",
        end_key="over",
        storage=LazyTensorStorage(8),
    )
    obs = TensorDict({"aim": torch.zeros(4, 2), "at": torch.arange(8.0).reshape(4, 2)}, [4])
    later = TensorDict({"aim": torch.zeros(4, 2), "at": torch.arange(2.0, 10.0).reshape(4, 2)}, [4])
    data = {"obs": obs, "next": TensorDict({"obs": later}, [4]), "gain": torch.zeros(4, 2)}
    buffer.extend(TensorDict({**data, "over": torch.tensor([0, 1, 0, 0])}, [4]))
    batch = buffer.sample(30)
    wanted = torch.tensor([[4.0, 5.0]] * 2 + [[8.0, 9.0]] * 2)[batch["index"]]
    check_same(batch["obs", "aim"], wanted)
    check_same(batch["next", "obs", "aim"], wanted)
    check_same(batch["gain"], torch.tensor([0.0, 1.0, 0.0, 1.0])[batch["index"]][:, None].expand(30, 2).clone())


# ------------------------------------------------------------------ in a buffer


def test_transforms_see_what_was_relabelled():
    seen = []
    buffer = buffer_of(10, [4], transform=lambda data: seen.append(data["desired_goal"].clone()) or data)
    batch = buffer.sample(5)
    check_same(seen[0], batch["desired_goal"])
    assert (seen[0] != -1).all()


def test_priorities_and_generations_go_along():
    buffer = buffer_of(
        10, [4], sampler=PrioritizedSampler(20, 1.0, 1.0), writer=RoundRobinWriter(track_generations=True)
    )
    batch = buffer.sample(5)
    assert {"index", "index_generation", "priority_weight"} <= set(batch.keys())
    batch["td_error"] = torch.full((5,), 9.0)
    buffer.update_tensordict_priority(batch)
    assert (buffer.sampler.priorities[batch["index"]] == 9).all()


@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
@pytest.mark.parametrize(
    ("lacking", "choices"),
    [
        ("desired_goal", {}),
        (("next", "reward"), {}),
        ("achieved_goal", {}),
        ("time", {"goal_key": "aim"}),
    ],
)
def test_items_that_lack_an_entry_are_refused(lacking, choices, storage):
    buffer = HERReplayBuffer(arrived, storage=storage(8), **choices)
    with pytest.raises(RuntimeError, match="empty"):
        buffer.sample(2)
    buffer.extend(walked(range(4), [], after=False, flags=("done",)).exclude(lacking))
    with refused(buffer, KeyError, "hindsight"):
        buffer.sample(2)


@pytest.mark.parametrize(
    ("choices", "error"),
    [
        ({"reward_fn": 3}, TypeError),
        ({"her_ratio": 1.5}, ValueError),
        ({"strategy": "later"}, ValueError),
        ({"goal_key": 3}, TypeError),
        ({"sample_unit": Sequence(2)}, ValueError),
        ({"sampler": ConsumingSampler()}, ValueError),
        ({"traj_key": 3}, TypeError),
        ({"end_key": "over", "only_named_keys": 1, "storage": 3}, TypeError),
    ],
)
def test_arguments_are_checked(choices, error):
    with pytest.raises(error):
        HERReplayBuffer(**{"reward_fn": arrived, "storage": LazyTensorStorage(4), **choices})
    HERReplayBuffer(arrived, sample_unit=Transition(), her_ratio=1)


# ------------------------------------------------------------------ rewards and ends


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bool, torch.int32])
def test_rewards_come_in_the_form_that_is_stored(shape, dtype):
    buffer = buffer_of(10, [4], reward_fn=lambda td: (td["time"] % 2).to(dtype).reshape(-1, *shape))
    batch = buffer.sample(20)
    check_same(batch["next", "reward"], (batch["time"] % 2).float()[:, None])


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ({"done": [0, 1], "terminated": [0, 1], "truncated": [0, 0]}, {"done": [0, 0], "terminated": [0, 0]}),
        ({"done": [0, 1], "terminated": [0, 1], "truncated": [0, 1]}, {"done": [0, 1], "terminated": [0, 0]}),
        ({"done": [0, 1], "terminated": [0, 1]}, {"done": [0, 0], "terminated": [0, 0]}),
        ({"done": [0, 1], "terminated": [0, 0]}, {"done": [0, 1], "terminated": [0, 0]}),
        ({"done": [0, 1]}, {"done": [0, 0]}),
    ],
)
def test_what_is_not_terminal_for_the_new_goal_goes_on_unless_it_was_truncated(flags, wanted):
    def never(td):
        return torch.zeros(td.shape), torch.zeros(td.shape, dtype=torch.bool)

    buffer = HERReplayBuffer(never, her_ratio=1.0, storage=LazyTensorStorage(2))
    data = walked(range(2), [], flags=())
    for name, values in flags.items():
        data["next", name] = torch.tensor(values, dtype=torch.bool)[:, None]
    buffer.extend(data)
    batch = buffer.sample(20)
    for name, values in wanted.items():
        check_same(batch["next", name][:, 0], torch.tensor(values, dtype=torch.bool)[batch["index"]])


@pytest.mark.parametrize(
    ("returned", "error"),
    [
        (1.0, TypeError),
        (torch.zeros(3), ValueError),
        ((torch.zeros(4), torch.zeros(4)), TypeError),
    ],
)
def test_rewards_that_do_not_fit_are_refused(returned, error):
    buffer = buffer_of(10, [4], reward_fn=lambda td: returned)
    with pytest.raises(error, match="reward_fn"):
        buffer.sample(4)
