"""Modules, losses, environments and collectors of torchrl that take a spec: with specs of this library as with its own."""

import itertools
import pickle
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from tensordict import TensorDict, is_tensor_collection
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn

from interop import specs as ours

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("torchrl")
    from torchrl import collectors, envs, modules, objectives
    from torchrl import data as theirs
    from torchrl.data import utils
    from torchrl.envs import utils as env_utils
    from torchrl.envs.gym_like import default_info_dict_reader
    from torchrl.modules.models import model_based
    from torchrl.modules.tensordict_module.actors import DistributionalQValueHook, QValueHook

    from tests.interop.specs.toy_environments import Toy, action_of, as_theirs, rolled_out

pytestmark = pytest.mark.filterwarnings("ignore")
BATCH = 6
FINITE = {"discrete": 4, "one-hot": 4, "multi-one-hot": 5}  # kinds of actions that value networks know, and their width
KEYS = {"discrete": "categorical", "one-hot": "one_hot", "multi-one-hot": "mult_one_hot"}


def data_of(action, width=4):
    """Transitions with an action of a kind."""
    torch.manual_seed(3)
    spec = action_of(theirs, action, (BATCH,))
    after = {
        "observation": torch.randn(BATCH, width),
        "reward": torch.randn(BATCH, 1),
        "done": torch.zeros(BATCH, 1, dtype=torch.bool),
        "terminated": torch.zeros(BATCH, 1, dtype=torch.bool),
    }
    made = {
        "observation": torch.randn(BATCH, width),
        "action": spec.rand(),
        "next": TensorDict(after, batch_size=BATCH),
    }
    return TensorDict(made, batch_size=BATCH)


def observed():
    return data_of("continuous").select("observation")


def with_values(width):
    torch.manual_seed(0)
    return observed().set("action_value", torch.randn(BATCH, width))


def q_actor(spec, width, **more):
    """A value network and the choice of its best action."""
    return modules.SafeSequential(
        linear("observation", "action_value", 4, width), modules.QValueModule(spec=spec, **more)
    )


def linear(in_key, out_key, *sizes):
    return TensorDictModule(nn.Linear(*sizes), in_keys=[in_key], out_keys=[out_key])


