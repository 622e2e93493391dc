"""Groups as trainers use them: sizes that differ, filters by rewards with reasons, weights, and an exact resume."""

import contextlib
import copy
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from scipy import stats
from tensordict import TensorDict

import interop
from fbuf.checkpoint import CheckpointCorrupt
from interop import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PromptGroupSampler,
    RateLimiter,
    RewardSpread,
    StalenessAwareSampler,
    Storage,
    TensorDictReplayBuffer,
)
from tests.faults.interrupts import Interrupt, Tracer
from tests.faults.signatures import signature

CAPACITY = 24


def rows(id_: int, rewards: list[float], version: int = 0, size: int | None = None) -> TensorDict:
    count = len(rewards)
    return TensorDict(
        {
            "prompt_id": torch.full((count,), id_),
            "reward": torch.tensor(rewards, dtype=torch.float32),
            "policy_version": torch.full((count,), version),
            "of": torch.full((count,), count if size is None else size),
        },
        [count],
    )


def made(storage: Storage | None = None, batch_size: int | None = None, seed: int = 0, **choices: Any) -> Any:
    return TensorDictReplayBuffer(
        storage=LazyTensorStorage(CAPACITY) if storage is None else storage,
        sampler=PromptGroupSampler(**choices),
        batch_size=batch_size,
        generator=torch.Generator().manual_seed(seed),
    )


GROUPS = {
    0: [0.0, 1.0, 1.0],  # standard deviation 0.471
    1: [1.0, 1.0, 1.0],
    2: [0.0, 0.0, 0.0],
    3: [0.1, 0.1, 0.1],  # whose mean rounds
    4: [0.0, 0.5, 1.0],  # 0.408
    5: [0.0, math.nan, 1.0],
    6: [0.9, 1.0, 1.0],  # 0.047
}


def filled(**choices: Any) -> Any:
    rb = made(group_size=3, **choices)
    for id_, rewards in GROUPS.items():
        rb.extend(rows(id_, rewards))
    return rb


def reasons(rb: Any) -> dict[Any, str | None]:
    return {group.id: group.reason for group in rb.sampler.groups()}


def test_groups_without_spread_are_not_drawn_and_say_why() -> None:
    rb = filled(spread=RewardSpread())
    none = "no spread"
    assert reasons(rb) == {0: None, 1: none, 2: none, 3: none, 4: None, 5: "not scored", 6: None}
    assert len(rb) == 9 and rb.sampler.num_ready == 3
    drawn = {int(each) for _ in range(40) for each in rb.sample(6)["prompt_id"]}
    assert drawn == {0, 4, 6}
    with pytest.raises(
        RuntimeError, match=re.escape("Cannot sample 4 groups: 3 of 7 have a weight above zero at")
    ) as error:
        rb.sample(12)
    assert "3 no spread" in str(error.value) and "1 not scored" in str(error.value)
    stds = {group.id: group.spread for group in rb.sampler.groups()}
    for id_, rewards in GROUPS.items():
        np.testing.assert_allclose(stds[id_], np.std(np.float32(rewards).astype(float)), atol=1e-12)
    assert stds[3] == 0


def test_the_bounds_of_the_mean_and_of_the_deviation() -> None:
    rb = filled(spread=RewardSpread(min_std=0.05, mean_range=(0.4, 0.6)))
    found = reasons(rb)
    assert (found[0], found[4], found[6], found[2]) == ("too easy", None, "no spread", "no spread")
    assert reasons(filled(spread=RewardSpread(mean_range=(0.6, 1))))[4] == "too hard"


def test_rewards_that_come_later_count_from_then_on() -> None:
    rb = filled(spread=RewardSpread())
    slots = next(group.slots for group in rb.sampler.groups() if group.id == 5)
    rb.set_at_("reward", torch.tensor([0.0, 0.0, 1.0]), torch.tensor(slots))
    assert reasons(rb)[5] is None and len(rb) == 12
    rb.set_("reward", torch.ones(21))
    assert len(rb) == 0 and set(reasons(rb).values()) == {"no spread"}


