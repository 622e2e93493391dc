"""Input that is refused: which error says so, and that nothing has changed."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from gymnasium import spaces
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
    from_gymnasium,
    from_jax,
    to_gymnasium,
    to_jax,
)
from tests.interop.specs.spec_kinds import ALL, KINDS, LEAVES, make


def nested():
    return Composite(
        a=Unbounded((2, 3)),
        n=Composite(b=Bounded(0, 1, (2, 3)), m=Composite(c=OneHot(4, (2, 3, 4)), shape=(2,)), shape=(2,)),
        z=Composite(d=Unbounded((2, 1, 5)), shape=(2, 1)),
        o=NonTensor((2,)),
        shape=(2,),
    )


def stacked_nested(dim=1):
    return torch.stack([nested(), nested().set("own", Unbounded((2,)))], dim)


def full_register():
    register = OneHot(2, use_register=True)
    assert [int(register.encode(raw).int().argmax()) for raw in (7, -3, 7)] == [0, 1, 0]
    assert OneHot(2, use_register=True).encode(-3)[0]
    return register


def filled(key, value):
    """A tensordict of `nested()` with another entry."""
    return nested().rand().set(key, value)


def _set(name, value):
    return lambda spec: setattr(spec, name, value)


def _encode(*values):
    """By value: that it is encoded."""
    return {f"encode {value}": lambda spec, value=value: spec.encode(value) for value in values}


def _each(error, words, calls):
    return {what: (call, error, words) for what, call in calls.items()}


MISSING = ("a", ("n", "b"), ("n", "m", "c"))
CHANGES = {
    "an entry that is no spec": (lambda spec: spec.set("x", 3), TypeError, "'x' must be a TensorSpec.*got int"),
    "an entry in a leaf": (lambda spec: spec.set(("a", "x"), Unbounded((2,))), TypeError, "'a' is a Unb.*no entries"),
    "a reserved key": (
        lambda spec: spec.set(("n", "space"), Unbounded((2,))),
        AttributeError,
        "'space'. cannot be set",
    ),
    "no device": (lambda spec: _set("device", None)(spec.to("cpu")), RuntimeError, "call clear_device_"),
    "names of another number": (_set("names", ["a", "b", "c"]), ValueError, "each of . dims, got ..a., .b., .c.."),
    "an entry that is missing": (lambda spec: spec["x"], KeyError, "'x' is not one of .'a', 'n', 'z', 'o'."),
    "an entry of one member": (lambda spec: spec["own"], KeyError, "'own' is not one of"),
    "to a text": (lambda spec: spec.to("abacus"), RuntimeError, "abacus"),
    "a dynamic dim, of objects": (
        lambda spec: spec.make_neg_dim(0),
        NotImplementedError,
        "NonTensor.*no dim is dynamic",
    ),
}
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


# By spec: how it is made; by what is done to it or in its place: the error, and the words that it must have.
REFUSED = {
    "no spec yet": (lambda: None, {
    "bounds crossed": (lambda _: Bounded(1, 0, (2,)), ValueError, "must not be above"),
    "no upper bound": (lambda _: Bounded(0, shape=(2,)), TypeError, "low and high"),
    "bounds of two shapes": (lambda _: Bounded(torch.zeros(2), torch.ones(3)), RuntimeError, "one shape"),
    "no domain": (lambda _: Bounded(0, 1, (2,), domain="real"), ValueError, "'real'"),
    "negative size": (lambda _: Unbounded((2, -3)), ValueError, "-3"),
    "Categorical of none": (lambda _: Categorical(0), ValueError, "at least 1"),
    "Categorical of three bools": (lambda _: Categorical(3, dtype=torch.bool), ValueError, "n=3"),
    "Categorical of 129 in int8": (lambda _: Categorical(129, dtype=torch.int8), ValueError, "at most 128 choices"),
    "OneHot of another shape": (lambda _: OneHot(3, shape=(3, 4)), ValueError, "must be 3"),
    "MultiOneHot with an empty group": (lambda _: MultiOneHot([2, 0]), ValueError, "at least 1"),
    "Binary of nothing": (lambda _: Binary(), TypeError, "needs n"),
    "mask too long": (lambda _: Categorical(3, mask=torch.ones(4)), RuntimeError, "Cannot expand mask"),
    "mask of uneven rows": (lambda _: MultiCategorical([[2, 3], [3, 2]], mask=torch.ones(5)), RuntimeError, "every row"),
    "mask without True": (lambda _: OneHot(3, mask=torch.zeros(3)), ValueError, "allows nothing"),
    "mask of bits": (lambda _: Binary(3).update_mask(torch.ones(3)), NotImplementedError, "Binary"),
    "features and batched": (lambda _: NonTensor((2,), batched=True, feature_dims=1), ValueError, "one of"),
    "choices of nothing": (lambda _: Choice([]), ValueError, "at least one"),
    "choices of two classes": (lambda _: Choice([Unbounded((1,)), OneHot(1)]), TypeError, "one class"),
    "two dicts": (lambda _: Composite({}, {}), RuntimeError, "multiple arguments"),
    "shape and batch size": (lambda _: Composite(shape=(2,), batch_size=(2,)), TypeError, "only one"),
    "an entry of another shape": (lambda _: Composite(a=Unbounded((3, 2)), shape=(2,)), ValueError, "must begin with"),
    "an entry on another device": (lambda _: Composite(a=Unbounded(device="meta"), device="cpu"), RuntimeError, "match"),
    "an entry that is no spec": (lambda _: Composite(a=3), TypeError, "TensorSpec"),
    "an empty key": (lambda _: Composite({(): Unbounded()}), TypeError, "texts"),
    "a reserved key": (lambda _: Composite({"dtype": Unbounded()}), AttributeError, "cannot be set"),
    "a stack of nothing": (lambda _: torch.stack([], 0), RuntimeError, "non-empty"),
    "a stack of two classes": (lambda _: torch.stack([OneHot(3), Unbounded(3)]), RuntimeError, "more than one type"),
    "a stack of two batch sizes": (
        lambda _: torch.stack([Composite(shape=(2,)), Composite(shape=(3,))]), RuntimeError, "Shapes"),
    "a stack into something": (
        lambda _: torch.stack([Unbounded((3,))], 0, out=Unbounded((1, 3))), NotImplementedError, "out"),
    "one-hot stacked along the last dim": (lambda _: torch.stack([OneHot(3)], -1), ValueError, "remain unchanged"),
    "keys with specs of two classes": (
        lambda _: consolidate_spec(StackedComposite(
            Composite(a=OneHot(3)), Composite(a=Unbounded(3)), Composite(), dim=0)), ValueError, "several classes"),
    }),
    "Categorical, a row of its mask without True": (
        lambda: Categorical(2, (2,), mask=torch.tensor([[True, False], [False, False]])),
        {"rand": (lambda spec: spec.rand(), RuntimeError, "allows nothing")},
    ),
    "Categorical of unknown size": (lambda: Categorical(-1), {
        **_each(RuntimeError, "Undefined cardinality", {
            "n": lambda spec: spec.n, "rand": lambda spec: spec.rand(),
            "cardinality": lambda spec: spec.cardinality(), "enumerate": lambda spec: spec.enumerate(),
        }),
        "set_provisional_n(0)": (lambda spec: spec.set_provisional_n(0), ValueError, "at least 1"),
    }),
    "OneHot": (lambda: OneHot(3), {
        **_each(AssertionError, "Value must be less than action space", _encode(3, -1, [0, 3], np.array([5]))),
        "project zeros": (lambda spec: spec.project(torch.zeros(3, dtype=torch.bool)), RuntimeError, "zeros"),
        "rand(3)": (lambda spec: spec.rand(3), TypeError, r"sequence of sizes, got 3: write \(3,\)"),
    }),
    "OneHot with a full register": (full_register, _each(RuntimeError, "full", _encode(8))),
    "MultiOneHot": (lambda: MultiOneHot([2, 3]), {
        **_each(RuntimeError, "one integer for each of 2 groups", _encode([2, 0], [0, 3], [0, -1], [0], [0, 0, 0])),
        "project zeros": (lambda spec: spec.project(torch.zeros(5, dtype=torch.bool)), RuntimeError, "zeros"),
    }),
    "NonTensor": (lambda: NonTensor((2,), example_data="a"), {
        "project an object of another batch size": (
            lambda spec: spec.project(NonTensorData("b")), TypeError, "projects tensors, got NonTensorData"),
        "project a tensor": (
            lambda spec: spec.project(torch.zeros(2)), NotImplementedError, r"cannot correct .* shape \[2\]"),
        "project a tensordict": (lambda spec: spec.project(TensorDict({}, ())), TypeError, "tensors, got TensorDict"),
    }),
    "Composite": (nested, {
        **CHANGES,
        "an entry of another shape": (lambda spec: spec.set("x", Unbounded((3,))), ValueError, "'x', .3., must begin"),
        "update, later wrong": (
            lambda spec: spec.update({"x": Unbounded((2,)), "y": Unbounded((3,))}), ValueError, "'y', .3., must begin"),
        "update, nested wrong": (
            lambda spec: spec.update({"n": {"b": Unbounded((2,)), "m": {"x": Unbounded((2,)), "y": 3}}}),
            TypeError, "'y' must be a TensorSpec.*got int"),
        "a shape that is none": (_set("shape", (3,)), ValueError, r"\[3\] does not begin that of 'a', \[2, 3\]"),
        "del": (lambda spec: spec.__delitem__("x"), KeyError, "'x' is not one of .'a', 'n', 'z', 'o'."),
        **{f"{method} without {key}": (
            lambda spec, method=method, key=key: getattr(spec, method)(spec.rand().exclude(key)), KeyError, "is missing")
           for method in ("is_in", "project", "to_numpy") for key in MISSING},
        "type_check of another dtype": (
            lambda spec: spec.type_check(filled(("n", "b"), torch.zeros(2, 3, dtype=torch.float64))), TypeError, "'b'"),
        **{f"encode another shape of {key}": (lambda spec, raw={key: raw}: spec.encode(raw), RuntimeError, repr(key))
           for key, raw in {"a": np.zeros(5), "n": {"b": np.zeros(5)}, "z": None}.items()},
        "encode another key": (lambda spec: spec.encode({"n": {"x": 1}}), KeyError, "'x'"),
    }),
    "Composite in a Composite": (lambda: Composite(a=Composite(b=OneHot(3))), {
        "is_in without it": (lambda spec: spec.is_in(TensorDict({})), KeyError, "'a' is missing"),
    }),
    "Composite, locked": (lambda: nested().lock_(), _each(RuntimeError, "locked", LOCKED)),
    "Composite, locked and pickled": (
        lambda: pickle.loads(pickle.dumps(nested().lock_())), _each(RuntimeError, "locked", LOCKED)),
    "StackedComposite": (stacked_nested, {
        **CHANGES,
        "an entry of another shape": (lambda spec: spec.set("x", Unbounded((3,))), ValueError, "'x', .3., must begin"),
        "update, later wrong": (
            lambda spec: spec.update({"x": Unbounded((2,)), "y": Unbounded((3,))}), ValueError, "'x', .2., must begin"),
        "update, nested wrong": (
            lambda spec: spec.update({"n": {"b": Unbounded((2,)), "m": {"x": Unbounded((2,)), "y": 3}}}),
            ValueError, "'b', .2., must begin"),
        "a shape": (_set("shape", (3,)), NotImplementedError, "follows from its members, it cannot be set"),
        "del": (lambda spec: spec.__delitem__("x"), KeyError, "at least one of the stacked"),
    }),
    "Stacked": (lambda: torch.stack([Bounded(0, 1, (3, 4)), Bounded(0, 1, (3, 5))], 0), {
        "rand((2,))": (lambda spec: spec.rand((2,)), RuntimeError, "stack dimension other than 0: .* behind 1 leading"),
        "rand along another dim": (
            lambda spec: torch.stack(list(spec.unbind()), 1).rand(), RuntimeError, "other than 0: here it is 1"),
        "reshape": (lambda spec: spec.reshape(6, -1), NotImplementedError, "cannot be reshaped"),
        "encode": (lambda spec: spec.encode(1), TypeError, "a raw value for each of 2 members, got 1"),
        "encode another number": (lambda spec: spec.encode([1, 2, 3]), RuntimeError, "for 2 members, got 3"),
        "encode an array without the stack dim": (
            lambda spec: spec.encode(np.array(1.0)), RuntimeError, r"shape \[\] has no stack dim"),
        "unbind": (lambda spec: spec.unbind(2), ValueError, "dim 2 .* cannot be unbound"),
        "make_neg_dim": (lambda spec: spec.make_neg_dim(0), ValueError, "stack dim 0, which cannot be dynamic"),
        "too many indices": (lambda spec: spec[0, 0, 0, 0], IndexError, "too many indices"),
        "an array of two dims": (lambda spec: spec[[[0, 1], [1, 1]]], IndexError, "has one dim, got shape"),
        "a mask over its dim": (lambda spec: spec[np.ones((2, 3), bool)], IndexError, "has one dim"),
        "a mask that includes its dim": (
            lambda spec: torch.stack(list(spec.unbind()), 1)[np.ones((3, 2), bool)], IndexError, "index it by numbers"),
        "two arrays": (lambda spec: spec[[0, 1], [0, 1]], IndexError, "one array of one dim"),
        "an index of no member": (lambda spec: spec[2:], IndexError, "selects no member"),
    }),
    "a space of gymnasium": (lambda: None, {
        "of texts": (
            lambda _: from_gymnasium(spaces.Dict(a=spaces.Tuple([spaces.Text(3)]))), TypeError, r"\['a'\]\[0\] is a Text"),
        "of sequences": (
            lambda _: from_gymnasium(spaces.Sequence(spaces.Discrete(2))), TypeError, "the space is a Sequence"),
        "with a key of two": (
            lambda _: from_gymnasium(spaces.Dict({("a", "b"): spaces.Discrete(2)})), TypeError, r"the key \('a', 'b'\)"),
        "with a reserved key": (
            lambda _: from_gymnasium(spaces.Dict(shape=spaces.Discrete(2))), ValueError, "the space: .*'shape'.*rename"),
        "of uint32": (
            lambda _: from_gymnasium(spaces.Box(0, 1, (), np.uint32)), TypeError, "is uint32, which specs do not have"),
    }),
    "a structure of JAX": (lambda: None, {
        "of uint32": (lambda _: from_jax({"a": jax.ShapeDtypeStruct((), jnp.uint32)}), TypeError, r"\['a'\] is uint32"),
        "of int64": (lambda _: from_jax({"x": jax.ShapeDtypeStruct((3,), np.int64)}), TypeError, "64"),
        "of float64": (lambda _: from_jax({"x": jax.ShapeDtypeStruct((3,), np.float64)}), TypeError, "64"),
        "of texts": (lambda _: from_jax({"a": "text"}), TypeError, "'a'"),
        "of nothing": (lambda _: from_jax({}), ValueError, "at least one array"),
    }),
    "dynamic": (lambda: Composite(a=Composite(b=Unbounded((2, -1)))), {
        "to_gymnasium": (to_gymnasium, ValueError, r"the spec\['a'\]\['b'\] has a dynamic dim"),
        "to_jax": (to_jax, ValueError, r"\['a'\]\['b'\] has a dynamic dim"),
    }),
    "of objects": (lambda: Composite(a=NonTensor()), {
        "to_gymnasium": (to_gymnasium, TypeError, r"the spec\['a'\] is NonTensor"),
        "to_jax": (to_jax, TypeError, r"\['a'\] is NonTensor"),
    }),
    "of uint32": (lambda: Composite(a=Unbounded(3, dtype=torch.uint32)), {
        "to_jax": (to_jax, TypeError, r"\['a'\] is torch.uint32")}),
    "of bfloat16": (lambda: Unbounded(dtype=torch.bfloat16), {"to_gymnasium": (to_gymnasium, TypeError, "bfloat16")}),
    "Choice": (lambda: Choice([Categorical(2), Categorical(3)]), {
        "to_gymnasium": (to_gymnasium, TypeError, "is a Choice")}),
    "Stacked of other bounds": (lambda: torch.stack([Bounded(0, 1, (2,)), Bounded(0, 2, (2,))]), {
        "to_gymnasium": (to_gymnasium, TypeError, "is a Stacked")}),
    "StackedComposite of other keys": (lambda: torch.stack([Composite(a=Unbounded()), Composite(b=Unbounded())]), {
        "to_gymnasium": (to_gymnasium, TypeError, "different keys")}),
}  # fmt: skip


@pytest.mark.parametrize(("name", "what"), [(name, what) for name, (_, cases) in REFUSED.items() for what in cases])
def test_what_is_refused_says_why_and_changes_nothing(name, what):
    construct, cases = REFUSED[name]
    call, error, words = cases[what]
    spec = construct()
    before = pickle.dumps(spec)
    with pytest.raises(error, match=words):
        call(spec)
    assert pickle.dumps(spec) == before


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
    assert not spec.is_in(torch.tensor([0, 0]))
    assert spec[0].rand() == 0


def test_a_categorical_of_unknown_size():
    spec = Categorical(-1)
    assert spec.is_in(torch.tensor(99))
    spec.set_provisional_n(3)
    assert spec.n == 3
    assert not spec.is_in(torch.tensor(99))


# ---------------------------------------------------------------------- Composites


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


@pytest.mark.parametrize("change", [each for each in LOCKED if each != "make_neg_dim"])
def test_what_a_lock_refused_is_done_when_it_is_unlocked(change):
    spec = nested().lock_()
    assert not spec.clone().is_locked
    LOCKED[change](spec.unlock_())


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


def test_a_check_of_types_is_one_of_entries_that_are_chosen():
    nested().type_check(filled(("n", "b"), torch.zeros(2, 3, dtype=torch.float64)), "a")


def test_a_projection_that_fails_leaves_the_tensordict():
    spec = Composite(a=Bounded(0, 1, (3,)), b=OneHot(3))
    value = TensorDict(a=torch.full((3,), 5.0), b=torch.zeros(3, dtype=torch.bool))
    with pytest.raises(RuntimeError, match="zeros"):
        spec.project(value)
    assert value["a"].tolist() == [5, 5, 5]
    value["b"][1] = True
    assert spec.project(value)["a"].tolist() == [1, 1, 1]


def test_members_of_a_stack_differ_in_sizes_and_keys():
    spec = torch.stack([Bounded(0, 1, (3, 4)), Bounded(0, 1, (3, 5))], 0)
    assert spec.shape == (2, 3, -1)
    assert spec.rand().is_nested
    composites = stacked_nested(0)
    composites.device = "cpu"
    assert {each.device for each in composites.members} == {torch.device("cpu")}


def test_objects_of_another_batch_size():
    spec = NonTensor((2,), example_data="a")
    assert spec.is_in("anything")
    assert spec.is_in(NonTensorData("b", batch_size=(2,)))
    for bad in (NonTensorData("b"), torch.zeros(2), TensorDict({}, ())):
        assert not spec.is_in(bad)
