"""Lazy stacks of all kinds of specs, nested and with members of other keys and sizes, beside stacks of their values."""

import random

import numpy as np
import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torch import Tensor

from interop import specs as ours
from interop.specs import (
    Bounded,
    Categorical,
    Choice,
    Composite,
    Stacked,
    StackedComposite,
    Unbounded,
    check_no_exclusive_keys,
    consolidate_spec,
)
from tests.interop.specs.spec_kinds import LEAVES, for_torch, same

LEAD = (2, 3)
SAME_SHAPE = [name for name in LEAVES if "rows" not in name and "bfloat16" not in name]
INDICES = [
    0,
    -1,
    slice(1, None),
    ...,
    None,
    (0, ...),
    (..., 0),
    (..., slice(1)),
    (0, 0),
    (slice(None), 0),
    (slice(1), 0),
    (slice(None), slice(None), 1),
    (0, slice(None), 1),
    (None, ..., None, 0),
    [1, 0, 1],
    (slice(None), [1, 0]),
    (0, [1, 0, 0]),
    (slice(None), slice(None), torch.tensor([1, 0])),
    (0, 1, np.array([0])),
]


def random_leaves(rng, library, lead):
    """Two leaves of one kind that differ where the kind has something to differ in."""
    name = rng.choice(SAME_SHAPE)
    one = LEAVES[name](library, lead)
    other = LEAVES[name.partition(", mask")[0]](library, lead) if "mask" in name else one.clone()
    if isinstance(one, library.Bounded):
        other.space.high = other.space.high + 1
    return one, other


def random_spec(rng, library, lead, depth=2):
    """A Composite, or a lazy stack of Composites, with leaves and further ones; its shape begins with `lead`."""
    if depth and rng.random() < 0.4:
        dim, parts = rng.randrange(len(lead)), []
        rest = (*lead[:dim], *lead[dim + 1 :])
        state = rng.getstate()
        for place in range(lead[dim]):
            rng.setstate(state)  # the same keys
            part = random_spec(rng, library, rest, depth - 1)
            if place:
                part[f"only{depth}"] = library.Unbounded((*rest, place))
            parts.append(part)
        return torch.stack(parts, dim)
    made = {}
    for place in range(rng.randrange(1, 4)):
        one, other = random_leaves(rng, library, lead)
        made[f"leaf{place}"] = rng.choice([one, other])
    if depth:
        made["inner"] = random_spec(rng, library, lead, depth - 1)
    return library.Composite(made, shape=lead)


def unlike(seed, library=ours, dim=None):
    """A lazy stack of two random specs of shape `LEAD`, the second of which has a key more; and the stack dim."""
    rng = random.Random(seed)
    dim = rng.randrange(len(LEAD) + 1) if dim is None else dim
    state, parts = rng.getstate(), []
    for place in range(2):
        rng.setstate(state)
        parts.append(random_spec(rng, library, LEAD))
        parts[-1][f"own{place}"] = library.Unbounded((*LEAD, place + 2))
    return torch.stack(parts, dim), dim


def facts(value):
    """The shapes of all entries of the parts of a value, whatever their keys and sizes."""
    if isinstance(value, Tensor):
        return value.shape
    parts = value.tensordicts if hasattr(value, "tensordicts") else None
    if parts is not None:
        return [value.batch_size, value.stack_dim, *map(facts, parts)]
    return [value.batch_size, {key: facts(each) for key, each in sorted(value.items())}]


def spec_facts(spec):
    """The same of a spec."""
    if isinstance(spec, StackedComposite):
        return [spec.shape, spec.stack_dim, *map(spec_facts, spec.members)]
    if isinstance(spec, Composite):
        return [spec.shape, {key: spec_facts(each) for key, each in sorted(spec.items())}]
    return spec.shape


@pytest.mark.parametrize("seed", range(12))
def test_indexed_stacks_are_of_the_indexed_values(seed):
    spec, _ = unlike(seed)
    for index in INDICES:
        value, made = spec.rand(), spec[index]
        assert made.shape == torch.zeros(spec.shape)[for_torch(index)].shape, index
        assert made.is_in(value[for_torch(index)]), index
        assert spec_facts(made) == facts(made.rand()), index


