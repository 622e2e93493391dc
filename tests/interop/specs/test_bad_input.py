"""Input that is refused: which error says so, and that nothing has changed."""

import pickle

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, TensorDict

from interop.specs import (
    Binary,
    Bounded,
    Categorical,
    Choice,
    Composite,
    MultiCategorical,
    MultiOneHot,
    NonTensor,
    OneHot,
    StackedComposite,
    Unbounded,
    consolidate_spec,
)
from tests.interop.specs.spec_kinds import ALL, KINDS, LEAVES, make

CONSTRUCTIONS = {
    "bounds crossed": (lambda: Bounded(1, 0, (2,)), ValueError, "must not be above"),
    "no upper bound": (lambda: Bounded(0, shape=(2,)), TypeError, "low and high"),
    "bounds of two shapes": (lambda: Bounded(torch.zeros(2), torch.ones(3)), RuntimeError, "one shape"),
    "no domain": (lambda: Bounded(0, 1, (2,), domain="real"), ValueError, "'real'"),
    "negative size": (lambda: Unbounded((2, -3)), ValueError, "-3"),
    "Categorical of none": (lambda: Categorical(0), ValueError, "at least 1"),
    "Categorical of three bools": (lambda: Categorical(3, dtype=torch.bool), ValueError, "n=3"),
    "Categorical of 129 in int8": (lambda: Categorical(129, dtype=torch.int8), ValueError, "at most 128 choices"),
    "OneHot of another shape": (lambda: OneHot(3, shape=(3, 4)), ValueError, "must be 3"),
    "MultiOneHot with an empty group": (lambda: MultiOneHot([2, 0]), ValueError, "at least 1"),
    "Binary of nothing": (lambda: Binary(), TypeError, "needs n"),
    "mask too long": (lambda: Categorical(3, mask=torch.ones(4)), RuntimeError, "Cannot expand mask"),
    "mask of uneven rows": (lambda: MultiCategorical([[2, 3], [3, 2]], mask=torch.ones(5)), RuntimeError, "every row"),
    "mask without True": (lambda: OneHot(3, mask=torch.zeros(3)), ValueError, "allows nothing"),
    "mask of bits": (lambda: Binary(3).update_mask(torch.ones(3)), NotImplementedError, "Binary"),
    "features and batched": (lambda: NonTensor((2,), batched=True, feature_dims=1), ValueError, "one of"),
    "choices of nothing": (lambda: Choice([]), ValueError, "at least one"),
    "choices of two classes": (lambda: Choice([Unbounded((1,)), OneHot(1)]), TypeError, "one class"),
    "two dicts": (lambda: Composite({}, {}), RuntimeError, "multiple arguments"),
    "shape and batch size": (lambda: Composite(shape=(2,), batch_size=(2,)), TypeError, "only one"),
    "an entry of another shape": (lambda: Composite(a=Unbounded((3, 2)), shape=(2,)), ValueError, "must begin with"),
    "an entry on another device": (lambda: Composite(a=Unbounded(device="meta"), device="cpu"), RuntimeError, "match"),
    "an entry that is no spec": (lambda: Composite(a=3), TypeError, "TensorSpec"),
    "an empty key": (lambda: Composite({(): Unbounded()}), TypeError, "texts"),
    "a reserved key": (lambda: Composite({"dtype": Unbounded()}), AttributeError, "cannot be set"),
    "a stack of nothing": (lambda: torch.stack([], 0), RuntimeError, "non-empty"),
    "a stack of two classes": (lambda: torch.stack([OneHot(3), Unbounded(3)]), RuntimeError, "more than one type"),
    "a stack of two batch sizes": (
        lambda: torch.stack([Composite(shape=(2,)), Composite(shape=(3,))]), RuntimeError, "Shapes"),
    "a stack into something": (
        lambda: torch.stack([Unbounded((3,))], 0, out=Unbounded((1, 3))), NotImplementedError, "out"),
    "one-hot stacked along the last dim": (lambda: torch.stack([OneHot(3)], -1), ValueError, "remain unchanged"),
    "keys with specs of two classes": (
        lambda: consolidate_spec(StackedComposite(
            Composite(a=OneHot(3)), Composite(a=Unbounded(3)), Composite(), dim=0)), ValueError, "several classes"),
}  # fmt: skip


