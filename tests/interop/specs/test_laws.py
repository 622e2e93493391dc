"""What holds for every kind of spec: members, corrections, shape operations, indices, copies, laws of draws."""

import copy
import itertools
import pickle

import numpy as np
import pytest
import torch
from scipy import stats
from tensordict import NonTensorData, TensorDict, lazy_stack
from torch import Tensor

from interop.specs import (
    Binary,
    Bounded,
    Categorical,
    Choice,
    Composite,
    MultiCategorical,
    NonTensor,
    OneHot,
    Stacked,
    TensorSpec,
    Unbounded,
    check_no_exclusive_keys,
    consolidate_spec,
    contains_lazy_spec,
    make_composite_from_td,
)
from tests.interop.specs.spec_kinds import (
    ALL,
    CHANGES,
    INDICES,
    KINDS,
    LEADS,
    LEAVES,
    REGROUPED,
    STACKS,
    for_torch,
    make,
    noise,
    same,
)

LEAD = (2, 1, 3)
TRIES = 12
MASKED = [name for name in KINDS if "mask" in name]


@pytest.mark.parametrize("lead", LEADS, ids=str)
@pytest.mark.parametrize("name", ALL)
def test_values_have_the_shape_and_dtype_and_draws_are_members(name, lead):
    spec = make(name, lead)
    for extra in ((), (5,), (2, 0), (1, 3)):
        for value in (spec.rand(extra), spec.zero(extra), spec.one(extra)):
            assert value.shape == (*extra, *spec.shape)
            assert spec.dtype is None or value.dtype == spec.dtype
        assert spec.is_in(spec.rand(extra))
        assert spec.is_in(spec.sample(torch.Size(extra)))
    spec.assert_is_in(spec.rand())
    spec.type_check(spec.rand())


@pytest.mark.parametrize("lead", LEADS, ids=str)
@pytest.mark.parametrize("name", ALL)
def test_projections_are_members_and_members_stay(name, lead):
    spec, members = make(name, lead), 0
    for _ in range(TRIES):
        value = hot(spec, noise(spec))
        is_member = bool(spec.is_in(value))
        members += is_member
        whole = value.clone()
        made = spec.project(value)
        assert spec.is_in(made)
        assert made.shape == value.shape
        if isinstance(spec, Composite):  # in place
            assert made is value or name in STACKS
            assert same(made, whole) or not is_member
        else:
            assert (made is value) == is_member
            assert same(value, whole)
    assert members


def hot(spec, value):
    """The value, each one-hot vector of zeros in it replaced: it names nothing that it could be projected to."""
    if isinstance(spec, Composite):
        for key in (key for key in spec.keys(True, True) if isinstance(spec[key], OneHot)):
            value[key] = hot(spec[key], value[key])
    kind = spec.members[0] if isinstance(spec, Stacked) else spec
    if isinstance(kind, OneHot):
        groups = getattr(kind, "nvec", [kind.n])
        parts = zip(value.split(groups, -1), spec.rand().split(groups, -1), strict=True)
        return torch.cat([torch.where((part != 0).any(-1, keepdim=True), part, other) for part, other in parts], -1)
    return value


@pytest.mark.parametrize("name", ALL)
def test_shape_operations_commute_with_membership(name):
    spec = make(name, LEAD)
    kept = pickle.dumps(spec)
    for change, function in (REGROUPED | CHANGES).items():
        if change in REGROUPED and name in STACKS:
            with pytest.raises(NotImplementedError):
                function(spec)
            continue
        made = function(spec)
        assert type(made) is type(spec), change
        for _ in range(TRIES):
            value = noise(spec)
            changed = function(value)
            assert changed.shape == made.shape, change
            assert bool(made.is_in(changed)) == bool(spec.is_in(value)), (change, value)
        assert made.rand().shape == made.shape, change
        assert pickle.dumps(spec) == kept, change


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dim", range(3))
def test_unbound_specs_are_of_the_unbound_values(name, dim):
    spec = make(name, LEAD)
    made = spec.unbind(dim)
    assert len(made) == LEAD[dim]
    for _ in range(TRIES):
        value = noise(spec)
        parts = value.unbind(dim)
        assert [each.shape for each in parts] == [each.shape for each in made]
        fits = [bool(one.is_in(part)) for one, part in zip(made, parts, strict=True)]
        assert all(fits) == bool(spec.is_in(value))


