"""Rows in the memory of torch and of JAX: the same writes, whoever owns it."""

import pickle
from multiprocessing import context
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch

from interop import LazyTensorStorage, ReplayBuffer, TensorStorage
from interop.data.index import resolved
from interop.engine.places import heap
from interop.host.device_rows import JaxRows
from interop.host.rows import TorchRows

CPU = torch.device("cpu")
ROWS, LANES = 6, (3,)


def in_torch():
    return TorchRows([torch.zeros(ROWS, *LANES, 2), torch.zeros(ROWS, *LANES, dtype=torch.int64)], LANES)


def in_torch_elsewhere():
    """As on a device that NumPy does not see."""
    rows = in_torch()
    rows._numpy = None
    return rows


def in_jax():
    return JaxRows.zeros([(ROWS, *LANES, 2), (ROWS, *LANES)], [torch.float32, torch.int64], LANES, CPU)


PLACES = {
    "row": 2,
    "rows": slice(1, 5, 2),
    "no rows": torch.zeros(0, dtype=torch.int64),
    "equal rows": torch.tensor([1, 4, 1, 1]),
    "equal items": (torch.tensor([1, 4, 1, 1]), torch.tensor([2, 0, 2, 2])),
    "a lane": (slice(0, 6), 1),
    "lanes of equal rows": (torch.tensor([[0, 5], [5, 0]]), slice(1, 3)),
    "mask": torch.tensor([True, False, True, False, False, True]),
    "mask of items": torch.eye(6, dtype=torch.bool)[:, :3],
    "the rest": (Ellipsis, 2),
}


def as_numpy(index):
    if isinstance(index, tuple):
        return tuple(map(as_numpy, index))
    return index.numpy() if isinstance(index, torch.Tensor) else index


@pytest.mark.parametrize("make", [in_torch, in_torch_elsewhere, in_jax])
@pytest.mark.parametrize("index", PLACES.values(), ids=PLACES)
def test_of_equal_places_the_last_wins(make, index):
    rows, wanted = make(), np.zeros((ROWS, *LANES), np.int64)
    shape = wanted[as_numpy(index)].shape
    values = 1 + torch.arange(int(np.prod(shape))).reshape(shape)
    wanted[as_numpy(index)] = values.numpy()
    places = resolved(index, ROWS, ROWS, (ROWS, *LANES))
    rows.write_at(places, [values[..., None].expand(*shape, 2).float(), values])
    assert rows.tensors[1].tolist() == wanted.tolist()
    assert rows.tensors[0][..., 1].tolist() == wanted.tolist()


FORMS = {
    "dense": (torch.complex64, lambda values: values),
    "strided": (torch.complex64, lambda values: values.repeat_interleave(2, -1)[..., ::2]),
    "expanded": (torch.complex64, lambda values: values[:1].expand_as(values)),
    "conjugate": (torch.complex64, lambda values: values.conj()),
    "negative": (torch.float32, lambda values: values.conj().imag),
    "with a graph": (torch.complex64, lambda values: values.clone().requires_grad_()),
    "of another dtype": (torch.float32, lambda values: values.real.contiguous().to(torch.int32)),
    "wider": (torch.float64, lambda values: values.real.to(torch.float32)),
}


@pytest.mark.parametrize("width", [0, 1, 3])
@pytest.mark.parametrize("form", FORMS)
def test_values_are_written_whatever_form_they_come_in(form, width):
    dtype, formed = FORMS[form]
    rows, wanted = TorchRows([torch.zeros(ROWS, width, dtype=dtype)], ()), torch.zeros(ROWS, width, dtype=dtype)
    number = 0
    for start in range(ROWS):
        for count in range(1, ROWS + 1):
            number += 1
            real = number + torch.arange(count * width).reshape(count, width)
            given = formed(torch.complex(real.float(), real.float() + 1))
            for place in range(count):
                wanted[(start + place) % ROWS] = given.detach()[place]
            rows.write_run(start, [given])
            assert torch.equal(rows.tensors[0], wanted)
            wanted[start] = given.detach()[-1]
            rows.write_at(start, [given[-1]])
            assert torch.equal(rows.tensors[0], wanted)


def test_rows_that_do_not_fit_are_not_written_beside_the_memory():
    memory = torch.zeros(ROWS + 2, 2)
    rows = TorchRows([memory[:ROWS]], ())
    for row, given in ((0, torch.ones(3)), (ROWS, torch.ones(2))):
        with pytest.raises((ValueError, IndexError)):
            rows.write_at(row, [given])
    assert not memory.any()


def test_a_tensor_without_memory_is_refused():
    zeros = torch._efficientzerotensor(2, 4)  # as automatic differentiation makes them
    rows = TorchRows([torch.ones(ROWS, 4)], ())
    for write in (lambda: rows.write_run(0, [zeros]), lambda: rows.write_at(0, [zeros[0]])):
        with pytest.raises(RuntimeError, match="ZeroTensor"):
            write()
    assert rows.tensors[0].all()


# ------------------------------------------------------------------ a buffer's own views


@pytest.mark.parametrize("wide", [1, 200_000], ids=["small", "large"])
@pytest.mark.parametrize("write", ["extend", "set"])
def test_rows_can_be_written_from_a_view_of_the_buffer(write, wide):
    buffer, ids = ReplayBuffer(storage=LazyTensorStorage(10)), torch.arange(18)
    for some in (ids[:10], ids[10:]):
        buffer.extend((some, some[:, None].expand(-1, wide).float()))
    view = tuple(leaf[6:10] for leaf in buffer[:])
    buffer.extend(view) if write == "extend" else buffer.storage.set(torch.tensor([8, 9, 0, 1]), view)
    for leaf in (buffer[:][0], buffer[:][1][:, -1]):
        assert leaf[[8, 9, 0, 1]].tolist() == [16, 17, 8, 9]


def test_a_view_through_numpy_is_one_too():
    memory = np.arange(10.0)
    buffer = ReplayBuffer(storage=TensorStorage(torch.from_numpy(memory[2:])))
    buffer.extend(torch.from_numpy(memory[1:9]))
    assert memory.tolist() == [0, 1, 1, 2, 3, 4, 5, 6, 7, 8]


# ------------------------------------------------------------------ other processes


class _Starting:
    """What pickling for a worker looks for, without a worker."""

    def duplicate_for_child(self, descriptor):
        return descriptor


def for_a_worker(held):
    context.set_spawning_popen(_Starting())
    try:
        return ForkingPickler.dumps(held)
    finally:
        context.set_spawning_popen(None)


def test_rows_of_jax_are_not_shared_with_workers(monkeypatch):
    monkeypatch.setattr(heap, "rows_in_jax", lambda device: True)
    buffer = ReplayBuffer(storage=LazyTensorStorage(10))
    buffer.extend(torch.arange(3))
    assert isinstance(buffer.storage.table.rows, JaxRows) and not buffer.storage.is_shared()
    with pytest.raises(RuntimeError, match="Cannot share"):
        for_a_worker(buffer)
    twin = pickle.loads(pickle.dumps(buffer))
    twin.extend(torch.arange(2))
    assert isinstance(twin.storage.table.rows, JaxRows) and (len(buffer), len(twin)) == (3, 5)