@pytest.mark.parametrize("case", CONSTRUCTIONS)
def test_specs_that_mean_nothing_are_refused(case):
    construct, error, message = CONSTRUCTIONS[case]
    with pytest.raises(error, match=message):
        construct()


@pytest.mark.parametrize("name", LEAVES)
def test_values_of_another_kind_are_not_in_it(name):
    spec = make(name, (2,))
    value = spec.rand((3,))
    other = torch.int16 if value.dtype != torch.int16 else torch.int32
    for bad in (value.to(other), value[..., None], value[:, :1], value.flatten(), value[0, 0], None, 3, "a", [1], {}):
        assert not spec.is_in(bad), bad
        with pytest.raises(AssertionError, match="is not in"):
            spec.assert_is_in(bad)
        if not isinstance(bad, torch.Tensor):
            with pytest.raises(TypeError, match="tensors"):
                spec.project(bad)
        elif bad.dtype == value.dtype:
            with pytest.raises(RuntimeError, match="must end as"):
                spec.project(bad)
    with pytest.raises(TypeError, match=r"of 'obs'.*int16"):
        spec.type_check(value.to(other), "obs")
    with pytest.raises((RuntimeError, AssertionError)):
        spec.encode([1, 2, 3, 4, 5, 6, 7])


BEYOND = [(0, 0), -3, True, "a", 0.5, [2], (..., ...), np.array([0.5]), torch.ones(3, dtype=torch.bool)]


@pytest.mark.parametrize("index", BEYOND, ids=str)
@pytest.mark.parametrize("name", ["Categorical", "OneHot", "Binary", "MultiOneHot, mask", "NonTensor", "Composite"])
def test_indices_beyond_the_shape(name, index):
    spec = make(name, (2,))
    if index == "a" and name == "Composite":
        index = ("a", 0)
    with pytest.raises(IndexError):
        spec[index]
    with pytest.raises(IndexError):
        make(name, () if name != "Binary" else (1,))[0 if name != "Binary" else 1]


@pytest.mark.parametrize("name", ALL)
def test_dims_and_sizes_that_do_not_fit(name):
    spec = make(name, (2, 3))
    before = pickle.dumps(spec)
    ndim = spec.ndim
    for call, error in {
        lambda: spec.unsqueeze(ndim + 1): ValueError,
        lambda: spec.squeeze(ndim): IndexError,
        lambda: spec.unbind(ndim): (IndexError, ValueError),
        lambda: spec.expand(5, *spec.shape[1:]): ValueError,
        lambda: spec.expand("a"): TypeError,
        lambda: spec.reshape(7, *spec.shape[2:]): (RuntimeError, NotImplementedError),
        lambda: spec.flatten(1, 0): (ValueError, NotImplementedError),
        lambda: spec.unflatten(1, (2, 2)): (RuntimeError, NotImplementedError),
        lambda: spec[::0]: (ValueError, IndexError),
        lambda: spec.rand(3): TypeError,
        lambda: spec.make_neg_dim(ndim): (ValueError, IndexError, NotImplementedError),
        lambda: spec.to(3.5): (ValueError, TypeError, RuntimeError),
        lambda: torch.sum(spec): TypeError,
        lambda: torch.index_select(spec, 0, torch.tensor([2])): (IndexError, NotImplementedError),
        lambda: hash(spec): TypeError,
    }.items():
        with pytest.raises(error):
            call()
    assert pickle.dumps(spec) == before