@pytest.mark.parametrize("name", KINDS)
def test_indexed_specs_are_of_the_indexed_values(name):
    spec = make(name, LEAD)
    for index in INDICES:
        made, chosen = spec[index], for_torch(index, spec.structural)
        for _ in range(TRIES):
            value, other = spec.rand(), noise(spec)
            if isinstance(value, Tensor | TensorDict):
                value[chosen] = other[chosen]
            part = value[chosen]
            assert part.shape == made.shape, index
            # Of a choice, other places have another member.
            assert bool(made.is_in(part)) == bool(spec.is_in(value)) or name == "Choice", index
        assert made.rand().shape == made.shape, index


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("dim", [0, 2, -3])
def test_index_select_is_an_index(name, dim):
    spec, places = make(name, LEAD), torch.tensor([1, 0, 1]) % LEAD[dim]
    dim = dim if dim >= 0 else dim + 3 - spec.ndim
    made = torch.index_select(spec, dim, places)
    assert made == spec[(slice(None),) * (dim % spec.ndim) + (places,)]
    assert made.shape[dim % spec.ndim] == 3


@pytest.mark.parametrize("index", [slice(None, None, -1), slice(3, 0, -2), slice(0, 9, 2)], ids=str)
@pytest.mark.parametrize("name", LEAVES)
def test_slices_may_have_negative_steps(name, index):
    spec = make(name, (4,))
    places = list(range(4)[index])
    assert spec[index] == spec[places]
    assert spec[index, None].shape == (len(places), 1, *spec.shape[1:])


@pytest.mark.parametrize("name", [name for name in KINDS if name != "Choice"])
@pytest.mark.parametrize("dim", range(4))
def test_stacked_specs_are_of_the_stacked_values(name, dim):
    one, other = make(name, LEAD), make(name.removesuffix(", mask"), LEAD)
    spec = torch.stack([one, other], dim)
    stack = torch.stack if isinstance(one.rand(), Tensor) else lazy_stack
    for _ in range(TRIES):
        values = noise(one), noise(other)
        whole = stack(list(values), dim)
        assert whole.shape == spec.shape
        assert bool(spec.is_in(whole)) == bool(one.is_in(values[0]) and other.is_in(values[1]))


@pytest.mark.parametrize("name", ALL)
def test_copies_are_equal_and_share_nothing_that_changes(name):
    spec = make(name, (2,))
    for made in (spec.clone(), copy.copy(spec), copy.deepcopy(spec), pickle.loads(pickle.dumps(spec)), spec.to("cpu")):
        made = made.clear_device_() if spec.device is None else made
        assert made == spec
        assert type(made) is type(spec)
        assert made.is_in(spec.rand())
        assert repr(made) == repr(spec)
    assert spec.to(None) is spec
    made = spec.clone()
    if not isinstance(spec, NonTensor | Choice):
        made.make_neg_dim(0)
        assert made.shape[0] == -1
        assert made != spec
        assert spec == make(name, (2,))


def test_kinds_differ():
    specs = [make(name, (2,)) for name in ALL]
    alike = {(one, other) for one, first in zip(ALL, specs, strict=True) for other, second in zip(ALL, specs, strict=True)
             if first == second and one != other}  # fmt: skip
    assert alike == {
        ("Binary, bool", "Categorical, bool"),
        ("Categorical, bool", "Binary, bool"),
    }  # a bit is one of two


@pytest.mark.parametrize("name", MASKED)
def test_masks_are_kept_by_copies_and_lost_by_none(name):
    if not hasattr(make(name), "update_mask"):
        return
    spec, free = make(name, (2,)), make(name, (2,))
    free.update_mask(None)
    assert spec != free
    assert free.clone() == free
    assert spec.to(torch.int32).to(spec.dtype) == spec
    free.update_mask(spec.mask)
    assert spec == free


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.float32])
@pytest.mark.parametrize("name", LEAVES)
def test_another_dtype_has_the_values_of_before(name, dtype):
    spec = make(name, (2,))
    made = spec.to(dtype)
    assert made.dtype == dtype
    assert made.is_in(made.rand((3,)))
    if "float" not in name and "bool" not in name:
        assert made.is_in(spec.rand((3,)).to(dtype))


