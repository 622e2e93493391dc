"""TensorStorage: which places an index names, where the length may grow, what is told about rows."""

import numpy as np
import pytest
import torch

from interop import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer
from tests.interop.rows import check_same, refused


@pytest.fixture(params=[LazyTensorStorage, LazyMemmapStorage])
def make(request):
    return request.param


def filled(make, count=10, capacity=20):
    buffer = ReplayBuffer(storage=make(capacity))
    buffer.extend(torch.arange(count))
    return buffer


# ------------------------------------------------------------------ reading


@pytest.mark.parametrize("index", [torch.tensor(True), np.array(False)], ids=repr)
def test_a_lone_bool_is_no_index(make, index):
    buffer = filled(make)
    with refused(buffer, TypeError, "bool"):
        buffer[index]
    with refused(buffer, TypeError, "bool"):
        buffer[index] = torch.arange(1)


def test_coordinates_keep_their_shape(make):
    storage = make(30, ndim=2)
    storage.set(slice(0, 5), torch.arange(10.0).reshape(5, 2))
    rows, lanes = torch.tensor([[4, 1, 0], [2, 2, 2]]), torch.tensor([[0, 1, 0], [0, 1, 0]])
    check_same(storage[rows, lanes], (2.0 * rows + lanes))
    check_same(storage[torch.tensor(3), torch.tensor(1)], torch.tensor(7.0))
    check_same(storage[rows, torch.tensor([0])], 2.0 * rows)
    check_same(storage[[4, 0], np.array([1, 1])[::-1]], torch.tensor([9.0, 1.0]))


@pytest.mark.parametrize(
    "index",
    [
        (0, slice(None), torch.tensor([2, 0, 1])),
        (torch.tensor([3, 1, 0]), slice(None), 1),
        (slice(0, 3), 1, torch.tensor([2, 0, 1])),
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


# ------------------------------------------------------------------ writing


@pytest.mark.parametrize(
    ("index", "rows"),
    [
        (slice(-3, 12), [7, 8, 9, 10, 11]),
        (slice(-30, 2), [0, 1]),
        (slice(12, 40, 4), [12, 16]),
        (-10, [0]),
        (torch.tensor([-10, 15]), [0, 15]),
        (torch.arange(10) > 7, [8, 9]),
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
