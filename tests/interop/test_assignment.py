"""`rb[index] = value`, and edits in place by key."""

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from interop import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
    TensorStorage,
)
from tests.interop.rows import check_same, first_of, flat_td, nested_td, plain_tensor, refused


@pytest.fixture(params=[LazyTensorStorage, LazyMemmapStorage])
def make(request):
    return request.param


def lanes(start=0, lanes=2, steps=3):
    ids = torch.arange(start, start + lanes * steps).reshape(lanes, steps)
    return TensorDict({"a": ids, "n": {"b": ids[..., None].double()}}, [lanes, steps])


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


def test_edits_of_all_rows_are_in_the_layout_of_the_storage(make):
    buffer = ReplayBuffer(storage=make(20, ndim=2))
    buffer.extend(lanes())
    buffer.set_("a", buffer.storage[:]["a"] * 10)
    check_same(buffer["a"], lanes()["a"] * 10)


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


@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_another_dtype_is_refused_however_many_item_dims(make, ndim):
    buffer = ReplayBuffer(storage=make(100, ndim=ndim))
    data = torch.arange(24).reshape(2, 3, 4)
    buffer.extend(data)
    for index in (0, slice(0, 1), slice(None)):
        with refused(buffer, RuntimeError, "float32"):
            buffer[index] = data[index].float()
        with refused(buffer, RuntimeError):
            buffer[index] = data[index][..., :1]


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


def test_what_is_assigned_passes_through_the_storage():
    class Noting(LazyTensorStorage):
        written = 0

        def set(self, cursor, data, *, set_cursor=True):
            super().set(cursor, data, set_cursor=set_cursor)
            self.written += (data if isinstance(data, torch.Tensor) else data["a"]).numel()

    buffer = ReplayBuffer(storage=Noting(10_000, ndim=2))
    buffer.extend(lanes(lanes=10, steps=1000))
    before = buffer.storage.written
    buffer[3] = lanes(lanes=10, steps=1000)[0].clone()
    assert buffer.storage.written - before == 1000


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
    assert len(buffer) == 3 and buffer.writer._cursor == 3
    check_same(buffer[:].exclude("index"), flat_td([4, 5, 6]))
    if kind is TensorDictReplayBuffer:
        check_same(buffer.storage._storage["index"], torch.tensor([0, 1, 2, 3, 0, 5, 6, 7]))


def test_another_number_of_rows_is_refused():
    for storage in (LazyTensorStorage, ListStorage):
        buffer = TensorDictReplayBuffer(storage=storage(8))
        buffer.extend(flat_td([0, 1, 2]))
        with refused(buffer, RuntimeError, "places of shape"):
            buffer[0:2] = flat_td([5, 6, 7])


def test_rows_that_have_no_number_get_none():
    buffer = TensorDictReplayBuffer(storage=TensorStorage(flat_td([0, 1, 2])))
    buffer[1] = flat_td([9])[0]
    check_same(buffer[:], flat_td([0, 9, 2]))


@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
def test_a_refused_write_leaves_no_number_in_what_was_given(storage):
    class Refusing(storage):
        def set(self, cursor, data, *, set_cursor=True):
            raise OSError("full")

    buffer = ReplayBuffer(storage=Refusing(4), writer=TensorDictRoundRobinWriter())
    given = [flat_td([0, 1]), [flat_td([0])[0]]]
    for batch in given:
        with pytest.raises(OSError):
            buffer.extend(batch)
    with pytest.raises(OSError):
        buffer.add(given[1][0])
    assert not any("index" in data for data in (given[0], given[1][0]))


# ------------------------------------------------------------------ edits by key


def numbers():
    return TensorDict({"a": torch.zeros(3), "i": torch.zeros(3, dtype=torch.int64), "n": {"x": torch.zeros(3)}}, [3])


