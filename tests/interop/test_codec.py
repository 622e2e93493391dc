"""User data to a flat list of tensors and back: the same types, keys and batch sizes; errors name the place."""

import re
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict, tensorclass
from torch import Tensor

from interop import LazyTensorStorage, TensorDictReplayBuffer
from interop.data import layout as layout_module
from interop.data import tensordicts
from interop.data.layout import Layout, stack_items
from interop.data.tensordicts import of_entries
from tests.interop.rows import check_same, first_of, tensors_of


class Pair(NamedTuple):
    left: Any
    right: Any


@tensorclass
class Step:
    obs: Tensor
    inner: Any


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)


def with_wider_batch() -> TensorDict:
    below = TensorDict({"x": numbers(3, 4, 5, 2)}, [3, 4, 5])
    return TensorDict({"deep": TensorDict({"deeper": below, "y": numbers(3, 4)}, [3, 4]), "z": numbers(3, 2)}, [3])


BATCHES = {
    "tensor": lambda: numbers(3, 2),
    "scalars": lambda: numbers(3, dtype=torch.int64),
    "dict": lambda: {"a": numbers(3), "b": numbers(3, 2, dtype=torch.uint8)},
    "int keys": lambda: {1: numbers(3), 0: numbers(3, 2), "1": numbers(3, dtype=torch.bool)},
    "tuple": lambda: (numbers(3), numbers(3, 2)),
    "list": lambda: [numbers(3), numbers(3, 2)],
    "named tuple": lambda: Pair(numbers(3), {"a": (numbers(3, 1),)}),
    "deep": lambda: {"a": {"b": numbers(3), "c": [numbers(3, 2), (numbers(3, 10),)]}},
    "tensordict": lambda: TensorDict({"a": numbers(3), "b": {"c": numbers(3, 2)}}, [3]),
    "wider batch": with_wider_batch,
    "batch below the root": lambda: TensorDict({"a": TensorDict({"b": numbers(3, 4)}, [3, 4])}, [3]),
    "tensorclass": lambda: Step(obs=numbers(3, 2), inner=numbers(3), batch_size=[3]),
    "nested tensorclass": lambda: Step(
        obs=numbers(3), inner=Step(obs=numbers(3, 1), inner=TensorDict({"a": numbers(3)}, [3]), batch_size=[3]),
        batch_size=[3],
    ),
    "tensordict in a dict": lambda: {"a": TensorDict({"x": numbers(3, 2)}, [3, 2]), "b": numbers(3)},
    "tensorclass in a tensordict": lambda: TensorDict(
        {"a": Step(obs=numbers(3, 2), inner=numbers(3, 2), batch_size=[3, 2])}, [3]
    ),
    "empty inside": lambda: {"a": numbers(3), "none": {}, "nothing": ()},
    "empty tensordict inside": lambda: TensorDict({"a": numbers(3), "none": TensorDict({}, [3])}, [3]),
    "no rows": lambda: {"a": numbers(0, 2), "b": numbers(0)},
    "no width": lambda: {"a": numbers(3, 0)},
}  # fmt: skip
every_kind = pytest.mark.parametrize("kind", BATCHES)


@every_kind
def test_data_comes_apart_into_its_very_tensors_and_back(kind):
    batch = BATCHES[kind]()
    layout = Layout.of(batch, 1)
    leaves = layout.flatten(batch, 1)
    check_same(layout.build(leaves, [leaves[0].shape[0]]), batch)
    assert sorted(leaf.data_ptr() for leaf in leaves) == sorted(leaf.data_ptr() for leaf in tensors_of(batch))
    specs = [(spec.shape, spec.dtype) for spec in layout.leaves]
    assert specs == [(tuple(leaf.shape[1:]), leaf.dtype) for leaf in leaves]
    if kind != "no rows":
        items = [layout.build([leaf[row] for leaf in leaves], []) for row in range(3)]
        check_same(items[0], first_of(batch))
        assert Layout.of(items[0], 0) == layout
        check_same(layout.build(layout.flatten(items[0], 0), []), items[0])
        check_same(stack_items(items), batch)


def test_equal_data_has_equal_and_hashable_layouts():
    one, other = (Layout.of(BATCHES["wider batch"](), 1) for _ in range(2))
    assert one == other and hash(one) == hash(other)
    assert Layout.of({"a": numbers(3)}, 1) != Layout.of({"a": numbers(3, 1)}, 1)
    assert Layout.of({"a": numbers(3)}, 1) != Layout.of({"a": numbers(3, dtype=torch.int32)}, 1)
    assert Layout.of((numbers(3),), 1) != Layout.of([numbers(3)], 1)