LAWS: dict[str, dict[str, Any]] = {
    "uniform": {"spread": RewardSpread()},
    "by deviation": {"spread": RewardSpread(weight_fn=lambda std: std)},
    "by its square, none small": {"spread": RewardSpread(weight_fn=lambda std: (std**2) * (std > 0.1))},
    "with staleness": {
        "spread": RewardSpread(weight_fn=lambda std: std),
        "staleness": StalenessAwareSampler(max_staleness=4),
    },
}


@pytest.mark.parametrize("name", LAWS)
def test_draws_follow_the_weights(name: str) -> None:
    """Chi-square, also against `chances`; `why` and `groups` agree with them."""
    choices = copy.deepcopy(LAWS[name])
    rb = made(group_size=3, **choices)
    for id_, rewards in GROUPS.items():
        rb.extend(rows(id_, rewards, version=id_ % 3))
    if "staleness" in choices:
        rb.sampler.staleness.consumer_version = 2
    std = np.array([np.std(rewards) for rewards in GROUPS.values()])
    kept = np.array([id_ in (0, 4, 6) for id_ in GROUPS])
    weights = {
        "uniform": kept * 1.0,
        "by deviation": np.where(kept, std, 0),
        "by its square, none small": np.where(kept & (std > 0.1), std, 0) ** 2,
        "with staleness": np.where(kept, std, 0) / (2 - np.array(list(GROUPS)) % 3 + 1),
    }[name]
    expected = weights / weights.sum()
    chances = rb.sampler.chances(rb.storage)
    np.testing.assert_allclose(chances.probability.reshape(-1, 3), expected[:, None].repeat(3, 1), rtol=1e-6)
    count = 3_000
    drawn = np.bincount([int(rb.sample(3)["prompt_id"][0]) for _ in range(count)], minlength=7)
    assert (drawn[expected == 0] == 0).all()
    some = expected > 0
    assert stats.chisquare(drawn[some], expected[some] * count).pvalue > 1e-3
    assert [group.id for group in rb.sampler.groups() if group.reason is None] == list(np.flatnonzero(some))


# ------------------------------------------------------------------ sizes that differ

STEPS = st.one_of(
    st.tuples(st.just("write"), st.integers(0, 3), st.integers(1, 4)),
    st.tuples(st.just("sample"), st.integers(1, 3)),
    st.tuples(st.sampled_from(["empty", "reload", "state"])),
)


class Sized:
    """Groups of their own sizes as plain lists."""

    def __init__(self, most: int | None) -> None:
        self.most = most
        self.groups: list[dict[str, Any]] = []

    def write(self, slot: int, id_: int, size: int) -> None:
        for group in self.groups:
            if slot in group["slots"]:
                group["slots"].remove(slot)
                group["broken"] = True
        last = next((each for each in reversed(self.groups) if each["id"] == id_ and not each["broken"]), None)
        if last is None or len(last["slots"]) == last["size"]:
            last = {"id": id_, "size": size, "slots": [], "broken": False, "uses": 0}
            self.groups.append(last)
        last["slots"].append(slot)

    def ready(self) -> list[dict[str, Any]]:
        whole = [each for each in self.groups if len(each["slots"]) == each["size"] and not each["broken"]]
        return [each for each in whole if self.most is None or each["uses"] < self.most]