@pytest.mark.parametrize("name", SAME_SHAPE)
@pytest.mark.parametrize("dim", range(3))
def test_indexed_stacks_of_leaves_are_of_the_indexed_values(name, dim):
    spec = Stacked(*random_leaves(random.Random(0), ours, LEAD), dim=dim)
    other = LEAVES[name](ours, LEAD)
    spec = Stacked(other, other.clone(), dim=dim)
    for index in INDICES:
        value, chosen = spec.rand(), for_torch(index, other.structural)
        made = spec[index]
        assert made.shape == value[chosen].shape, index
        assert made.is_in(value[chosen]), index


@pytest.mark.parametrize("seed", range(12))
def test_shape_operations_and_their_inverses(seed):
    spec, dim = unlike(seed)
    assert spec[(slice(None),) * dim + (0,)] is spec.members[0]
    for at in range(-1 - spec.ndim, spec.ndim + 1):
        made = spec.unsqueeze(at)
        place = at % (spec.ndim + 1)
        assert made.shape == torch.zeros(spec.shape).unsqueeze(at).shape
        assert made[(slice(None),) * place + (0,)] == spec == made.squeeze(place) == made.unbind(place)[0]
    assert spec[None] == spec.unsqueeze(0)
    wider = spec.expand(4, *spec.shape)
    assert all(each == spec for each in (wider[0], wider[-1], *wider.unbind(0)))
    same_shape = spec.expand(spec.shape)
    assert same_shape == spec and same_shape is not spec


@pytest.mark.parametrize("seed", range(12))
def test_encoding_gives_back_what_to_numpy_made(seed):
    spec, _ = unlike(seed)
    value = spec.rand()
    made = spec.encode(spec.to_numpy(value, safe=True))
    assert facts(made) == facts(value) and spec.is_in(made)
    for one, other in zip(made.unbind(spec.stack_dim), value.unbind(spec.stack_dim), strict=True):
        for key, each in one.items(True, True):
            assert same(each, other.get(key)), key


def test_encoding_of_arrays_and_dicts_along_the_stack_dim():
    raw = np.arange(24.0, dtype=np.float32).reshape(2, 3, 4)
    for dim in range(3):
        parts = [Bounded(0, 100 + place, raw.shape) for place in range(2)]
        spec = torch.stack(parts, dim)
        assert isinstance(spec, Stacked)
        assert same(spec.encode(np.stack([raw, raw + 1], dim)), torch.as_tensor(np.stack([raw, raw + 1], dim)))
        assert same(spec.encode([raw, raw + 1]), torch.as_tensor(np.stack([raw, raw + 1], dim)))
        whole = torch.stack([Composite(a=each, shape=raw.shape) for each in parts], dim)
        assert same(
            whole.encode({"a": np.stack([raw, raw + 1], dim)})["a"], torch.as_tensor(np.stack([raw, raw + 1], dim))
        )


@pytest.mark.parametrize("dim", range(3))
def test_entries_are_set_updated_and_deleted_in_each_member(dim):
    spec = torch.stack([Composite(a=Unbounded((*LEAD, 4)), shape=LEAD), Composite(b=Unbounded(LEAD), shape=LEAD)], dim)
    ragged = torch.stack([Unbounded((*LEAD, 4)), Unbounded((*LEAD, 5))], dim)
    spec["r"] = ragged
    assert spec["r"] == ragged and [each["r"].shape[-1] for each in spec.members] == [4, 5]
    spec["r"] = Bounded(0, 1, (*spec.shape, 7))
    assert spec["r"].shape == (*spec.shape, 7)
    assert spec.update({"r": ragged, "n": {"x": ragged}}) is spec
    assert spec["r"] == ragged and spec["n", "x"] == ragged
    del spec["b"]
    assert [sorted(each.keys()) for each in spec.members] == [["a", "n", "r"], ["n", "r"]]
    del spec["n", "x"]
    assert spec["n"].is_empty()
    with pytest.raises(KeyError, match="at least one"):
        del spec["b"]


def test_the_values_of_a_stack_are_all_combinations_of_those_of_its_members():
    spec = torch.stack([Categorical(2), Categorical(3)])
    assert spec.cardinality() == 6
    assert spec.enumerate().tolist() == [[one, two] for one in range(2) for two in range(3)]
    spec = torch.stack([Composite(a=Categorical(2)), Composite(a=Categorical(3), b=Categorical(2))])
    assert spec.cardinality() == 12 == len(spec.enumerate())
    assert spec.is_in(spec.enumerate())


