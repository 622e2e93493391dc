"""Transforms of one tensordict beside those of an installed torchrl: the same data and keys, or an error in both."""

import itertools
import warnings

import pytest
import torch
from tensordict import TensorDict

from interop import transforms as ours

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("torchrl", reason="torchrl is not installed")
    from torchrl.envs import transforms as theirs
    from torchrl.envs.transforms.transforms import FlattenTensorDict
    from torchrl.modules import GRUModule

    theirs.FlattenTensorDict = FlattenTensorDict

pytestmark = pytest.mark.filterwarnings("ignore")
F64, F32, I64 = torch.float64, torch.float32, torch.int64
DTYPES = [F32, F64, torch.float16, I64, torch.uint8]
BOTH, REWARDS = ["f", ("next", "f")], ["reward", ("next", "reward")]


def entries(dtype=F32):
    random = torch.Generator().manual_seed(0)

    def numbers(*shape):
        return torch.randn(4, 2, *shape, generator=random)

    inner = TensorDict({"c": numbers(3), "d": numbers(2), "count": torch.arange(8).reshape(4, 2)}, [4, 2])
    reward = (numbers(1) * 50).to(dtype)
    after = TensorDict({"a": numbers(3), "reward": reward.clone(), "done": numbers(1) > 0}, [4, 2])
    more = {"reward": reward, "done": numbers(1) > 0, "terminated": numbers(1) > 0, "double": numbers(2).double()}
    pixels = torch.randint(0, 256, (4, 2, 5, 6, 3), generator=random).to(dtype)
    return TensorDict(
        {"a": numbers(3), "b": numbers(2), "p": numbers(3, 4, 5), "n": inner, "next": after, "pixels": pixels, **more},
        [4, 2],
    )


CASES = [
    ("RenameTransform", (["a", ("n", "c")], [("n", "a"), "z"]), {}),
    ("RenameTransform", (["a", ("next", "a")], ["b", ("next", "z")]), {"create_copy": True}),
    ("RenameTransform", (["a"], ["z"], [("i", "j")], [("n", "d")]), {"create_copy": True}),
    ("RenameTransform", (["gone"], ["b"]), {}),
    ("SelectTransform", ("a", ("next", "a"), "gone"), {"keep_rewards": False}),
    ("SelectTransform", ("next",), {"keep_dones": False}),
    ("ExcludeTransform", (("n", "c"), ("n", "d"), "next", "gone"), {}),
    ("CatTensors", (["b", "a", ("n", "c"), ("next", "a")],), {}),
    ("CatTensors", (["b", "a"], ("next", "z")), {"sort": False, "del_keys": False}),
    ("CatTensors", (["a", ("n", "c")], "z"), {"dim": -2}),
    ("CatTensors", (["a", "gone"],), {}),
    ("Stack", (["a", ("next", "a")], ("n", "z")), {"dim": -2, "del_keys": False}),
    ("Stack", (["a", ("next", "a")], "z", "p", ["x", "y", "w"]), {"dim": -3}),
    ("FlattenObservation", (-2, -1, ["p"], ["z"]), {}),
    ("FlattenObservation", (2, 3, ["p"]), {"allow_positive_dim": True}),
    ("UnsqueezeTransform", (-1,), {"in_keys": ["a", "p"], "in_keys_inv": ["reward"]}),
    ("UnsqueezeTransform", (-2,), {"in_keys": ["a"], "out_keys": ["z"], "in_keys_inv": ["i"], "out_keys_inv": ["b"]}),
    ("SqueezeTransform", (-1,), {"in_keys": ["reward", "p"], "in_keys_inv": ["a"]}),
    ("PermuteTransform", ((-1, -3, -2),), {"in_keys": ["p"], "in_keys_inv": ["p"]}),
    ("ExpandAs", ("done", "a", ("n", "z")), {}),
    ("FlattenTensorDict", (), {"inverse": False}),
    ("DoubleToFloat", (), {"in_keys_inv": ["b"]}),
    ("DoubleToFloat", (["double"], ["x"]), {"in_keys_inv": ["y"], "out_keys_inv": ["b"]}),
    ("DTypeCastTransform", (I64, F32), {}),
    ("DTypeCastTransform", (F64, I64, ["a", ("n", "c")]), {}),
    ("UnaryTransform", (["a"], ["x"], ["y"], ["b"]), {"fn": torch.exp, "inv_fn": torch.neg}),
    ("FiniteTensorDictCheck", (), {}),
    ("RewardClipping", (-1, 2), {}),
    ("BinarizeReward", (), {}),
    ("SignTransform", (["reward"],), {"in_keys_inv": ["reward"]}),
    ("ClipTransform", (["reward"],), {"low": -1, "high": 2, "in_keys_inv": ["reward"]}),
    ("ToTensorImage", (), {}),
    ("ToTensorImage", (), {"from_int": True, "dtype": torch.float16}),
    ("ToTensorImage", (), {"from_int": False, "shape_tolerant": True}),
    ("GrayScale", (["p"],), {}),
    ("RewardScaling", (1.0, 3.0), {"in_keys": REWARDS, "standard_normal": True}),
    ("RewardScaling", (torch.tensor([1.0]), torch.tensor([2.0])), {}),
    ("ObservationNorm", (1.0, 3.0), {"in_keys": REWARDS, "in_keys_inv": REWARDS, "standard_normal": True}),
    ("ObservationNorm", (torch.ones(3), torch.full((3,), 2.0)), {"in_keys": ["a"], "in_keys_inv": ["a"]}),
]


def result(module, name, args, kwargs, inverse, dtype):
    try:
        transform = getattr(module, name)(*args, **kwargs)
        return transform, (transform.inv if inverse else transform)(entries(dtype))
    except Exception as error:
        return None, error


