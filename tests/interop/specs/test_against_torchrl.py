"""Every leaf and method beside TorchRL, where that is: the same shapes, dtypes, values and errors."""

import functools
import re
import warnings

import numpy as np
import pytest
import torch
from tensordict import is_tensor_collection
from torch import Tensor

from interop import specs as ours
from tests.interop.specs.spec_kinds import LEAVES, make, noise, same

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("torchrl")
    from torchrl import data as theirs

pytestmark = pytest.mark.filterwarnings("ignore")
FIELDS = ("low", "high", "nvec", "mask", "n", "example_data", "use_register")

CALLS = {
    "is_in": lambda spec, value: bool(spec.is_in(value)),
    "is_in, more dims": lambda spec, value: bool(spec.is_in(value.expand(2, *value.shape))),
    "is_in, dtype": lambda spec, value: bool(spec.is_in(value.to(torch.int16))),
    "is_in, shape": lambda spec, value: bool(spec.is_in(value[..., None, :2])),
    "assert_is_in": lambda spec, value: spec.assert_is_in(value),
    "type_check": lambda spec, value: spec.type_check(value.to(torch.int16)),
    "project": lambda spec, value: spec.project(value.clone()) * (not hasattr(spec, "mask")),
    "rand": lambda spec, value: spec.rand((2, 3)) * 0,
    "rand, int": lambda spec, value: spec.rand(3),
    "zero": lambda spec, value: spec.zero((4,)),
    "one": lambda spec, value: spec.one(),
    "to_numpy": lambda spec, value: spec.to_numpy(value),
    "to_numpy, safe": lambda spec, value: spec.to_numpy(value, safe=True),
    "encode": lambda spec, value: spec.encode(spec.to_numpy(value)),
    "encode, list": lambda spec, value: spec.encode(spec.to_numpy(value).tolist()),
    "encode, other": lambda spec, value: spec.encode(np.zeros(7)),
    "cardinality": lambda spec, value: spec.cardinality(),
    "enumerate": lambda spec, value: spec.enumerate(),
    "enumerate, mask": lambda spec, value: spec.enumerate(use_mask=True),
    "to_one_hot": lambda spec, value: spec.to_one_hot(value),
    "to_one_hot_spec": lambda spec, value: spec.to_one_hot_spec(),
    "to_categorical": lambda spec, value: spec.to_categorical(value),
    "to_categorical_spec": lambda spec, value: spec.to_categorical_spec(),
    "index": lambda spec, value: spec.index(value, torch.arange(24.0).reshape(2, 1, 3, 4)),
    "clone": lambda spec, value: spec.clone(),
    "to": lambda spec, value: spec.to(torch.float64),
    "to, device": lambda spec, value: spec.to("meta").device,
    "eq": lambda spec, value: bool(spec == spec.clone()),
    "ne": lambda spec, value: bool(spec == spec.unsqueeze(0)),
    "make_neg_dim": lambda spec, value: (spec.make_neg_dim(0), spec.shape)[1],
    "make_neg_dim, more": lambda spec, value: spec.make_neg_dim(9),
    "expand": lambda spec, value: spec.expand(5, 2, 4, *spec.shape[2:]),
    "expand, other": lambda spec, value: spec.expand(3, *spec.shape[1:]),
    "reshape": lambda spec, value: spec.reshape(6, *spec.shape[3:]),
    "reshape, -1": lambda spec, value: spec.view((-1, *spec.shape[3:])),
    "reshape, other": lambda spec, value: spec.reshape(7),
    "flatten": lambda spec, value: spec.flatten(0, 1),
    "unflatten": lambda spec, value: spec.unflatten(0, (2, 1)),
    "squeeze": lambda spec, value: spec.squeeze(1),
    "squeeze all": lambda spec, value: spec.squeeze(),
    "squeeze, more": lambda spec, value: spec.squeeze(9),
    "unsqueeze": lambda spec, value: spec.unsqueeze(1),
    "unsqueeze, last": lambda spec, value: spec.unsqueeze(-1),
    "unsqueeze, more": lambda spec, value: spec.unsqueeze(9),
    "unbind": lambda spec, value: spec.unbind(0),
    "unbind, last": lambda spec, value: spec.unbind(-1),
    "unbind, more": lambda spec, value: spec.unbind(9),
    "stack": lambda spec, value: torch.stack([spec, spec], 1),
    "index_select": lambda spec, value: torch.index_select(spec, 2, torch.tensor([2, 0])),
    "index_select, more": lambda spec, value: torch.index_select(spec, 0, torch.tensor([2])),
} | {
    f"[{index}]": lambda spec, value, index=index: spec[index]
    for index in (0, 2, slice(1), slice(None, None, -1), slice(None, None, 0), None, (0, ..., 0), (..., 0), (0, 0, 1, 0),
                  (slice(None), 0, [2, 0]), ([0, 1], slice(None), [2, 0]), (0, slice(None), [1, 2]), range(1),
                  (..., ...), True, "a", [2])
}  # fmt: skip

