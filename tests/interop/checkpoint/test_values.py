"""Values and lists of them come back as they were, through JSON; what cannot be saved is named; other trees are refused."""

import collections
import copy
import dataclasses
import sys

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import MemoryMappedTensor, TensorDict, tensorclass

from fbuf.checkpoint import CheckpointCorrupt, CheckpointError, CheckpointMismatch
from interop.checkpoint.values import decode, encode, load_items, save_items
from tests.interop.checkpoint import saved_values as every
from tests.interop.checkpoint.saved_values import STACKS, Pair, Step, same, tensor_of, through_json

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf")
TRUSTED = True  # allow_pickle


def kept(value):
    return decode(through_json(encode(value, "value")))


def items_of(tree):
    return load_items(through_json(tree))


def item(n):
    """One of five structures, with shapes of their own."""
    return [
        TensorDict({"a": torch.full((n % 3, 2), float(n)), "s": f"s{n}", "td": TensorDict({"b": torch.tensor(n)}, [])}, []),
        {"text": "t" * n, "n": n * 2**60, "x": np.arange(n, dtype=np.int16), "f": n / 7 if n % 2 else float("nan")},
        f"text {n}",
        Step(obs=torch.full((2,), n), note=str(n), batch_size=[2]),
        (n, None, b"b" * (n % 5), Pair(n, (n,)), True, np.float32(n), np.arange(n % 4)),
    ][n % 5]  # fmt: skip


@given(st.lists(every.values, max_size=12), st.lists(st.integers(0, 11), max_size=40))
def test_lists_of_anything(values, order):
    items = values + [values[place % len(values)] for place in order if values]
    assert same(items_of(save_items(items)), items)


@pytest.mark.parametrize("dtype", every.every_dtype(), ids=str)
def test_tensors_of_every_dtype(dtype):
    tensors = [tensor_of(dtype, *shape) for shape in [(), (0,), (3,), (2, 0, 3), (2, 3), (3, 2), (2, 3)]]
    assert same(kept(tensors), tensors)
    for each in tensors:
        assert same(kept(each), each)