@pytest.mark.parametrize(("make", "most"), [(LazyTensorStorage, None), (LazyTensorStorage, 2), (ListStorage, 1)])
def test_groups_of_many_sizes_agree_with_lists(
    tmp_path_factory: Any, make: Callable[[int], Storage], most: int | None
) -> None:
    @settings(max_examples=20, deadline=None)
    @given(st.lists(STEPS, min_size=8, max_size=30))
    def histories(history: list[tuple[Any, ...]]) -> None:
        def new() -> Any:
            return made(make(10), size_key="of", max_uses=most)

        rb, model, cursor = new(), Sized(most), 0
        size_of = dict[int, int]()  # of the group of an id that is open
        for step, *arguments in history:
            if step == "write":
                id_, count = arguments
                left = next(
                    (
                        each["size"] - len(each["slots"])
                        for each in reversed(model.groups)
                        if each["id"] == id_ and not each["broken"] and len(each["slots"]) < each["size"]
                    ),
                    None,
                )
                size = size_of[id_] if left is not None else count + (id_ == 3)  # of id 3 one comes later
                count = count if left is None else min(count, left)
                size_of[id_] = size
                for slot in rb.extend(rows(id_, [0.0] * count, size=size)).tolist():
                    assert slot == cursor
                    model.write(slot, id_, size)
                    cursor = (cursor + 1) % 10
            elif step == "sample":
                ready = model.ready()
                if not len(rb.storage) or len(ready) < arguments[0]:
                    with pytest.raises(RuntimeError):
                        rb.sample(arguments[0])
                    continue
                batch, info = rb.sample(arguments[0], return_info=True)
                parts = np.split(info["index"].numpy(), np.flatnonzero(np.diff(info["group_number"].numpy())) + 1)
                assert len(parts) == arguments[0]
                for part in parts:
                    group = next(each for each in ready if each["slots"] == part.tolist())
                    group["uses"] += 1
                assert batch["of"].tolist() == [len(part) for part in parts for _ in part]
            elif step == "empty" and len(rb.storage):
                rb.empty()
                model, cursor = Sized(most), 0
            elif len(rb.storage):
                other = new()
                if step == "state":
                    other.load_state_dict(rb.state_dict())
                else:
                    rb.dumps(path := tmp_path_factory.mktemp("saved") / "rb")
                    other.loads(path)
                rb = other
            assert len(rb) == sum(each["size"] for each in model.ready())
            assert rb.sampler.num_ready == len(model.ready())

    histories()


def test_a_group_is_drawn_as_often_as_a_larger_one() -> None:
    rb = made(size_key="of")
    for id_, size in enumerate((1, 2, 3, 4, 5)):
        rb.extend(rows(id_, [0.0] * size))
    batches = [rb.sample(2) for _ in range(2_000)]
    counts = np.bincount([int(each) for batch in batches for each in batch["prompt_id"].unique()], minlength=5)
    assert counts.sum() == 4_000 and stats.chisquare(counts).pvalue > 1e-3


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        ({"of": torch.tensor([2, 3])}, ValueError, "disagree on the size of their group: 2 and 3"),
        ({"of": torch.tensor([0, 0])}, ValueError, "an integer of at least 1, got 0"),
        ({"of": torch.tensor([0.5, 0.5])}, TypeError, "sizes of groups must be integers or texts"),
    ],
)
def test_sizes_that_are_none_are_refused_by_the_draw_until_they_are_gone(
    wrong: dict[str, Any], error: type[Exception], text: str
) -> None:
    rb = made(LazyTensorStorage(2), size_key="of")
    rb.extend(TensorDict({"prompt_id": torch.zeros(2, dtype=torch.int64), **wrong}, [2]))
    for _ in range(2):
        with pytest.raises(error, match=re.escape(text)):
            rb.sample(1)
    rb.set_("of", torch.full((2,), 2).to(wrong["of"].dtype))
    assert len(rb.sample(1)) == 2


# ------------------------------------------------------------------ resume

CHOICES: list[dict[str, Any]] = [
    {"group_size": 3, "spread": RewardSpread(), "max_uses": 2},
    {"size_key": "of", "spread": RewardSpread(weight_fn=torch.sqrt), "max_uses": 3},
    {"size_key": "of", "max_uses": 2},
]


def _in_use(choices: dict[str, Any], storage: Storage) -> Any:
    rb = made(storage, **choices)
    sizes = (3, 3, 3, 3, 3, 3) if "group_size" in choices else (3, 1, 4, 2, 5, 3)
    for id_, size in enumerate(sizes):
        rb.extend(rows(id_, torch.linspace(0, 1, size).tolist()))
    rb.extend(rows(9, [0.0, 1.0], size=3))  # one is missing
    for _ in range(3):
        rb.sample(rb.sampler.group_size or 1)
    return rb


