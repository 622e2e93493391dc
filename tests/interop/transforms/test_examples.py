"""What transforms make of entries: a table of examples, in both directions."""

import pytest
import torch
from scipy import stats
from tensordict import NonTensorData, TensorDict, lazy_stack

from interop import LazyTensorStorage, ReplayBuffer
from interop.transforms import (
    BinarizeReward,
    CatTensors,
    ClipTransform,
    DeviceCastTransform,
    DiscreteActionProjection,
    DoubleToFloat,
    DTypeCastTransform,
    ExcludeTransform,
    ExpandAs,
    FiniteTensorDictCheck,
    FlattenObservation,
    FlattenTensorDict,
    PermuteTransform,
    PinMemoryTransform,
    RenameTransform,
    RewardClipping,
    SelectTransform,
    SignTransform,
    SqueezeTransform,
    Stack,
    UnaryTransform,
    UnsqueezeTransform,
)

F16, F32, F64, I64, U8 = torch.float16, torch.float32, torch.float64, torch.int64, torch.uint8
PIXELS = torch.arange(4 * 2 * 3 * 5).reshape(4, 2, 3, 5)


def data():
    return TensorDict(
        {
            "a": torch.full((4, 2), 1.0),
            "b": torch.zeros(4, 3),
            "n": TensorDict({"a": torch.full((4, 2), 2.0), "e": torch.full((4,), 3.0)}, [4]),
            "number": torch.arange(4),
            "double": torch.ones(4, dtype=F64),
            "pixels": PIXELS,
            "reward": torch.tensor([[-3.0], [0.0], [0.1], [2.0]]),
            "done": torch.zeros(4, 1, dtype=torch.bool),
            "truncated": torch.zeros(4, 1, dtype=torch.bool),
            "text": NonTensorData("text", [4]),
            "next": TensorDict({"a": torch.full((4, 2), 4.0), "reward": torch.ones(4, 1)}, [4]),
        },
        [4],
    )


def leaves(found):
    return set(found.keys(True, True))


ALL = leaves(data())
REWARD, A, NA, NEXT = data()["reward"], data()["a"], ("n", "a"), ("next", "a")

