"""Conditions on stored trajectories: `traj`, `rb.query`, `filter_trajectories`, beside torchrl where it is installed."""

import importlib.util
import pickle
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

import interop
from interop import TrajectoryPredicate, filter_trajectories, iter_trajectories, traj

HAS_TORCHRL = importlib.util.find_spec("torchrl") is not None


def rows(lengths, start=0, ids=True):
    """Episodes of these lengths; "obs" counts all rows, "done" is true in the last row of each."""
    count = sum(lengths)
    last = torch.zeros(count, 1, dtype=torch.bool)
    last[np.cumsum(lengths) - 1] = True
    data = TensorDict(
        {
            "obs": torch.arange(start, start + count),
            "reward": torch.arange(start, start + count).float()[:, None] % 7,
            "next": {"done": last, "score": torch.arange(count) % 5},
        },
        [count],
    )
    if ids:
        data["traj_ids"] = torch.repeat_interleave(torch.arange(len(lengths)) + 10 * start, torch.tensor(lengths))
    return data


def buffer(library=interop, capacity=20, lengths=(4, 7, 2, 5, 9), **kwargs):
    rb = library.TensorDictReplayBuffer(storage=library.LazyTensorStorage(capacity), batch_size=4, **kwargs)
    rb.extend(rows(lengths))
    return rb


def obs(found):
    return [each.obs.tolist() for each in found]


CONDITIONS = {
    "sum": lambda traj: traj.reward.sum() > 10,
    "mean": lambda traj: traj.reward.mean() <= 3,
    "max": lambda traj: traj.reward.max() == 6,
    "min": lambda traj: traj.obs.min() >= 11,
    "first": lambda traj: traj.reward.first() < 4,
    "last": lambda traj: traj["next", "score"].last() != 4,
    "of next": lambda traj: traj.score.sum() > 6,
    "length": lambda traj: (traj.length > 4) & (traj.length < 9),
    "total": lambda traj: traj.total_reward >= 15,
    "any": lambda traj: (traj.reward > 5).any(),
    "all": lambda traj: (traj.reward < 6).all() | (traj.length == 9),
    "not": lambda traj: ~((traj.reward.sum() > 10) & (traj.length > 4)),
}


@pytest.mark.parametrize("name", CONDITIONS)
@pytest.mark.parametrize("capacity", [20, 40])
def test_a_query_chooses_what_a_function_of_the_rows_chooses(name, capacity):
    rb = buffer(capacity=capacity)
    condition = CONDITIONS[name](traj)
    chosen = [part for part in rb.query() if condition(part)]
    assert obs(rb.query(condition)) == obs(chosen) == obs(rb.query(lambda part: condition(part)))
    assert obs(filter_trajectories(rb.in_order(), condition)) == obs(chosen)
    mask = rb.episodes.where(condition)
    assert len(rb.episodes.select(mask)) == sum(map(len, chosen)) if mask.any() else not chosen


@pytest.mark.skipif(not HAS_TORCHRL, reason="torchrl is not installed")
@pytest.mark.parametrize("name", CONDITIONS)
@pytest.mark.parametrize("capacity", [20, 40])
def test_a_query_chooses_what_torchrl_chooses(name, capacity):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torchrl.data as other

        theirs, mine = buffer(other, capacity), buffer(capacity=capacity)
        assert obs(mine.query()) == obs(theirs.query())
        condition = CONDITIONS[name](other.traj)
        assert obs(mine.query(CONDITIONS[name](traj))) == obs(theirs.query(condition))
        data = rows([3, 5, 1, 2], ids=False)
        assert obs(iter_trajectories(data)) == obs(other.iter_trajectories(data))
        assert CONDITIONS[name](traj).required_keys() == condition.required_keys()


@given(st.lists(st.integers(1, 6), min_size=1, max_size=8), st.integers(0, 30))
def test_total_lengths_and_order(lengths, more):
    rb = buffer(capacity=25, lengths=lengths)
    if more:
        rb.extend(rows([more], start=100))
    found = rb.query()
    assert torch.equal(torch.cat([part.obs for part in found]), rb.in_order()["obs"])
    assert [part.length for part in rb.query(traj.length > 2)] == [n for n in map(len, found) if n > 2]


def test_lanes_come_one_after_the_other():
    rb = interop.TensorDictReplayBuffer(storage=interop.LazyTensorStorage(40, ndim=2), batch_size=4)
    rb.extend(torch.stack([rows([3, 5]), rows([6, 2], start=50)]))
    assert obs(rb.query()) == [[0, 1, 2], [3, 4, 5, 6, 7], [50, 51, 52, 53, 54, 55], [56, 57]]


def test_a_named_key_alone_divides():
    data = rows([4, 4])
    data["task"] = torch.tensor([0, 0, 1, 1, 1, 1, 1, 2])
    assert [len(part) for part in iter_trajectories(data, "task")] == [2, 5, 1]
    rb = interop.TensorDictReplayBuffer(storage=interop.LazyTensorStorage(8), batch_size=4)
    rb.extend(data)
    assert [len(part) for part in rb.query(trajectory_key="task")] == [2, 5, 1]
    with pytest.raises(KeyError, match="nothing"):
        rb.query(trajectory_key="nothing")