VALUES = [
    *(float("nan"), float("inf"), float("-inf"), -0.0, 5e-324, 1e308, sys.float_info.max),
    *(2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**9999 - 1, -(10**30), True, 1, 1.0),
    *("", "\ud800", "\ud83d\ude00", "a\0b", "é" * 5000, b"", bytes(range(256)), complex("nan+infj"), -0j),
    *(None, (), [], {}, ((),), [[]], {"": {}}, {1: 2, "1": 3, -5: ()}, {"a": {2: [None]}}),
    *(np.float64(2), np.bool_(True), np.int8(-1)),
    *(np.array(3.0), np.zeros((2, 0))),
    *(np.arange(3, dtype=ml_dtypes.bfloat16), ml_dtypes.bfloat16(1.5), np.ones((2, 2), np.complex64)),
    *(torch.Size([2, 3]), torch.Size([]), Pair(1, (2,)), collections.OrderedDict(b=1, a=torch.ones(1))),
    Step(obs=torch.ones(2, 3), note="n", more={"k": [1, None]}, batch_size=[2]),
    TensorDict({}, [2, 0], names=["a", None]),
    TensorDict({"x": torch.ones(2), "td": TensorDict({"y": torch.ones(2, 3)}, [2, 3])}, [2], device="cpu"),
    *(make() for make in STACKS.values()),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_edges(value):
    assert same(kept(value), value)


def test_memory_is_dense_and_of_its_own():
    base = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    for odd in (base.T, base[:, ::2], base.flip(0), base.expand(2, 3, 4), torch.ones(2, dtype=torch.complex64).conj()):
        for back in (kept(odd), kept([odd, odd])[1]):
            assert same(back, odd.clone().resolve_conj()) and back.is_contiguous()
    negative = torch.ones(2, dtype=torch.complex64).conj().imag
    assert negative.is_neg() and same(kept(negative), negative.clone())
    array = np.arange(6, dtype=">i4").reshape(2, 3)
    for odd in (array, array.T, array[:, ::-1], np.asfortranarray(array)):
        back = kept(odd)
        assert (
            back.dtype == np.dtype("=i4") and (back == odd).all() and back.flags.c_contiguous and back.flags.writeable
        )
    assert same(kept(np.float32(1).astype(">f4")[()]), np.float32(1))
    weight = torch.nn.Parameter(torch.ones(2))
    assert type(kept(weight)) is torch.Tensor and not kept(weight).requires_grad
    grown = (weight * 2)[0]
    assert same(kept(grown), torch.tensor(2.0)) and not kept(grown).requires_grad
    assert same(kept(MemoryMappedTensor.from_tensor(torch.arange(3))), torch.arange(3))
    view = TensorDict({"a": torch.arange(4)}, [4])._get_sub_tensordict(slice(2))
    assert same(kept(view), TensorDict({"a": torch.arange(2)}, [2]))


def test_tensors_go_where_they_are_wanted():
    items = [{"a": torch.ones(2), "td": TensorDict({"y": torch.ones(1)}, [], device="cpu")} for _ in range(12)]
    tree = save_items(items)
    for each in load_items(tree, device=torch.device("meta")):
        assert each["a"].is_meta and each["td"]["y"].is_meta and each["td"].device.type == "meta"
    tree["columns"][0]["device"] = "cuda:77"
    with pytest.raises(CheckpointMismatch, match="cuda:77, which is not here"):
        load_items(tree)
    assert same(load_items(tree, device=torch.device("cpu")), items)


def test_items_that_are_alike_are_described_once():
    items = [TensorDict({"a": torch.randn(3), "b": torch.tensor(n), "s": str(n)}, []) for n in range(1000)]
    tree = save_items(items)
    assert len(tree["forms"]) == 1 and tree["order"].dtype == np.uint8
    assert same(load_items(tree), items)
    odd = save_items([{f"k{n}": torch.full((n,), n), "t": ("x" * 5000,)} for n in range(200)])
    assert len(odd["columns"]) == 2 and len(odd["forms"]) == 200


# ---------------------------------------------------------------------- what cannot be saved


class Custom:
    def __init__(self, value=0):
        self.value = value

    def __eq__(self, other):
        return self.value == other.value


class Sub(dict):
    pass


@dataclasses.dataclass
class Settings:
    rate: float


def _hidden():
    @tensorclass
    class Hidden:
        x: torch.Tensor

    return Hidden(x=torch.ones(1), batch_size=[])


REFUSED = [
    *(Custom(), object(), {1, 2}, range(3), Sub(a=1), lambda: 0, Custom, sys, ...),
    *(Settings(1.0), torch.float32, {(1, 2): 3}, {True: 1}, 2**10_000, collections.deque()),
    *(bytearray(b"a"), np.array(["a"]), np.datetime64(1, "s"), np.array([Custom()]), np.zeros(2, [("a", "i4")])),
    *(torch.ones(2).to_sparse(), torch.ones(2, device="meta"), torch.nn.Linear(1, 1), torch.Generator()),
]


@pytest.mark.parametrize("value", REFUSED, ids=lambda value: type(value).__name__)
def test_other_kinds_are_refused_by_name(value):
    with pytest.raises(TypeError, match=r"^item 3, at \['env'\]\[1\]: an object of type .* cannot be saved"):
        encode({"a": 1, "env": [0, value]}, "item 3")


def test_the_message_says_where_and_what_to_do():
    with pytest.raises(
        TypeError, match=r"item 3, at \['env'\]: an object of type .*Custom cannot be saved; pass allow_pic"
    ):
        encode({"env": Custom()}, "item 3")
    with pytest.raises(TypeError, match=r"item 7, at \['td'\]\['s'\]\['data'\]: an object of type set"):
        save_items([1] * 7 + [{"td": TensorDict({"s": {1}, "x": torch.ones(2)}, [2])}])
    with pytest.raises(TypeError, match=r"value: .*Hidden cannot be saved, whose class is not found by its name"):
        encode([_hidden()], "value")
    with pytest.raises(TypeError, match=r"at \['f'\]: .* cannot be pickled"):
        encode({"f": lambda: 0}, "item 0", allow_pickle=True)


def test_pickled_objects_need_leave_at_both_ends():
    items = [{"a": n, "b": "x" if n < 20 else {n}, "t": torch.ones(2)} for n in range(23)]
    tree = through_json(save_items([*items, Custom(4)], allow_pickle=True))
    with pytest.raises(CheckpointMismatch, match=r"items: .* pass allow_pickle=True at load"):
        load_items(tree)
    back = load_items(tree, TRUSTED)
    assert [each["b"] for each in back[18:23]] == ["x", "x", {20}, {21}, {22}] and back[23] == Custom(4)
    (pickles,) = [column for column in tree["columns"] if column["kind"] == "pickled"]
    pickles["raw"] = np.zeros_like(pickles["raw"])
    with pytest.raises(CheckpointMismatch, match="cannot be read"):
        load_items(tree, TRUSTED)
    tree["columns"].remove(pickles)
    with pytest.raises(CheckpointError):
        load_items(tree, TRUSTED)


def test_depth_and_cycles():
    def nested(depth, inner=()):
        for _ in range(depth):
            inner = [inner]
        return inner

    for inner in ((), []):
        assert same(kept(nested(64, inner)), nested(64, inner))
    looped: list = [1]
    looped.append([looped])
    wide: list = []
    wide += [wide, wide]
    for value in (nested(65), nested(10**4), nested(10**4, 1), looped, {"a": looped}):
        with pytest.raises(ValueError, match=r"nested more than 64 deep|contains itself"):
            encode(value, "value")
    tree = encode(nested(64), "value")
    for _ in range(2):
        tree["forms"] = [{"kind": "list", "keys": [0], "children": tree["forms"], "batch": [], "names": []}]
    with pytest.raises(CheckpointCorrupt, match="nested"):
        decode(tree)


# ---------------------------------------------------------------------- what was not saved so


def test_classes_must_be_imported_and_the_same(monkeypatch):
    step = Step(obs=torch.ones(1), note="", batch_size=[1])
    tree = encode([step, Pair(1, 2)], "value")
    module = sys.modules[Step.__module__]
    monkeypatch.delitem(sys.modules, Step.__module__)
    with pytest.raises(CheckpointMismatch, match="import its module"):
        decode(tree)
    assert Step.__module__ not in sys.modules
    monkeypatch.setitem(sys.modules, Step.__module__, module)
    monkeypatch.setattr(module, "Pair", collections.namedtuple("Pair", ["left", "up"]))
    with pytest.raises(CheckpointMismatch, match=r"fields are \['left', 'up'\] now"):
        decode(tree)


def test_constructors_are_not_run():
    class Loud(Pair):
        def __new__(cls, *args):
            raise AssertionError

    sys.modules[__name__].Loud = Loud
    Loud.__qualname__ = "Loud"
    value = tuple.__new__(Loud, (1, 2))
    assert same(kept(value), value)


JUNK = [
    *(None, True, -1, 0, 2**62, float("nan"), "x", "cuda:0", "os:system", [], [[]], {}, {"kind": "plain"}),
    *(np.zeros(0), np.zeros((2, 3)), np.array([-1]), np.full(1, 2**62), np.array(["a"], object), np.zeros(9, np.uint8)),
    {"kind": "list", "keys": [], "children": [], "batch": [], "names": []},
]  # fmt: skip


@given(st.recursive(st.sampled_from(JUNK), lambda inner: st.dictionaries(st.sampled_from(
    ["kind", "keys", "children", "batch", "device", "names", "dtype", "dims", "json", "raw", "shapes"]
), inner, max_size=6)))  # fmt: skip
def test_junk_is_refused(tree):
    for whole in (tree, {"format": 3, "order": np.zeros(1, np.uint8), "forms": [0], "columns": [tree]}):
        with pytest.raises(CheckpointError):
            decode(whole)
    if isinstance(tree, dict) and tree is not JUNK[-1]:
        with pytest.raises(CheckpointError):
            decode({"format": 3, "order": np.zeros(1, np.uint8), "forms": [tree], "columns": []})


@pytest.mark.parametrize("sizes", [[2**62, 2**62], [-1, 5], [2, 3], [2**40, 0], [0, 2**63 - 1], [4, 0], [1]], ids=str)
def test_sizes_must_add_up(sizes):
    for items in ([torch.ones(1), torch.ones(3)], [b"a", b"b" * 3], [np.ones(1), np.ones(3)]):
        tree = save_items(items)
        tree["columns"][0]["shapes"] = np.array(sizes, np.int64).reshape(-1, 1)
        if sizes == [4, 0]:
            assert len(load_items(tree)[0]) == 4  # the same bytes, cut elsewhere
            continue
        with pytest.raises(CheckpointCorrupt):
            load_items(tree)


def test_there_may_not_be_more_than_fit():
    tree = save_items(["a"] * 5)
    with pytest.raises(CheckpointCorrupt, match="one value was expected, found 5"):
        decode(tree)
    edited = copy.deepcopy(tree)
    edited["columns"].append(edited["columns"][0])
    with pytest.raises(CheckpointCorrupt, match="the items have"):
        load_items(edited)