def test_built_tensordicts_have_the_device_and_are_unlocked():
    batch = BATCHES["tensordict"]().lock_()
    layout = Layout.of(batch, 1)
    built = layout.build(layout.flatten(batch, 1), [3], torch.device("cpu"))
    assert built.device == torch.device("cpu") and built["b"].device == torch.device("cpu")
    assert not built.is_locked
    built["new"] = numbers(3)
    assert "new" not in batch.keys()  # noqa: SIM118


def test_several_leading_dims():
    batch = TensorDict({"a": numbers(3, 4, 2), "n": TensorDict({"b": numbers(3, 4, 5)}, [3, 4, 5])}, [3, 4])
    layout = Layout.of(batch, 2)
    assert [spec.shape for spec in layout.leaves] == [(2,), (5,)]
    check_same(layout.build(layout.flatten(batch, 2), [3, 4]), batch)
    rows = layout.build([torch.zeros(7, 2), torch.zeros(7, 5)], [7])
    assert rows.batch_size == (7,) and rows["n"].batch_size == (7, 5)


# ------------------------------------------------------------------ any nesting

keys = st.text("abc", min_size=1, max_size=2) | st.integers(0, 3)
dtypes = st.sampled_from([torch.float32, torch.int64, torch.bool, torch.bfloat16])
items = st.builds(lambda shape, dtype: numbers(2, *shape, dtype=dtype), st.lists(st.integers(0, 3), max_size=2), dtypes)
names = st.text("abc", min_size=1, max_size=2)
trees = st.recursive(
    items,
    lambda inner: (
        st.dictionaries(keys, inner, min_size=1, max_size=3)
        | st.lists(inner, min_size=1, max_size=3)
        | st.lists(inner, min_size=1, max_size=3).map(tuple)
        | st.builds(Pair, inner, inner)
        | st.dictionaries(names, items, min_size=1, max_size=3).map(lambda held: TensorDict(held, [2]))
    ),
    max_leaves=8,
)


@given(tree=trees)
def test_any_nesting_comes_back_as_it_went(tree):
    layout = Layout.of(tree, 1)
    check_same(layout.build(layout.flatten(tree, 1), [2]), tree)
    item = first_of(tree)
    check_same(stack_items([item, item]), layout.build([leaf[[0, 0]] for leaf in layout.flatten(tree, 1)], [2]))


# ------------------------------------------------------------------ what does not fit


def stored() -> dict[str, Any]:
    return {"a": {"b": numbers(3, 2), "c": (numbers(3), [numbers(3, 4)])}}


def changed(place: str, value: Any) -> dict[str, Any]:
    data = stored()
    match place:
        case "b":
            data["a"]["b"] = value
        case "c":
            data["a"]["c"] = value
        case "c0":
            data["a"]["c"] = (value, [numbers(3, 4)])
        case "c10":
            data["a"]["c"] = (numbers(3), [value])
        case "a":
            data["a"] = value
    return data