def _rest(rb: Any) -> list[list[int]]:
    """All batches that are left, after the missing row was written."""
    rb.extend(rows(9, [0.5], size=3))
    found = []
    while rb.sampler.num_ready:
        found.append(rb.sample(rb.sampler.group_size or 1)["index"].tolist())
    return found


@pytest.mark.parametrize("by", ["dumps", "state_dict", "deepcopy", "folder", "resize"])
@pytest.mark.parametrize("choices", CHOICES, ids=" ".join)
def test_it_goes_on_in_the_middle(by: str, choices: dict[str, Any], tmp_path: Path) -> None:
    def storage(name: str) -> Storage:
        return LazyMemmapStorage(CAPACITY, scratch_dir=tmp_path / name)

    rb, other = _in_use(choices, storage("one")), _in_use(choices, storage("other"))
    if by == "dumps":
        rb.dumps(tmp_path / "rb")
        rb = made(seed=3, **choices)
        rb.loads(tmp_path / "rb")
    elif by == "state_dict":
        state = rb.state_dict()
        rb = made(seed=3, **choices)
        rb.load_state_dict(state)
    elif by == "deepcopy":
        rb = copy.deepcopy(rb)
    elif by == "resize":
        rb.resize(CAPACITY + 6)
        assert sorted(_rest(rb)) == sorted(_rest(other))  # in another order
        return
    else:
        generator = rb.generator
        rb.storage.close()
        rb = made(LazyMemmapStorage.open(tmp_path / "one"), **choices)
        rb.set_rng(generator)
        uses = {group.id: (group.uses, group.reason) for group in rb.sampler.groups()}
        assert uses == {group.id: (group.uses, group.reason) for group in other.sampler.groups()}
        rest, expected = _rest(rb), _rest(other)  # in another order: the file has no order of groups
        assert sorted(rest) == sorted(expected)
        return
    assert _rest(rb) == _rest(other)


@pytest.mark.parametrize("choices", CHOICES, ids=" ".join)
def test_an_interrupt_at_any_step_of_a_draw_counts_it_or_not(choices: dict[str, Any]) -> None:
    def left(at: int | None) -> tuple[str, int, str]:
        rb = _in_use(choices, LazyTensorStorage(CAPACITY))
        with contextlib.suppress(Interrupt), Tracer(-1 if at is None else at, looks=True) as tracer:
            if at is not None:
                rb.sample(rb.sampler.group_size or 1)
        groups = [(group.number, group.uses, group.reason) for group in rb.sampler.groups()]
        return signature([groups, rb.generator.get_state()]), tracer.count, tracer.where

    known = {left(at)[0] for at in (None, -1)}
    assert len(known) == 2
    count = left(-1)[1]
    for at in range(0, count, 7):
        found, _, where = left(at)
        assert found in known, where


def test_a_kill_in_a_draw_leaves_each_group_its_uses(in_a_fork: Any) -> None:
    """The child draws groups of many sizes until it is killed; then none was used too often, and the rest can be drawn."""
    in_a_fork("""
        import os, random, signal, tempfile, time, torch
        from tensordict import TensorDict
        from interop import LazyMemmapStorage, PromptGroupSampler, RewardSpread, TensorDictReplayBuffer

        def rows(id_, size):
            ids, sizes = torch.full((size,), id_), torch.full((size,), size)
            return TensorDict({"prompt_id": ids, "reward": torch.linspace(0, 1, size), "of": sizes}, [size])

        for turn in range(4):
            folder = tempfile.mkdtemp() + "/rows"
            child = os.fork()
            if child == 0:
                sampler = PromptGroupSampler(size_key="of", max_uses=3, spread=RewardSpread())
                rb = TensorDictReplayBuffer(storage=LazyMemmapStorage(400, scratch_dir=folder), sampler=sampler)
                for id_ in range(90):
                    rb.extend(rows(id_, 1 + id_ % 5))
                open(folder + "/../ready", "w").close()
                for _ in range(200):
                    rb.sample(1)
                time.sleep(30)
                os._exit(1)
            while not os.path.exists(folder + "/../ready"):
                time.sleep(0.001)
            time.sleep(random.uniform(0, 0.02))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            sampler = PromptGroupSampler(size_key="of", max_uses=3, spread=RewardSpread())
            rb = TensorDictReplayBuffer(storage=LazyMemmapStorage.open(folder), sampler=sampler)
            groups = sampler.groups()
            assert [len(group.slots) for group in groups] == [1 + group.id % 5 for group in groups] and len(groups) == 90
            assert all(group.uses <= 3 and (group.reason == "consumed") == (group.uses == 3) for group in groups)
            assert all((group.id % 5 == 0) == (group.reason == "no spread") for group in groups)
            left = sum(3 - group.uses for group in groups if group.id % 5)
            for _ in range(left):
                rb.sample(1)
            assert sampler.num_ready == 0
    """)


