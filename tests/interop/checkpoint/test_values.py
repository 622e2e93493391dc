"""Values come back as they were, through JSON; what cannot be saved is named; what is no saved value is refused."""

import collections
import dataclasses
import sys
import threading

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import MemoryMappedTensor, TensorDict

from fbuf.checkpoint import CheckpointCorrupt, CheckpointError, CheckpointMismatch
from interop.checkpoint.rule import Rule
from interop.checkpoint.values import decode, encode
from tests.interop.checkpoint import saved_values as every
from tests.interop.checkpoint.saved_values import STACKS, Frozen, Pair, Settings, Step, same, tensor_of, through_json

TRUSTED = Rule(allow_pickle=True)


def kept(value):
    return decode(through_json(encode(value, "value")))


@given(every.values)
def test_values_come_back_as_they_were(value):
    assert same(kept(value), value)


@pytest.mark.parametrize("kind", STACKS)
def test_stacks_come_back_as_stacks(kind):
    assert same(kept(STACKS[kind]()), STACKS[kind]())


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", every.every_dtype(), ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3)], ids=str)
def test_tensors_of_every_dtype(dtype, shape):
    tensor = tensor_of(dtype, *shape)
    assert same(kept(tensor), tensor)
    assert kept(dtype) is dtype


@pytest.mark.parametrize(
    "value",
    [
        *(float("nan"), float("inf"), float("-inf"), -0.0, 5e-324, 1e308, sys.float_info.max),
        *(2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**20000, -(10**30), True, 1, 1.0),
        *("", "\ud800", "a\0b", "é" * 5000, b"", bytes(range(256)), complex("nan+infj"), -0j),
        *(None, (), [], {}, ((),), [[]], {"": {}}, {1: 2, "1": 3, (1, "a"): 4, None: 5, b"k": 6, False: 7, 0.5: 8}),
        *(np.float64(2), np.bool_(True), np.str_("é"), np.bytes_(b"ab"), np.datetime64("NaT", "us"), np.int8(-1)),
        *(np.array("abc"), np.array([], "U0"), np.array(3.0), np.zeros((2, 0)), np.array(["2020-01-01"], "M8[D]")),
        *(np.arange(3, dtype=ml_dtypes.bfloat16), ml_dtypes.bfloat16(1.5), np.ones((2, 2), np.complex64)),
        *(torch.Size([2, 3]), torch.Size([]), torch.device("cuda:3"), torch.device("meta"), torch.int4, Step, Frozen),
        *(Settings(1.0), Frozen(torch.Size([1]), Settings(2.0, "y")), Pair(1, (2,)), collections.OrderedDict(b=1, a=2)),
        Step(obs=torch.ones(2, 3), note="n", more={"k": [1, None]}, batch_size=[2]),
        TensorDict({}, [2, 0], names=["a", None]),
        TensorDict({"x": torch.ones(2), "td": TensorDict({"y": torch.ones(2, 3)}, [2, 3])}, [2], device="cpu"),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_edges(value):
    assert same(kept(value), value)


def test_memory_is_normalised():
    base = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    for odd in (base.T, base[:, ::2], base.flip(0), base.expand(2, 3, 4), torch.ones(2, dtype=torch.complex64).conj()):
        back = kept(odd)
        assert same(back, odd.clone().resolve_conj()) and back.is_contiguous()
    array = np.arange(6, dtype=">i4").reshape(2, 3)
    for odd in (array, array.T, array[:, ::-1], np.asfortranarray(array)):
        back = kept(odd)
        assert (
            back.dtype == np.dtype("=i4") and (back == odd).all() and back.flags.c_contiguous and back.flags.writeable
        )
    assert same(kept(np.float32(1).astype(">f4")[()]), np.float32(1))


def test_what_comes_back_is_plain_and_of_its_own():
    weight = torch.nn.Parameter(torch.ones(2))
    assert type(kept(weight)) is torch.Tensor and not kept(weight).requires_grad
    grown = (weight * 2)[0]
    assert same(kept(grown), torch.tensor(2.0)) and not kept(grown).requires_grad
    mapped = MemoryMappedTensor.from_tensor(torch.arange(3))
    assert same(kept(mapped), torch.arange(3))
    view = TensorDict({"a": torch.arange(4)}, [4])._get_sub_tensordict(slice(2))
    assert same(kept(view), TensorDict({"a": torch.arange(2)}, [2]))
    array, shared = np.arange(3), torch.zeros(3)
    tree = encode({"a": array, "b": [shared, shared]}, "value")
    back = decode(tree)
    array[:], shared[:] = 9, 9
    assert back["a"].tolist() == [0, 1, 2] and back["b"][0].tolist() == [0, 0, 0]
    back["b"][0][0] = 5
    assert back["b"][1][0] == 0 and same(decode(tree)["b"][1], shared)


def test_tensors_go_where_they_are_wanted():
    value = {"a": torch.ones(2), "td": TensorDict({"x": torch.ones(2)}, [2], device="cpu")}
    back = decode(encode(value, "value"), device=torch.device("meta"))
    assert back["a"].is_meta and back["td"]["x"].is_meta and back["td"].device.type == "meta"
    tree = encode(value, "value")
    tree["form"]["items"][0]["device"] = "cuda:77"
    with pytest.raises(CheckpointMismatch, match="cuda:77, which is not here"):
        decode(tree)
    assert same(decode(tree, device=torch.device("cpu")), value)


def test_another_default_device_makes_no_difference():
    value = {
        "a": torch.ones(2),
        "td": TensorDict({"x": torch.ones(2), "s": "t"}, [2]),
        "b": [torch.ones(3), torch.ones(4)],
    }
    with torch.device("meta"):
        back = decode(encode(value, "value"))
    assert same(back, value)


# ---------------------------------------------------------------------- what cannot be saved


class Custom:
    def __init__(self, value=0):
        self.value = value

    def __eq__(self, other):
        return self.value == other.value


class Sub(dict):
    pass


def _local():
    @dataclasses.dataclass
    class Hidden:
        x: int = 0

    return Hidden


@dataclasses.dataclass
class Loaded(dict):
    x: int = 0


def _more():
    value = Settings(1.0)
    value.extra = 3
    return value


REFUSED = [
    *(Custom(), object(), {1, 2}, frozenset(), range(3), slice(3), Sub(a=1), lambda: 0, print, Custom, int, sys, ...),
    *(threading.Thread(), collections.deque(), bytearray(b"a"), _local()(), _local()),
    *(Loaded(), _more(), np.array([Custom()]), np.zeros(2, [("a", "i4")]), np.longdouble(1), np.ma.array([1])),
    *(torch.ones(2).to_sparse(), torch.ones(2, device="meta"), torch.nn.Linear(1, 1), torch.Generator()),
]


@pytest.mark.parametrize("value", REFUSED, ids=lambda value: type(value).__name__)
def test_other_kinds_are_refused_by_name(value):
    with pytest.raises(TypeError, match=r"^item 3, key 'env', element 1: "):
        encode({"a": 1, "env": [0, value]}, "item 3")


def test_the_message_says_what_to_do():
    with pytest.raises(
        TypeError, match=r"item 3, key 'env': an object of type .*Custom cannot be saved; pass allow_pickle"
    ):
        encode({"env": Custom()}, "item 3")
    with pytest.raises(TypeError, match=r"item 0, key 'td', key 's', field 'data': an object of type set"):
        encode({"td": TensorDict({"s": {1}, "x": torch.ones(2)}, [2])}, "item 0")


def test_pickled_objects_need_leave_at_both_ends():
    tree = encode({"env": Custom(4), "x": torch.ones(2)}, "item 3", allow_pickle=True)
    assert [name for leaf in tree["leaves"] if isinstance(leaf, dict) for name in leaf] == [
        "pickled",
        "lengths",
        "stack",
    ]
    with pytest.raises(CheckpointMismatch, match=r"item 3: .* pass allow_pickle=True at load"):
        decode(tree, where="item 3")
    assert decode(through_json(tree), TRUSTED)["env"] == Custom(4)
    tree["leaves"][0]["pickled"] = tree["leaves"][0]["pickled"].copy()
    tree["leaves"][0]["pickled"][:5] = 0
    with pytest.raises(CheckpointMismatch, match="cannot be read"):
        decode(tree, TRUSTED)
    with pytest.raises(TypeError, match=r"key 'f': .* cannot be pickled"):
        encode({"f": lambda: 0}, "item 0", allow_pickle=True)


def test_depth_and_cycles():
    def nested(depth):
        value = []
        for _ in range(depth):
            value = [value]
        return value

    assert same(kept(nested(64)), nested(64))
    looped: list = [1]
    looped.append([looped])
    wide: list = []
    wide += [wide, wide]
    for value in (nested(65), nested(10**4), looped, wide, {"a": looped}):
        with pytest.raises(ValueError, match=r"nested more than 64 deep|contains itself"):
            encode(value, "value")
    tree = encode(nested(64), "value")
    tree["form"] = {"kind": "list", "items": [tree["form"]]}
    with pytest.raises(CheckpointCorrupt, match="nested"):
        decode(tree)


# ---------------------------------------------------------------------- what was not saved so


def test_classes_must_be_imported_and_the_same(monkeypatch):
    tree = encode([Settings(1.0), Step(obs=torch.ones(1), note="", batch_size=[1]), Pair(1, 2)], "value")
    module = sys.modules[Settings.__module__]
    monkeypatch.delitem(sys.modules, Settings.__module__)
    with pytest.raises(CheckpointMismatch, match="import its module"):
        decode(tree)
    assert Settings.__module__ not in sys.modules
    monkeypatch.setitem(sys.modules, Settings.__module__, module)

    @dataclasses.dataclass
    class Other:
        rate: float

    monkeypatch.setattr(module, "Settings", Other)
    with pytest.raises(CheckpointMismatch, match=r"were \['rate', 'name', 'made'\] .* now"):
        decode(tree)


def test_constructors_are_not_run():
    tree = encode(Settings(1.0), "value")
    assert tree["leaves"][0] == [1.0]
    tree["leaves"][0] = [-1.0]
    assert decode(tree).rate == -1.0


def _edits(tree, replace):
    """Every tree with one node replaced, deleted, or given twice."""
    if isinstance(tree, dict):
        for key in tree:
            yield {name: each for name, each in tree.items() if name != key}
            yield {**tree, "more": 0}
            yield from ({**tree, key: edit} for edit in _edits(tree[key], replace))
    elif isinstance(tree, list):
        for place in range(len(tree)):
            yield [*tree[:place], *tree[place + 1 :]]
            yield [*tree, tree[place]]
            yield from ([*tree[:place], edit, *tree[place + 1 :]] for edit in _edits(tree[place], replace))
    yield from (each for each in replace if type(each) is not type(tree) or isinstance(each, np.ndarray))


JUNK = [
    *(None, True, -1, 2**62, float("nan"), "x", "cuda:0", "os:system", [], [[]], {}, {"kind": "none"}),
    *(np.zeros(0), np.zeros((2, 3)), np.array([-1]), np.full(1, 2**62), np.array(["a"], object)),
    {"kind": "list", "items": []},
]  # fmt: skip


def test_edited_trees_are_refused_or_harmless():
    step = Step(obs=torch.ones(2), note="", more=None, batch_size=[2])
    value = {"t": torch.ones(2), "i": 1, "s": [step, Settings(1.0), np.arange(2), b"x", {1: 2**80, 2: float("inf")}]}
    count = 0
    for tree in _edits(encode(value, "value"), JUNK):
        try:
            decode(tree)
        except CheckpointError:
            count += 1
    assert count > 500


@given(st.recursive(st.sampled_from(JUNK), lambda inner: st.dictionaries(st.sampled_from(
    ["kind", "form", "leaves", "items", "keys", "class", "fields", "batch", "device", "names", "dim", "content", "name"]
), inner, max_size=6)))  # fmt: skip
def test_junk_is_refused(tree):
    with pytest.raises(CheckpointError):
        decode(
            {"form": tree, "leaves": []}
            if isinstance(tree, dict) and "kind" in tree and tree != {"kind": "none"}
            else 7
        )


@pytest.mark.parametrize("place", ["shapes", "lengths"])
@pytest.mark.parametrize("sizes", [[2**62, 2**62], [-1, 5], [2, 3], [2**40, 0], [0, 2**63 - 1]], ids=str)
def test_sizes_must_add_up(place, sizes):
    from interop.checkpoint.lists import load_items, save_items

    tree = save_items([torch.ones(1), torch.ones(3)] if place == "shapes" else ["a", "b" * 5000])
    (column,) = tree["groups"][0]["columns"]
    column[place] = np.array(sizes, np.int64).reshape(column[place].shape)
    with pytest.raises(CheckpointCorrupt):
        load_items(tree)