@pytest.mark.parametrize("name", [name for name in ALL if "bfloat16" not in name and name != "Choice"])
def test_encoding_gives_back_what_to_numpy_made(name):
    spec = make(name, (2, 3))
    value = spec.rand()
    raw = spec.to_numpy(value, safe=True)
    assert same(spec.encode(raw), value)
    assert spec.is_in(spec.encode(raw, ignore_device=True))
    if name in LEAVES:
        assert same(spec.encode(raw.tolist()), value)
        assert same(spec.encode(raw[::-1][::-1]), value)


@pytest.mark.parametrize("name", [name for name in LEAVES if "OneHot" in name or "Categorical" in name])
def test_one_hot_and_categorical_are_two_forms_of_one_value(name):
    spec = make(name, (2,))
    value = spec.rand((4,))
    if "rows" in name:
        assert spec.to_one_hot_spec().is_in(spec.to_one_hot(spec.rand()))
        return
    there, back = ("categorical", "one_hot") if "OneHot" in name else ("one_hot", "categorical")
    other = getattr(spec, f"to_{there}_spec")()
    made = getattr(spec, f"to_{there}")(value, safe=True)
    assert other.is_in(made)
    assert same(getattr(other, f"to_{back}")(made).to(spec.dtype), value)
    assert getattr(spec, f"to_{back}_spec")() is spec
    assert getattr(spec, f"to_{back}")(value) is value
    assert getattr(other, f"to_{back}_spec")().to(spec.dtype) == spec
    assert spec.is_in(getattr(other, f"to_{back}")(other.rand((50,))).to(spec.dtype))


# ---------------------------------------------------------------------- all values

FINITE = [name for name in LEAVES if not name.startswith(("Bounded", "Unbounded"))]


@pytest.mark.parametrize("name", FINITE)
def test_draws_are_uniform_over_the_allowed_values(name):
    spec, free = make(name), make(name)
    is_masked = getattr(spec, "mask", None) is not None
    if is_masked:
        free.update_mask(None)
    every = free.enumerate()
    assert len(every) == spec.cardinality()
    assert every.shape[1:] == spec.shape
    assert len(every.unique(dim=0)) == len(every)
    allowed = torch.stack([each for each in every if spec.is_in(each)])
    assert is_masked == (len(allowed) < len(every))
    drawn = spec.rand((6000,))
    matches = (drawn[:, None] == allowed).reshape(6000, len(allowed), -1).all(-1)
    assert (matches.sum(1) == 1).all()
    assert stats.chisquare(matches.sum(0)).pvalue > 1e-4
    if type(spec).__name__ == "Categorical" and not spec.ndim:
        assert same(spec.enumerate(use_mask=True), allowed)


def member(spec, value):
    """Whether a row of numbers is in a spec, in plain Python."""
    mask = None if getattr(spec, "mask", None) is None else spec.mask.flatten().tolist()
    if isinstance(spec, OneHot):
        sizes, start = getattr(spec, "nvec", [spec.n]), 0
        hot = [place for place, number in enumerate(value) if number == 1]
        for size in sizes:
            if len([place for place in hot if start <= place < start + size]) != 1:
                return False
            start += size
        return set(value) <= {0, 1} and (mask is None or all(mask[place] for place in hot))
    sizes = spec.nvec.tolist() if hasattr(spec, "nvec") else [spec.n] * len(value)
    starts = [sum(sizes[:at]) if hasattr(spec, "nvec") else 0 for at in range(len(value))]
    return all(0 <= number < size and (mask is None or mask[start + number])
               for number, size, start in zip(value, sizes, starts, strict=True))  # fmt: skip


@pytest.mark.parametrize("name", FINITE)
def test_members_are_what_the_definition_says(name):
    spec = make(name)
    numbers = range(-1, 5) if spec.dtype not in (torch.bool, torch.uint8) else (0, 1)
    for value in itertools.islice(itertools.product(numbers, repeat=spec.shape.numel()), 0, None, 3):
        tensor = torch.tensor(value).to(spec.dtype).reshape(spec.shape)
        assert bool(spec.is_in(tensor)) == member(spec, value), value


