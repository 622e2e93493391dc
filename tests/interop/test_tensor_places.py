"""TensorStorage: which places an index names, where the length may grow, what is told about rows."""

from collections import OrderedDict, defaultdict

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from interop import LazyMemmapStorage, LazyTensorStorage, ListStorage, ReplayBuffer, TensorStorage
from tests.interop.rows import Pair, check_same, refused


@pytest.fixture(params=[LazyTensorStorage, LazyMemmapStorage])
def make(request):
    return request.param


def filled(make, count=10, capacity=20):
    buffer = ReplayBuffer(storage=make(capacity))
    buffer.extend(torch.arange(count))
    return buffer


# ------------------------------------------------------------------ reading


@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
@pytest.mark.parametrize("index", [np.arange(5)[::-1], np.arange(10)[1:8:3], range(5, 0), range(4, 1, -1)], ids=repr)
def test_arrays_of_any_strides_and_ranges_are_read(storage, index):
    buffer = ReplayBuffer(storage=storage(20), collate_fn=lambda rows: rows)
    buffer.extend(torch.arange(10))
    assert [int(row) for row in buffer[index]] == list(index)


@pytest.mark.parametrize("index", [torch.tensor(True), np.array(False)], ids=repr)
def test_a_lone_bool_is_no_index(make, index):
    buffer = filled(make)
    with refused(buffer, TypeError, "bool"):
        buffer[index]
    with refused(buffer, TypeError, "bool"):
        buffer[index] = torch.arange(1)


def test_a_list_takes_masks_of_one_dim():
    buffer = ReplayBuffer(storage=ListStorage(5))
    buffer.extend([1, 2])
    with refused(buffer, IndexError):
        buffer.storage[torch.eye(2, dtype=torch.bool)]


def test_coordinates_keep_their_shape(make):
    storage = make(30, ndim=2)
    storage.set(slice(0, 5), torch.arange(10.0).reshape(5, 2))
    rows, lanes = torch.tensor([[4, 1, 0], [2, 2, 2]]), torch.tensor([[0, 1, 0], [0, 1, 0]])
    check_same(storage[rows, lanes], (2.0 * rows + lanes))
    check_same(storage[torch.tensor(3), torch.tensor(1)], torch.tensor(7.0))
    check_same(storage[rows, torch.tensor([0])], 2.0 * rows)
    check_same(storage[[4, 0], np.array([1, 1])[::-1]], torch.tensor([9.0, 1.0]))


def test_an_ellipsis_stands_for_item_dims_alone(make):
    storage = make(30, ndim=2)
    storage.set(slice(0, 4), torch.arange(24.0).reshape(4, 3, 2))
    check_same(storage[..., 2], torch.arange(24.0).reshape(4, 3, 2)[:, 2])
    storage[..., 2] = torch.zeros(4, 2)
    storage[..., 1, 0] = torch.ones(2)
    check_same(storage[:, 2], torch.zeros(4, 2))
    check_same(storage[1, 0], torch.ones(2))


@pytest.mark.parametrize(
    "index",
    [
        (0, slice(None), torch.tensor([2, 0, 1])),
        (torch.tensor([3, 1, 0]), slice(None), 1),
        (slice(0, 3), 1, torch.tensor([2, 0, 1])),
        (torch.tensor(2), [1, 0, 2]),
        (1, Ellipsis, np.array([1, 0, 2])),
    ],
    ids=str,
)
def test_places_are_written_as_they_are_read(make, index):
    storage, wanted = make(60, ndim=3), torch.zeros(4, 3, 3)
    storage.set(slice(0, 4), wanted.clone())
    values = 1 + torch.arange(wanted[index].numel()).reshape(wanted[index].shape).float()
    storage[index] = values
    wanted[index] = values
    check_same(torch.as_tensor(storage[:]).clone(), wanted)
    check_same(torch.as_tensor(storage[index]).clone(), values)


def test_rows_are_counted_and_iterated_over_where_they_hold_several_items(make):
    storage = make(100, ndim=2)
    storage.set(slice(0, 5), torch.arange(10).reshape(5, 2))
    assert len(storage) == 10 and 4 in storage and 7 not in storage and -5 in storage and -6 not in storage
    check_same(storage.contains(torch.tensor([4, 5, -5, -6])), torch.tensor([True, False, True, False]))
    assert [row.tolist() for row in storage] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]


