"""Transforms of this library in environments and buffers of TorchRL, where TorchRL is: what its own do there."""

import copy
import pickle
import warnings

import pytest
import torch
from tensordict import TensorDict

from interop import LazyTensorStorage, ReplayBuffer, SliceSampler, TensorDictReplayBuffer, specs
from interop import transforms as ours
from interop.transforms import Compose, Transform, as_torchrl
from tests.interop.transforms.every_transform import CASES, ITEMS, same

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("torchrl")
    from torchrl import data as other
    from torchrl.collectors import Collector
    from torchrl.envs import GymEnv, TransformedEnv, check_env_specs
    from torchrl.envs import transforms as theirs

pytestmark = pytest.mark.filterwarnings("ignore")


def env_of(*transforms, name="Pendulum-v1"):
    env = GymEnv(name)
    for transform in transforms:
        env = TransformedEnv(env, transform, auto_unwrap=True)
    return env


def seeded(env, steps=4):
    env.set_seed(0)
    torch.manual_seed(0)
    return env.rollout(steps, break_when_any_done=False)


def bounds(spec):
    return spec.space.low.flatten()[0].item(), spec.space.high.flatten()[0].item()


class Affine(Transform):
    """Entries times `by` plus `to`, in both directions."""

    invertible = True

    def __init__(self, by=3.0, to=0.5, keys=(), inverse_keys=()):
        super().__init__(list(keys), list(keys), list(inverse_keys), list(inverse_keys))
        self.register_buffer("by", torch.tensor(by))
        self.to_ = to

    def _apply_transform(self, obs):
        return obs * self.by + self.to_

    def _inv_apply_transform(self, state):
        return (state - self.to_) / self.by


OBS, ACTION = ["observation"], ["action"]
CAST = (torch.float32, torch.float64, ["observation", "reward"])
PAIRS = [
    [("RewardScaling", (1.0, 2.0), {})],
    [("RewardClipping", (-0.5, 0.0), {})],
    [("DTypeCastTransform", CAST, {"in_keys_inv": ACTION})],
    [("ObservationNorm", (0.5, 2.0, OBS), {})],
    [("CatTensors", (OBS, "vector"), {})],
    [("CatTensors", (OBS, "vector"), {"del_keys": False})],
    [("UnsqueezeTransform", (-1,), {"in_keys": OBS, "in_keys_inv": ACTION})],
    [("SqueezeTransform", (-1,), {"in_keys": ["reward"]})],
    [("FlattenObservation", (-1, -1, OBS), {})],
    [("RenameTransform", (OBS, ["seen"], ACTION, ["chosen"]), {})],
    [("RenameTransform", (["reward"], ["gain"]), {})],
    [("SignTransform", (["reward"],), {})],
    [("ClipTransform", (OBS,), {"low": -0.5, "high": 0.5})],
    [("BinarizeReward", (), {})],
    [
        ("RewardScaling", (1.0, 2.0), {}),
        ("RewardClipping", (-0.5, 0.0), {}),
        ("UnsqueezeTransform", (-1,), {"in_keys": OBS}),
        ("RenameTransform", (OBS, ["seen"]), {}),
    ],
]
ACTIONS = {
    "DTypeCastTransform": specs.Bounded(-2, 2, (1,), dtype=torch.float64),
    "UnsqueezeTransform": specs.Bounded(-2, 2, (1, 1)),
}


@pytest.mark.parametrize("rows", PAIRS, ids=str)
def test_rollouts_and_specs_are_those_that_theirs_give(rows):
    def make(library):
        return library.Compose(*(getattr(library, name)(*args, **kwargs) for name, args, kwargs in rows))

    name = rows[0][0]
    said = {"action": ACTIONS[name]} if name in ACTIONS and len(rows) == 1 else None
    check_env_specs(env_of(as_torchrl(make(ours))))
    there, here = env_of(make(theirs)), env_of(as_torchrl(make(ours), specs=said))
    check_env_specs(here)
    same(seeded(here), seeded(there))
    for part in ("observation_spec", "full_reward_spec", "full_action_spec", "full_done_spec"):
        mine, their = getattr(here, part), getattr(there, part)
        assert set(mine.keys(True, True)) == set(their.keys(True, True))
        for key in mine.keys(True, True):
            assert (mine[key].shape, mine[key].dtype) == (their[key].shape, their[key].dtype), key
            assert mine[key].is_in(their[key].zero()) or type(mine[key]) is not type(their[key])