@pytest.mark.parametrize("name", [name for name in LEAVES if "OneHot" in name or "Binary" in name])
def test_the_last_dim_of_structured_specs_stays(name):
    spec, dim = make(name, (2, 1)), 2
    with pytest.raises(ValueError, match="must remain unchanged"):
        spec.unbind(dim)
    with pytest.raises(ValueError, match="must remain unchanged"):
        torch.index_select(spec, -1, torch.tensor([0]))
    if "OneHot" in name:
        for change in (lambda: spec.unsqueeze(-1), lambda: spec.unsqueeze(3), lambda: OneHot(1).expand(3),
                       lambda: OneHot(1).squeeze(), lambda: OneHot(1).squeeze(0), lambda: Choice([spec]).unsqueeze(-1),
                       lambda: Choice([spec]).unbind(-1)):  # fmt: skip
            with pytest.raises(ValueError, match="must remain unchanged"):
                change()


ROWS = [name for name in KINDS if name.endswith(("rows", "masks"))] + ["Composite", "Composite, leaf"]


@pytest.mark.parametrize("name", [name for name in KINDS if name not in ("NonTensor", "Choice")])
def test_dynamic_dims_have_no_size(name):
    spec = make(name, (3,))
    spec.make_neg_dim(0)
    assert spec.shape[0] == -1
    for size in (1, 4):
        assert spec.is_in(make(name, (size,)).rand()) or name in ROWS
    assert spec[0].shape == spec[5].shape == spec[:].shape[1:] == spec.shape[1:]
    assert spec.expand(2, *spec.shape).shape == (2, *spec.shape)
    for change in (lambda: spec[1:], lambda: spec[[0]], lambda: spec[[0, 0]]):
        with pytest.raises(IndexError, match="dynamic"):
            change()
    with pytest.raises(ValueError, match="dynamic"):
        spec.unbind(0)
    with pytest.raises(ValueError):
        spec.expand(3, *spec.shape[1:])
    with pytest.raises(RuntimeError):
        spec.reshape(3, *spec.shape[1:])


MASKED = {name: make(name, (2,)) for name in LEAVES if name.endswith((", mask", ", masks"))}


@pytest.mark.parametrize("name", MASKED)
@pytest.mark.parametrize("mask", [torch.ones(7, dtype=torch.bool), torch.zeros((), dtype=torch.bool), "mask"], ids=str)
def test_a_mask_that_is_refused_leaves_the_old_one(name, mask):
    spec = MASKED[name].clone()
    with pytest.raises((RuntimeError, ValueError, TypeError)):
        spec.update_mask(mask)
    assert spec == MASKED[name]


def test_a_row_of_a_mask_without_true_has_no_draws():
    spec = Categorical(2, (2,), mask=torch.tensor([[True, False], [False, False]]))
    with pytest.raises(RuntimeError, match="allows nothing"):
        spec.rand()
    assert not spec.is_in(torch.tensor([0, 0]))
    assert spec[0].rand() == 0


def test_a_categorical_of_unknown_size():
    spec = Categorical(-1)
    for call in (lambda: spec.n, spec.rand, spec.cardinality, spec.enumerate):
        with pytest.raises(RuntimeError, match="Undefined cardinality"):
            call()
    assert spec.is_in(torch.tensor(99))
    with pytest.raises(ValueError, match="at least 1"):
        spec.set_provisional_n(0)
    spec.set_provisional_n(3)
    assert spec.n == 3
    assert not spec.is_in(torch.tensor(99))


def test_raw_values_that_are_no_choices():
    for bad in (3, -1, [0, 3], np.array([5])):
        with pytest.raises(AssertionError, match="Value must be less than action space"):
            OneHot(3).encode(bad)
    for bad in ([2, 0], [0, 3], [0, -1], [0], [0, 0, 0]):
        with pytest.raises(RuntimeError, match="one integer for each of 2 groups"):
            MultiOneHot([2, 3]).encode(bad)
    register = OneHot(2, use_register=True)
    assert [int(register.encode(raw).int().argmax()) for raw in (7, -3, 7)] == [0, 1, 0]
    with pytest.raises(RuntimeError, match="full"):
        register.encode(8)
    assert OneHot(2, use_register=True).encode(-3)[0]
    for name in ("OneHot", "MultiOneHot"):
        with pytest.raises(RuntimeError, match="zeros"):
            make(name).project(make(name).zero())