# ------------------------------------------------------------------ writing


@pytest.mark.parametrize(
    ("index", "rows"),
    [
        (slice(-3, 12), [7, 8, 9, 10, 11]),
        (slice(-3, None), [7, 8, 9]),
        (slice(-30, 2), [0, 1]),
        (slice(8, -1), [8]),
        (slice(12, 40, 4), [12, 16]),
        (-10, [0]),
        (torch.tensor([-10, 15]), [0, 15]),
        (torch.arange(10) > 7, [8, 9]),
        (torch.arange(20) > 17, [18, 19]),
    ],
    ids=str,
)
def test_places_count_from_the_end_of_what_is_filled(make, index, rows):
    buffer = filled(make)
    buffer.storage[index] = (
        -torch.ones((), dtype=torch.int64) if isinstance(index, int) else -torch.arange(1, 1 + len(rows))
    )
    wanted = torch.cat([torch.arange(10), torch.zeros(10, dtype=torch.int64)])
    wanted[rows] = -torch.arange(1, 1 + len(rows))
    check_same(torch.as_tensor(buffer.storage._storage).clone(), wanted)
    assert len(buffer) == 10


@pytest.mark.parametrize(
    "index", [-11, 20, torch.tensor([-11]), torch.tensor([20]), (-11,), torch.ones(9).bool()], ids=repr
)
def test_places_beyond_either_end_are_refused(make, index):
    buffer = filled(make)
    with refused(buffer, IndexError):
        buffer.storage[index] = torch.arange(1)


@pytest.mark.parametrize(
    "cursor", [7, torch.tensor([5, 7]), slice(6, 8), slice(5, 9, 2), torch.arange(20) == 6, [6, 6]], ids=str
)
def test_the_length_never_grows_over_rows_that_were_not_written(make, cursor):
    buffer = filled(make, 5)
    data = torch.arange(1, 3) if not isinstance(cursor, int) else torch.tensor(1)
    data = data[:1] if isinstance(cursor, torch.Tensor) and cursor.dtype == torch.bool else data
    with refused(buffer, RuntimeError, "gap"):
        buffer.storage.set(cursor, data)


@pytest.mark.parametrize("cursor", [1, -1, torch.tensor([1]), slice(1, 2)], ids=str)
def test_a_first_write_begins_at_the_first_row(make, cursor):
    storage = make(10)
    with pytest.raises((RuntimeError, IndexError)):
        storage.set(cursor, torch.tensor(1) if isinstance(cursor, int) else torch.tensor([1]))
    assert not storage.initialized and len(storage) == 0


@pytest.mark.parametrize("cursor", [5, torch.tensor([6, 5, 0]), slice(3, 8), [6, 5, 5], torch.arange(20) < 9], ids=str)
def test_the_length_grows_over_rows_that_are_written(make, cursor):
    buffer = filled(make, 5)
    rows = torch.arange(20)[cursor]
    buffer.storage.set(cursor, rows + 100)
    assert len(buffer) == int(rows.max()) + 1
    check_same(buffer[rows], rows + 100)


def test_rows_that_grow_are_written_whole(make):
    storage = make(20, ndim=2)
    with pytest.raises(RuntimeError, match="whole rows"):
        storage.set((slice(0, 2), 0), torch.zeros(2, 2))
    storage.set(slice(0, 2), torch.zeros(2, 2))
    with pytest.raises(RuntimeError, match="whole rows"):
        storage.set((2, 0), torch.tensor(1.0))
    storage.set((slice(2, 3), slice(None)), torch.ones(1, 2))
    assert len(storage) == 6 and storage[2].tolist() == [1, 1]


def test_a_write_costs_nothing_for_rows_that_it_does_not_name():
    storage = LazyTensorStorage(2**40)  # an index of all rows could not be made
    storage.set(slice(0, 3), torch.zeros(3, 0))
    storage.set(torch.tensor([3, 1]), torch.zeros(2, 0))
    assert len(storage) == 4