def test_transforms_run_before_the_condition():
    rb = buffer(transform=lambda data: data.set("obs", data["obs"] + 1000))
    assert obs(rb.query(traj.obs.first() == 1018)) == [list(range(1018, 1027))]


def test_text_is_read_whole():
    rb = interop.TensorDictReplayBuffer(storage=interop.LazyStackStorage(8), batch_size=4)
    data = rows([3, 2])
    for row in data.unbind(0):
        row.set_non_tensor("name", "a" if row["obs"] < 3 else "b")
        rb.add(row)
    [found] = rb.query(lambda part: part.data[0]["name"] == "b")
    assert found.obs.tolist() == [3, 4]


def test_interleaved_rows_and_views():
    data = TensorDict({"traj_ids": torch.arange(8) % 2, "v": torch.arange(8)}, [8])
    assert [part.v.tolist() for part in iter_trajectories(data)] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    data = rows([3, 2])
    next(iter_trajectories(data)).data["obs"][0] = 99
    assert data["obs"][0] == 99


def test_flags_of_the_rows_count_where_no_other_marker_is():
    data = TensorDict({"done": torch.tensor([False, True, False]), "v": torch.arange(3)}, [3])
    assert [part.v.tolist() for part in iter_trajectories(data)] == [[0, 1], [2]]


def test_expressions_compare_with_each_other():
    rb = buffer(lengths=[4, 7])
    assert obs(rb.query(traj.obs.first() > traj.length)) == []
    assert obs(rb.query(traj.obs.last() > traj.length)) == [list(range(4, 11))]
    assert obs(rb.query((traj.obs == traj["next", "score"]).any())) == [[0, 1, 2, 3], [4, 5, 6, 7, 8, 9, 10]]
    assert len(rb.query(traj["next", "done"].any())) == 2


def test_predicates_are_pickled():
    condition = (traj.reward.sum() > 3) & ~(traj.reward > 5).any()
    again = pickle.loads(pickle.dumps(condition))
    assert obs(buffer().query(again)) == obs(buffer().query(condition))
    assert repr(again) == "TrajectoryPredicate(((traj.reward.sum() > 3) & ~(traj.reward > 5).any()))"


def test_predicates_join_functions():
    rb = buffer()
    long = TrajectoryPredicate(lambda part: part.length > 4, "long")
    assert len(rb.query(long & (traj.length < 9))) == len(rb.query((lambda part: part.length > 4) & (traj.length < 9)))
    assert (long | (traj.length < 9)).required_keys() is None
    assert repr(long) == "TrajectoryPredicate(long)"


@pytest.mark.parametrize(
    "use",
    [
        lambda: (traj.length > 3) and (traj.length < 5),
        lambda: not traj.length,
        lambda: buffer().query(traj.reward > 3),
        lambda: (traj.reward > 3) | (traj.length < 3),
        lambda: (traj.length < 3) & (traj.reward > 3),
        lambda: buffer().query(3),
        lambda: traj[3],
        lambda: list(iter_trajectories({"done": 1})),
        lambda: interop.Trajectory([1]),
    ],
)
def test_what_is_no_condition_is_a_type_error(use):
    with pytest.raises(TypeError):
        use()


def test_other_errors():
    with pytest.raises(KeyError, match=r"'nokey'.*'obs'"):
        buffer().query(traj.nokey.sum() > 1)
    with pytest.raises(ValueError, match="2 numbers"):
        filter_trajectories(TensorDict({"v": torch.zeros(3, 2), "traj_ids": torch.zeros(3)}, [3]), traj.v.first() > 1)
    with pytest.raises(KeyError, match="trajectory_key"):
        list(iter_trajectories(TensorDict({"v": torch.zeros(3)}, [3])))
    with pytest.raises(ValueError, match="one batch dim"):
        list(iter_trajectories(TensorDict({}, [3, 2])))
    with pytest.raises(AttributeError, match="'nokey'"):
        _ = buffer().query()[0].nokey
    assert interop.TensorDictReplayBuffer(storage=interop.LazyTensorStorage(8)).query(traj.length > 1) == []
    assert list(iter_trajectories(TensorDict({}, [0]))) == []


def test_a_trajectory_gives_its_rows():
    part = buffer(capacity=40).query(traj.length == 7)[0]
    assert len(part) == part.length == 7
    assert part[2:5].obs.tolist() == part["obs"][2:5].tolist() == part.obs[2:5].tolist()
    assert torch.equal(part.get("score"), part["next", "score"])
    assert part.get("nothing", 3) == 3
    assert part.clone().to("cpu").obs.tolist() == part.obs.tolist()
    assert "length=7" in repr(part)