# Transform, entries that are new or changed, entries that are gone.
READ = [
    (RewardClipping(-1, 1), {"reward": REWARD.clamp(-1, 1)}, ()),
    (RewardClipping(torch.tensor([0.5])), {"reward": REWARD.clamp(0.5)}, ()),
    (RewardClipping(-1, 2, ["number"], ["x"]), {"x": torch.tensor([0, 1, 2, 2])}, ()),
    (ClipTransform(["reward"], ["x"], low=-1), {"x": REWARD.clamp(-1)}, ()),
    (ClipTransform(["number"], high=1), {"number": torch.tensor([0.0, 1, 1, 1])}, ()),
    (BinarizeReward(), {"reward": torch.tensor([[0], [0], [1], [1]], dtype=torch.int8)}, ()),
    (SignTransform(["reward", "number"]), {"reward": REWARD.sign(), "number": torch.tensor([0, 1, 1, 1])}, ()),
    (DoubleToFloat(), {"double": torch.ones(4)}, ()),
    (DTypeCastTransform(I64, F16, ["double", NA], ["x", "y"]), {"x": torch.ones(4).half(), "y": 2 * A.half()}, ()),
    (UnaryTransform(["a", NA], ["a", "x"], fn=torch.neg), {"a": -A, "x": -2 * A}, ()),
    (UnaryTransform(["text"], ["x"], fn=lambda text: torch.full((4,), len(text))), {"x": torch.full((4,), 4)}, ()),
    (FlattenObservation(-3, -1), {"pixels": PIXELS.reshape(4, 30)}, ()),
    (FlattenObservation(1, -1, allow_positive_dim=True), {"pixels": PIXELS.reshape(4, 30)}, ()),
    (UnsqueezeTransform(-3, in_keys=["pixels"], out_keys=["x"]), {"x": PIXELS[:, :, None]}, ()),
    (SqueezeTransform(-1, in_keys=["reward", "pixels"]), {"reward": REWARD[:, 0]}, ()),
    (PermuteTransform((-1, -3, -2), in_keys=["pixels"]), {"pixels": PIXELS.permute(0, 3, 1, 2)}, ()),
    (ExpandAs("number", "a", "x"), {"x": torch.arange(4)[:, None].expand(4, 2)}, ()),
    (
        CatTensors([NA, "b", "a"]),
        {"observation_vector": torch.tensor([1.0, 1, 0, 0, 0, 2, 2]).expand(4, 7)},
        ("a", "b", NA),
    ),
    (CatTensors(["b", "a"], "a", sort=False), {"a": torch.tensor([0.0, 0, 0, 1, 1]).expand(4, 5)}, ("b",)),
    (
        CatTensors(["a", "double"], ("next", "x"), del_keys=False, unsqueeze_if_oor=True),
        {("next", "x"): torch.ones(4, 3).double()},
        (),
    ),
    (Stack([NA, "a"], "x", dim=-2), {"x": torch.stack([2 * A, A], 1)}, ("a", NA)),
    (RenameTransform(["a", NA], [("next", "x"), "y"]), {("next", "x"): A, "y": 2 * A}, ("a", NA)),
    (
        RenameTransform(["n"], [("n", "n")]),
        {("n", "n", "a"): 2 * A, ("n", "n", "e"): torch.full((4,), 3.0)},
        (NA, ("n", "e")),
    ),
    (
        RenameTransform(["a", "n"], ["x", "m"], create_copy=True),
        {"x": A, ("m", "a"): 2 * A, ("m", "e"): torch.full((4,), 3.0)},
        (),
    ),
    (SelectTransform("a", NEXT, "missing"), {}, ALL - {"a", NEXT, "reward", "done"}),
    (SelectTransform("n", keep_rewards=False, keep_dones=False), {}, ALL - {NA, ("n", "e")}),
    (ExcludeTransform("a", ("next", "reward"), "n", "missing"), {}, ("a", ("next", "reward"), NA, ("n", "e"))),
]
WRITTEN = [
    (ClipTransform(["a"], ["a"], ["stored"], ["reward"], low=-1, high=0.5), {"stored": REWARD.clamp(-1, 0.5)}, ()),
    (SignTransform(in_keys_inv=["reward"]), {"reward": REWARD.sign()}, ()),
    (DTypeCastTransform(F16, F64), {"double": torch.ones(4).half()}, ()),
    (DTypeCastTransform(F16, F32, ["b"], None, ["stored"], ["a"]), {"stored": A.half()}, ()),
    (DTypeCastTransform(F16, F32, ["b"]), {}, ()),
    (UnaryTransform(["a"], ["a"], ["stored"], [NA], fn=torch.neg, inv_fn=torch.exp), {"stored": (2 * A).exp()}, ()),
    (UnsqueezeTransform(-1, in_keys_inv=["reward"]), {"reward": REWARD[:, 0]}, ()),
    (SqueezeTransform(-1, in_keys_inv=["number"]), {"number": torch.arange(4)[:, None]}, ()),
    (PermuteTransform((-1, -3, -2), in_keys_inv=["pixels"]), {"pixels": PIXELS.permute(0, 2, 3, 1)}, ()),
    (Stack(["p", "q"], "a", "a", ["p", "q"]), {"p": torch.ones(4), "q": torch.ones(4)}, ("a",)),
    (Stack(["p", "q"], "x", "x", ["p", "q"]), {}, ()),
    (RenameTransform(["p"], ["q"], ["stored"], ["a"]), {"stored": A}, ("a",)),
    (ExcludeTransform("a", inverse=True), {}, ("a",)),
    (FlattenTensorDict(inverse=False), {}, ()),
]