def gaussian(spec, **more):
    network = nn.Sequential(nn.Linear(4, 4), modules.NormalParamExtractor())
    return modules.ProbabilisticActor(
        TensorDictModule(network, in_keys=["observation"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        spec=spec,
        distribution_class=modules.TanhNormal,
        distribution_kwargs={"low": -2.0, "high": 2.0},
        return_log_prob=True,
        **more,
    )


def choosing(spec, width=4):
    """An actor of a finite action."""
    kind = modules.OneHotCategorical if isinstance(spec, theirs.OneHot) else torch.distributions.Categorical
    return modules.ProbabilisticActor(
        linear("observation", "logits", 4, width), in_keys=["logits"], spec=spec, distribution_class=kind
    )


class Critic(nn.Module):
    def __init__(self, out=1):
        super().__init__()
        self.network = nn.Linear(6, out)

    def forward(self, observation, action):
        return self.network(torch.cat([observation, action], -1))


def critic(out=1):
    return modules.ValueOperator(Critic(out), in_keys=["observation", "action"])


def losses(loss, action):
    """The values of a loss."""
    torch.manual_seed(5)
    return {key: value for key, value in loss(data_of(action)).items() if key.startswith("loss")}


def decision_transformer(spec):
    class Policy(nn.Module):
        def forward(self, observation, action, returns):
            return observation[..., :2] + action + returns

    policy = TensorDictModule(Policy(), in_keys=["observation", "action", "return_to_go"], out_keys=["action"])
    return modules.DecisionTransformerInferenceWrapper(policy, inference_context=3, spec=spec)


def sequence():
    torch.manual_seed(2)
    made = {"observation": torch.randn(2, 5, 4), "action": torch.randn(2, 5, 2), "return_to_go": torch.randn(2, 5, 1)}
    return TensorDict(made, batch_size=[2, 5])


def two_outputs(lib):
    return lib.Composite(action=lib.Bounded(-1, 1, (2,)), other=lib.Unbounded(1))


def two_out():
    return TensorDictModule(lambda value: (9 * value[..., :2], value[..., :1]), ["observation"], ["action", "other"])


def within(spec, value):
    """What random values have in common: they are in the spec of either library."""
    cast = value.to(spec.dtype)  # the greedy choice of a one-hot action is int64, whatever the dtype of the spec
    assert spec.is_in(cast) and as_theirs(spec).is_in(cast)
    return value.shape, value.dtype


def cases():
    """name -> a function of the library, whose results are compared."""

    def bounded(lib):
        return lib.Bounded(-1, 1, (2,))

    def batched(lib):
        return lib.Bounded(-1, 1, (BATCH, 2))

    def act():
        return linear("observation", "action", 4, 2)

    found = {
        "SafeModule": lambda lib: modules.SafeModule(
            nn.Linear(4, 2), ["observation"], ["action"], spec=bounded(lib), safe=True
        )(observed()),
        "SafeModule, two outputs": lambda lib: modules.SafeModule(
            two_out().module, ["observation"], ["action", "other"], spec=two_outputs(lib), safe=True
        )(observed()),
        "SafeModule, random": lambda lib: within(
            (made := modules.SafeModule(nn.Linear(4, 2), ["observation"], ["action"], spec=bounded(lib))).spec[
                "action"
            ],
            made.random(TensorDict())["action", "action"],
        ),
        "SafeModule, spec": lambda lib: (
            modules.SafeModule(nn.Linear(4, 2), ["observation"], ["action"], spec=bounded(lib)).spec
        ),
        "SafeModule, wrong spec": lambda lib: modules.SafeModule(
            nn.Linear(4, 2), ["observation"], ["action"], spec=lib.Composite(other=bounded(lib)), safe=True
        ),
        "SafeProbabilisticModule": lambda lib: (
            modules.SafeProbabilisticModule(
                in_keys=["loc"],
                out_keys=["action"],
                spec=bounded(lib),
                safe=True,
                distribution_class=modules.Delta,
                distribution_kwargs={},
            ).spec
        ),
        "SafeSequential": lambda lib: modules.SafeSequential(
            modules.SafeModule(nn.Linear(4, 3), ["observation"], ["hidden"], spec=None),
            modules.SafeModule(nn.Linear(3, 2), ["hidden"], ["action"], spec=bounded(lib), safe=True),
        )(observed()),
        "Actor": lambda lib: modules.Actor(nn.Linear(4, 2), in_keys=["observation"], spec=bounded(lib), safe=True)(
            observed()
        ),
        "Actor, Composite": lambda lib: (
            modules.Actor(nn.Linear(4, 2), in_keys=["observation"], spec=lib.Composite(action=bounded(lib))).spec
        ),
        "ProbabilisticActor": lambda lib: gaussian(bounded(lib))(observed()),
        "ProbabilisticActor, safe": lambda lib: gaussian(lib.Bounded(-0.1, 0.1, (2,)), safe=True)(observed()),
        "ProbabilisticActor, Composite": lambda lib: gaussian(lib.Composite(action=bounded(lib))).spec,
        "TanhModule": lambda lib: modules.TanhModule(in_keys=["action"], spec=bounded(lib), clamp=True)(
            act()(observed())
        ),
        "TanhModule, Composite": lambda lib: modules.TanhModule(
            in_keys=["action"], spec=lib.Composite(action=lib.Bounded(0, 3, (2,)))
        )(act()(observed())),
        "TanhModule, bounds": lambda lib: modules.TanhModule(in_keys=["action"], spec=bounded(lib), low=-2.0),
        "DecisionTransformerInferenceWrapper": lambda lib: decision_transformer(bounded(lib))(sequence()),
        "DiffusionActor": lambda lib: modules.DiffusionActor(2, obs_dim=4, num_steps=3, spec=bounded(lib))(observed()),
        "RSSMPrior": lambda lib: model_based.RSSMPrior(bounded(lib), 8, 8, 4)(
            torch.randn(BATCH, 4), torch.randn(BATCH, 8), torch.randn(BATCH, 2)
        ),
        "RSSMPriorV3": lambda lib: model_based.RSSMPriorV3(bounded(lib), 8, 8, 4, 4)(
            torch.randn(BATCH, 16), torch.randn(BATCH, 8), torch.randn(BATCH, 2)
        )[:1],
        "RandomPolicy": lambda lib: within(batched(lib), modules.RandomPolicy(batched(lib))(observed())["action"]),
        "RandomPolicy, Composite": lambda lib: within(
            batched(lib),
            modules.RandomPolicy(lib.Composite(action=batched(lib), shape=(BATCH,)))(observed())["action"],
        ),
        "AdditiveGaussianModule": lambda lib: TensorDictSequential(
            act(), modules.AdditiveGaussianModule(bounded(lib), sigma_init=0.3)
        )(observed()),
        "AdditiveGaussianModule, Composite": lambda lib: TensorDictSequential(
            act(), modules.AdditiveGaussianModule(lib.Composite(action=bounded(lib)), sigma_init=0.3)
        )(observed()),
        "AdditiveGaussianModule, spec": lambda lib: modules.AdditiveGaussianModule(bounded(lib)).spec,
        "OrnsteinUhlenbeckProcessModule": lambda lib: TensorDictSequential(
            act(), modules.OrnsteinUhlenbeckProcessModule(bounded(lib))
        )(observed().set("is_init", torch.ones(BATCH, 1, dtype=torch.bool))),
        "OrnsteinUhlenbeckProcessModule, spec": lambda lib: modules.OrnsteinUhlenbeckProcessModule(bounded(lib)).spec,
        "TD3Loss": lambda lib: losses(
            objectives.TD3Loss(act(), critic(), action_spec=lib.Bounded(-2, 2, (2,))), "continuous"
        ),
        "TD3Loss, Composite": lambda lib: losses(
            objectives.TD3Loss(act(), critic(), action_spec=lib.Composite(action=bounded(lib))), "continuous"
        ),
        "TD3Loss, unbounded": lambda lib: objectives.TD3Loss(act(), critic(), action_spec=lib.Unbounded(2)),
        "TD3BCLoss": lambda lib: losses(objectives.TD3BCLoss(act(), critic(), action_spec=bounded(lib)), "continuous"),
        "SACLoss": lambda lib: losses(
            objectives.SACLoss(gaussian(bounded(lib)), critic(), action_spec=bounded(lib)), "continuous"
        ),
        "SACLoss, of the actor": lambda lib: losses(objectives.SACLoss(gaussian(bounded(lib)), critic()), "continuous"),
        "SACLoss, entropy": lambda lib: (
            objectives.SACLoss(
                gaussian(None),
                critic(),
                action_spec=lib.Composite(action=lib.Composite(a=bounded(lib), b=lib.OneHot(3))),
            ).target_entropy
        ),
        "REDQLoss": lambda lib: losses(
            objectives.REDQLoss(gaussian(bounded(lib)), critic(), action_spec=bounded(lib), num_qvalue_nets=3),
            "continuous",
        ),
        "CQLLoss": lambda lib: losses(
            objectives.CQLLoss(gaussian(bounded(lib)), critic(), action_spec=bounded(lib)), "continuous"
        ),
        "CrossQLoss": lambda lib: losses(
            objectives.CrossQLoss(gaussian(bounded(lib)), critic(), action_spec=bounded(lib)), "continuous"
        ),
        "TQCLoss": lambda lib: losses(
            objectives.TQCLoss(gaussian(bounded(lib)), critic(5), action_spec=bounded(lib)), "continuous"
        ),
        "DQNLoss, wrong spec": lambda lib: objectives.DQNLoss(
            linear("observation", "action_value", 4, 4), action_space=bounded(lib)
        ),
        "QValueModule, two specs": lambda lib: modules.QValueModule(action_space=lib.OneHot(4), spec=lib.OneHot(4)),
        "QValueModule, wrong space": lambda lib: modules.QValueModule(action_space="categorical", spec=lib.OneHot(4)),
        "QValueModule, Composite": lambda lib: modules.QValueModule(spec=lib.Composite(action=lib.OneHot(4)))(
            with_values(4)
        ),
        "QValueModule, nested": lambda lib: modules.QValueModule(
            spec=lib.Composite(agents=lib.Composite(action=lib.Categorical(4))),
            out_keys=[("agents", "action"), "action_value", "chosen_action_value"],
        )(with_values(4)),
        "contains_lazy_spec": lambda lib: [
            utils.contains_lazy_spec(spec)
            for spec in (lib.OneHot(3), uneven(lib), lib.Composite(a=uneven(lib), shape=(2,)))
        ],
        "check_no_exclusive_keys": lambda lib: [
            utils.check_no_exclusive_keys(spec) for spec in (uneven(lib), lib.Composite(a=uneven(lib), shape=(2,)))
        ],
        "consolidate_spec": lambda lib: utils.consolidate_spec(lib.Composite(a=uneven(lib), shape=(2,))).keys(True),
        "terminated_or_truncated": lambda lib: env_utils.terminated_or_truncated(
            TensorDict({"done": torch.ones(1, dtype=torch.bool), "terminated": torch.ones(1, dtype=torch.bool)}),
            lib.Composite(done=flag(lib), terminated=flag(lib)),
        ),
        "default_info_dict_reader": lambda lib: read_info(default_info_dict_reader(["x"], spec=[lib.Unbounded(2)])),
        "default_info_dict_reader, dict": lambda lib: read_info(
            default_info_dict_reader(["x"], spec={"x": lib.Unbounded(2)})
        ),
        "default_info_dict_reader, Composite": lambda lib: read_info(
            default_info_dict_reader(["x"], spec=lib.Composite(x=lib.Unbounded(2), shape=[]))
        ),
        "torch.stack of both": lambda lib: torch.stack([theirs.OneHot(3), lib.OneHot(3)], 0).shape,
        "Composite": lambda lib: everything(lib),
    }
    for action, width in FINITE.items():
        found |= finite_cases(action, width)
    return found


def finite_cases(action, width):
    """The cases of a kind of finite actions; `width` is the number of values that a network computes."""

    def spec(lib):
        return action_of(lib, action)

    more = {"var_nums": [2, 3]} if action == "multi-one-hot" else {}
    support = torch.linspace(-1, 1, 3)
    found = {
        f"_find_action_space, {action}": lambda lib: utils._find_action_space(spec(lib)),
        f"QValueModule, {action}": lambda lib: modules.QValueModule(spec=spec(lib), **more)(with_values(width)),
        f"QValueModule, space, {action}": lambda lib: modules.QValueModule(action_space=spec(lib), **more)(
            with_values(width)
        ),
        f"QValueModule, safe, {action}": lambda lib: modules.QValueModule(spec=spec(lib), safe=True, **more)(
            with_values(width)
        ),
        f"QValueHook, {action}": lambda lib: QValueHook(spec(lib), **more)(
            None, None, torch.arange(2.0 * width).reshape(2, width)
        ),
        f"DQNLoss, {action}": lambda lib: losses(
            objectives.DQNLoss(q_actor(spec(lib), width, **more), action_space=spec(lib)), action
        ),
        f"DiscreteCQLLoss, {action}": lambda lib: losses(
            objectives.DiscreteCQLLoss(q_actor(spec(lib), width, **more), action_space=spec(lib)), action
        ),
        f"EGreedyModule, {action}": lambda lib: within(
            action_of(lib, action, (BATCH,)),
            TensorDictSequential(
                q_actor(spec(lib), width, **more),
                modules.EGreedyModule(spec(lib), eps_init=0.5),
            )(observed())["action"],
        ),
    }
    if action == "multi-one-hot":
        return found
    found |= {
        f"QValueActor, {action}": lambda lib: modules.QValueActor(
            nn.Linear(4, width), in_keys=["observation"], spec=spec(lib)
        )(observed()),
        f"DQNLoss, of the actor, {action}": lambda lib: losses(
            objectives.DQNLoss(modules.QValueActor(nn.Linear(4, width), in_keys=["observation"], spec=spec(lib))),
            action,
        ),
        f"DistributionalDQNLoss, {action}": lambda lib: losses(
            objectives.DistributionalDQNLoss(
                modules.DistributionalQValueActor(
                    nn.Sequential(nn.Linear(4, 12), nn.Unflatten(-1, (3, 4)), nn.LogSoftmax(-2)),
                    in_keys=["observation"],
                    spec=spec(lib),
                    support=support,
                ),
                gamma=0.9,
                delay_value=False,
            ),
            action,
        ),
        f"DistributionalQValueModule, {action}": lambda lib: modules.DistributionalQValueModule(
            None, support, spec=spec(lib)
        )(observed().set("action_value", torch.randn(BATCH, 3, 4).log_softmax(-2))),
        f"DistributionalQValueActor, {action}": lambda lib: modules.DistributionalQValueActor(
            nn.Sequential(nn.Linear(4, 12), nn.Unflatten(-1, (3, 4)), nn.LogSoftmax(-2)),
            in_keys=["observation"],
            spec=spec(lib),
            support=support,
        )(observed()),
        f"DistributionalQValueHook, {action}": lambda lib: DistributionalQValueHook(spec(lib), support)(
            None, None, torch.randn(2, 3, 4).log_softmax(-2)
        ),
        f"DiscreteSACLoss, {action}": lambda lib: losses(
            objectives.DiscreteSACLoss(
                choosing(spec(lib)), linear("observation", "action_value", 4, 4), action_space=spec(lib), num_actions=4
            ),
            action,
        ),
        f"DiscreteIQLLoss, {action}": lambda lib: losses(
            objectives.DiscreteIQLLoss(
                choosing(spec(lib)),
                linear("observation", "state_action_value", 4, 4),
                linear("observation", "state_value", 4, 1),
                action_space=spec(lib),
            ),
            action,
        ),
        f"QMixerLoss, {action}": lambda lib: mixed(spec(lib), action),
    }
    return found


def uneven(lib):
    """A lazy stack whose members differ in their keys."""
    return torch.stack([lib.Composite(a=lib.OneHot(3), b=lib.Unbounded(2)), lib.Composite(a=lib.OneHot(3))], 0)


def flag(lib):
    return lib.Categorical(2, (1,), dtype=torch.bool)


def read_info(reader):
    return reader({"x": np.array([1.0, 2.0], np.float32), "y": 3}, TensorDict()), reader.info_spec


def everything(lib):
    """A Composite of torchrl that holds specs of the library, through the methods of Composite."""
    inner = lib.Composite(b=lib.Bounded(-1, 1, (3, 2)), c=lib.OneHot(4, (3, 4)), d=None, shape=(3,))
    made = theirs.Composite(a=lib.Categorical(3, (3,)), inner=inner, text=lib.NonTensor((3,)), shape=(3,))
    made["more"] = lib.MultiCategorical([2, 3], (3, 2))
    locked = made.clone().lock_()
    for change in (lambda: locked.set("x", lib.OneHot(4)), lambda: locked["inner"].set("x", None)):
        with pytest.raises(RuntimeError, match="locked"):
            change()
    with pytest.raises(RuntimeError, match="locked graph"):
        locked["inner"].unlock_()
    locked.unlock_()
    locked["inner"]["new"] = lib.Unbounded((3, 2))
    made.pop(("inner", "d"))
    return [
        made, locked, list(made.keys(True, True)), made.expand(2, 3), made[0], made.unsqueeze(0), made.clone(),
        made.zero(), made.is_in(made.rand()), made.to(torch.float64)["inner", "b"],
        made.unbind(0)[1], torch.stack([made, made.clone()], 0), made == made.clone(), made.empty(), made.device,
        made.to("cpu").device, made.clear_device_().device, made.project(made.rand()).batch_size,
        lib.Composite(made, shape=(3,)), lib.Composite(shape=(3,)).update(made), pickle.loads(pickle.dumps(made)),
    ]  # fmt: skip


def mixed(spec, action):
    torch.manual_seed(0)
    local = TensorDictModule(nn.Linear(4, 4), [("agents", "observation")], [("agents", "action_value")])
    value = modules.QValueModule(
        spec=spec,
        action_value_key=("agents", "action_value"),
        out_keys=[("agents", "action"), ("agents", "action_value"), ("agents", "chosen_action_value")],
    )
    mixer = TensorDictModule(
        modules.VDNMixer(n_agents=2, device="cpu"), [("agents", "chosen_action_value")], ["chosen_action_value"]
    )
    loss = objectives.QMixerLoss(modules.SafeSequential(local, value), mixer, action_space=spec)
    loss.set_keys(
        action_value=("agents", "action_value"), local_value=("agents", "chosen_action_value"),
        global_value="chosen_action_value", action=("agents", "action"),
    )  # fmt: skip
    data = TensorDict(
        {
            "agents": {"observation": torch.randn(3, 2, 4), "action": action_of(theirs, action, (3, 2)).rand()},
            "next": {
                "agents": {"observation": torch.randn(3, 2, 4)},
                "reward": torch.randn(3, 1),
                "done": torch.zeros(3, 1, dtype=torch.bool),
                "terminated": torch.zeros(3, 1, dtype=torch.bool),
            },
        },
        batch_size=[3],
    )
    return loss(data).select("loss")


LAYOUTS = {
    "one": lambda lib, **about: Toy(lib, **about),
    "batch": lambda lib, **about: Toy(lib, batch_size=(3,), **about),
    "two in turn": lambda lib, **about: envs.SerialEnv(2, lambda: Toy(lib, **about)),
    "two of batches": lambda lib, **about: envs.SerialEnv(2, lambda: Toy(lib, batch_size=(3,), **about)),
    "different": lambda lib, **about: envs.SerialEnv(
        2, [lambda: Differing(lib, 2, **about), lambda: Differing(lib, 3, **about)]
    ),
    "pickled": lambda lib, **about: pickle.loads(pickle.dumps(Picklable(lib is ours, **about))),
}
ACTIONS = ["continuous", "discrete", "one-hot", "multi-discrete", "multi-one-hot", "bits", "dict"]


class Differing(Toy):
    """An observation with bounds of its own: stacks of the specs are lazy."""

    def __init__(self, library, high, **about):
        super().__init__(library, **about)
        self.high = high
        spec = self.observation_spec.clone()
        spec["own"] = library.Bounded(0.0, high, (2,))
        self.observation_spec = spec

    def observed(self):
        return super().observed() | {"own": torch.full((2,), float(self.count % self.high))}


class Picklable(Toy):
    """A toy that names its library by a flag: modules cannot be pickled."""

    def __init__(self, is_ours, **about):
        super().__init__(ours if is_ours else theirs, **about)


def of_environment(lib, layout, action):
    """What an environment tells about its specs, and what it does by them."""
    env = LAYOUTS[layout](lib, action=action)
    found = {
        "specs": [env.input_spec, env.output_spec, env.action_spec, env.reward_spec, env.done_spec, env.state_spec],
        "observation": env.observation_spec,
        "keys": [env.action_keys, env.reward_keys, env.done_keys, sorted(map(str, env.observation_keys))],
        "fake": [sorted(map(str, env.fake_tensordict().keys(True, True))), env.fake_tensordict().batch_size],
        "dynamic": env._has_dynamic_specs,
    }
    assert as_theirs(env.full_action_spec).is_in(env.rand_action(TensorDict(batch_size=env.batch_size)))
    env_utils.check_env_specs(env)
    found["rollout"] = rolled_out(env)
    found["unbatched"] = [env.action_spec_unbatched, env.observation_spec_unbatched]
    if layout == "one" and action == "discrete":
        found["all"] = [env.full_action_spec.cardinality(), env.all_actions()]
    if layout == "one":
        locked = env.is_spec_locked
        env.set_spec_lock_(False)
        env.observation_spec = lib.Composite(env.observation_spec, shape=env.batch_size).clone()
        env.set_spec_lock_(locked)
        wide = env.to("cpu")
        found["moved"] = [wide.observation_spec, wide.action_spec, wide.device]
        found["specs of the action"] = [env.full_action_spec_unbatched, env.specs]
    return found


PAIRS = [(layout, action) for layout in LAYOUTS for action in (ACTIONS if layout == "one" else ["one-hot", "dict"])]


@pytest.mark.parametrize(("layout", "action"), PAIRS)
def test_environments_are_as_with_torchrls_own_specs(layout, action):
    own, made = (plain(of_environment(library, layout, action)) for library in (theirs, ours))
    assert own.keys() == made.keys()
    for key in own:
        assert same(own[key], made[key]), (key, own[key], made[key])


def collected(lib, **about):
    """A batch of a collector with a policy whose actions follow from the step."""
    policy = TensorDictModule(lambda kind: torch.nn.functional.one_hot(kind % 4, 4).bool(), ["kind"], ["action"])
    env = envs.TransformedEnv(Toy(lib, action="one-hot"), envs.Compose(envs.StepCounter(), envs.RewardSum()))
    made = collectors.Collector(env, policy, frames_per_batch=25, total_frames=50, **about)
    try:
        return [each.clone() for each in made]
    finally:
        made.shutdown()


def test_collectors_give_the_same_batches():
    own, made = collected(theirs), collected(ours)
    assert len(own) == len(made) == 2 and all(map(same, own, made))


def test_collectors_draw_random_actions_of_the_spec():
    env = Toy(ours, action="one-hot")
    collector = collectors.Collector(env, None, frames_per_batch=20, total_frames=20)
    (batch,) = collector
    collector.shutdown()
    assert ours.OneHot(4).is_in(batch["action"]) and batch["action"].any(0).all()


def make_picklable():
    return Picklable(True, action="one-hot")


@pytest.mark.parametrize(
    "make",
    [
        lambda lib: modules.QValueModule(spec=lib.OneHot(4)),
        lambda lib: q_actor(lib.Categorical(2), 2),
        lambda lib: modules.SafeModule(
            nn.Linear(4, 2), ["action_value"], ["action"], spec=lib.Bounded(-0.1, 0.1, (2,)), safe=True
        ),
        lambda lib: modules.AdditiveGaussianModule(lib.Bounded(-0.1, 0.1, (2,)), sigma_init=3.0),
    ],
    ids=["QValueModule", "QValueActor", "SafeModule", "AdditiveGaussianModule"],
)
def test_modules_compile_as_one_graph(make):
    results = []
    for library in (theirs, ours):
        torch.compiler.reset()
        torch.manual_seed(0)
        module = torch.compile(make(library), backend="eager", fullgraph=True)
        data = with_values(4).update({"observation": torch.ones(BATCH, 4), "action": torch.zeros(BATCH, 2)})
        results.append(module(data))
    assert same(*results)


@pytest.mark.slow
def test_environments_in_other_processes():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        env = envs.ParallelEnv(2, make_picklable, mp_start_method="spawn")
        try:
            env_utils.check_env_specs(env)
            rows = rolled_out(env)
        finally:
            env.close()
    assert same(rows, rolled_out(envs.SerialEnv(2, make_picklable)))


def test_the_order_of_imports_does_not_matter():
    for first, second in itertools.permutations(["from interop import specs", "import torchrl.data"]):
        code = f"""
{first}
from interop import specs
spec, box = specs.Composite(a=specs.Bounded(-1, 1, (2,))), specs.Bounded(-1, 1, (2,)).space
{second}
import torchrl.data as theirs
from torchrl.data.tensor_specs import ContinuousBox
assert isinstance(spec, theirs.Composite) and not isinstance(spec, theirs.OneHot)
assert isinstance(spec["a"], theirs.BoundedContinuous) and issubclass(specs.OneHot, theirs.OneHot)
assert isinstance(box, ContinuousBox)
from torchrl.data.utils import _find_action_space
assert _find_action_space(specs.OneHot(4)) == "one_hot"
"""
        subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


def plain(result):
    """A result as something that can be compared: specs as torchrl's."""
    if isinstance(result, theirs.TensorSpec):
        return as_theirs(result)
    if isinstance(result, dict):
        return {key: plain(value) for key, value in result.items()}
    if isinstance(result, Tensor | str | int | float | None) or is_tensor_collection(result):
        return result
    return [plain(each) for each in result] if hasattr(result, "__iter__") else type(result)


def same(one, other):
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if is_tensor_collection(one):
        keys = set(one.keys(True, True))
        return keys == set(other.keys(True, True)) and all(same(one.get(key), other.get(key)) for key in keys)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


CASES = cases()
REFUSED = {  # torchrl refuses its own specs, too
    "DQNLoss, wrong spec",
    "QValueModule, two specs",
    "QValueModule, wrong space",
    "SafeModule, wrong spec",
    "TD3Loss, unbounded",
    "TanhModule, bounds",
    "DiscreteIQLLoss, one-hot",
    *(f"QValueModule, space, {action}" for action in FINITE),
    *(f"QValueHook, {action}" for action in FINITE),
    *(f"DistributionalQValueHook, {action}" for action in ("discrete", "one-hot")),
}


def outcome(name, library):
    torch.manual_seed(0)
    try:
        return plain(CASES[name](library))
    except Exception as error:
        if name not in REFUSED:
            raise
        return type(error)


@pytest.mark.parametrize("name", CASES)
def test_results_are_as_with_torchrls_own_specs(name):
    own, made = outcome(name, theirs), outcome(name, ours)
    assert (name in REFUSED) == (isinstance(own, type) and issubclass(own, Exception))
    assert same(own, made), (own, made)