def test_a_list_of_rows_of_several_lanes_fills_the_ring(make):
    buffer = ReplayBuffer(storage=make(100, ndim=2))
    index = buffer.extend([torch.full((2, 40), row) for row in range(60)])
    assert buffer.storage.shape == torch.Size([50, 2]) and buffer.writer._cursor == 10
    assert index[-1].tolist() == [9, 1] and bool((buffer.storage[9] == 59).all())


# ------------------------------------------------------------------ what is refused, what is kept


def test_rows_without_items_are_refused(make):
    buffer = ReplayBuffer(storage=make(10, ndim=2))
    for write in (
        lambda: buffer.storage.set(slice(0, 5), torch.zeros(5, 0)),
        lambda: buffer.storage.row_capacity(torch.zeros(5, 0)),
        lambda: buffer.storage.set(0, torch.tensor(1.0)),
    ):
        with refused(buffer, RuntimeError, "dim"):
            write()
    assert not buffer.storage.initialized


@pytest.mark.parametrize("ndim", [1.5, True, "2", torch.tensor(True)], ids=repr)
def test_a_number_of_item_dims_that_is_no_int_is_refused(ndim):
    with pytest.raises(TypeError):
        LazyTensorStorage(10, ndim=ndim)


def test_memory_without_any_tensor_is_refused():
    with pytest.raises(RuntimeError, match="without any tensor"):
        TensorStorage({})


@pytest.mark.parametrize("kind", [dict, OrderedDict, lambda rows: defaultdict(list, rows)])
def test_mappings_come_back_as_their_kind(make, kind):
    buffer = ReplayBuffer(storage=make(10, ndim=2))
    rows = kind({"b": torch.arange(6).reshape(2, 3), "a": kind({"c": torch.zeros(2, 3)})})
    buffer.extend(rows)
    buffer.extend({"a": {"c": torch.ones(2, 1)}, "b": torch.ones(2, 1, dtype=torch.int64)})
    for read in (buffer[:], buffer.sample(3), buffer.storage[0]):
        assert type(read) is type(rows) and type(read["a"]) is type(rows) and list(read) == ["b", "a"]


class Picky(dict):
    def __init__(self, rows):
        super().__init__(rows)


def test_mappings_that_cannot_be_made_empty_come_back_as_dicts(make):
    buffer = ReplayBuffer(storage=make(10))
    buffer.extend(Picky({"a": torch.arange(3)}))
    assert type(buffer[:]) is dict and buffer[:]["a"].tolist() == [0, 1, 2]


def test_names_of_dims_within_items_are_kept(make):
    inner = TensorDict({"b": torch.zeros(3, 4, 2)}, [3, 4, 2], names=["row", "time", "agent"])
    buffer = ReplayBuffer(storage=make(10))
    buffer.extend(TensorDict({"a": torch.zeros(3, 4), "n": inner}, [3, 4], names=["row", "time"]))
    assert buffer[:].names == buffer.sample(2).names == [None, "time"]
    assert buffer[0].names == ["time"] and buffer[0]["n"].names == ["time", "agent"]


def test_all_rows_of_nested_lists_can_be_written(make):
    def rows(value):
        return [torch.full((5,), value), torch.full((5,), value)], torch.full((5,), value)

    buffer = ReplayBuffer(storage=make(10))
    buffer.extend(rows(0))
    buffer.write_all(rows(1))
    check_same(buffer[:], rows(1))


def test_named_tuples_are_assigned_within_their_items():
    buffer = ReplayBuffer(storage=LazyTensorStorage(10), dim_extend=1)
    buffer.extend(Pair(torch.zeros(2, 3), torch.ones(2, 3)))
    buffer[0] = Pair(torch.full((3,), 7.0), torch.full((3,), 8.0))
    assert type(buffer[:]) is Pair and buffer[0].left.tolist() == [7] * 3 and buffer[1].right.tolist() == [1] * 3


def test_a_flat_storage_is_a_copy(make):
    storage = make(30, ndim=2)
    storage.set(slice(0, 2), torch.zeros(2, 3))
    storage.flatten()[:].fill_(7)
    assert not storage[:].any()
