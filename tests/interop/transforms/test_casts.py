"""Casts, functions and checks of entries, and projected actions."""

import copy
import pickle

import pytest
import torch
from scipy import stats
from tensordict import NonTensorData, TensorDict, lazy_stack

from interop import LazyTensorStorage, ReplayBuffer
from interop.transforms import (
    DeviceCastTransform,
    DiscreteActionProjection,
    DoubleToFloat,
    DTypeCastTransform,
    FiniteTensorDictCheck,
    PinMemoryTransform,
    UnaryTransform,
)


def mixed():
    return TensorDict(
        {
            "double": torch.ones(3, dtype=torch.float64),
            "float": torch.ones(3),
            "count": torch.ones(3, dtype=torch.int64),
            "deep": TensorDict({"double": torch.ones(3, 2, dtype=torch.float64)}, [3]),
            "text": NonTensorData("text", [3]),
        },
        [3],
    )


def dtypes(data):
    return {key: value.dtype for key, value in data.items(True, True) if isinstance(value, torch.Tensor)}


def test_without_keys_all_of_a_dtype_are_cast_and_cast_back():
    data = mixed()
    before = dtypes(data)
    out = DoubleToFloat()(data)
    assert out is data
    assert dtypes(out) == {**before, "double": torch.float32, ("deep", "double"): torch.float32}
    back = DoubleToFloat().inv(out)
    assert dtypes(back) == {**before, "float": torch.float64}
    assert dtypes(out)["double"] == torch.float32
    assert out["text"] == "text"


def test_named_entries_are_cast_whatever_their_dtype():
    transform = DTypeCastTransform(torch.int64, torch.float16, ["double", ("deep", "double")], ["a", "b"])
    out = transform(mixed())
    assert out["a"].dtype == out["b"].dtype == torch.float16 and out["double"].dtype == torch.float64
    assert dtypes(transform.inv(mixed())) == dtypes(mixed())
    inverse = DTypeCastTransform(torch.int32, torch.int64, ["count"], in_keys_inv=["stored"], out_keys_inv=["count"])
    assert inverse.inv(mixed())["stored"].dtype == torch.int32
    # As torchrl has it: no keys to read means all, named keys to write mean these.
    written = DoubleToFloat(in_keys_inv=["float"])
    assert dtypes(written(mixed()))["deep", "double"] == torch.float32
    found = dtypes(written.inv(DoubleToFloat()(mixed())))
    assert (found["float"], found["double"]) == (torch.float64, torch.float32)


def test_what_casts_refuse_and_show():
    assert repr(DoubleToFloat()) == "DoubleToFloat(in_keys=None, out_keys=None, in_keys_inv=None, out_keys_inv=None)"
    assert "in_keys=['a'], out_keys=['a'], in_keys_inv=[]" in repr(DoubleToFloat(["a"]))
    with pytest.raises(ValueError, match="out_keys without in_keys"):
        DoubleToFloat(out_keys=["a"])
    with pytest.raises(ValueError, match="out_keys_inv without in_keys_inv"):
        DoubleToFloat(["a"], out_keys_inv=["a"])
    with pytest.raises(TypeError, match="dtype_in"):
        DTypeCastTransform("float64", torch.float32)
    with pytest.raises(TypeError, match="'text' must be a tensor"):
        DoubleToFloat(["text"])(mixed())
    with pytest.raises(KeyError, match="'other'"):
        DoubleToFloat(["other"])(mixed())
    with pytest.raises(TypeError):
        DoubleToFloat()(torch.ones(3))


def test_all_entries_go_to_a_device_and_back():
    data = TensorDict({"a": torch.ones(3), "b": {"c": torch.ones(3)}}, [3])
    transform = DeviceCastTransform("meta", "cpu")
    out = transform(data.copy())
    assert out.device == torch.device("meta") and out["b", "c"].is_meta
    assert transform.inv(data).device == torch.device("cpu") and data.device is None
    assert DeviceCastTransform("meta").inv(data)["a"].is_cpu
    assert repr(transform) == "DeviceCastTransform(device=meta, orig_device=cpu)"


