"""What torchrl's code asks of specs, tested without torchrl: virtual classes, live boxes, locks, and keys of a step."""

import copy
import pickle
import subprocess
import sys
import weakref

import pytest
import torch
from tensordict import TensorDict
from tensordict.base import _NESTED_TENSORS_AS_LISTS

from interop import specs
from tests.interop.specs.spec_kinds import ALL, make

STUB = """
import abc, sys, types
theirs = types.ModuleType("torchrl.data.tensor_specs")
class TensorSpec(metaclass=abc.ABCMeta): pass
class OneHot(TensorSpec): pass
class Unbounded(TensorSpec): pass
class UnboundedContinuous(Unbounded): pass
class Composite(TensorSpec): pass
class StackedComposite(Composite): pass
class Box: pass
class ContinuousBox(Box): pass
vars(theirs).update({each.__name__: each for each in (OneHot, Unbounded, UnboundedContinuous, Box, ContinuousBox)})
utils = types.ModuleType("torchrl.data.utils")
utils.ACTION_SPACE_MAP = {OneHot: "one_hot", "one_hot": "one_hot"}

def begin():
    sys.modules["torchrl.data.tensor_specs"] = theirs

def finish():
    vars(theirs).update(TensorSpec=TensorSpec, Composite=Composite, StackedComposite=StackedComposite)
    sys.modules["torchrl.data.utils"] = utils
"""
PROGRAMS = {
    "torchrl first": "begin(); finish(); from interop import specs; hot, free = specs.OneHot(4), specs.Unbounded(3)",
    "specs first": """
from interop import specs
hot, free = specs.OneHot(4), specs.Unbounded(3)
assert not isinstance(hot, OneHot)  # torchrl is not imported
begin()
assert not isinstance(hot, OneHot)  # it is being imported
finish()""",
}
CHECKS = """
class Own(specs.OneHot): pass
assert isinstance(hot, OneHot) and isinstance(hot, TensorSpec) and not isinstance(hot, Unbounded)
assert isinstance(free, UnboundedContinuous) and isinstance(free, Unbounded) and not isinstance(free, Composite)
assert isinstance(specs.Composite(a=hot), Composite) and not isinstance(specs.Composite(a=hot), StackedComposite)
assert isinstance(Own(3), OneHot) and not isinstance(specs.Categorical(3), OneHot) and issubclass(specs.OneHot, OneHot)
assert isinstance(free.space, ContinuousBox) and not isinstance(hot.space, ContinuousBox)
assert isinstance(free.space, specs.ContinuousBox) and isinstance(hot.space, specs.CategoricalBox)
assert utils.ACTION_SPACE_MAP[type(hot)] == "one_hot" and specs.Categorical not in utils.ACTION_SPACE_MAP
assert type(hot) is hot.__class__ is specs.OneHot and not any(name.startswith("torchrl") for name in sys.modules
                                                             if name not in (theirs.__name__, utils.__name__))
import pickle
assert pickle.loads(pickle.dumps((hot, free.space, hot.space))) == (hot, free.space, hot.space)
"""


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_classes_of_torchrl_know_the_specs_whatever_was_imported_first(program):
    subprocess.run([sys.executable, "-W", "ignore", "-c", STUB + program + CHECKS], check=True)


def test_bounds_of_a_box_are_those_of_the_spec():
    spec = specs.Bounded(torch.zeros(2, 3), torch.ones(2, 3))
    kept, box = spec.clone(), spec.space
    box.low, box.high = box.low.flatten() - 1, 2 * box.high.flatten()
    spec.shape = box.low.shape
    assert spec == specs.Bounded(-torch.ones(6), 2 * torch.ones(6)) and spec.is_in(spec.rand((4,)))
    assert kept == specs.Bounded(torch.zeros(2, 3), torch.ones(2, 3))
    spec.dtype, spec.space.low, spec.space.high = torch.float64, box.low.double(), box.high.double()
    assert spec.rand().dtype == torch.float64 and spec.is_in(spec.rand())


@pytest.mark.parametrize("box", [specs.Bounded(-1, 1, (2,)).space, specs.Unbounded(2).space, specs.OneHot(3).space,
                                 specs.MultiCategorical([2, 3]).space, specs.BinaryBox(3)], ids=str)  # fmt: skip