MISFITS = {
    "width": ("b", lambda: numbers(3, 1), RuntimeError, "('a', 'b')"),
    "rows": ("c10", lambda: numbers(2, 4), RuntimeError, "('a', 'c', 1, 0)"),
    "dtype": ("c10", lambda: numbers(3, 4, dtype=torch.float64), RuntimeError, "('a', 'c', 1, 0)"),
    "no tensor": ("c0", lambda: iter([1.0]), TypeError, "('a', 'c', 0)"),
    "tensor for a container": ("c", lambda: numbers(3), TypeError, "('a', 'c')"),
    "list for a tuple": ("c", lambda: [numbers(3), [numbers(3, 4)]], TypeError, "('a', 'c')"),
    "missing key": ("a", lambda: {"b": numbers(3, 2)}, KeyError, "'a'"),
    "unknown key": ("a", lambda: {**stored()["a"], "d": numbers(3)}, KeyError, "'a'"),
    "without memory": ("b", lambda: torch.empty(3, 2, device="meta"), (TypeError, RuntimeError), "('a', 'b')"),
    "zeros of autograd": ("b", lambda: torch._efficientzerotensor(3, 2), TypeError, "('a', 'b')"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISFITS)
def test_errors_name_the_place(name):
    place, make, error, path = MISFITS[name]
    layout = Layout.of(stored(), 1)
    with pytest.raises(error, match=re.escape(path)):
        layout.flatten(changed(place, make()), 1)


def td(entries: dict[str, Any]) -> TensorDict:
    return TensorDict(entries, [3])


def nested() -> dict[str, Any]:
    return {"a": numbers(3, 2), "b": td({"c": numbers(3), "d": td({"e": numbers(3, 4)})}), "f": numbers(3, 1)}


def test_tensordicts_come_apart_whatever_the_order_of_their_keys():
    data = nested()
    layout = Layout.of(td(data), 1)
    a, b, f = data["a"], data["b"], data["f"]
    c, d = b["c"], b["d"]
    for each in (td(data), td({"f": f, "b": td({"d": d, "c": c}), "a": a})):
        for found, wanted in zip(layout.flatten(each, 1), [a, c, d["e"], f], strict=True):
            assert found is wanted


@pytest.mark.parametrize(
    ("change", "error", "place"),
    [
        (lambda data: data.pop("f"), KeyError, "f"),
        (lambda data: data["b"].pop("c"), KeyError, "'b'"),
        (lambda data: data.update(b=numbers(3)), TypeError, "'b'"),
        (lambda data: data["b"].set("d", numbers(3)), TypeError, "'b', 'd'"),
        (lambda data: data.update(a=numbers(3, 3)), RuntimeError, "'a'"),
        (lambda data: data["b", "d"].set("e", numbers(3, 4, dtype=torch.int64)), RuntimeError, "'b', 'd', 'e'"),
    ],
)
def test_tensordicts_that_do_not_fit_are_refused_by_place(change, error, place):
    layout, data = Layout.of(td(nested()), 1), td(nested())
    change(data)
    with pytest.raises(error, match=place):
        layout.flatten(data, 1)


def test_what_is_built_of_entries_is_like_any_tensordict():
    entries = nested()
    made, wanted = of_entries(entries, torch.Size([3]), None), td(entries)
    check_same(made, wanted)
    made.set("g", numbers(3))
    assert made.names == wanted.names and not made.is_locked and "g" not in entries
    assert of_entries({}, torch.Size([2]), None).is_empty()
    assert of_entries({"a": numbers(2)}, torch.Size([2]), torch.device("cpu")).clone().device == torch.device("cpu")


@pytest.mark.parametrize(
    ("data", "error", "match"),
    [
        ({"a": {"b": "text"}}, TypeError, "'a', 'b'.*a batch.*one str"),
        ({"a": np.array([None, 1])}, TypeError, "'a'.*ListStorage"),
        ([numbers(3), iter([1.5])], TypeError, "1.*ListStorage"),
        ({"a": {"b": numbers(3).to(torch.float8_e4m3fn)}}, TypeError, "'a', 'b'.*float8"),
    ],
    ids=["text", "array of objects", "iterator", "float8"],
)  # fmt: skip
def test_what_tensors_cannot_hold_is_refused_by_place(data, error, match):
    with pytest.raises(error, match=match):
        Layout.of(data, 1)


# ------------------------------------------------------------------ lists at the root


@pytest.mark.parametrize(
    "wrong",
    [
        [torch.zeros(2), torch.zeros(3)],
        [torch.zeros(2), 1.0],
        [{"a": torch.zeros(2)}, {"b": torch.zeros(2)}],
        [{"a": torch.zeros(2)}, (torch.zeros(2),)],
        [TensorDict({"a": torch.zeros(2)}, []), TensorDict({"a": torch.zeros(3)}, [])],
    ],
)
def test_items_that_are_not_alike_do_not_stack(wrong):
    with pytest.raises(RuntimeError, match=r"stacking the elements of the list failed.*tuple"):
        stack_items(wrong)
    with pytest.raises(RuntimeError, match="at least one element"):
        stack_items([])


@pytest.mark.parametrize("known", [True, False])
def test_tensordicts_of_unknown_insides_are_used_by_their_methods(monkeypatch, known):
    if not known:
        monkeypatch.setattr(tensordicts, "PLAIN", None)
        monkeypatch.setattr(layout_module, "PLAIN", None)
    batch = TensorDict({"a": numbers(3, 2), "next": {"b": numbers(3)}}, [3])
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(8), batch_size=4)
    buffer.extend(batch)
    buffer.add(batch[0])
    assert (tensordicts.entries_of(batch) is not None) == known
    check_same(buffer[:].exclude("index"), torch.cat([batch, batch[:1]]))
    drawn = buffer.sample()
    check_same(drawn.exclude("index"), buffer[drawn["index"]].exclude("index"))
    check_same(stack_items(list(batch)), batch)