@pytest.mark.parametrize("device", [None, "cpu"])
def test_named_entries_go_to_a_device_alone(device):
    data = TensorDict({"a": torch.ones(3), "b": {"c": torch.ones(3)}}, [3], device=device)
    transform = DeviceCastTransform("meta", "meta", in_keys=["a"], out_keys=["d"], in_keys_inv=[("b", "c")])
    out = transform(data.copy())
    assert out["d"].is_meta and out["a"].is_cpu and out["b", "c"].is_cpu
    stored = transform.inv(data)
    assert stored["b", "c"].is_meta and stored["a"].is_cpu and data["b", "c"].is_cpu


def test_a_tensordict_stays_where_it_is_when_entries_are_refused():
    data = TensorDict({"x": torch.ones(2), "deep": TensorDict({"y": torch.ones(2)}, [2])}, [2], device="cpu")
    for keys, error in ((["x", "z"], KeyError), (["x", "deep"], TypeError)):
        with pytest.raises(error):
            DeviceCastTransform("meta", in_keys=keys)(data)
        assert data.device == data["deep"].device == data["x"].device == torch.device("cpu")
    DeviceCastTransform("meta", in_keys=["x", ("deep", "y")])(data)
    assert data.device is None and data["x"].is_meta and data["deep", "y"].is_meta


def test_memory_is_pinned_where_there_is_something_to_pin_it_for():
    data = TensorDict({"a": torch.ones(3)}, [3])
    if torch.cuda.is_available():
        assert PinMemoryTransform()(data)["a"].is_pinned()
    else:
        with pytest.raises(RuntimeError, match="accelerator"):
            PinMemoryTransform()(data)


def test_a_function_of_entries():
    transform = UnaryTransform(["a", ("b", "c")], ["a", "d"], ["a"], fn=torch.neg, inv_fn=torch.exp)
    data = TensorDict({"a": torch.ones(3), "b": {"c": torch.ones(3) * 2}}, [3])
    out = transform(data.copy())
    assert out["a"].tolist() == [-1] * 3 and out["d"].tolist() == [-2] * 3
    torch.testing.assert_close(transform.inv(data)["a"], torch.ones(3).exp())
    same = UnaryTransform(["a"], ["b"], in_keys_inv=["x"], out_keys_inv=["a"], fn=torch.Tensor.double)
    for each in (same, copy.deepcopy(same), pickle.loads(pickle.dumps(same))):
        assert each.inv(data)["x"].dtype == torch.float64 and "x" not in data
    assert repr(same) == "UnaryTransform(keys=['a'])"
    with pytest.raises(TypeError, match="fn must be callable"):
        UnaryTransform(["a"], ["a"], fn=None)
    with pytest.raises(KeyError, match="'a'"):
        transform(TensorDict())


def test_functions_of_what_is_no_tensor():
    data = TensorDict({"text": NonTensorData("abc", [])}, [])
    assert UnaryTransform(["text"], ["size"], fn=lambda text: torch.tensor(len(text)))(data.copy())["size"] == 3
    raw = UnaryTransform(["text"], ["size"], fn=lambda text: torch.tensor(len(text.data)), use_raw_nontensor=True)
    assert raw(data.copy())["size"] == 3
    stack = torch.stack([TensorDict({"text": word}, []) for word in ("a", "bcd")])
    sizes = UnaryTransform(["text"], ["size"], fn=lambda texts: torch.tensor([len(text) for text in texts]))
    assert sizes(stack)["size"].tolist() == [1, 3]
    assert UnaryTransform(["size"], ["text"], fn=str)(TensorDict({"size": torch.tensor(3)}))["text"] == "tensor(3)"


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.complex64])
def test_what_is_not_finite_is_refused_by_name(wrong, dtype):
    data = mixed()
    check = FiniteTensorDictCheck()
    assert check(data) is data
    data["deep", "x"] = torch.tensor([1, wrong, 2], dtype=dtype)
    with pytest.raises(ValueError, match=r"non-finite.*\('deep', 'x'\)$"):
        check(data)
    assert check.inv(data)["deep", "x"].dtype == dtype
    rb = ReplayBuffer(storage=LazyTensorStorage(6))
    rb.append_transform(check, invert=True)
    with pytest.raises(ValueError, match="non-finite"):
        rb.extend(data.exclude("text"))
    assert len(rb) == 0


