"""Trajectories as rows: the documented examples, and a model that goes row by row."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict

from interop.postprocs import split_trajectories


def rollout(done: Any, **entries: Any) -> TensorDict:
    """Rows that count on, with these done flags."""
    flags = torch.tensor(done, dtype=torch.bool)
    rows = torch.arange(flags.numel()).reshape(flags.shape)
    return TensorDict(
        {"obs": rows, **entries, "next": {"obs": rows[..., None] + 1.0, "done": flags[..., None]}}, flags.shape
    )


ENDS_AT_3_AND_7 = [0, 0, 0, 1, 0, 0, 0, 1, 0, 0]


def test_one_row_of_three_trajectories() -> None:
    data = rollout(ENDS_AT_3_AND_7).refine_names("time")
    before = data.clone()
    split = split_trajectories(data)
    assert split.batch_size == torch.Size([3, 4]) and split.names == [None, None]
    assert split["mask"].tolist() == [[True] * 4, [True] * 4, [True, True, False, False]]
    assert split["traj_ids"].tolist() == [[0] * 4, [1] * 4, [2, 2, 0, 0]]
    assert split["obs"].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 0]]
    assert split["next", "obs"].squeeze(-1).tolist() == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 0, 0]]
    assert split["next", "done"].shape == (3, 4, 1)
    assert (data == before).all() and set(data.keys()) == {"obs", "next"}


def test_where_the_mask_and_the_ids_are() -> None:
    data = rollout(ENDS_AT_3_AND_7, collector=TensorDict({"x": torch.ones(10)}, [10]))
    assert {"mask", "traj_ids", "x"} == set(split_trajectories(data)["collector"].keys())
    assert "mask" in split_trajectories(data, prefix="other")["other"].keys()  # noqa: SIM118
    assert ("a", "b", "traj_ids") in split_trajectories(data, prefix=("a", "b")).keys(True)
    split = split_trajectories(data, trajectory_key="ids", prefix="other")
    assert set(split.keys()) == {"obs", "next", "collector", "ids", "mask"}
    assert set(split_trajectories(data, trajectory_key=("a", "ids"))["a"].keys()) == {"ids", "mask"}


def test_ids_and_done_count_together() -> None:
    ids = torch.tensor([5, 5, 7, 7, 7, 5, 9, 9, 9, 9])
    for shaped in (ids, ids[:, None], ids[:, None].double()):
        data = rollout(ENDS_AT_3_AND_7, traj_ids=shaped)
        split = split_trajectories(data)
        assert split["traj_ids"].flatten(1).tolist() == [[5, 5], [7, 7], [7, 0], [5, 0], [9, 9], [9, 9]]
        assert split["traj_ids"].dtype == shaped.dtype
        del data["next", "done"]
        split = split_trajectories(data)
        assert split["obs"].tolist() == [[0, 1, 0, 0], [2, 3, 4, 0], [5, 0, 0, 0], [6, 7, 8, 9]]
    split = split_trajectories(rollout(ENDS_AT_3_AND_7, mine=ids), trajectory_key="mine")
    assert split["obs"].tolist() == [[0, 1], [2, 3], [4, 0], [5, 0], [6, 7], [8, 9]]


def test_named_keys_alone() -> None:
    data = rollout(
        ENDS_AT_3_AND_7, mine=torch.arange(10) // 6, is_init=torch.arange(10) % 5 == 0, episode=torch.arange(10)
    )
    split = split_trajectories(data, trajectory_key="mine", done_key="done", only_named_keys=True)
    assert split["mask"].sum(1).tolist() == [4, 2, 2, 2]
    assert split_trajectories(data, trajectory_key="mine")["mask"].sum(1).tolist() == [1] * 10


def test_interleaved_ids_are_trajectories_of_their_own() -> None:
    """Two environments step by step, the first of which begins again without a flag."""
    ids = torch.tensor([0, 1, 0, 1, 2, 1, 2, 1])
    split = split_trajectories(rollout([0] * 8, traj_ids=ids))
    assert split["obs"].tolist() == [[0, 2, 0, 0], [1, 3, 5, 7], [4, 6, 0, 0]]
    assert split["traj_ids"].tolist() == [[0, 0, 0, 0], [1, 1, 1, 1], [2, 2, 0, 0]]
    texts = NonTensorStack(*[NonTensorData(str(row)) for row in range(8)])
    split = split_trajectories(rollout([0] * 8, traj_ids=ids, text=texts))
    assert split.get("text").tolist()[0] == ["0", "2", None, None]
    split = split_trajectories(rollout([0] * 8, traj_ids=ids), as_nested=True)
    assert [each.tolist() for each in split["obs"].unbind(0)] == [[0, 2], [1, 3, 5, 7], [4, 6]]


def test_equal_ids_that_are_apart_are_two_trajectories() -> None:
    split = split_trajectories(rollout([0] * 6, traj_ids=torch.tensor([1, 1, 2, 2, 1, 1])))
    assert split["obs"].tolist() == [[0, 1], [2, 3], [4, 5]]


def test_padding_is_left_out() -> None:
    data = rollout(ENDS_AT_3_AND_7)
    split = split_trajectories(data)
    assert (split_trajectories(split) == split).all()
    split["text"] = NonTensorStack(*[NonTensorStack(*map(NonTensorData, "abcd")) for _ in range(3)])
    assert split_trajectories(split).get("text").tolist()[2] == ["a", "b", None, None]
    data["collector", "mask"] = torch.arange(10) < 6
    assert split_trajectories(data)["obs"].tolist() == [[0, 1, 2, 3], [4, 5, 0, 0]]


def test_other_done_keys() -> None:
    data = rollout([0, 0, 0, 0])
    data["next", "agents", "done"] = torch.tensor([1.0, 0, 0, 0])[:, None, None]
    assert split_trajectories(data, done_key=("agents", "done"))["mask"].sum(1).tolist() == [1, 3]
    data["next", "truncated"] = torch.tensor([0, 1, 0, 0])
    assert split_trajectories(data)["mask"].sum(1).tolist() == [2, 2]
    assert split_trajectories(data, done_key=("agents", "done"))["mask"].sum(1).tolist() == [1, 1, 2]
    named = split_trajectories(data, done_key=("agents", "done"), only_named_keys=True)
    assert named["mask"].sum(1).tolist() == [1, 3]


def test_nested() -> None:
    data = rollout(ENDS_AT_3_AND_7)
    split = split_trajectories(data, as_nested=True)
    assert split.batch_size == torch.Size([3, -1]) and "mask" not in split.keys()  # noqa: SIM118
    assert [each.tolist() for each in split["obs"].unbind(0)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [each.tolist() for each in split["traj_ids"].unbind(0)] == [[0] * 4, [1] * 4, [2, 2]]
    data["obs"].zero_()
    assert split["obs"].unbind(0)[1].tolist() == [4, 5, 6, 7]
    assert [len(each) for each in split_trajectories(rollout([[0, 0]] * 2), as_nested=True)["obs"].unbind(0)] == [2, 2]


def test_entries_that_are_no_tensors() -> None:
    texts = NonTensorStack(*[NonTensorData(str(row)) for row in range(10)])
    lists = NonTensorStack(*[NonTensorData([row]) for row in range(10)])
    data = rollout(ENDS_AT_3_AND_7, text=NonTensorData("hello", batch_size=[10]), each=texts, lists=lists)
    split = split_trajectories(data)
    assert split["text"] == "hello" and split.get("lists").batch_size == split.batch_size
    assert split.get("lists")[2].tolist() == [[8], [9], None, None]
    assert split.get("each").tolist() == [list("0123"), list("4567"), ["8", "9", None, None]]
    with pytest.raises(TypeError, match="'each': NonTensorStack cannot be nested"):
        split_trajectories(data, as_nested=True)


def test_no_rows() -> None:
    assert split_trajectories(rollout([])).batch_size == torch.Size([0, 0])


@given(st.integers(0, 10**6))
def test_all_values_are_where_the_model_says(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    shape = ((7,), (3, 4), (2, 2, 3))[seed % 3]
    done = torch.rand(shape, generator=generator) < 0.3
    bits = torch.randint(0, 256, (*shape, 4), dtype=torch.uint8, generator=generator)
    data = rollout(
        done.tolist(), x=bits.view(torch.float32), half=bits[..., :2].view(torch.bfloat16), empty=torch.zeros(*shape, 0)
    )
    data = LazyStackedTensorDict(*data.unbind(0)) if seed % 2 else data
    split = split_trajectories(data)
    pieces: list[list[Any]] = []
    for row in done.flatten(0, -2) if done.ndim > 1 else done[None]:
        pieces.append([])
        for end in row.tolist():
            pieces[-1].append(end)
            if end:
                pieces.append([])
        pieces = [each for each in pieces if each]
    assert split.batch_size == (len(pieces), max(map(len, pieces)))
    assert split["mask"].sum(1).tolist() == [len(each) for each in pieces]
    flat, kept = bits.flatten(0, -2), split["mask"]
    assert torch.equal(split["x"][kept].view(torch.uint8), flat)
    assert torch.equal(split["half"][kept].view(torch.uint8), flat[:, :2])
    assert not split["x"][~kept].any() and split["empty"].shape == (*split.shape, 0)


def test_refused() -> None:
    data = rollout(ENDS_AT_3_AND_7)
    with pytest.raises(
        KeyError, match=r"\('next', 'over'\) and 'traj_ids' are missing.*; there are 'obs', \('next', 'obs'\)"
    ):
        split_trajectories(data, done_key="over")
    with pytest.raises(KeyError, match="there are no entries"):
        split_trajectories(TensorDict({}, [3]))
    with pytest.raises(ValueError, match=r"\('next', 'obs'\) has the shape \[10, 3\], the rows have \[10\]"):
        data["next", "obs"] = torch.zeros(10, 3)
        split_trajectories(data, done_key="obs")
    with pytest.raises(ValueError, match="batch dims of which the last is time"):
        split_trajectories(data[0])
    for what in (torch.zeros(3), {"obs": torch.zeros(3)}, None):
        with pytest.raises(TypeError, match="takes a tensordict"):
            split_trajectories(what)  # type: ignore[arg-type]
    data["text"] = "hello"
    with pytest.raises(TypeError, match="'text' must be a tensor"):
        split_trajectories(data, trajectory_key="text")