# ---------------------------------------------------------------------- Composites


def nested():
    return Composite(
        a=Unbounded((2, 3)),
        n=Composite(b=Bounded(0, 1, (2, 3)), m=Composite(c=OneHot(4, (2, 3, 4)), shape=(2,)), shape=(2,)),
        z=Composite(d=Unbounded((2, 1, 5)), shape=(2, 1)),
        o=NonTensor((2,)),
        shape=(2,),
    )


def _set(name, value):
    return lambda spec: setattr(spec, name, value)


CHANGES = {
    "an entry of another shape": (lambda spec: spec.set("x", Unbounded((3,))), ValueError),
    "an entry that is no spec": (lambda spec: spec.set("x", 3), TypeError),
    "an entry in a leaf": (lambda spec: spec.set(("a", "x"), Unbounded((2,))), TypeError),
    "a reserved key": (lambda spec: spec.set(("n", "space"), Unbounded((2,))), AttributeError),
    "update, later wrong": (lambda spec: spec.update({"x": Unbounded((2,)), "y": Unbounded((3,))}), ValueError),
    "update, nested wrong": (
        lambda spec: spec.update({"n": {"b": Unbounded((2,)), "m": {"x": Unbounded((2,)), "y": 3}}}), TypeError),
    "a shape that is none": (_set("shape", (3,)), ValueError),
    "no device": (lambda spec: _set("device", None)(spec.to("cpu")), RuntimeError),
    "names of another number": (_set("names", ["a", "b", "c"]), ValueError),
    "an entry that is missing": (lambda spec: spec["x"], KeyError),
    "del": (lambda spec: spec.__delitem__("x"), KeyError),
    "to a text": (lambda spec: spec.to("abacus"), RuntimeError),
    "a dynamic dim, of objects": (lambda spec: spec.make_neg_dim(0), NotImplementedError),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("is_stacked", [False, True], ids=["Composite", "StackedComposite"])
def test_a_change_that_is_refused_changes_nothing(change, is_stacked):
    function, error = CHANGES[change]
    if not is_stacked:
        spec = nested()
    else:
        spec = torch.stack([nested(), nested().set("own", Unbounded((2,)))], 1)
        error = (error, NotImplementedError, ValueError)
    before = pickle.dumps(spec)
    with pytest.raises(error):
        function(spec)
    assert pickle.dumps(spec) == before


def test_a_stack_of_which_one_member_is_locked_stays_as_it_is():
    members = [Composite(a=Unbounded(()), b=Unbounded(())), Composite(a=Unbounded(()))]
    spec = StackedComposite(*members, dim=0)
    members[1].lock_()
    with pytest.raises(RuntimeError, match="locked"):
        spec["c"] = Unbounded((2,))
    assert list(members[0].keys()) == ["a", "b"]
    assert list(spec.keys()) == ["a"]
    with pytest.raises(RuntimeError, match="locked"):
        del spec["a"]
    assert list(members[0].keys()) == ["a", "b"]


LOCKED = {
    "set": lambda spec: spec.set("x", Unbounded((2,))),
    "set deeper": lambda spec: spec["n", "m"].set("x", Unbounded((2,))),
    "del": lambda spec: spec.__delitem__("a"),
    "pop": lambda spec: spec.pop("a"),
    "separates": lambda spec: spec.separates("a", ("n", "b")),
    "update nested": lambda spec: spec.update({"n": {"x": Unbounded((2,))}}),
    "device": _set("device", "cpu"),
    "make_neg_dim": lambda spec: spec.make_neg_dim(0),
    "unlock a part": lambda spec: spec["n", "m"].unlock_(),
}


@pytest.mark.parametrize("change", LOCKED)
def test_a_locked_composite_stays_as_it_is(change):
    spec = nested().lock_()
    for each in (spec, pickle.loads(pickle.dumps(spec))):
        before = pickle.dumps(each)
        with pytest.raises(RuntimeError, match="locked"):
            LOCKED[change](each)
        assert pickle.dumps(each) == before
    assert not spec.clone().is_locked
    spec.unlock_()
    if change != "make_neg_dim":
        LOCKED[change](spec)


def test_what_two_locked_composites_share_is_unlocked_by_neither():
    shared = Composite(a=Unbounded())
    one, other = (Composite(shared=shared, own=Unbounded()).lock_() for _ in range(2))
    assert one["shared"] is other["shared"] is shared
    with pytest.raises(RuntimeError, match="locked graph"):
        one.unlock_()
    assert one.is_locked
    assert shared.is_locked
    free = Composite(shared=shared, own=Unbounded())
    with pytest.raises(RuntimeError, match="locked"):
        free.separates("own", ("shared", "a"))
    assert list(free.keys(True)) == [("shared", "a"), "shared", "own"]


def test_tensordicts_with_missing_and_wrong_entries():
    spec = nested()
    for missing in ("a", ("n", "b"), ("n", "m", "c")):
        value = spec.rand().exclude(missing)
        for call in (spec.is_in, spec.project, spec.to_numpy):
            with pytest.raises(KeyError, match="is missing"):
                call(value)
    value = spec.rand().set(("n", "b"), torch.zeros(2, 3, dtype=torch.float64))
    with pytest.raises(TypeError, match="'b'"):
        spec.type_check(value)
    spec.type_check(value, "a")
    for key, raw in {"a": np.zeros(5), "n": {"b": np.zeros(5)}, "z": None}.items():
        with pytest.raises(RuntimeError, match=repr(key)):
            spec.encode({key: raw})
    with pytest.raises(KeyError, match="'x'"):
        spec.encode({"n": {"x": 1}})


def test_a_projection_that_fails_leaves_the_tensordict():
    spec = Composite(a=Bounded(0, 1, (3,)), b=OneHot(3))
    value = TensorDict(a=torch.full((3,), 5.0), b=torch.zeros(3, dtype=torch.bool))
    with pytest.raises(RuntimeError, match="zeros"):
        spec.project(value)
    assert value["a"].tolist() == [5, 5, 5]
    value["b"][1] = True
    assert spec.project(value)["a"].tolist() == [1, 1, 1]


def test_stacks_refuse_what_their_members_would_differ_in():
    spec = torch.stack([Bounded(0, 1, (3, 4)), Bounded(0, 1, (3, 5))], 0)
    assert spec.shape == (2, 3, -1)
    assert spec.rand().is_nested
    for call, error in {
        lambda: spec.rand((2,)): RuntimeError,
        lambda: torch.stack(list(spec.unbind()), 1).rand(): RuntimeError,
        lambda: spec.reshape(6, -1): NotImplementedError,
        lambda: spec.encode(1): NotImplementedError,
        lambda: spec.unbind(2): ValueError,
        lambda: spec.make_neg_dim(0): ValueError,
        lambda: spec[:, 0]: IndexError,
        lambda: spec[2:]: IndexError,
    }.items():
        with pytest.raises(error):
            call()
    composites = torch.stack([nested(), nested().set("own", Unbounded((2,)))], 0)
    with pytest.raises(KeyError):
        composites["own"]
    with pytest.raises(KeyError, match="at least one"):
        del composites["x"]
    with pytest.raises(NotImplementedError, match="members"):
        composites.shape = (2,)
    composites.device = "cpu"
    assert {each.device for each in composites.members} == {torch.device("cpu")}


def test_objects_of_another_batch_size():
    spec = NonTensor((2,), example_data="a")
    assert spec.is_in("anything")
    assert spec.is_in(NonTensorData("b", batch_size=(2,)))
    for bad in (NonTensorData("b"), torch.zeros(2), TensorDict({}, ())):
        assert not spec.is_in(bad)
        with pytest.raises((TypeError, RuntimeError, NotImplementedError)):
            spec.project(bad)
