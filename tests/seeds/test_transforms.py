"""Transforms: of this library, and functions; on the way out, and on the way in where they are inverted."""

import pytest
import torch
from tensordict import TensorDict

from interop import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    SamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from interop.postprocs import MultiStep
from interop.transforms import (
    CatTensors,
    Compose,
    ExcludeTransform,
    MultiStepTransform,
    RandomCropTensorDict,
    SelectTransform,
    Transform,
)
from tests.seeds.stream import cart_pole

each_storage = pytest.mark.parametrize("storage", [LazyMemmapStorage, LazyTensorStorage, ListStorage])


@each_storage
@pytest.mark.parametrize("buffer", [ReplayBuffer, TensorDictReplayBuffer])
def test_an_inverted_transform_runs_when_writing(buffer, storage):
    rb = buffer(storage=storage(10), batch_size=4)
    data = TensorDict({"a": torch.zeros(10)}, [10])

    def t(data):
        data += 1
        return data

    assert rb.append_transform(t, invert=True) is rb
    rb.extend(data)
    assert (data == 1).all()
    assert rb[:]["a"].tolist() == [1] * 10
    assert rb.sample()["a"].tolist() == [1] * 4
    assert rb[:]["a"].tolist() == [1] * 10  # reading runs the other direction, which does nothing


@each_storage
def test_a_function_runs_when_reading_and_leaves_the_storage_alone(storage):
    rb = ReplayBuffer(storage=storage(10), batch_size=4)
    rb.extend(TensorDict({"a": torch.zeros(10)}, [10]))

    def t(data):
        data["a"] += 1
        return data

    rb.append_transform(t)
    for _ in range(2):
        assert rb[:]["a"].tolist() == [1] * 10
        assert rb[0]["a"] == 1
        assert rb[2:4]["a"].tolist() == [1, 1]
        assert rb[[0, 1]]["a"].tolist() == [1, 1]
        assert rb.sample()["a"].tolist() == [1] * 4


def test_transforms_are_executed_in_order_when_sample_is_called():
    rb = ReplayBuffer(storage=LazyTensorStorage(10), transform=lambda data: data + 1, batch_size=3)
    rb.append_transform(lambda data: data * 10)
    rb.insert_transform(0, lambda data: data - 5)
    rb.extend(torch.zeros(10))
    assert isinstance(rb.transform, Compose) and len(rb.transform) == 3
    assert rb.sample().tolist() == [-40] * 3
    assert rb[0] == -40
    assert rb.storage[0] == 0


def test_a_module_with_an_inverse_runs_both_ways():
    class Scale(torch.nn.Module):
        def forward(self, data):
            return data * 10

        def inv(self, data):
            return data / 10

    rb = ReplayBuffer(storage=LazyTensorStorage(10), transform=Scale())
    rb.extend(torch.full((4,), 20.0))
    assert rb.storage[0:4].tolist() == [2] * 4
    assert rb[:].tolist() == [20] * 4
    rb[1] = torch.tensor(50.0)
    assert rb.storage[1] == 5
    assert rb[1] == 50


class Normed(Transform):
    """Adds the norm of observations when reading, and drops it when writing."""

    def forward(self, tensordict):
        return tensordict.set("obs_norm", tensordict.get("observation").norm(dim=-1))

    def _inv_call(self, tensordict):
        return tensordict.exclude("obs_norm")


def test_a_function_has_no_inverse_and_a_transform_has_one():
    def func(data):
        return data.set("obs_norm", data.get("observation").norm(dim=-1))

    given = TensorDict({"observation": torch.ones(4, 9), "obs_norm": torch.zeros(4)}, [4])
    for transform, stored in ((func, {"observation", "obs_norm"}), (Normed(), {"observation"})):
        rb = ReplayBuffer(storage=LazyTensorStorage(10), transform=transform, batch_size=3)
        rb.extend(given)
        assert set(rb.storage[:].keys()) == stored
        sample = rb.sample()
        assert "obs_norm" in sample.keys()  # noqa: SIM118
        assert sample["obs_norm"].tolist() == [3] * 3


def robot(steps=10):
    """Steps of which the observation is nested, as some datasets have them."""
    random = torch.Generator().manual_seed(0)

    def observation():
        sizes = {"achieved_goal": 2, "desired_goal": 2, "observation": 27}
        return {name: torch.randn(steps, size, generator=random, dtype=torch.float64) for name, size in sizes.items()}

    flags = {name: torch.zeros(steps, 1, dtype=torch.bool) for name in ("done", "terminated", "truncated")}
    return TensorDict(
        {
            "action": torch.randn(steps, 8, generator=random),
            "episode": torch.zeros(steps, dtype=torch.int64),
            "info": {"success": flags["done"].clone()},
            "next": {"observation": observation(), "reward": torch.zeros(steps, 1, dtype=torch.float64), **flags},
            "observation": observation(),
        },
        [steps],
    )


