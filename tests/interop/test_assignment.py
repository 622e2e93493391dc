"""`rb[index] = value`, and edits in place by key."""

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from interop import LazyMemmapStorage, LazyTensorStorage, ListStorage, ReplayBuffer, TensorDictReplayBuffer
from tests.interop.rows import check_same, flat_td, refused


@pytest.fixture(params=[LazyTensorStorage, LazyMemmapStorage])
def make(request):
    return request.param


def lanes(start=0, lanes=2, steps=3):
    ids = torch.arange(start, start + lanes * steps).reshape(lanes, steps)
    return TensorDict({"a": ids, "n": {"b": ids[..., None].double()}}, [lanes, steps])


class Copies(LazyTensorStorage):
    __module__ = "interop.storages"  # as a class of the library, which says by `is_live` what `get` returns

    def get(self, index):
        return super().get(index).clone()

    def is_live(self, index):
        return False


def test_edits_of_copies_are_stored():
    buffer = TensorDictReplayBuffer(storage=Copies(4))
    buffer.extend(TensorDict({"x": torch.zeros(4)}, [4]))
    buffer["x"] = torch.arange(4.0)
    assert buffer["x"].tolist() == [0, 1, 2, 3]


# ------------------------------------------------------------------ in the layout of the user


@pytest.mark.parametrize("steps", [3, 2])
def test_a_key_is_assigned_in_the_layout_in_which_it_is_read(make, steps):
    buffer = ReplayBuffer(storage=make(20, ndim=2))
    buffer.extend(lanes(steps=steps))
    buffer["a"] = buffer["a"] * 10
    buffer["n", "b"] = buffer["n", "b"] + 1
    check_same(buffer["a"], lanes(steps=steps)["a"] * 10)
    check_same(buffer["n", "b"], lanes(steps=steps)["n", "b"] + 1)
    check_same(buffer.storage[:]["a"], (lanes(steps=steps)["a"] * 10).t().clone())
    with refused(buffer, RuntimeError, "a"):
        buffer["a"] = torch.zeros(steps, 2 + steps, dtype=torch.int64)


INDICES = [0, -1, slice(1, 2), slice(None), [1, 0], torch.tensor([True, False]), (1, slice(0, 2)), (0, 2), ...]


@pytest.mark.parametrize("index", INDICES, ids=repr)
@pytest.mark.parametrize("rows", [lambda: lanes()["a"], lanes, lambda: {"x": (lanes()["a"], lanes()["n", "b"])}])
def test_every_index_is_assigned_as_it_is_read(make, index, rows):
    buffer, wanted = TensorDictReplayBuffer if isinstance(rows(), TensorDict) else ReplayBuffer, rows()
    buffer = buffer(storage=make(20, ndim=2))
    buffer.extend(rows())
    leaves = [wanted] if isinstance(wanted, torch.Tensor | TensorDict) else list(wanted["x"])
    values = [leaf[index] + 50 for leaf in leaves]
    for leaf, value in zip(leaves, values, strict=True):
        leaf[index] = value
    buffer[index] = values[0] if len(values) == 1 else {"x": tuple(values)}
    read = buffer[:]
    check_same(read.exclude("index") if isinstance(read, TensorDict) else read, wanted)
    if isinstance(read, TensorDict):
        check_same(read["index"], torch.arange(3).expand(2, 3))


@pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictReplayBuffer])
def test_a_dim_within_the_items_is_assigned_too(make, kind):
    buffer = kind(storage=make(30), dim_extend=1)
    buffer.extend(lanes())
    buffer[1] = lanes(50)[0].clone()
    check_same(buffer[:]["a"], torch.tensor([[0, 1, 2], [50, 51, 52]]))
    with refused(buffer, RuntimeError):
        buffer[1] = lanes(50)[0].apply(lambda leaf: leaf.int())
    if kind is TensorDictReplayBuffer:
        check_same(buffer[:]["index"], torch.arange(3).expand(2, 3))