def test_bounds_of_changed_entries_are_said_or_none():
    def made(**given):
        env = env_of(as_torchrl(Affine(-2.0, 1.0, keys=["observation"], inverse_keys=["action"]), specs=given))
        check_env_specs(env)
        return env

    free = made()
    assert free.observation_spec["observation"] == other.Unbounded((3,)) and free.action_spec == other.Unbounded((1,))
    high = torch.tensor([3.0, 3.0, 17.0])
    said = made(observation=specs.Bounded(2 - high, high), action=other.Bounded(-3, 5, (1,)))
    assert said.observation_spec["observation"] == other.Bounded(2 - high, high)
    given = said.rollout(20)["action"]
    assert bounds(said.action_spec) == (-3, 5) and (given.min() < -2 or given.max() > 2)


def test_images_agents_and_what_is_no_tensor():
    spec = other.Composite(
        full_observation_spec=other.Composite(
            pixels=other.Bounded(0, 255, (16, 16, 3), dtype=torch.uint8),
            agents=other.Composite(
                observation=other.Bounded(-1, 1, (2, 3)), name=other.NonTensor(shape=(2,)), shape=(2,)
            ),
        ),
        full_reward_spec=other.Composite(agents=other.Composite(reward=other.Bounded(0, 1, (2, 1)), shape=(2,))),
        full_done_spec=other.Composite(done=other.Categorical(2, (1,), dtype=torch.bool)),
    )
    chain = Compose(
        ours.ToTensorImage(),
        ours.Resize(8),
        ours.RenameTransform([("agents", "observation")], [("agents", "seen")]),
        ours.RewardScaling(1.0, 2.0, in_keys=[("agents", "reward")], out_keys=["gain"]),
        ours.UnsqueezeTransform(-1, in_keys=["done"]),
        ours.FiniteTensorDictCheck(),
    )
    found = as_torchrl(chain).transform_output_spec(spec)
    pixels, seen = found["full_observation_spec", "pixels"], found["full_observation_spec", "agents", "seen"]
    assert pixels == other.Unbounded((3, 8, 8), dtype=torch.float32)
    assert seen == spec["full_observation_spec", "agents", "observation"]
    assert found["full_observation_spec", "agents", "name"] == spec["full_observation_spec", "agents", "name"]
    assert found["full_reward_spec", "gain"] == other.Unbounded((2, 1))
    assert found["full_reward_spec", "agents", "reward"] == spec["full_reward_spec", "agents", "reward"]
    done = found["full_done_spec", "done"]
    assert done == other.Categorical(2, (1, 1), dtype=torch.bool)
    assert list(spec["full_observation_spec"].keys()) == ["pixels", "agents"]


@pytest.mark.parametrize("keys", [["observation"], ["observation", "reward"]], ids=len)
def test_running_statistics_are_of_the_steps(keys):
    there, here = env_of(theirs.VecNorm(in_keys=keys)), env_of(as_torchrl(ours.VecNorm(in_keys=keys)))
    assert here.observation_spec["observation"] == other.Unbounded((3,))
    left, right = seeded(here, 10), seeded(there, 10)
    for key in ("observation", ("next", "observation"), ("next", "reward")):
        torch.testing.assert_close(left[key], right[key], rtol=1e-2, atol=1e-3)
    check_env_specs(here)
    here.transform.transform.freeze()
    mean = here.transform.transform.loc["observation"].clone()
    seeded(here, 3)
    assert torch.equal(here.transform.transform.loc["observation"], mean)


def test_what_environments_cannot_have_is_refused():
    class Keeps(Affine):
        keeps = True

    for broken, error, says in (
        (Keeps(keys=["observation"]), ValueError, "works in buffers only"),
        (lambda data: data.unsqueeze(0), ValueError, "batch size"),
        (lambda data: None, ValueError, "batch size"),
        (Affine(keys=["observatoin"]), KeyError, "observatoin"),
        (ours.RandomCropTensorDict(2), RuntimeError, "batch"),
    ):
        with pytest.raises(error, match=says):
            assert env_of(as_torchrl(broken)).output_spec
    with pytest.raises(RuntimeError, match="callable"):
        as_torchrl(3)


def test_it_shares_the_transform():
    transform = Affine(keys=["reward"])
    env = env_of(as_torchrl(transform))
    low = env.rollout(1)["next", "reward"]
    transform.by.fill_(0.0)
    assert env.rollout(1)["next", "reward"].item() == 0.5 != low.item()
    assert list(env.state_dict()) == ["transform.by"]
    assert env.transform.in_keys == ["reward"] and not transform.training
    assert as_torchrl(env.transform) is env.transform
    assert "Affine(keys=['reward'])" in repr(env)


