"""Input that is awkward but right is stored as it shows; input that is wrong leaves no trace."""

import pytest
import torch
from tensordict import TensorDict, lazy_stack

from interop import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    TensorDictReplayBuffer,
)
from tests.interop.bits import edges, of_each_dtype, same_bits

STORAGES = {"memory": LazyTensorStorage, "memmap": LazyMemmapStorage, "list": ListStorage}
in_each_storage = pytest.mark.parametrize("make", STORAGES.values(), ids=STORAGES)
in_tensors = pytest.mark.parametrize("make", [LazyTensorStorage, LazyMemmapStorage], ids=["memory", "memmap"])


@in_tensors
@of_each_dtype
def test_strided_rows_of_every_dtype_are_stored_and_written_over(make, dtype, tmp_path):
    rows = edges(dtype).repeat(4).reshape(4, 6).t()
    storage = make(4, scratch_dir=tmp_path / "rows") if make is LazyMemmapStorage else make(4)
    buffer = ReplayBuffer(storage=storage)
    buffer.extend(rows[::2])
    buffer.extend(rows)
    assert same_bits(buffer[:], rows[[5, 2, 3, 4]])
    buffer[[0, 0, 2]] = rows[[0, 1, 0]]
    assert same_bits(buffer[:], rows[[1, 2, 0, 4]])


def lanes(*batch: int) -> TensorDict:
    return TensorDict({"a": torch.rand(*batch), "n": {"b": torch.rand(*batch, 2)}}, batch)


@in_each_storage
def test_locked_tensordicts_are_stored(make):
    buffer, data = TensorDictReplayBuffer(storage=make(10)), lanes(3).lock_()
    buffer.extend(data)
    buffer.add(data[0].lock_())
    assert torch.equal(buffer[:]["n", "b"], data["n", "b"][[0, 1, 2, 0]])
    assert data.is_locked and set(data.keys()) == {"a", "n"}
    sample = buffer.sample(4)
    sample["new"] = torch.zeros(4)


@in_each_storage
def test_lazily_stacked_tensordicts_are_stored(make):
    buffer, data = TensorDictReplayBuffer(storage=make(10)), lanes(3)
    for rows in (lazy_stack(list(data.unbind(0))), data, TensorDict({**data, "n": lazy_stack(list(data["n"]))}, [3])):
        buffer.extend(rows)
    assert torch.equal(buffer[:]["a"], data["a"].repeat(3))
    assert torch.equal(buffer[:]["n", "b"], data["n", "b"].repeat(3, 1))
    assert buffer[:]["index"].tolist() == list(range(9))


# ------------------------------------------------------------------ wrong input


def pairs(first: int, count: int) -> dict[str, torch.Tensor]:
    ids = torch.arange(float(first), first + count)
    return {"x": ids, "y": ids[:, None].clone()}


WITHOUT_MEMORY = {
    "sparse": lambda t: t.to_sparse(),
    "on no device": lambda t: t.to("meta"),
}


@in_tensors
@pytest.mark.parametrize("wrong", WITHOUT_MEMORY)
@pytest.mark.parametrize("write", ["extend", "add", "set"])
@pytest.mark.parametrize("kind", [dict, TensorDict])
def test_a_tensor_that_cannot_be_copied_tears_no_rows(make, wrong, write, kind):
    buffer = ReplayBuffer(storage=make(4))
    buffer.extend(kind(pairs(0, 4)) if kind is dict else TensorDict(pairs(0, 4), [4]))
    x, y = torch.tensor([100.0, 101.0]), torch.tensor([[100.0], [101.0]])
    if write == "add":
        x, y = x[0], y[0]
    bad = {"x": x, "y": WITHOUT_MEMORY[wrong](y)}
    bad = bad if kind is dict else TensorDict(bad, x.shape)
    with pytest.raises((TypeError, RuntimeError)):
        if write == "set":
            buffer[0:2] = bad
        else:
            getattr(buffer, write)(bad)
    assert buffer[:]["x"].tolist() == buffer[:]["y"][:, 0].tolist() == [0, 1, 2, 3]
    assert (len(buffer), buffer.write_count) == (4, 4)
    assert buffer.extend(buffer[1:2]).tolist() == [0]


@in_tensors
@pytest.mark.parametrize("wrong", WITHOUT_MEMORY)
def test_a_first_write_that_is_refused_fixes_nothing(make, wrong):
    buffer = ReplayBuffer(storage=make(4))
    with pytest.raises((TypeError, RuntimeError)):
        buffer.extend({"x": torch.zeros(3), "y": WITHOUT_MEMORY[wrong](torch.zeros(3, 1))})
    assert (len(buffer), buffer.write_count) == (0, 0)
    buffer.extend(torch.arange(3))
    assert buffer[:].tolist() == [0, 1, 2]