@pytest.mark.parametrize(
    ("written", "transform", "expected", "gone"),
    [*((False, *row) for row in READ), *((True, *row) for row in WRITTEN)],
    ids=lambda each: repr(each) if isinstance(each, torch.nn.Module) else "",
)
def test_entries_become(written, transform, expected, gone):
    given = data()
    found = transform.inv(given) if written else transform(given)
    assert leaves(found) == (ALL - set(gone)) | set(expected)
    for key in leaves(found) - {"text"}:
        value = expected.get(key, data().get(key, None)) if key not in expected else expected[key]
        assert found[key].dtype == value.dtype and torch.equal(found[key], value), key
    if written:
        assert leaves(given) == ALL and all(torch.equal(given[key], data()[key]) for key in ALL - {"text"})


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda **keys: UnsqueezeTransform(-1, **keys), "number"),
        (lambda **keys: SqueezeTransform(-1, **keys), "reward"),
        (lambda **keys: PermuteTransform((-2, -1, -3), **keys), "pixels"),
    ],
)
def test_the_inverse_takes_back_what_forward_does(make, key):
    transform = make(in_keys=[key], in_keys_inv=["stored"], out_keys_inv=[key])
    assert transform.invertible
    rb = ReplayBuffer(storage=LazyTensorStorage(4), transform=transform)
    rb.extend(transform(data()))
    assert torch.equal(rb.storage[:]["stored"], data()[key])
    by_name = transform(**{key: data()[key]})
    assert torch.equal(by_name, transform(data())[key])


@pytest.mark.parametrize("dtype", [U8, torch.int8, torch.int16, I64])
@pytest.mark.parametrize("bounds", [(-1, 1), (None, 1000), (0, 300), (-1000, 100)])
def test_integer_bounds_do_not_wrap_around(dtype, bounds):
    held = torch.iinfo(dtype)
    values = torch.tensor([max(held.min, -(2**40)), 0, 1, 100, min(held.max, 2**40)]).to(dtype)
    out = RewardClipping(*bounds)(TensorDict({"reward": values}, [5]))["reward"]
    low, high = (default if bound is None else bound for bound, default in zip(bounds, (-(2**50), 2**50), strict=True))
    assert out.dtype == dtype and out.tolist() == [min(max(value, low), high) for value in values.tolist()]


@pytest.mark.parametrize(
    ("shapes", "batch", "dim", "expected"),
    [
        (([], []), [], -1, [2]),
        (([3], [3]), [], -2, [2, 3]),
        (([4], [4, 3]), [4], -1, [4, 4]),
        (([4, 3], [4, 2, 3]), [4], -2, [4, 3, 3]),
        (([4], [4]), [4], 1, [4, 2]),
    ],
)
def test_entries_that_lack_the_dim_get_it(shapes, batch, dim, expected):
    given = TensorDict({name: torch.ones(shape) for name, shape in zip("ab", shapes, strict=True)}, batch)
    assert list(CatTensors(["a", "b"], "c", dim=dim, unsqueeze_if_oor=True)(given)["c"].shape) == expected


def test_tensordicts_are_stacked_in_a_batch_dim_and_batch_dims_become_items():
    agents = {name: TensorDict({"obs": torch.full((4, 5), float(n))}, [4]) for n, name in enumerate("uv")}
    found = Stack(["u", "v"], "agents")(TensorDict(agents, [4]))
    assert found["agents"].batch_size == (4, 2) and found["agents", "obs"][0, :, 0].tolist() == [0, 1]
    rb = ReplayBuffer(storage=LazyTensorStorage(8), transform=FlattenTensorDict())
    rb.extend(found["agents"])
    assert len(rb) == 8 and rb.storage[:]["obs"][:, 0].tolist() == [0, 1] * 4
    assert FlattenTensorDict().inv(TensorDict({"a": torch.ones(3)}, [])).batch_size == (1,)