@pytest.mark.parametrize("name", FINITE)
def test_all_values_of_a_batch_are_the_combinations_of_those_of_its_places(name):
    one, spec = make(name), make(name, (2,))
    rows = [made.enumerate(use_mask=True) for made in spec.unbind(0)]
    wanted = [torch.stack(pair) for pair in itertools.product(*rows)]
    assert same(spec.enumerate(use_mask=True), torch.stack(wanted))
    if "rows" not in name:
        assert spec.cardinality() == one.cardinality() ** 2
    assert len(spec.enumerate()) == spec.cardinality()


def test_lists_of_too_many_values_are_refused_before_any_memory_is_taken():
    assert Binary(64).cardinality() == 2**64
    for spec in (Binary(64), Categorical(10, (40,)), OneHot(10, (40, 10)), MultiCategorical([10] * 40)):
        with pytest.raises(ValueError, match="too many"):
            spec.enumerate()
    with pytest.raises(OverflowError, match=r"10{40}|10000000000"):
        MultiCategorical([10] * 40).cardinality()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int64])
def test_bounded_integers_are_uniform_and_reach_both_bounds(dtype):
    drawn = Composite(a=make("Bounded, uint8").to(dtype)).rand((4000,))["a"]
    assert stats.chisquare(drawn.flatten().to(torch.int64).bincount()[1:]).pvalue > 1e-4
    assert drawn.unique().tolist() == [1, 2, 3, 4]


def test_draws_between_bounds_that_are_far_or_infinite():
    inf = torch.inf
    spec = Bounded(torch.tensor([-inf, 2.0, -inf, -1e30]), torch.tensor([inf, inf, -2.0, 1e30]))
    drawn = spec.rand((2000,))
    assert spec.is_in(drawn)
    assert drawn.isfinite().all()
    assert (drawn.std(0) > 0.5).all()
    for low, high in ((-(2**63), 2**63 - 1), (0, 2**63 - 1), (-(2**62), 2**62), (2**62, 2**62 + 1)):
        spec = Bounded(low, high, (2000,), dtype=torch.int64)
        drawn = spec.rand()
        assert spec.is_in(drawn)
        middle = (low + high) // 2
        assert 0.4 < (drawn > middle).double().mean() < 0.6


def test_bounded_floats_are_uniform_and_unbounded_ones_normal():
    bounded, unbounded = make("Bounded, float64").rand((4000,)), make("Unbounded, float32").rand((2000,))
    assert stats.kstest(bounded.numpy(), "uniform", (-0.5, 1)).pvalue > 1e-4
    assert stats.kstest(unbounded.flatten().numpy(), "norm").pvalue > 1e-4


def test_a_composite_enumerates_all_combinations_with_the_first_key_slowest():
    spec = Composite(a=make("Categorical", (2,)), b=Composite(c=make("OneHot", (2,)), shape=(2,)), shape=(2,))
    assert spec.cardinality() == 16**2 and spec.enumerate().shape == (16**2, 2) and spec.is_in(spec.enumerate())
    spec = spec[0]
    every = spec.enumerate()
    assert every.shape == (16,)
    assert spec.cardinality() == 16
    assert spec.is_in(every)
    pairs = [(int(each["a"]), int(each["b", "c"].int().argmax())) for each in every]
    assert pairs == [(a, c) for a in range(4) for c in range(4)]


@pytest.mark.parametrize("name", ["OneHot", "Categorical", "MultiOneHot"])
def test_a_member_is_an_index(name):
    spec, numbers = make(name, (2,)), torch.arange(10.0).reshape(2, 5)
    value = spec.rand()
    if name == "Categorical":
        assert same(spec.index(value, numbers), numbers[:, value])
        return
    wanted = numbers[:, : value.shape[-1]][value].reshape(2, -1)
    assert same(spec.index(value, numbers), wanted)


def test_every_class_is_among_the_kinds():
    def classes(of):
        return {of} | {each for below in of.__subclasses__() for each in classes(below)}

    made = {type(make(name)) for name in ALL}
    bare = {each.__name__ for each in classes(TensorSpec) if each.__module__.startswith("interop.specs")}
    abstract = {"TensorSpec", "LazyStack", "Bounded", "Unbounded", "_Interval", "Choices"}
    old = {name for name in bare if name.endswith("Spec")}
    assert bare - abstract - old == {each.__name__ for each in made}