def test_boxes_are_copied_and_pickled(box):
    for made in (
        copy.copy(box),
        copy.deepcopy(box),
        pickle.loads(pickle.dumps(box)),
        pickle.loads(pickle.dumps(box, 1)),
    ):
        assert made == box and isinstance(made, specs.ContinuousBox) == isinstance(box, specs.ContinuousBox)


@pytest.mark.parametrize("name", ALL)
def test_specs_are_copied_and_pickled_in_every_protocol(name):
    spec = make(name)
    assert spec.__class__ is type(spec)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(spec, protocol)) == spec
    assert copy.deepcopy(spec) == copy.copy(spec) == spec


class Outer:
    """Locks its entries as torchrl's Composite does."""

    def __init__(self, *entries):
        self.entries, self.is_locked = entries, False

    def lock_(self):
        self.is_locked = True
        for each in self.entries:
            each._propagate_lock(recurse=True, lock_parents_weakrefs=[weakref.ref(self)], is_compiling=False)

    def unlock_(self):
        self.is_locked = False
        found = [entry for each in self.entries for entry in (*each._propagate_unlock(recurse=True), each)]
        for each in found:
            each._check_unlock()
        return found


def test_a_composite_of_another_library_locks_its_entries():
    inner = specs.Composite(deep=specs.Composite(a=specs.OneHot(3)))
    outer, other = Outer(inner), Outer(inner)
    outer.lock_()
    assert inner.is_locked and inner["deep"].is_locked
    for part in (inner, inner["deep"]):
        with pytest.raises(RuntimeError, match="locked graph"):
            part.unlock_()
        with pytest.raises(RuntimeError, match="locked"):
            part["b"] = specs.OneHot(2)
    assert [list(each) for each in outer.unlock_()] == [["a"], ["deep"]]
    inner["deep", "b"] = specs.OneHot(2)
    outer.lock_(), other.lock_()
    with pytest.raises(RuntimeError, match="locked graph"):
        outer.unlock_()
    inner.lock_()
    other.unlock_()
    inner["c"] = specs.OneHot(2)


def test_static_composites_are_kept_whole_by_a_step():
    static = specs.Composite(b=specs.OneHot(3), deep=specs.Composite(c=specs.OneHot(2)), step_mdp_static=True)
    spec = specs.Composite(
        a=specs.OneHot(3), static=static, plain=specs.Composite(d=specs.OneHot(2), static=static.clone())
    )
    assert list(spec.keys(True, True, step_mdp_static_only=True)) == [
        "a",
        "static",
        ("plain", "d"),
        ("plain", "static"),
    ]
    assert list(spec.keys(True, step_mdp_static_only=True)) == [
        "a", "static", ("plain", "d"), ("plain", "static"), "plain",
    ]  # fmt: skip
    assert list(spec.keys(step_mdp_static_only=True)) == ["a", "static", "plain"]
    assert list(spec.keys(False, True, step_mdp_static_only=True)) == ["a", "static"]
    assert list(static.keys(True, True, step_mdp_static_only=True)) == []


def test_members_of_lazy_stacks_are_listed():
    differing = torch.stack([specs.Bounded(0, 1, (2,)), specs.Bounded(0, 2, (2,))], 0)
    parts = torch.stack(
        [specs.Composite(a=specs.Unbounded(2), b=specs.OneHot(3)), specs.Composite(a=specs.Unbounded(5))], 0
    )
    spec = specs.Composite(leaf=differing, node=parts, plain=specs.OneHot(3, (2, 3)), none=None, shape=(2,))
    keys = list(spec.keys(True, True, is_leaf=_NESTED_TENSORS_AS_LISTS))
    assert keys == [
        ("leaf", "0"),
        ("leaf", "1"),
        ("node", "0", "a"),
        ("node", "0", "b"),
        ("node", "1", "a"),
        "plain",
        "none",
    ]
    assert list(parts.keys(True, True, is_leaf=_NESTED_TENSORS_AS_LISTS)) == [("0", "a"), ("0", "b"), ("1", "a")]
    shapes = [each.shape for each in parts.values(True, True, is_leaf=_NESTED_TENSORS_AS_LISTS)]
    assert shapes == [(2,), (3,), (5,)]


def test_an_empty_composite_demands_no_entry():
    spec = specs.Composite(a=specs.Bounded(0, 1, (2,)), empty=specs.Composite(deep=specs.Composite()))
    del spec["empty", "deep"]
    data = TensorDict({"a": torch.full((2,), 3.0)})
    spec.type_check(data)
    assert not spec.is_in(data) and spec.is_in(spec.project(data))
