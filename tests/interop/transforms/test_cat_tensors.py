"""Several entries in one."""

import pytest
import torch
from tensordict import TensorDict

from interop import LazyTensorStorage, ReplayBuffer
from interop.transforms import CatTensors, Stack


def data():
    return TensorDict(
        {
            "b": torch.zeros(4, 3),
            "a": torch.ones(4, 2),
            "flat": torch.full((4,), 5.0),
            "n": TensorDict({"a": torch.full((4, 2), 2.0)}, [4]),
        },
        [4],
    )


def leaves(found):
    return set(found.keys(True, True))


ALL = leaves(data())


def test_entries_are_put_together_in_the_order_of_their_names():
    transform = CatTensors([("n", "a"), "b", "a"])
    assert transform.in_keys == ["a", "b", ("n", "a")] and transform.out_keys == ["observation_vector"]
    found = transform(data())
    assert found["observation_vector"][0].tolist() == [1, 1, 0, 0, 0, 2, 2]
    assert leaves(found) == {"observation_vector", "flat"} and "n" in found


@pytest.mark.parametrize(
    ("shapes", "batch", "dim", "expected"),
    [
        (([], []), [], -1, [2]),
        (([3], [3]), [], -2, [2, 3]),
        (([4], [4]), [4], -1, [4, 2]),
        (([4], [4, 3]), [4], -1, [4, 4]),
        (([4, 3], [4, 2, 3]), [4], -2, [4, 3, 3]),
        (([4], [4]), [4], 1, [4, 2]),
    ],
)
def test_entries_that_lack_the_dim_get_it(shapes, batch, dim, expected):
    given = TensorDict({name: torch.ones(shape) for name, shape in zip("ab", shapes, strict=True)}, batch)
    found = CatTensors(["a", "b"], "c", dim=dim, unsqueeze_if_oor=True)(given)
    assert list(found["c"].shape) == expected


@pytest.mark.parametrize("transform", [CatTensors(["a", "gone"], "c"), Stack(["a", "gone"], "c")])
def test_a_missing_entry_is_named_and_nothing_changes(transform):
    found = data()
    with pytest.raises(KeyError, match="'gone' not found"):
        transform(found)
    assert leaves(found) == ALL
    transform.set_missing_tolerance(True)
    assert leaves(transform(found)) == ALL


@pytest.mark.parametrize(
    ("transform", "error"),
    [
        (CatTensors(["a", "flat"], "c"), r"'flat' \[4\] do not fit along dim -1"),
        (CatTensors(["flat"], "c", dim=-2), "do not fit along dim -2"),
        (CatTensors(["a", "b"], "c", dim=0), "do not fit along dim 0"),
        (CatTensors(["a", ("n", "a")], "c", dim=0), "'c' would be of shape .8, 2. in a tensordict of batch size .4."),
        (CatTensors(["a", ("n", "a")], ("n", "a"), dim=-2), "batch dims have to stay"),
        (Stack(["a", "b"], "c"), r"'a' \[4, 2\], 'b' \[4, 3\] do not fit at dim -1"),
        (Stack(["a", ("n", "a")], "c", dim=-3), "batch dims have to stay"),
        (Stack(["a"], "c", dim=-5), "do not fit at dim -5"),
    ],
)
def test_shapes_that_do_not_fit_are_named_and_nothing_changes(transform, error):
    found = data()
    with pytest.raises(ValueError, match=error):
        transform(found)
    assert leaves(found) == ALL


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: CatTensors(), ValueError, "at least one"),
        (lambda: CatTensors([]), ValueError, "at least one"),
        (lambda: CatTensors(["a", "a"]), ValueError, "different"),
        (lambda: CatTensors(["a"], ["b"]), TypeError, "needs one key as out_key"),
        (lambda: CatTensors(["a"], None), TypeError, "needs one key as out_key"),
        (lambda: CatTensors(["a"], dim=1.5), TypeError, "dim must be an int"),
        (lambda: Stack([], "c"), ValueError, "at least one"),
        (lambda: Stack(["a"], "c", dim=1), ValueError, "allow_positive_dim=True"),
        (lambda: Stack(["a"], "c", "d"), ValueError, "both of in_key_inv and out_keys_inv"),
        (lambda: Stack(["a"], "c", None, ["d"]), ValueError, "both of in_key_inv and out_keys_inv"),
    ],
)
def test_bad_arguments_are_refused(make, error, text):
    with pytest.raises(error, match=text):
        make()


def test_entries_that_are_no_tensors_are_named():
    with pytest.raises(TypeError, match="'n' must be a tensor"):
        CatTensors(["a", "n"])(data())


def test_entries_are_stacked_in_a_new_dim():
    found = Stack([("n", "a"), "a"], "c", dim=-2)(data())
    assert found["c"][0].tolist() == [[2, 2], [1, 1]] and leaves(found) == {"b", "flat", "c"}
    kept = Stack([("n", "a"), "a"], "c", dim=1, allow_positive_dim=True, del_keys=False)(data())
    assert kept["c"].shape == (4, 2, 2) and leaves(kept) == ALL | {"c"}


def test_tensordicts_are_stacked_in_a_batch_dim():
    agents = {name: TensorDict({"obs": torch.full((4, 5), float(n))}, [4]) for n, name in enumerate("uv")}
    found = Stack(["u", "v"], "agents")(TensorDict(agents, [4]))
    assert found["agents"].batch_size == (4, 2) and found["agents", "obs"][0, :, 0].tolist() == [0, 1]


def test_an_entry_is_taken_apart_when_written_and_stacked_again_when_read():
    rb = ReplayBuffer(storage=LazyTensorStorage(4), transform=Stack(["p", "q"], "both", "both", ["p", "q"], dim=-2))
    both = torch.arange(24.0).reshape(4, 2, 3)
    rb.extend(TensorDict({"both": both}, [4]))
    assert leaves(rb.storage[:]) == {"p", "q"} and torch.equal(rb.storage[:]["q"], both[:, 1])
    assert torch.equal(rb[:]["both"], both) and leaves(rb[:]) == {"both"}


def test_an_entry_of_other_parts_is_not_taken_apart():
    rb = ReplayBuffer(storage=LazyTensorStorage(4), transform=Stack(["p", "q"], "both", "both", ["p", "q"], dim=-2))
    with pytest.raises(ValueError, match=r"'both' of shape \[4, 3, 3\] has no dim -2 of size 2"):
        rb.extend(TensorDict({"both": torch.ones(4, 3, 3)}, [4]))
    assert len(rb) == 0
    assert leaves(rb.transform.inv(TensorDict({"p": torch.ones(4, 3)}, [4]))) == {"p"}


@pytest.mark.parametrize("make", [lambda **keys: CatTensors(**keys), lambda **keys: Stack(**keys)])
def test_nothing_changes_where_an_entry_cannot_be_taken_out(make):
    given = TensorDict({"a": torch.ones(4, 2), "n": TensorDict({"a": torch.zeros(4, 2)}, [4])}, [4])
    given["n"].lock_()
    with pytest.raises(RuntimeError, match="locked"):
        make(in_keys=["a", ("n", "a")], out_key="both")(given)
    assert leaves(given) == {"a", ("n", "a")}
    with pytest.raises(KeyError, match="'a' is no tensordict but a Tensor"):
        make(in_keys=["a"], out_key=("n", "a", "x"))(given)
    assert leaves(given) == {"a", ("n", "a")}