BAD_EDITS = {
    "array of another dtype": ({"i": np.ones(3)}, RuntimeError),
    "array of another shape": ({"i": np.ones(2, np.int64)}, RuntimeError),
    "text": ({"i": "text"}, TypeError),
    "nothing": ({"i": None}, TypeError),
    "a fraction for integers": ({"i": 1.5}, RuntimeError),
    "a new key of too few rows": ({"z": torch.ones(2)}, RuntimeError),
    "a new key below of too few rows": ({"n": {"y": torch.ones(2)}}, RuntimeError),
    "a new key of an object": ({"z": object()}, TypeError),
    "a new key of a number": ({"z": 1.5}, RuntimeError),
    "a sparse new key": ({"n": {"y": torch.ones(3).to_sparse()}}, TypeError),
    "a tensor for a tensordict": ({"n": torch.ones(3)}, TypeError),
    "a tensordict for a tensor": ({"i": TensorDict({}, [3])}, TypeError),
    "another shape below": ({"n": {"x": torch.ones(2)}}, RuntimeError),
    "sparse": ({"n": {"x": torch.ones(3).to_sparse()}}, RuntimeError),
    "without memory": ({"n": {"x": torch.ones(3, device="meta")}}, RuntimeError),
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


def test_edits_can_be_narrowed_to_nested_keys(make):
    buffer = ReplayBuffer(storage=make(8))
    buffer.extend(nested_td([0, 1, 2]))
    buffer.update_(nested_td([7, 8, 9]), keys_to_update=[("next", "reward")])
    check_same(buffer["next", "reward"], torch.tensor([7.0, 8.0, 9.0]))
    check_same(buffer["obs"], nested_td([0, 1, 2])["obs"])
    with refused(buffer, KeyError, "keys_to_update"):
        buffer.update_(nested_td([7, 8, 9]), keys_to_update=["obs", "missing"])


# ------------------------------------------------------------------ the corners of writing


def test_a_batch_without_lanes_is_an_empty_one(make):
    buffer = TensorDictReplayBuffer(storage=make(20, ndim=2))
    index = buffer.extend(lanes(lanes=0))
    assert index.shape == (0, 2) and index.dtype == torch.int64
    with pytest.raises(RuntimeError, match="at least one element"):
        ReplayBuffer(storage=make(20, ndim=2)).extend(torch.zeros(0, 3))
    assert not buffer.storage.initialized and len(buffer) == 0
    buffer.extend(lanes())
    check_same(buffer[:].exclude("index"), lanes())


class First(torch.nn.Module):
    """Stores one entry of a tensordict."""

    def forward(self, data):
        return data

    def inv(self, data):
        return data["a"]


def test_add_stores_what_extend_would():
    one, two = (ReplayBuffer(storage=LazyTensorStorage(4), transform=First()) for _ in range(2))
    rows = TensorDict({"a": torch.ones(2, 3)}, [2])
    one.extend(rows)
    for row in rows:
        two.add(row)
    check_same(one.storage[:], two.storage[:])


@pytest.mark.parametrize("kwargs", [{}, {"dim_extend": 1}], ids=["rows", "columns"])
def test_the_writer_of_row_numbers_fits_every_buffer(kwargs):
    buffer = ReplayBuffer(storage=LazyTensorStorage(8), writer=TensorDictRoundRobinWriter(), **kwargs)
    given = lanes()
    buffer.extend(given)
    buffer.extend(given.clone().lock_())
    assert ("index" in given) == (not kwargs) and buffer.write_count == len(buffer)
    rows = torch.arange(len(buffer))
    check_same(buffer[:]["index"], rows.expand(2, 6) if kwargs else rows[:, None].expand(4, 3))


def test_a_tensordict_buffer_may_store_what_is_none():
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(4), transform=First())
    rows = TensorDict({"a": torch.ones(2, 3), "td_error": torch.ones(2)}, [2])
    buffer.extend(rows)
    buffer.add(first_of(rows))
    check_same(buffer.storage[:], torch.ones(3, 3))


def test_numpy_edits_do_not_alias_what_is_given():
    buffer, given = ReplayBuffer(storage=LazyTensorStorage(4)), np.zeros(3, np.float32)
    buffer.extend(numbers())
    buffer["a"] = given
    given[:] = 9
    check_same(buffer["a"], torch.zeros(3))
    buffer["a"] = plain_tensor([1, 2, 3])[:, 0]
    check_same(buffer["a"], torch.tensor([1.0, 2.0, 3.0]))