# ---------------------------------------------------------------------- stacks and utilities


def exclusive(lead=()):
    """A stack whose members have keys of their own, at two levels; one in a Composite."""
    inner = [Composite(a=Unbounded((*lead, 3)), shape=lead), Composite(b=Bounded(0, 1, (*lead, 3, 4)), shape=lead)]
    members = [Composite({"same": Unbounded(lead), "inner": each, key: OneHot(4, (*lead, 4))}, shape=lead)
               for key, each in zip("xy", inner, strict=True)]  # fmt: skip
    return torch.stack(members, 0)


@pytest.mark.parametrize("lead", LEADS, ids=str)
@pytest.mark.parametrize("is_nested", [False, True])
def test_consolidated_stacks_have_no_exclusive_keys(lead, is_nested):
    spec = exclusive(lead)
    spec = Composite(deeper=spec, shape=spec.shape) if is_nested else spec
    before = pickle.dumps(spec)
    made = consolidate_spec(spec)
    assert pickle.dumps(spec) == before
    assert contains_lazy_spec(spec)
    assert not check_no_exclusive_keys(spec)
    assert check_no_exclusive_keys(spec, recurse=False) == is_nested
    assert check_no_exclusive_keys(made)
    assert made.is_in(made.rand())
    assert spec.is_in(made.rand())
    stack = made["deeper"] if is_nested else made
    for member, old in zip(stack.members, (spec["deeper"] if is_nested else spec).members, strict=True):
        keys = {"same", "inner", "x", "y", ("inner", "a"), ("inner", "b")}
        assert set(member.keys(True)) == keys
        assert all(member[key] == old[key] for key in old.keys(True, True))
        for key in keys - set(old.keys(True)):
            assert member[key].shape[: len(lead)] == lead
            assert set(member[key].shape[len(lead) :]) == {0}
    assert not check_no_exclusive_keys(consolidate_spec(spec, recurse_through_entries=False))


@pytest.mark.parametrize("name", [name for name in ALL if name.startswith(("Composite", "stack of Composite"))])
def test_the_spec_made_of_a_tensordict_has_it(name):
    data = make(name, (2,)).rand()
    made = make_composite_from_td(data, unsqueeze_null_shapes=False)
    assert made.shape == data.batch_size
    assert set(made.keys(True, True)) == set(data.keys(True, True))
    made.data_cls = None
    assert made.is_in(data)
    assert make_composite_from_td(TensorDict(a=torch.zeros(())))["a"].shape == (1,)
    dynamic = make_composite_from_td(data, dynamic_shape=True)
    assert dynamic["a"].shape == (*made["a"].shape[:-1], -1)


def test_a_stack_is_its_members():
    members = [make("Bounded, rows", (2,)), make("Bounded, float32", (2,))]
    for dim in (0, 1, 2):
        spec = torch.stack(members, dim)
        assert spec.unbind(dim) == tuple(members)
        whole = (slice(None),) * dim
        assert spec[(*whole, 1)] is members[1]
        assert spec[(*whole, slice(0, 1))] == members[0].unsqueeze(dim)
        assert spec[(*whole, [1, 0, 1])].unbind(dim) == (members[1], members[0], members[1])
        assert spec.unsqueeze(0).unbind(0) == (spec,)
        assert spec.unsqueeze(0).squeeze(0) == spec
    spec = torch.stack([make("Categorical", (2, 1, 3)), make("Categorical, mask", (2, 1, 3))], 0)
    value = torch.stack([each.rand() for each in spec.members])
    value[1, 1, 0, 1] = 1  # not allowed
    for change in (lambda each: each.squeeze(2), lambda each: each.unsqueeze(1), lambda each: each.unsqueeze(2),
                   lambda each: each.expand(2, 2, 4, 3), lambda each: each.unsqueeze(0).squeeze(0)):  # fmt: skip
        assert change(value).shape == change(spec).shape
        assert not change(spec).is_in(change(value))
        assert change(spec).is_in(change(torch.zeros_like(value)))
    fits = [each.is_in(part) for each, part in zip(spec.unbind(1), value.unbind(1), strict=True)]
    assert fits == [True, False]
    spec.make_neg_dim(1)
    assert spec.shape == (2, -1, 1, 3)
    assert [each.shape[0] for each in spec.members] == [-1, -1]
    composite = exclusive((2,))
    composite["new"] = Unbounded((2, 2, 5))
    assert [each["new"].shape for each in composite.members] == [(2, 5), (2, 5)]
    assert composite["new"] == Unbounded((2, 2, 5))
    del composite["x"]
    assert list(composite.members[0].keys()) == ["same", "inner", "new"]