def test_type_check_takes_the_value_of_an_entry_and_its_key():
    one = Composite(a=Unbounded(3), n=Composite(b=Categorical(3)))
    one.type_check(torch.zeros(3), "a")
    one.type_check(torch.tensor(1), ("n", "b"))
    for spec in (one, torch.stack([one, one.clone().update({"c": Unbounded(3)})])):
        lead = spec.shape
        with pytest.raises(TypeError, match=r"of 'a' has dtype torch.float64"):
            spec.type_check(torch.zeros(*lead, 3, dtype=torch.float64), "a")
    with pytest.raises(TypeError, match="needs its key"):
        one.type_check(torch.zeros(3))


def test_missing_entries_of_any_ndim_and_device_are_added_by_consolidation():
    for one, two in (
        (Unbounded((3, 4)), Unbounded((3, 4, 5))),
        (Unbounded((3,)), Unbounded((3, 4, 5))),
        (Unbounded((3, 4)), Unbounded((3, 4), device="meta")),
    ):
        first, second = (Composite(z=each, shape=(3,)) for each in (one, two))
        spec = StackedComposite(first, second, Composite(shape=(3,)), dim=0)
        made = consolidate_spec(spec)
        assert check_no_exclusive_keys(made) and not check_no_exclusive_keys(spec)
        assert made.members[:2] == [first, second]
        assert made.members[2]["z"].shape[0] == 3 and 0 in (*made.members[2]["z"].shape[1:], 0 * one.ndim)
    on_meta = Composite(shape=(3,), device="meta")
    made = consolidate_spec(StackedComposite(Composite(z=Unbounded((3, 4)), shape=(3,), device="cpu"), on_meta, dim=0))
    assert [each["z"].device.type for each in made.members] == ["cpu", "meta"]


def test_changes_of_bounds_in_place_are_of_one_spec():
    low = torch.zeros(3)
    for make in (lambda: Bounded(low, 1), lambda: Bounded(0, 1, (3,))):
        spec = make()
        relatives = [spec.clone(), spec.expand(3), spec.unsqueeze(0).squeeze(0), torch.stack([spec, spec])[0], spec[:]]
        twins = [make() for _ in relatives]
        spec.space.low[0] = -5
        assert spec.low.tolist() == [-5, 0, 0] and low.tolist() == [0, 0, 0]
        assert relatives == twins and all(each != spec for each in relatives)
    members = [Bounded(0, 1, (3,)), Bounded(0, 2, (3,))]
    spec = torch.stack(members)
    other = spec.clone()
    assert spec == other
    members[0].space.high.fill_(9)
    assert spec != other and spec[0].high.tolist() == [9] * 3 and other[0].high.tolist() == [1] * 3


def test_large_specs_of_scalar_bounds_take_no_memory_until_a_place_is_changed():
    spec = Bounded(0, 1, (10**6, 10**6))
    for made in (spec.clone(), spec.expand(3, *spec.shape), spec[0], torch.stack([spec, spec])):
        assert made.low.untyped_storage().nbytes() == 4
    assert "ContinuousBox" in repr(spec)


def test_spaces_can_be_set():
    spec = Bounded(0, 1, (3,))
    spec.space = Bounded(torch.arange(3.0), 9).space
    assert spec == Bounded(torch.arange(3.0), 9)
    with pytest.raises(ValueError, match="are not of the shape"):
        spec.space = Bounded(0, 1, (4,)).space
    with pytest.raises(TypeError, match="ContinuousBox"):
        spec.space = None
    spec = Categorical(3, (2,))
    spec.space = Categorical(7).space
    assert spec == Categorical(7, (2,)) and spec.n == 7
    spec.update_mask([True] * 7)
    with pytest.raises(ValueError, match="update_mask"):
        spec.space = Categorical(3).space
    spec = ours.MultiOneHot([2, 3])
    spec.space = ours.MultiOneHot([3, 2]).space
    assert spec == ours.MultiOneHot([3, 2]) and spec.to_categorical_spec() == ours.MultiCategorical([3, 2])
    spec = ours.MultiCategorical([2, 3], (2, 2))
    spec.space = ours.MultiCategorical([[5, 3], [2, 3]]).space
    assert spec == ours.MultiCategorical([[5, 3], [2, 3]])
    for spec in (ours.OneHot(3), ours.MultiOneHot([2, 3]), ours.Binary(3), Unbounded(3)):
        with pytest.raises(ValueError, match=r"space|bit|Bounded"):
            spec.space = Categorical(7).space if not isinstance(spec, Unbounded) else Bounded(0, 1, (3,)).space
        spec.space = spec.space
    with pytest.raises(AttributeError):
        Categorical(3).space.n = 5


