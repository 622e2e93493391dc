"""Casts, functions, checks and projected actions beside an installed torchrl."""

import pytest
import torch
from tensordict import TensorDict

theirs = pytest.importorskip("torchrl.envs.transforms", reason="torchrl is not installed")

from interop import transforms as ours  # noqa: E402

F64, F32, I64 = torch.float64, torch.float32, torch.int64
CASES = [
    ("DoubleToFloat", {}),
    ("DoubleToFloat", {"in_keys": ["a"]}),
    ("DoubleToFloat", {"in_keys_inv": ["b"]}),
    ("DoubleToFloat", {"in_keys": ["a"], "out_keys": ["x"], "in_keys_inv": ["y"], "out_keys_inv": ["b"]}),
    ("DTypeCastTransform", {"dtype_in": I64, "dtype_out": F32}),
    ("DTypeCastTransform", {"dtype_in": F64, "dtype_out": I64, "in_keys": ["c", ("n", "a")]}),
    ("DeviceCastTransform", {"device": "cpu"}),
    ("DeviceCastTransform", {"device": "cpu", "in_keys": ["a"], "out_keys": ["x"]}),
    ("UnaryTransform", {"in_keys": ["a"], "out_keys": ["x"], "fn": torch.exp}),
    (
        "UnaryTransform",
        {
            "in_keys": ["a"],
            "out_keys": ["a"],
            "in_keys_inv": ["y"],
            "out_keys_inv": ["b"],
            "fn": torch.exp,
            "inv_fn": torch.neg,
        },
    ),
    ("FiniteTensorDictCheck", {}),
]


def entries():
    a, b, c = torch.randn(3, 2, dtype=F64), torch.randn(3), torch.arange(3)
    return TensorDict({"a": a, "b": b, "c": c, "n": TensorDict({"a": a * 2}, [3])}, [3])


def same(found, expected):
    assert set(found.keys(True, True)) == set(expected.keys(True, True))
    for key in found.keys(True, True):
        torch.testing.assert_close(found[key], expected[key], rtol=0, atol=0)


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_both_directions(name, options):
    data = entries()
    pair = [getattr(each, name)(**options) for each in (ours, theirs)]
    same(*(each(data.clone()) for each in pair))
    same(*(each.inv(data.clone()) for each in pair))
    if name not in ("DeviceCastTransform",):
        assert repr(pair[0]).replace("in_keys_inv=[], out_keys_inv=[]", "") == repr(pair[1]).replace(
            "in_keys_inv=[], out_keys_inv=None", ""
        ).replace("in_keys_inv=[], out_keys_inv=[]", "")


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32], ids=str)
def test_actions(dtype):
    pair = [each.DiscreteActionProjection(num_actions_effective=3, max_actions=5) for each in (ours, theirs)]
    few = TensorDict({"action": torch.eye(3).to(dtype)[torch.tensor([2, 0, 1, 1])]}, [4])
    many = TensorDict({"action": torch.eye(5).to(dtype)[torch.tensor([2, 0, 1, 1])]}, [4])
    if dtype != torch.bool:  # of which theirs takes no argmax
        same(*(each(few.clone()) for each in pair))
    same(*(each.inv(many.clone()) for each in pair))
    assert repr(pair[0]) == repr(pair[1])
    assert pair[0].in_keys == pair[1].in_keys and pair[0].in_keys_inv == pair[1].in_keys_inv


def test_what_is_not_finite():
    data = entries().set("b", torch.tensor([1.0, float("nan"), 2.0]))
    for each in (ours, theirs):
        with pytest.raises(ValueError, match="non-finite"):
            each.FiniteTensorDictCheck()(data.clone())