def test_names_follow_the_dims():
    spec = make("Composite", (2, 1, 3))
    spec.names = ["x", "y", "z"]
    assert spec["inner"].names == ["x", "y", "z"]
    assert spec.rand((4,)).names == [None, "x", "y", "z"]
    assert spec.unsqueeze(1).names == ["x", None, "y", "z"]
    assert spec.squeeze().names == ["x", "z"]
    assert spec[:, None, 0].names == ["x", None, "z"]
    assert spec[:, 0, [0, 1]].names == ["x", "z"]
    assert spec.expand(5, 2, 1, 3).names == [None, "x", "y", "z"]
    assert spec.unbind(1)[0].names == ["x", "z"]
    assert spec.clone().refine_names(..., "z").names == ["x", "y", "z"]


# ---------------------------------------------------------------------- what specs remember


@pytest.mark.parametrize("name", [name for name in LEAVES if "bfloat16" not in name])
def test_a_memo_of_encoded_values_changes_nothing(name):
    spec, plain = make(name, (2,)), make(name, (2,))
    spec.memoize_encode()
    for value in (spec.rand(), spec.rand()):
        raw = spec.to_numpy(value)
        for _ in range(2):
            for each in (raw, raw.tolist(), raw.astype(np.int64) if raw.dtype.kind == "i" else raw):
                made = spec.encode(each)
                assert same(made, plain.encode(each))
                made.zero_()
    wider = spec.expand(2, *spec.shape)
    assert wider.encode(np.stack([raw, raw])).shape == (2, *spec.shape)
    assert spec.unsqueeze(0).encode(raw).shape == plain.unsqueeze(0).encode(raw).shape
    assert spec.clone() == plain
    spec.erase_memoize_cache()
    assert same(spec.encode(raw), plain.encode(raw))


def test_a_register_numbers_values_as_they_come_and_belongs_to_one_spec():
    spec = OneHot(3, use_register=True)
    value = spec.encode([7, -1, 7])
    assert value.int().argmax(-1).tolist() == [0, 1, 0]
    assert spec.to_numpy(value).tolist() == [7, -1, 7]
    other = spec.clone()
    assert other.encode(5)[2]
    assert spec.encode(9)[2]
    assert other.to_numpy(other.encode(5)) == 5
    assert spec != OneHot(3)


def test_checks_of_encoded_values(in_a_fork):
    spec, outside = make("Bounded, float32"), np.array([9.0, 9.0])
    assert not spec.is_in(spec.encode(outside))
    in_a_fork("""
        import os
        os.environ["CHECK_SPEC_ENCODE"] = "1"
        import numpy as np, torch
        from interop.specs import Bounded

        spec = Bounded(-1, 1, (2,))
        for call in (lambda: spec.encode(np.array([9.0, 9.0])), lambda: spec.to_numpy(torch.full((2,), 9.0))):
            try:
                call()
            except AssertionError as error:
                assert "is not in" in str(error), error
            else:
                os._exit(1)
        assert spec.to_numpy(torch.full((2,), 9.0), safe=False).tolist() == [9, 9]
    """)


def test_a_choice_between_objects():
    spec = Choice([NonTensorData(each, batch_size=(2,)) for each in "abc"])
    drawn = {spec.rand().data for _ in range(60)}
    assert drawn == set("abc")
    assert spec.zero().data == "a"
    assert spec.rand((3,)).batch_size == (3, 2)
    assert spec.cardinality() == spec.num_choices == len(spec.enumerate()) == 3
    assert all(spec.is_in(each) for each in spec.enumerate())
    assert not spec.is_in(NonTensorData("d", batch_size=(2,)))
    assert spec == spec.clone() != Choice([NonTensorData("a", batch_size=(2,))])
    assert Choice([make("Categorical"), make("Categorical")]).cardinality() == 8