# ------------------------------------------------------------------ row numbers


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage, ListStorage])
@pytest.mark.parametrize(
    "index", [1, -2, slice(1, 3), [2, 0], torch.tensor([False, True, True]), np.array([1])], ids=repr
)
def test_assigned_rows_have_their_own_number(storage, index):
    buffer = TensorDictReplayBuffer(storage=storage(5))
    buffer.extend(flat_td([0, 1, 2]))
    given = flat_td([7, 8, 9])[index].clone()
    buffer[index] = given
    assert "index" not in given
    check_same(buffer[:]["index"], torch.arange(3))
    check_same(buffer[index].exclude("index"), given)
    buffer[index] = given.set("index", torch.full(given.batch_size, 9))
    check_same(buffer[:]["index"], torch.arange(3))


@pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictReplayBuffer])
def test_a_row_past_the_length_is_written_and_stays_invisible(make, kind):
    buffer = kind(storage=make(8))
    buffer.extend(flat_td([0, 1, 2]))
    buffer[5] = flat_td([9])[0]
    buffer[6:8] = flat_td([9, 9])
    buffer.write_all(flat_td([4, 5, 6, 7]))
    assert len(buffer) == 3 and buffer.writer.cursor == 3
    check_same(buffer[:].exclude("index"), flat_td([4, 5, 6]))
    if kind is TensorDictReplayBuffer:
        check_same(buffer.storage._storage["index"], torch.tensor([0, 1, 2, 3, 0, 5, 6, 7]))


# ------------------------------------------------------------------ edits by key


def numbers():
    return TensorDict({"a": torch.zeros(3), "i": torch.zeros(3, dtype=torch.int64), "n": {"x": torch.zeros(3)}}, [3])


BAD_EDITS = {
    "array of another dtype": ({"i": np.ones(3)}, RuntimeError),
    "text": ({"i": "text"}, TypeError),
    "a fraction for integers": ({"i": 1.5}, RuntimeError),
    "a new key of too few rows": ({"z": torch.ones(2)}, RuntimeError),
    "a new key of an object": ({"z": object()}, TypeError),
    "a tensor for a tensordict": ({"n": torch.ones(3)}, TypeError),
    "a tensordict for a tensor": ({"i": TensorDict({}, [3])}, TypeError),
    "sparse": ({"n": {"x": torch.ones(3).to_sparse()}}, RuntimeError),
}


@pytest.mark.parametrize("bad", BAD_EDITS)
def test_edits_of_which_one_does_not_fit_write_nothing(make, bad):
    buffer = ReplayBuffer(storage=make(8))
    buffer.extend(numbers())
    edit, error = BAD_EDITS[bad]
    with refused(buffer, error):
        buffer.update_({"a": torch.ones(3), **edit})
    key, value = next(iter(edit.items()))
    with refused(buffer, error):
        buffer[key] = value


def test_edits_take_arrays_numbers_and_what_is_nested(make):
    buffer = ReplayBuffer(storage=make(8))
    buffer.extend(numbers())
    buffer.update_({"a": np.arange(3, dtype=np.float32), "i": 7, "n": {"x": [1.0, 2.0, 3.0]}}, clone=True)
    check_same(buffer["a"], torch.arange(3.0))
    check_same(buffer["i"], torch.full((3,), 7))
    check_same(buffer["n", "x"], torch.tensor([1.0, 2.0, 3.0]))
    weight = torch.full((3,), 5.0, requires_grad=True)
    buffer.set_("a", weight * 2).set_at_("i", 9, torch.tensor([0, 2])).set_at_("n", {"x": 0}, slice(1, 2))
    assert not buffer["a"].requires_grad and buffer["a"].tolist() == [10.0] * 3
    assert buffer["i"].tolist() == [9, 7, 9] and buffer["n", "x"].tolist() == [1.0, 0.0, 3.0]
