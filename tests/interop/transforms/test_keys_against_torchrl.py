"""Transforms of keys and shapes beside those of TorchRL, where that is: the same data, or an error in both."""

import warnings

import pytest
import torch
from tensordict import TensorDict

from interop import transforms as ours

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("torchrl", exc_type=ImportError)
    from torchrl.envs import transforms as theirs
    from torchrl.envs.transforms.transforms import FlattenTensorDict

    theirs.FlattenTensorDict = FlattenTensorDict

pytestmark = pytest.mark.filterwarnings("ignore")


def data():
    random = torch.Generator().manual_seed(0)

    def numbers(*shape):
        return torch.randn(4, 2, *shape, generator=random)

    inner = TensorDict({"c": numbers(3), "d": numbers(2)}, [4, 2])
    after = TensorDict({"a": numbers(3), "reward": numbers(1), "done": numbers(1) > 0}, [4, 2])
    more = {"reward": numbers(1), "done": numbers(1) > 0, "terminated": numbers(1) > 0}
    return TensorDict(
        {"a": numbers(3), "b": numbers(2), "p": numbers(3, 4, 5), "n": inner, "next": after, **more}, [4, 2]
    )


CASES = [
    ("RenameTransform", (["a"], ["z"]), {}),
    ("RenameTransform", (["a", ("n", "c")], [("n", "a"), "z"]), {}),
    ("RenameTransform", (["a", "n"], ["y", "z"]), {}),
    ("RenameTransform", (["a", ("next", "a")], ["b", ("next", "z")]), {"create_copy": True}),
    ("RenameTransform", (["a"], ["z"], ["i"], ["b"]), {}),
    ("RenameTransform", (["a"], ["z"], [("i", "j")], [("n", "d")]), {"create_copy": True}),
    ("RenameTransform", (["a"], ["a"]), {}),
    ("RenameTransform", (["a"], ["b", "c"]), {}),
    ("RenameTransform", (["gone"], ["b"]), {}),
    ("SelectTransform", ("a", ("n", "c")), {}),
    ("SelectTransform", ("a", ("next", "a"), "gone"), {"keep_rewards": False}),
    ("SelectTransform", ("next",), {"keep_rewards": False, "keep_dones": False}),
    ("SelectTransform", (["a"],), {}),
    ("ExcludeTransform", ("a", ("n", "c"), "gone"), {}),
    ("ExcludeTransform", (("n", "c"), ("n", "d"), "next"), {}),
    ("ExcludeTransform", ("a",), {"inverse": True}),
    ("ExcludeTransform", (["a"],), {}),
    ("CatTensors", (["b", "a", ("n", "c"), ("next", "a")],), {}),
    ("CatTensors", (["b", "a"], ("next", "z")), {"sort": False, "del_keys": False}),
    ("CatTensors", (["b", "a"], "a"), {}),
    ("CatTensors", (["a", ("n", "c")], "z"), {"dim": 2}),
    ("CatTensors", (["a", ("n", "c")], "z"), {"dim": -2}),
    ("CatTensors", (["a", "gone"],), {}),
    ("CatTensors", (["a", "b"], ["z"]), {}),
    ("Stack", (["a", ("n", "c")], "z"), {}),
    ("Stack", (["a", ("next", "a")], ("n", "z")), {"dim": -2, "del_keys": False}),
    ("Stack", (["a", ("next", "a")], "z", "p", ["x", "y", "w"]), {"dim": -3}),
    ("Stack", (["a", ("next", "a")], "z", "p", ["x", "y"]), {"dim": -3}),
    ("Stack", (["a", "b"], "z"), {}),
    ("Stack", (["a", "b"], "z"), {"dim": 2}),
    ("FlattenObservation", (-3, -1, ["p"]), {}),
    ("FlattenObservation", (-2, -1, ["p"], ["z"]), {}),
    ("FlattenObservation", (2, 3, ["p"]), {"allow_positive_dim": True}),
    ("FlattenObservation", (-4, -1, ["p"]), {}),
    ("FlattenObservation", (0, -1, ["p"]), {}),
    ("UnsqueezeTransform", (-1,), {"in_keys": ["a", "p"], "in_keys_inv": ["reward"]}),
    (
        "UnsqueezeTransform",
        (-2,),
        {"in_keys": ["a"], "out_keys": [("n", "z")], "in_keys_inv": ["i"], "out_keys_inv": ["b"]},
    ),
    ("UnsqueezeTransform", (2,), {"in_keys": ["a"], "allow_positive_dim": True}),
    ("UnsqueezeTransform", (2,), {"in_keys": ["a"]}),
    ("UnsqueezeTransform", (-4,), {"in_keys": ["a"]}),
    ("SqueezeTransform", (-1,), {"in_keys": ["reward", "p"], "in_keys_inv": ["a"]}),
    ("SqueezeTransform", (-2,), {"in_keys": ["p"]}),
    ("SqueezeTransform", (0,), {"in_keys": ["p"]}),
    ("PermuteTransform", ((-1, -3, -2),), {"in_keys": ["p"], "in_keys_inv": ["p"]}),
    (
        "PermuteTransform",
        ((-2, -1, -3),),
        {"in_keys": ["p"], "out_keys": ["z"], "in_keys_inv": ["i"], "out_keys_inv": ["p"]},
    ),
    ("PermuteTransform", ((0, 1),), {"in_keys": ["p"]}),
    ("ExpandAs", ("done", "p"), {}),
    ("ExpandAs", ("done", "a", ("n", "z")), {}),
    ("ExpandAs", ("p", "a"), {}),
    ("FlattenTensorDict", (), {}),
    ("FlattenTensorDict", (), {"inverse": False}),
]


def result(module, name, args, kwargs, inverse):
    try:
        transform = getattr(module, name)(*args, **kwargs)
        return transform, (transform.inv if inverse else transform)(data())
    except Exception as error:
        return None, error


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize(("name", "args", "kwargs"), CASES)
def test_both_do_the_same(name, args, kwargs, inverse):
    ours_is, found = result(ours, name, args, kwargs, inverse)
    theirs_is, expected = result(theirs, name, args, kwargs, inverse)
    assert isinstance(found, Exception) == isinstance(expected, Exception), (found, expected)
    if not isinstance(expected, Exception):
        assert found.batch_size == expected.batch_size and set(found.keys(True)) == set(expected.keys(True))
        assert all(torch.equal(found[key], expected[key]) for key in expected.keys(True, True))
        for keys in ("in_keys", "out_keys", "in_keys_inv", "out_keys_inv"):
            assert getattr(ours_is, keys) == getattr(theirs_is, keys)


def test_names_are_sorted_in_the_same_order():
    keys = [
        ("n", "c"),
        "nZ",
        "n[",
        "n^",
        "n_",
        "n_z",
        "n`",
        "n",
        ("n", "a"),
        ("n", "b", "z"),
        ("n", "b"),
        ("n_b", "z"),
        "n_b",
    ]
    assert ours.CatTensors(keys).in_keys == theirs.CatTensors(keys).in_keys


def test_entries_that_lack_a_dim_get_it_in_both():
    given = TensorDict({"a": torch.ones(3), "b": torch.zeros(3)}, [])
    found, expected = (
        module.CatTensors(["a", "b"], "c", dim=-2, unsqueeze_if_oor=True)(given.copy())["c"]
        for module in (ours, theirs)
    )
    assert torch.equal(found, expected) and found.shape == (2, 3)