INTENDED = {  # patterns of kinds and calls for which TorchRL does something by accident, and what is done instead
    ("", r"reshape, (-1|other)"): "-1 is resolved, sizes that do not fit are refused",
    ("", r"\[slice\(None, None, -1"): "slices with negative steps have a size",
    ("", r"\[(True|a|\(Ellipsis, Ellipsis\))\]"): "an IndexError, as for other indices",
    ("", r"is_in, shape"): "False for a shape that does not broadcast",
    ("Categorical|Binary|OneHot|Multi", "cardinality|enumerate"): "all values of the shape, not of one place",
    (".*bool|Binary|.*float32|.*int8", "enumerate|to_one_hot|index"): "lists have the dtype, all dtypes are indices",
    ("OneHot", "index"): "one entry for each vector, as documented",
    ("Multi", "index"): "entries by group, or NotImplementedError",
    ("OneHot|Multi", "enumerate, mask"): "the values that a mask allows are listed, as those of Categorical",
    ("OneHot, int64|MultiOneHot", "project"): "every member of the dtype can be projected",
    (
        ".*masks?",
        r"enumerate|expand|stack|to|reshape|flatten|unflatten|project|\[\(",
    ): "masks are kept by all operations",
    (".*masks?", "is_in|assert_is_in|to_numpy, safe"): "with a mask as without: dtype, and one in each group",
    ("MultiCategorical", "to|reshape|flatten|unflatten|squeeze all"): "nvec follows, and stays int64",
}


def told(call, spec, value):
    """What a call makes, as something that can be compared: fields of specs, values, or the class of an error."""
    try:
        return summary(call(spec, value))
    except Exception as error:
        return type(error).__name__


def summary(made):
    if isinstance(made, tuple | list):
        return [summary(each) for each in made]
    if isinstance(made, Tensor | np.ndarray) or is_tensor_collection(made):
        return made
    if isinstance(made, ours.TensorSpec | theirs.TensorSpec):
        fields = {
            name: getattr(made, name, None) for name in FIELDS if "Multi" not in type(made).__name__ or name != "n"
        }
        rest = type(made).__name__, made.shape, made.dtype, made.device, made.domain
        return rest, {name: each for name, each in fields.items() if each is not None}
    return made


def alike(one, two):
    if type(one) is not type(two):
        return False
    if isinstance(one, tuple | list):
        return len(one) == len(two) and all(map(alike, one, two))
    if isinstance(one, dict):  # masks that TorchRL loses are kept
        return one.keys() - two.keys() <= {"mask"} and all(alike(one[key], two[key]) for key in two)
    if isinstance(one, Tensor) and one.numel() and one.is_floating_point():
        return one.shape == two.shape and one.dtype == two.dtype and torch.allclose(one, two)
    return same(one, two) if isinstance(one, Tensor | np.ndarray) or is_tensor_collection(one) else one == two


@functools.cache
def differences(name):
    """The calls that differ, with what both make of the first value that shows it."""
    found = {}
    for call, function in CALLS.items():
        for seed in range(4):
            torch.manual_seed(seed)
            value = noise(make(name, (2, 1, 3)))
            mine, other = (told(function, make(name, (2, 1, 3), library), value) for library in (ours, theirs))
            if call not in found and not alike(mine, other):
                found[call] = mine, other
    return found


def reasons(name, call):
    return {pair for pair in INTENDED if re.match(pair[0], name) and re.match(pair[1], call)}


@pytest.mark.parametrize("name", LEAVES)
def test_leaves_do_the_same(name):
    assert not {call: both for call, both in differences(name).items() if not reasons(name, call)}


def test_each_intended_difference_is_one():
    assert set().union(*(reasons(name, call) for name in LEAVES for call in differences(name))) == set(INTENDED)


