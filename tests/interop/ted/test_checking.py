"""`check_ted` finds each thing that is wrong with data, names it and its first row, and passes what is right."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict
from torch import Tensor

from interop.ted import TEDError, check_ted, row_values
from tests.interop.ted.model import OBSERVATIONS, as_tuple, write

DONE = {(2, 0), (4, 1), (6, 0)}


def rollout(steps: int = 8, lanes: tuple[int, ...] = (), **options: Any) -> TensorDict:
    """Time first, episodes that end anywhere."""
    return write(steps, lanes, steps, DONE, **options).data


@pytest.fixture(scope="module")
def good() -> TensorDict:
    data = rollout()
    data["next", "truncated"] = data["next", "done"] & ~data["next", "terminated"]
    return data


def violations(data: Any, **options: Any) -> tuple[Any, ...]:
    with pytest.raises(TEDError) as caught:
        check_ted(data, **options)
    text = str(caught.value)
    assert all(str(each) in text for each in caught.value.violations)
    return caught.value.violations


def test_what_is_right_passes(good: TensorDict) -> None:
    check_ted(good)
    check_ted(good, strict=True)
    check_ted(LazyStackedTensorDict(*good.unbind(0), stack_dim=0))
    check_ted(good.refine_names("time"))
    check_ted(good[:1])
    check_ted(good[:0])
    with_text = good.copy()
    with_text["text"] = NonTensorData("hello", batch_size=[8])
    check_ted(with_text)
    check_ted(good.exclude("done", "terminated", "truncated"))


def test_time_may_be_any_batch_dim() -> None:
    data = rollout(6, (2, 3))
    data["next", "truncated"] = data["next", "done"] & ~data["next", "terminated"]
    check_ted(data, time_dim=0)
    check_ted(data.permute(1, 2, 0))
    check_ted(data.permute(1, 0, 2).clone(), time_dim=1)
    assert {each.key[-1] for each in violations(data)} == {as_tuple(key)[-1] for key in OBSERVATIONS}


@given(st.integers(0, 10**6))
def test_the_first_row_that_does_not_follow_is_named(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    lanes = ((), (2,), (2, 2))[seed % 3]
    data = write(5, lanes, 5, {(1, 0), (3, 1)}, observations={"obs": ((3,), torch.float32)}, seed=seed % 100).data
    data = data.permute(*range(1, data.ndim), 0).exclude("terminated", ("next", "terminated"), ("next", "truncated"))
    flips = torch.rand(data.shape, generator=generator) < 0.2
    after = data["next", "obs"].clone()
    after.view(torch.int32)[flips] ^= 1
    data["next", "obs"] = after
    wrong = flips & ~data["next", "done"].reshape(data.shape)
    wrong[..., -1] = False
    if not wrong.any():
        check_ted(data)
        return
    (found,) = violations(data)
    assert found.key == ("next", "obs") and found.row == tuple(wrong.nonzero()[0].tolist())
    shown = found.row[0] if len(found.row) == 1 else found.row
    assert (
        f"('next', 'obs') is not the 'obs' of the row that follows, and no trajectory ends there, first in row {shown}"
        in str(found)
    )


def test_bits_are_compared(good: TensorDict, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN equals itself; 0.0 is not -0.0."""
    monkeypatch.setattr(row_values, "_PIECE", 3)
    data = good.clone()
    obs, after = torch.zeros(8), torch.zeros(8)
    obs[1:3] = after[0:2] = float("nan")
    data["x"], data["next", "x"] = obs, after
    check_ted(data)
    after[4] = -0.0
    data["next", "x"] = after
    (found,) = violations(data)
    assert found.key == ("next", "x") and found.row == (4,)


def put(key: Any, value: Any) -> Any:
    """What sets an entry to a value, or to that of a function of the data; None deletes it."""

    def change(data: TensorDict) -> None:
        if value is None:
            del data[key]
        else:
            data.set(key, value if isinstance(value, Tensor) else value(data))

    return change