def test_a_batch_of_masks_is_for_a_batch_of_choices():
    masks = torch.tensor([[True, False, False], [False, True, True]])
    spec = Categorical(3, (2,), mask=masks)
    assert spec.enumerate(use_mask=True).tolist() == [[0, 1], [0, 2]]
    assert spec.is_in(torch.tensor([0, 2])) and not spec.is_in(torch.tensor([0, 0]))
    spec = Categorical(3, mask=masks[:1])
    assert spec.mask.tolist() == [True, False, False]
    with pytest.raises(RuntimeError, match=r"Cannot expand mask.*each of \[2\] values expand the spec"):
        spec.update_mask(masks)
    wider = Categorical(3).expand(2)
    wider.update_mask(masks)
    assert wider == Categorical(3, (2,), mask=masks)


def test_one_vector_indexes_every_row():
    hot, numbers = torch.tensor([False, True, False]), torch.arange(12.0).reshape(2, 2, 3)
    spec = ours.OneHot(3)
    assert same(spec.index(hot, numbers[0, 0]), torch.tensor([1.0]))
    assert same(spec.index(hot, numbers), numbers[..., 1:2])
    assert same(spec.index(hot.expand(2, 1, 3), numbers), numbers[..., 1:2])
    assert same(spec.index(hot.expand(2, 3), numbers[0, 0]), numbers[0, 0, [1, 1]].unsqueeze(-1))
    assert same(Categorical(3).index(torch.tensor(1), numbers[0, 0]), numbers[0, 0, 1])


def test_a_choice_projects_to_the_nearest_of_its_members():
    spec = Choice([Bounded(0, 1, (2,)), Bounded(4, 5, (2,))])
    assert spec.project(torch.tensor([2.0, 2.0])).tolist() == [1, 1]
    assert spec.project(torch.tensor([3.5, 3.0])).tolist() == [4, 4]
    value = torch.tensor([4.5, 4.5])
    assert spec.project(value) is value
    spec = Choice(
        [Composite(a=Bounded(0, 1, (2,)), b=Categorical(3)), Composite(a=Bounded(4, 5, (2,)), b=Categorical(3))]
    )
    data = TensorDict(a=torch.tensor([3.5, 6.0]), b=torch.tensor(7))
    assert spec.project(data) is data
    assert data["a"].tolist() == [4, 5] and data["b"] == 2


def test_beside_torchrl():
    """Where torchrl gives a spec for an index along the stack dim alone, it is the same."""
    pytest.importorskip("torchrl")
    from torchrl import data as theirs

    checked = 0
    for dim in range(3):
        for index in INDICES:
            one, other = (
                torch.stack([library.Bounded(0, 1 + place, (*LEAD, 4)) for place in range(2)], dim)
                for library in (ours, theirs)
            )
            parts = index if isinstance(index, tuple) else (index,)
            rest = [part for place, part in enumerate(parts) if place != dim and part is not ...]
            if any(type(part) is not slice or part != slice(None) for part in rest):
                continue  # torchrl raises IndexError, or drops the part of the index
            try:
                found = other[index]
            except (IndexError, TypeError):
                continue
            made, checked = one[index], checked + 1
            assert type(made).__name__ == type(found).__name__ and made.shape == found.shape, (dim, index)
            assert bool((made.rand() <= 2).all()) and getattr(made, "stack_dim", None) == getattr(
                found, "stack_dim", None
            )
    assert checked >= 6


def test_values_of_a_stack_are_lazy_stacks_in_any_nesting():
    inner = torch.stack([Composite(a=Unbounded((2, 3)), shape=(2,)), Composite(a=Unbounded((2, 4)), shape=(2,))], 1)
    outer = torch.stack([inner, inner.clone().update({"b": Unbounded((2, 2))})], 0)
    made = outer.rand()
    assert made.batch_size == outer.shape == (2, 2, 2)
    assert outer.is_in(lazy_stack(list(made.unbind(0)), 0))
    assert outer[:, 0].shape == (2, 2) and outer[..., 1].is_in(made[..., 1])