@each_storage
def test_the_observations_of_a_dataset_become_one_vector(storage):
    cat_tensors = CatTensors(
        in_keys=[
            ("observation", "observation"),
            ("observation", "achieved_goal"),
            ("observation", "desired_goal"),
        ],
        out_key="obs",
    )
    cat_next_tensors = CatTensors(
        in_keys=[
            ("next", "observation", "observation"),
            ("next", "observation", "achieved_goal"),
            ("next", "observation", "desired_goal"),
        ],
        out_key=("next", "obs"),
    )
    t = Compose(cat_tensors, cat_next_tensors)

    def func(td):
        td = td.select(
            "action",
            "episode",
            ("next", "done"),
            ("next", "observation"),
            ("next", "reward"),
            ("next", "terminated"),
            ("next", "truncated"),
            "observation",
        )
        return t(td)

    data = robot()
    before, rows = ReplayBuffer(storage=storage(10), transform=func), torch.stack([func(row) for row in data])
    before.extend(data)
    after = ReplayBuffer(storage=storage(10))
    after.extend(rows)
    for found in (before[:], after[:]):
        leaves = {
            "action",
            "episode",
            "obs",
            *(("next", name) for name in ("done", "reward", "terminated", "truncated", "obs")),
        }
        assert set(found.keys(True, True)) - {"index"} == leaves
        assert found["obs"].shape == found["next", "obs"].shape == (10, 31) and found["obs"].dtype == torch.float64
        assert found["observation"].is_empty() and found["next", "observation"].is_empty()
        parts = [data["observation", name] for name in ("achieved_goal", "desired_goal", "observation")]
        assert torch.equal(found["obs"], torch.cat(parts, -1))  # in the order of names


@each_storage
def test_entries_are_filtered_in_or_out(storage):
    names = {
        SelectTransform("action", ("next", "reward")): {"action", ("next", "reward")},
        ExcludeTransform("info", "observation", ("next", "observation")): {
            "action",
            "episode",
            *(("next", name) for name in ("done", "reward", "terminated", "truncated")),
        },
    }
    for transform, kept in names.items():
        rb = ReplayBuffer(storage=storage(10), transform=transform, batch_size=4)
        rb.extend(robot())
        assert set(rb.sample().keys(True, True)) - {"index"} == kept
        assert ("observation", "observation") in rb.storage[0].keys(True)


@each_storage
def test_sub_trajectories_of_trajectories_that_are_items(storage):
    """Each item is a whole trajectory: no entry has to say where one begins or ends."""
    rb = TensorDictReplayBuffer(
        storage=storage(8), sampler=SamplerWithoutReplacement(), transform=RandomCropTensorDict(5), batch_size=8
    )
    places = torch.stack([torch.full((8, 20), 0), torch.arange(20).expand(8, 20)], -1)
    places[..., 0] = torch.arange(8)[:, None]
    rb.extend(TensorDict({"place": places}, [8, 20]))
    starts = set()
    for _ in range(20):
        sample = rb.sample()
        assert sample.shape == (8, 5)
        trajectory, step = sample["place"].unbind(-1)
        assert sorted(trajectory[:, 0].tolist()) == list(range(8)) and (trajectory == trajectory[:, :1]).all()
        assert torch.equal(step, step[:, :1] + torch.arange(5))
        starts |= set(step[:, 0].tolist())
    assert starts == set(range(16))


def test_after_several_steps_at_once_what_follows_is_no_longer_what_comes_next():
    data = next(cart_pole(60))
    inside = ~data["next", "done"][:-1, 0]
    assert torch.equal(data[1:]["observation"][inside], data[:-1]["next", "observation"][inside])
    several = MultiStep(gamma=0.9, n_steps=3)(data)
    assert not torch.equal(several[1:]["observation"][inside], several[:-1]["next", "observation"][inside])
    assert torch.equal(several["next", "original_reward"], data["next", "reward"])
    rb = ReplayBuffer(storage=LazyTensorStorage(100), transform=MultiStepTransform(n_steps=3, gamma=0.9))
    for part in data.split(7):
        rb.extend(part)
    assert len(rb) == 57
    stored = rb[:]
    for key in ("observation", "gamma", "steps_to_next_obs", ("next", "observation"), ("next", "reward")):
        torch.testing.assert_close(stored[key], several[key][:57])
