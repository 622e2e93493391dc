"""Entries that are renamed, selected and excluded."""

import pytest
import torch
from tensordict import TensorDict

from interop import LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer
from interop.transforms import ExcludeTransform, RenameTransform, SelectTransform


def data():
    return TensorDict(
        {
            "a": torch.arange(4.0),
            "n": TensorDict({"c": torch.ones(4, 2), "e": torch.ones(4)}, [4]),
            "reward": torch.ones(4, 1),
            "done": torch.zeros(4, 1, dtype=torch.bool),
            "truncated": torch.zeros(4, 1, dtype=torch.bool),
            "next": TensorDict({"a": torch.ones(4), "reward": torch.zeros(4, 1)}, [4]),
        },
        [4],
    )


def leaves(found):
    return set(found.keys(True, True))


ALL = leaves(data())


def test_entries_have_other_names():
    found = RenameTransform(["a", ("n", "c")], [("next", "b"), "c"])(data())
    assert leaves(found) == (ALL - {"a", ("n", "c")}) | {("next", "b"), "c"}
    assert torch.equal(found["next", "b"], data()["a"]) and torch.equal(found["c"], data()["n", "c"])


def test_a_whole_tensordict_is_renamed_even_into_itself():
    assert leaves(RenameTransform(["n"], ["m"])(data())["m"]) == {"c", "e"}
    assert leaves(RenameTransform(["n"], [("n", "n")])(data())["n"]) == {("n", "c"), ("n", "e")}


@pytest.mark.parametrize(
    ("keys", "names", "error", "text"),
    [
        (["a"], [("truncated", "x")], KeyError, "'truncated' is no tensordict but a Tensor"),
        (["a", "done"], ["b", ("next", "a", "x")], KeyError, "'a' is no tensordict but a Tensor"),
        (["reward"], [("wide", "x")], ValueError, r"of shape \[4, 1\] in a tensordict of batch size \[4, 2\]"),
        (["a", ("next", "a")], ["b", "c"], RuntimeError, "locked"),
    ],
)
def test_nothing_is_renamed_where_one_name_is_refused(keys, names, error, text):
    given = data().set("wide", TensorDict({}, [4, 2]))
    given["next"].lock_()
    with pytest.raises(error, match=text):
        RenameTransform(keys, names)(given)
    assert leaves(given) == ALL and torch.equal(given["a"], data()["a"])


def test_copies_keep_the_old_names():
    found = RenameTransform(["a", "n"], ["b", "m"], create_copy=True)(data())
    assert leaves(found) == ALL | {"b", ("m", "c"), ("m", "e")}
    assert found["b"] is found["a"]
    del found["m", "c"]
    assert ("n", "c") in leaves(found)


@pytest.mark.parametrize(
    ("keys", "error"),
    [
        ((["a"], ["b", "c"]), "as many, got 1 and 2"),
        ((["a"], ["b"], ["i"], ["j", "k"]), "in_keys_inv and out_keys_inv must be as many"),
        ((["a"], ["b"], ["i"]), "got 1 and 0"),
        ((["a"], ["a"]), "swap names with two transforms"),
        ((["a", "b"], ["b", "c"]), "another name"),
        ((["a", "b"], ["c", "c"]), "another name"),
        ((["a", "a"], ["b", "c"]), "another name"),
        ((None, ["b"]), "as many"),
    ],
)
def test_names_that_do_not_pair_up_are_refused(keys, error):
    with pytest.raises(ValueError, match=error):
        RenameTransform(*keys)


def test_what_is_no_tensordict_is_refused():
    for transform in (SelectTransform("a"), ExcludeTransform("a")):
        with pytest.raises(TypeError, match="tensordict, got dict"):
            transform({"a": 1})


@pytest.mark.parametrize(
    ("keys", "kwargs", "kept"),
    [
        (("a",), {}, {"a", "reward", "done"}),
        (("a",), {"keep_rewards": False}, {"a", "done"}),
        (("a", "missing"), {"keep_rewards": False, "keep_dones": False}, {"a"}),
        ((("n", "c"), ("next", "a")), {"keep_rewards": False}, {("n", "c"), ("next", "a"), "done"}),
        (("next",), {"keep_dones": False}, {("next", "a"), ("next", "reward"), "reward"}),
        ((), {}, {"reward", "done"}),
    ],
)
def test_selected_entries_are_left(keys, kwargs, kept):
    assert leaves(SelectTransform(*keys, **kwargs)(data())) == kept


def test_all_but_the_excluded_ones_are_left():
    found = ExcludeTransform("a", ("next", "reward"), "missing")(data())
    assert leaves(found) == ALL - {"a", ("next", "reward")}
    assert leaves(ExcludeTransform("n")(data())) == ALL - {("n", "c"), ("n", "e")}


def test_an_inverse_exclusion_is_never_stored():
    rb = ReplayBuffer(storage=LazyTensorStorage(4), transform=ExcludeTransform("a", inverse=True))
    given = data()
    rb.extend(given)
    assert leaves(rb.storage[:]) == ALL - {"a"} and leaves(given) == ALL
    assert leaves(ExcludeTransform("a", inverse=True)(data())) == ALL
    assert leaves(ExcludeTransform("a").inv(data())) == ALL


def test_the_index_of_a_sample_is_behind_the_transforms():
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(4), transform=SelectTransform("a", keep_dones=False), batch_size=2
    )
    rb.extend(data())
    assert leaves(rb.sample()) == {"a", "reward", "index"}


@pytest.mark.parametrize("keys", [(["a", "b"],), (1,), ((),), (("a", 1),)])
@pytest.mark.parametrize("transform", [SelectTransform, ExcludeTransform])
def test_keys_are_arguments(keys, transform):
    with pytest.raises(TypeError, match="takes keys as arguments"):
        transform(*keys)