COMPOSITE = {
    "keys": lambda spec, value: [list(spec.keys(*flags)) for flags in ((), (True,), (True, True), (False, True))],
    "values": lambda spec, value: list(spec.values(True, True)),
    "rand": lambda spec, value: sorted(spec.rand((2,)).keys(True, True), key=str),
    "batch": lambda spec, value: (spec.rand((2,)).batch_size, spec.rand()["inner"].batch_size),
    "zero": lambda spec, value: spec.zero(),
    "is_in": lambda spec, value: bool(spec.is_in(value)),
    "missing": lambda spec, value: spec.is_in(value.exclude("a")),
    "type_check": lambda spec, value: spec.type_check(value),
    "get": lambda spec, value: [spec["inner", "d"], spec.get(("inner", ("c",))), spec.get("x", 3)],
    "no entry": lambda spec, value: spec["x"],
    "no nested entry": lambda spec, value: spec["inner", "x"],
    "pop": lambda spec, value: (spec.pop(("inner", "d")), list(spec.keys(True))),
    "no pop": lambda spec, value: spec.pop("x"),
    "del": lambda spec, value: (spec.__delitem__(("inner", "d")), list(spec.keys(True))),
    "separates": lambda spec, value: (spec.separates("a", ("inner", "d")).keys(True).__len__(), list(spec.keys(True))),
    "set": lambda spec, value: (spec.__setitem__(("y", "z"), spec["a"]), list(spec.keys(True)), spec["y"].shape),
    "set wrong": lambda spec, value: spec.set("y", spec["a"][0]),
    "set reserved": lambda spec, value: spec.__setitem__("shape", spec["a"]),
    "update": lambda spec, value: list(spec.update({"inner": {"y": spec["a"]}, "x": spec["a"]}).keys(True)),
    "shape": lambda spec, value: (setattr(spec, "shape", (2,)), spec.shape, spec["inner"].shape),
    "wrong shape": lambda spec, value: setattr(spec, "shape", (3,)),
    "device None": lambda spec, value: (spec.to("cpu").clear_device_().device, spec.to("cpu")["inner"].device),
    "locked": lambda spec, value: spec.lock_().set("y", spec["a"]),
    "locked part": lambda spec, value: spec.lock_()["inner"].unlock_(),
    "names": lambda spec, value: (setattr(spec, "names", ["x", "y", "z"]), spec.unsqueeze(1).names, spec[0].names,
                                  spec.squeeze(1).names, spec.expand(4, 2, 1, 3).names, spec["inner"].names),
    "wrong names": lambda spec, value: setattr(spec, "names", ["x"]),
    "empty": lambda spec, value: (spec.empty().shape, spec.is_empty(), len(spec), list(spec)),
    "eq": lambda spec, value: (spec == spec.clone(), spec == spec.empty(), spec == 3),
    "expand": lambda spec, value: _shapes(spec.expand(4, 2, 5, 3)),
    "wrong expand": lambda spec, value: spec.expand(3, 1, 3),
    "reshape": lambda spec, value: _shapes(spec.reshape(6)),
    "flatten": lambda spec, value: _shapes(spec.flatten(0, 1)),
    "unflatten": lambda spec, value: _shapes(spec.unflatten(0, (2, 1))),
    "squeeze": lambda spec, value: _shapes(spec.squeeze(1)),
    "unsqueeze": lambda spec, value: [_shapes(spec.unsqueeze(dim)) for dim in (0, 2, -1, -4)],
    "unsqueeze, more": lambda spec, value: spec.unsqueeze(5),
    "unbind": lambda spec, value: [_shapes(each) for dim in (0, 1, -1) for each in spec.unbind(dim)],
    "unbind, more": lambda spec, value: spec.unbind(3),
    "index": lambda spec, value: [_shapes(spec[index]) for index in (0, slice(1), (0, 0), None, (0, ...), [1, 0],
                                                                     (slice(None), 0, [2, 0]), (0, slice(None), [1, 2]))],
    "wrong index": lambda spec, value: spec[0, 0, 0, 0],
    "stack": lambda spec, value: [_shapes(torch.stack([spec, spec], dim)) for dim in (0, 1, -1)],
    "lazy stack": lambda spec, value: _lazy(spec, 1),
    "lazy stack, last": lambda spec, value: _lazy(spec, -1),
}  # fmt: skip


def _shapes(spec):
    return spec.shape, {key: each.shape for key, each in spec.items(True) if each is not None}


def _lazy(spec, dim):
    """Facts of a stack of Composites that differ."""
    other = spec.clone()
    other["a"], other["own"] = spec["a"].to(torch.float64).to(torch.float32).unsqueeze(-1), spec["a"]
    made = torch.stack([spec, other.update({"a": spec["a"]})], dim)
    return [made.shape, list(made.keys()), made.device, made.stack_dim, type(made).__name__, made["a"].shape,
            made.unsqueeze(0).shape, made.unsqueeze(0).stack_dim, made.expand(2, *made.shape).shape, len(made),
            made.rand().batch_size, made.rand((2,)).batch_size, bool(made.is_in(made.rand())), made == made.clone(),
            made.clone().update({"new": made["a"]})["new"].shape, made.rand().stack_dim]  # fmt: skip


@pytest.mark.parametrize("call", COMPOSITE)
def test_composites_do_the_same(call):
    value = make("Composite", (2, 1, 3)).rand()
    mine, other = (told(COMPOSITE[call], make("Composite", (2, 1, 3), library), value) for library in (ours, theirs))
    assert alike(mine, other), (mine, other)