def same(found, expected, **tolerance):
    assert found.batch_size == expected.batch_size and set(found.keys(True)) == set(expected.keys(True))
    for key in expected.keys(True, True):
        torch.testing.assert_close(found[key], expected[key], **(tolerance or {"rtol": 0, "atol": 0}))


@pytest.mark.parametrize(("name", "args", "kwargs"), CASES, ids=str)
def test_both_do_the_same(name, args, kwargs):
    by_value = name.startswith(("Reward", "Binarize", "Sign", "Clip", "ToTensor"))
    for inverse, dtype in itertools.product((False, True), DTYPES if by_value else DTYPES[:1]):
        one, found = result(ours, name, args, kwargs, inverse, dtype)
        other, expected = result(theirs, name, args, kwargs, inverse, dtype)
        assert isinstance(found, Exception) == isinstance(expected, Exception), (found, expected)
        if not isinstance(expected, Exception):
            same(found, expected)
            for keys in ("in_keys", "out_keys", "in_keys_inv", "out_keys_inv"):
                assert list(getattr(one, keys)) == list(getattr(other, keys) or getattr(one, keys))
            if by_value:
                assert repr(one) == repr(other)


def test_names_are_sorted_in_the_same_order():
    names = [("n", "c"), "nZ", "n[", "n^", "n_", "n_z", "n`", "n", ("n", "a"), ("n", "b", "z"), ("n", "b"), "n_b"]
    assert ours.CatTensors(names).in_keys == theirs.CatTensors(names).in_keys


@pytest.mark.parametrize(("decay", "eps"), [(1.0, 1e-4), (0.9999, 0.3), (0.5, 1e-4)])
def test_the_older_running_norm(decay, eps):
    keys, near = ["observation", ("next", "reward")], {"rtol": 1e-3, "atol": 1e-3}
    options = {"in_keys": keys, "out_keys": ["o", "r"], "decay": decay, "eps": eps}
    pair = [ours.VecNorm(**options), theirs.VecNorm(**options, new_api=False)]
    for batch in ((8,), (3, 4), (1,), (5,)):
        data = TensorDict({"observation": torch.randn(*batch, 3) * 2 + 1}, batch)
        data["next"] = TensorDict({"reward": torch.randn(*batch, 1)}, batch)
        same(*(each(data.clone()) for each in pair), **near)
    for each in pair:
        each.freeze()
    normed = [each(data.clone()) for each in pair]
    same(*normed, **near)
    same(*(each.to_observation_norm()(data.clone()) for each in pair), **near)
    assert repr(pair[0]) == repr(pair[1])


def test_sums_step_by_step_as_in_an_environment():
    ends, rewards = torch.rand(3, 12, 1) < 0.3, torch.randn(3, 12, 1)
    data = TensorDict({"next": {"reward": rewards, "done": ends}}, [3, 12], names=[None, "time"])
    found = ours.RewardSum([("next", "reward")])(data)["next", "episode_reward"]
    env_side, total = theirs.RewardSum(reset_keys=["_reset"]), torch.zeros(3, 1)
    for t in range(12):
        step = TensorDict({"reward": rewards[:, t], "done": ends[:, t]}, [3])
        step = env_side._step(TensorDict({"episode_reward": total}, [3]), step)
        torch.testing.assert_close(found[:, t], step["episode_reward"])
        total = torch.where(ends[:, t], 0.0, step["episode_reward"])


def frames_of(shape, frame, dtype, seed=0):
    random = torch.Generator().manual_seed(seed)
    done = torch.rand(*shape, 1, generator=random) < 0.25
    first, after = ((torch.rand(*shape, *frame, generator=random) * 200).to(dtype) for _ in range(2))
    given = TensorDict({"f": first, "next": {"f": after, "done": done}}, shape)
    given.names = [None] * (len(shape) - 1) + ["time"]
    return given


@pytest.mark.parametrize("padding", ["same", "constant"])
@pytest.mark.parametrize("keys", [BOTH[:1], BOTH, BOTH[1:]], ids=str)
@pytest.mark.parametrize(("frame", "dim"), [((4,), -1), ((2, 3, 3), -3), ((2, 3, 3), -1)])
def test_stacks_are_the_same(frame, dim, keys, padding):
    if keys is BOTH and dim != -len(frame):
        return  # theirs fail for the frames under "next" then
    shapes, dtypes = [(6,), (3, 9), (2, 3, 5)], [torch.uint8, F32]
    for seed, (shape, dtype, count) in enumerate(itertools.product(shapes, dtypes, (2, 4))):
        kwargs = {"N": count, "dim": dim, "padding": padding, "padding_value": 7, "in_keys": keys}
        if seed % 2:
            kwargs["out_keys"] = [("next", "s") if isinstance(key, tuple) else "s" for key in keys]
        given = frames_of(shape, frame, dtype, seed)
        same(*(module.CatFrames(**kwargs)(given.clone()) for module in (ours, theirs)))


def test_burnt_in_states_are_the_same():
    torch.manual_seed(0)
    keys = {"in_keys": ["observation", "hidden"], "out_keys": ["out", ("next", "hidden")]}
    module = GRUModule(input_size=3, hidden_size=4, default_recurrent_mode=True, **keys)
    shape = (2, 9)
    given = {"observation": torch.randn(*shape, 3), "hidden": torch.randn(*shape, 1, 4)}
    given = TensorDict({**given, "is_init": torch.rand(*shape, 1) < 0.2}, shape)
    pair = [each.BurnInTransform([module], burn_in=4) for each in (ours, theirs)]
    assert pair[0].out_keys == pair[1].out_keys and set(pair[0].in_keys) == set(pair[1].in_keys)
    same(*(each(given.clone()) for each in pair))