# ------------------------------------------------------------------ beside other parts


def test_a_checkpoint_is_opened_with_its_filter(tmp_path: Path) -> None:
    spread = RewardSpread(min_std=0.1, mean_range=(0.0, 0.9))
    rb = made(size_key="of", spread=spread, max_uses=2, batch_size=1)
    rb.extend(rows(0, [0.0, 1.0]))
    rb.dumps(tmp_path / "rb")
    opened = interop.open(tmp_path / "rb")
    assert opened.sampler.spread == spread and opened.sampler.groups() == rb.sampler.groups()
    rb = made(size_key="of", spread=RewardSpread(weight_fn=torch.sqrt), batch_size=1)
    rb.extend(rows(0, [0.0, 1.0]))
    rb.dumps(tmp_path / "other")
    with pytest.raises(interop.CheckpointMismatch, match=re.escape("spread.weight_fn")):
        interop.open(tmp_path / "other")
    state = rb.state_dict()
    state["_sampler"]["groups"]["sizes"] = torch.tensor([1])
    with pytest.raises(CheckpointCorrupt, match="the state of a PromptGroupSampler, groups: 'rows'"):
        rb.load_state_dict(state)


def test_iterating_ends_when_no_group_is_left_that_teaches() -> None:
    rb = filled(spread=RewardSpread(), max_uses=1, batch_size=3)
    assert sorted(int(batch["prompt_id"][0]) for batch in rb) == [0, 4, 6]


def test_a_limiter_counts_completions() -> None:
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(CAPACITY),
        sampler=PromptGroupSampler(size_key="of"),
        limiter=RateLimiter(1, 1, (0, 40)),
    )
    rb.extend(rows(0, [0.0] * 5))
    rb.sample(1)
    assert rb.limiter is not None and (rb.limiter.inserted, rb.limiter.sampled) == (5, 5)


def test_what_is_refused() -> None:
    for choices in ({}, {"group_size": 2, "size_key": "of"}):
        with pytest.raises(TypeError, match="give one of group_size and size_key"):
            PromptGroupSampler(**choices)
    with pytest.raises(TypeError, match="spread must be a RewardSpread"):
        PromptGroupSampler(2, spread=0.1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="min_std must be at least 0"):
        RewardSpread(min_std=-1)
    with pytest.raises(ValueError, match="mean_range must be a pair"):
        RewardSpread(mean_range=(1, 0))
    with pytest.raises(TypeError, match="reward_key must name"):
        RewardSpread(None)
    for weight_fn, text in (
        (lambda std: -std, "weights must be finite and at least 0"),
        (lambda std: std * math.nan, "weights must be finite"),
        (lambda std: std[:1], "must give a tensor of 3 weights, got [1]"),
        (lambda std: 1.0, "got float"),
    ):
        rb = filled(spread=RewardSpread(weight_fn=weight_fn))
        with pytest.raises(ValueError, match=re.escape(text)):
            rb.sample(3)
    rb = filled(spread=RewardSpread("score"))
    assert len(rb) == 21  # as far as it is known
    with pytest.raises(KeyError, match="score"):
        rb.sample(3)
