"""Arrays of NumPy and JAX, and numbers, are stored as the tensors that they are."""

from collections import namedtuple

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from interop import LazyMemmapStorage, LazyTensorStorage, ListStorage, ReplayBuffer, to_jax
from interop.data.bridge import DTYPES
from tests.interop.rows import check_same

Step = namedtuple("Step", ["a", "b"])


def tensors(rows=4):
    return {"a": torch.arange(3.0 * rows).reshape(rows, 3), "b": torch.arange(rows, dtype=torch.int32)}


def each(data, change):
    return {key: change(value) for key, value in data.items()}


KINDS = {
    "dict": lambda data: data,
    "nested": lambda data: {"x": data, "y": (data["b"],)},
    "tuple": lambda data: (data["a"], data["b"]),
    "named tuple": lambda data: Step(data["a"], data["b"]),
    "one array": lambda data: data["a"],
}
ARRAYS = {"NumPy": lambda tensor: tensor.numpy(), "JAX": to_jax}


def stored(storage, *batches, call="extend"):
    buffer = ReplayBuffer(storage=storage(16), batch_size=2, generator=torch.Generator().manual_seed(0))
    slots = [getattr(buffer, call)(batch) for batch in batches]
    return buffer[:], slots, buffer.sample()


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
@pytest.mark.parametrize("array", ARRAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_of_arrays_is_stored_as_one_of_tensors(kind, array, storage):
    first, second = tensors(), tensors(2)
    want = stored(storage, KINDS[kind](first), KINDS[kind](second))
    # The first batch fixes the layout: it may be of either kind.
    for as_first, as_second in ((ARRAYS[array], ARRAYS[array]), (lambda leaf: leaf, ARRAYS[array])):
        batches = KINDS[kind](each(first, as_first)), KINDS[kind](each(second, as_second))
        check_same(stored(storage, *batches), want)


@pytest.mark.parametrize("array", ARRAYS)
def test_a_list_of_dicts_is_a_list_of_items(array):
    want = stored(LazyTensorStorage, tensors())
    items = [each(tensors(), lambda leaf, row=row: ARRAYS[array](leaf[row])) for row in range(4)]
    check_same(stored(LazyTensorStorage, items), want)
    check_same(stored(LazyTensorStorage, *items, call="add")[0], want[0])


def test_numbers_are_tensors_without_dims():
    buffer = ReplayBuffer(storage=LazyTensorStorage(4), batch_size=2)
    buffer.add({"reward": 0.5, "done": True, "action": 3})
    buffer.extend([{"reward": 1.5, "done": False, "action": 4}])
    check_same(
        buffer[:],
        {"reward": torch.tensor([0.5, 1.5]), "done": torch.tensor([True, False]), "action": torch.tensor([3, 4])},
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_that_both_have_is_kept(dtype):
    values = np.array([[0, 1], [1, 0]]).astype(DTYPES[dtype])
    rows = stored(LazyTensorStorage, {"a": values})[0]
    assert rows["a"].dtype == dtype
    assert torch.equal(rows["a"], torch.tensor([[0, 1], [1, 0]]).to(dtype))


@pytest.mark.parametrize(
    "array",
    [
        np.arange(8.0).reshape(4, 2)[::-1],
        np.arange(16.0).reshape(4, 4)[:, ::2],
        np.asfortranarray(np.arange(8.0).reshape(4, 2)),
        np.broadcast_to(np.arange(2.0), (4, 2)),
        np.frombuffer(np.arange(8.0).tobytes()).reshape(4, 2),
    ],
    ids=["reversed", "every second", "columns first", "broadcast", "read only"],
)
def test_an_array_of_any_strides_is_stored_by_value(array):
    rows, _, _ = stored(LazyTensorStorage, {"a": array})
    assert np.array_equal(rows["a"].numpy(), array)


def test_stored_rows_are_copies():
    array = np.zeros((4, 2))
    rows, _, _ = stored(LazyTensorStorage, {"a": array})
    array[:] = 1
    assert (rows["a"] == 0).all()


def test_a_list_storage_keeps_the_arrays_themselves():
    buffer = ReplayBuffer(storage=ListStorage(4), collate_fn=lambda items: items, batch_size=1)
    array = np.zeros(2)
    buffer.add(array)
    assert buffer.storage[0] is array


@pytest.mark.parametrize(
    "array",
    [np.array(["a", "b"]), np.array([None, 1]), np.zeros(2, ">f4"), np.zeros(2, "M8[s]"), np.zeros(2, np.longdouble)],
    ids=lambda array: str(array.dtype),
)
def test_a_dtype_that_tensors_do_not_have_is_refused(array):
    buffer = ReplayBuffer(storage=LazyTensorStorage(4))
    with pytest.raises(TypeError, match="'a': tensors have no dtype like that of this array"):
        buffer.extend({"a": array})
    assert len(buffer) == 0
    buffer.extend({"a": np.zeros(2)})


def test_an_array_of_another_shape_or_dtype_is_refused():
    buffer = ReplayBuffer(storage=LazyTensorStorage(8))
    buffer.extend({"a": np.zeros((4, 2), np.float32)})
    for array, words in ((np.zeros((4, 3), np.float32), r"shape \[2\], got \[3\]"), (jnp.zeros((4, 2), int), "int")):
        with pytest.raises(RuntimeError, match=words):
            buffer.extend({"a": array})
    assert len(buffer) == 4


def test_a_jax_array_in_a_tensordict_names_the_way_out():
    tensordict = pytest.importorskip("tensordict")
    buffer = ReplayBuffer(storage=LazyTensorStorage(4))
    with pytest.raises(TypeError, match=r"interop\.to_torch\(array\)"):
        buffer.extend(tensordict.TensorDict({"a": jnp.zeros((4, 2))}, [4]))