def flag(key: Any, *rows: int) -> Any:
    """What flips flags."""

    def change(data: TensorDict) -> None:
        data[key][list(rows)] = ~data[key][list(rows)]

    return change


PARTS = [put(("next", name), None) for name in ("terminated", "truncated")]
WRONG: dict[str, tuple[list[Any], list[tuple[Any, Any, str]]]] = {
    "next is missing": ([put("next", None)], [(("next",), None, "is missing")]),
    "a reward of the root": ([put("reward", torch.zeros(8, 1))], [(("reward",), None, "is in the root")]),
    "done without its parts": (
        [flag(("next", "done"), 3)],
        [(("next", "done"), (3,), "is not terminated | truncated")],
    ),
    "flags of two shapes": (
        [put(("next", "truncated"), lambda data: data["next", "truncated"][..., 0])],
        [(("next", "truncated"), None, "has the shape [8], ('next', 'done') [8, 1]")],
    ),
    "done in the root": (
        [flag("done", 3)],
        [(("done",), (3,), "is not terminated | truncated"), (("done",), (3,), "is set in the root")],
    ),
    "no root observation": (
        [put("obs", None)],
        [(("next", "obs"), None, "is there, and the root has no 'obs'")],
    ),
    "more flags than rows": (
        [put(("next", "done"), torch.zeros(8, 3, dtype=torch.bool)), *PARTS],
        [(("next", "done"), None, "has the shape [8, 3] for rows of [8]")],
    ),
    "much at once": (
        [
            put("reward", torch.zeros(8, 1)),
            flag(("next", "done"), 3),
            flag("truncated", 5),
            put(("next", "obs"), lambda data: data["next", "obs"] + 1),
        ],
        [
            (("reward",), None, "move it to ('next', 'reward')"),
            (("done",), (5,), "is not"),
            (("next", "done"), (3,), "is not"),
            (("truncated",), (5,), "is set in the root"),
            (("next", "obs"), (0,), "is not the 'obs' of the row that follows"),
        ],
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_each_thing_that_is_wrong(good: TensorDict, what: str) -> None:
    changes, expected = WRONG[what]
    data = good.clone()
    for change in changes:
        change(data)
    found = violations(data)
    assert [(each.key, each.row) for each in found] == [(key, row) for key, row, _ in expected]
    for each, (_, _, text) in zip(found, expected, strict=True):
        assert text in str(each)


def test_options(good: TensorDict) -> None:
    data = good.clone()
    data["next", "reward"] = torch.zeros(8)
    check_ted(data)
    (found,) = violations(data, strict=True)
    assert found.key == ("next", "reward") and "unsqueeze(-1)" in str(found)
    for key in ("done", "truncated"):
        flag(key, 3)(data)
    assert [each.key for each in violations(data)] == [("done",), ("truncated",)]
    check_ted(data, auto_reset=False)


def test_other_keys(good: TensorDict) -> None:
    data = good.select("obs", ("next", "obs"))
    data["next", "agents", "over"] = good["next", "done"]
    data["next", "agents", "gain"] = torch.zeros(8, 2, 1)
    options: dict[str, Any] = {
        "done_key": ("next", "agents", "over"),
        "done_keys": [("agents", "over")],
        "reward_keys": [("agents", "gain")],
    }
    check_ted(data, **options)
    assert len(violations(data)) == 3
    (found,) = violations(data, **options, observation_keys=["obs", "seen"])[:1]
    assert found.key == ("seen",)


def test_what_cannot_be_checked(good: TensorDict) -> None:
    for data in (torch.zeros(3), {"obs": 1}):
        with pytest.raises(TypeError, match="takes a tensordict"):
            check_ted(data)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="time_dim must be a batch dim of"):
        check_ted(good, time_dim=1)
    with pytest.raises(ValueError, match="time_dim"):
        check_ted(good[0])
    with pytest.raises(TypeError, match="done_keys must be a list"):
        check_ted(good, done_keys="done")
    assert issubclass(TEDError, ValueError)