def uneven(value):
    """Elements of other shapes, and an entry that only some have."""
    items = [TensorDict({"x": torch.full((n,), value, dtype=torch.float64)}, []) for n in (1, 2, 3)]
    items[2]["only", "here"] = torch.full((2,), value, dtype=torch.float64)
    return TensorDict({"items": lazy_stack(items), "text": NonTensorData("text", [3])}, [3])


def test_all_entries_of_uneven_elements_are_cast_and_checked():
    data = DoubleToFloat()(uneven(1.0))
    items = data["items"].tensordicts
    assert {each["x"].dtype for each in items} == {items[2]["only", "here"].dtype} == {torch.float32}
    assert DoubleToFloat().inv(data)["items"].tensordicts[2]["only", "here"].dtype == torch.float64
    assert items[0]["x"].dtype == torch.float32
    assert FiniteTensorDictCheck()(data) is data
    items[2]["only", "here"][0] = float("nan")
    with pytest.raises(ValueError, match=r"in \('items', 'only', 'here'\)$"):
        FiniteTensorDictCheck()(data)
    with pytest.raises(ValueError, match=r"in \('items', 'x'\), "):
        FiniteTensorDictCheck()(uneven(float("inf")))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32, torch.uint8])
def test_actions_go_from_many_places_to_few_and_back(dtype):
    data = TensorDict({"action": torch.eye(5).to(dtype)[torch.tensor([0, 1, 2, 0])]}, [4])
    transform = DiscreteActionProjection(3, 5)
    stored = transform.inv(data)
    assert stored["action"].dtype == torch.int64
    assert stored["action"].tolist() == torch.eye(3)[torch.tensor([0, 1, 2, 0])].tolist()
    assert torch.equal(transform(stored)["action"], data["action"].long())
    alone = TensorDict({"action": torch.eye(3)[0]}, [])
    assert DiscreteActionProjection(3, 5, include_forward=False)(alone)["action"].shape == (3,)
    assert DiscreteActionProjection(3, 5)(alone)["action"].tolist() == [1, 0, 0, 0, 0]


def test_actions_outside_become_one_of_the_few_each_as_likely():
    torch.manual_seed(3)
    data = TensorDict({"action": torch.eye(7)[torch.full((6000,), 6)]}, [6000])
    counts = DiscreteActionProjection(4, 7).inv(data)["action"].sum(0)
    assert counts.sum() == 6000
    assert stats.chisquare(counts.numpy()).pvalue > 1e-3


def test_actions_that_do_not_fit():
    for effective, most in ((0, 3), (4, 3)):
        with pytest.raises(ValueError, match="num_actions_effective"):
            DiscreteActionProjection(effective, most)
    with pytest.raises(TypeError, match="max_actions must be an int"):
        DiscreteActionProjection(2, 3.0)
    for shape in ([4, 3], [4, 6], [4]):
        with pytest.raises(ValueError, match="'action': one-hot actions of 5 places"):
            DiscreteActionProjection(3, 5).inv(TensorDict({"action": torch.zeros(shape)}, [4]))
    with pytest.raises(ValueError, match="'action': one-hot actions of at most 5"):
        DiscreteActionProjection(3, 5)(TensorDict({"action": torch.zeros(4, 6)}, [4]))
    text = "DiscreteActionProjection(num_actions_effective=3, max_actions=5, in_keys_inv=['a'])"
    assert repr(DiscreteActionProjection(3, 5, "a")) == text