def test_devices():
    given = TensorDict({"a": torch.ones(3), "b": {"c": torch.ones(3)}}, [3], device="cpu")
    every = DeviceCastTransform("meta", "cpu")
    out = every(given.copy())
    assert out.device == torch.device("meta") and out["b", "c"].is_meta
    assert every.inv(given)["a"].is_cpu


def test_memory_is_pinned_where_there_is_an_accelerator():
    given = TensorDict({"a": torch.ones(3)}, [3])
    if torch.cuda.is_available():
        assert PinMemoryTransform()(given)["a"].is_pinned()
    else:
        with pytest.raises(RuntimeError, match=r"accelerator|NVIDIA"):  # of a build for CUDA, the latter
            PinMemoryTransform()(given)


def test_functions_take_words():
    stack = torch.stack([TensorDict({"text": word}, []) for word in ("a", "bcd")])
    sizes = UnaryTransform(["text"], ["size"], fn=lambda texts: torch.tensor([len(text) for text in texts]))
    assert sizes(stack)["size"].tolist() == [1, 3]
    assert UnaryTransform(["size"], ["text"], fn=str)(TensorDict({"size": torch.tensor(3)}))["text"] == "tensor(3)"


def uneven(value):
    """Elements of other shapes, and an entry that only some have."""
    items = [TensorDict({"x": torch.full((n,), value, dtype=F64)}, []) for n in (1, 2, 3)]
    items[2]["only", "here"] = torch.full((2,), value, dtype=F64)
    return TensorDict({"items": lazy_stack(items), "text": NonTensorData("text", [3])}, [3])


@pytest.mark.parametrize(
    ("wrong", "dtype"), [(float("nan"), F16), (float("inf"), F32), (-float("inf"), torch.complex64)]
)
def test_infinities_and_nans_are_refused_by_name(wrong, dtype):
    given, check = data(), FiniteTensorDictCheck()
    assert check(given) is given
    given["deep", "x"] = torch.tensor([1, wrong, 2, 3], dtype=dtype)
    with pytest.raises(ValueError, match=r"non-finite.*\('deep', 'x'\)$"):
        check(given)
    assert check.inv(given)["deep", "x"].dtype == dtype
    with pytest.raises(ValueError, match=r"in \('items', 'x'\), "):
        check(uneven(wrong))
    rb = ReplayBuffer(storage=LazyTensorStorage(6))
    rb.append_transform(check, invert=True)
    with pytest.raises(ValueError, match="non-finite"):
        rb.extend(given)
    assert len(rb) == 0


def test_all_entries_of_uneven_elements_are_cast():
    found = DoubleToFloat()(uneven(1.0))
    items = found["items"].tensordicts
    assert {each["x"].dtype for each in items} == {items[2]["only", "here"].dtype} == {F32}
    assert DoubleToFloat().inv(found)["items"].tensordicts[2]["only", "here"].dtype == F64
    assert items[0]["x"].dtype == F32


@pytest.mark.parametrize("dtype", [I64, torch.bool, F32, U8])
def test_actions_go_from_many_places_to_few_and_back(dtype):
    given = TensorDict({"action": torch.eye(5).to(dtype)[torch.tensor([0, 1, 2, 0])]}, [4])
    transform = DiscreteActionProjection(3, 5)
    stored = transform.inv(given)
    assert stored["action"].dtype == I64
    assert stored["action"].tolist() == torch.eye(3)[torch.tensor([0, 1, 2, 0])].tolist()
    assert torch.equal(transform(stored)["action"], given["action"].long())
    alone = TensorDict({"action": torch.eye(3)[0]}, [])
    assert DiscreteActionProjection(3, 5, include_forward=False)(alone)["action"].shape == (3,)


def test_actions_outside_become_one_of_the_few_each_as_likely():
    torch.manual_seed(3)
    given = TensorDict({"action": torch.eye(7)[torch.full((6000,), 6)]}, [6000])
    counts = DiscreteActionProjection(4, 7).inv(given)["action"].sum(0)
    assert counts.sum() == 6000
    assert stats.chisquare(counts.numpy()).pvalue > 1e-3