def test_chains_become_theirs():
    chain = as_torchrl(Compose(Affine(keys=["reward"]), theirs.StepCounter(), lambda data: data))
    assert type(chain) is theirs.Compose and len(chain) == 3 and type(chain[1]) is theirs.StepCounter
    env = env_of(chain, as_torchrl(Affine(keys=["observation"])))
    env.append_transform(as_torchrl(lambda data: data.set("twice", data["step_count"] * 2)))
    check_env_specs(env)
    assert env.rollout(3)["next", "twice"].flatten().tolist() == [2, 4, 6]
    assert len(env.transform) == 5 and env.transform[3].parent.transform[0].in_keys == ["reward"]


def test_it_is_copied_and_pickled():
    made = as_torchrl(Affine(5.0, keys=["reward"]), specs={"reward": other.Unbounded((1,))})
    for twin in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert type(twin) is type(made) and isinstance(twin, theirs.Transform)
        assert twin.transform is not made.transform and twin.transform.by == 5 and list(twin.specs) == ["reward"]
    clone = made.clone()
    assert clone is not made and clone.transform is made.transform
    env = env_of(made)
    check_env_specs(copy.deepcopy(env))
    assert made.container is env and clone.container is None


@pytest.mark.parametrize("handed", [False, True], ids=["batches", "buffer"])
def test_a_collector_of_theirs_fills_our_buffer(handed):
    scaling = ours.RewardScaling(0.0, 0.5)
    env = env_of(as_torchrl(Compose(scaling, ours.RenameTransform(["observation"], ["seen"]))), name="CartPole-v1")
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(200),
        sampler=SliceSampler(slice_len=4, traj_key=("collector", "traj_ids")),
        transform=ours.RewardScaling(0.0, 4.0, in_keys=[("next", "reward")]),
        batch_size=16,
    )
    collector = Collector(env, None, frames_per_batch=50, total_frames=150, **({"replay_buffer": rb} if handed else {}))
    for batch in collector:
        if not handed:
            assert (batch["next", "reward"] == 0.5).all()
            rb.extend(batch)
    collector.shutdown()
    assert len(rb) == 150 and (rb.storage[:]["next", "reward"] == 0.5).all()
    sample = rb.sample().reshape(-1, 4)
    assert (sample["next", "reward"] == 2).all()
    assert torch.equal(sample["seen"][:, 1:], sample["next", "seen"][:, :-1])
    assert (sample["collector", "traj_ids"] == sample["collector", "traj_ids"][:, :1]).all()


@pytest.mark.parametrize("splits", [[6], [1, 5], [2, 2, 2]], ids=repr)
def test_their_buffers_take_what_keeps_something_for_the_next_write(splits):
    never = torch.zeros(6, 1, dtype=torch.bool)
    flags = {"done": never, "terminated": never, "truncated": never}
    data = TensorDict(
        {"a": torch.arange(6), "next": {"a": torch.arange(6) + 1, "reward": torch.ones(6, 1), **flags}}, [6]
    )
    for transform in (as_torchrl(ours.MultiStepTransform(3, 0.5)), theirs.MultiStepTransform(3, 0.5)):
        rb = other.ReplayBuffer(storage=other.LazyTensorStorage(10), transform=transform)
        for part in data.split(splits):
            rb.extend(part)
        assert rb[:]["a"].tolist() == [0, 1, 2] and rb[:]["next", "a"].tolist() == [3, 4, 5]
        assert rb[:]["next", "reward"].flatten().tolist() == [1.75] * 3


@pytest.mark.parametrize(
    "case",
    [case for case in CASES.values() if not case.waits],
    ids=[name for name, case in CASES.items() if not case.waits],
)
def test_each_does_in_their_buffer_what_it_does_in_ours(case):
    found = []
    for buffer, storage, dress in (
        (other.ReplayBuffer, other.LazyTensorStorage, as_torchrl),
        (ReplayBuffer, LazyTensorStorage, lambda transform: transform),
    ):
        torch.manual_seed(0)
        rb = buffer(storage=storage(2 * ITEMS), transform=dress(case.make()))
        rb.extend(case.data())
        torch.manual_seed(0)
        found.append(rb[:].exclude("index"))
    same(*found)
