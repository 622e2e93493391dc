"""Input that is awkward but right is stored as it shows; input that is wrong leaves no trace."""

import copy
import pickle

import pytest
import torch
from tensordict import TensorDict, lazy_stack

from interop import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    ReplayBuffer,
    TensorDictReplayBuffer,
)
from tests.interop.bits import edges, of_each_dtype, same_bits
from tests.interop.rows import check_same

STORAGES = {"memory": LazyTensorStorage, "memmap": LazyMemmapStorage, "list": ListStorage}
in_each_storage = pytest.mark.parametrize("make", STORAGES.values(), ids=STORAGES)
in_tensors = pytest.mark.parametrize("make", [LazyTensorStorage, LazyMemmapStorage], ids=["memory", "memmap"])

VIEWS = {
    "transposed": lambda t: t.t().contiguous().t(),
    "stepped": lambda t: t.repeat_interleave(3, 0)[::3],
    "columns": lambda t: torch.cat([t, t], 1)[:, : t.shape[1]],
    "expanded": lambda t: t[:1].expand(t.shape),
    "parameter": lambda t: torch.nn.Parameter(t, requires_grad=t.dtype.is_floating_point),
}


@in_each_storage
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("width", [4, 100_000], ids=["small", "large"])
def test_rows_in_any_strides_are_stored_around_the_end_of_the_ring(make, view, width):
    rows = VIEWS[view](torch.arange(6.0 * width).reshape(6, width))
    buffer = ReplayBuffer(storage=make(4))
    buffer.extend(rows[:3])
    buffer.extend(rows[1:5:2])
    assert same_bits(buffer[:], torch.stack([rows[3], rows[1], rows[2], rows[1]]))


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


@in_tensors
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_conjugated_rows_are_stored_as_they_show(make, dtype, tmp_path):
    rows = torch.tensor([[1 + 2j], [3 + 4j]], dtype=dtype).conj()
    storage = make(3, scratch_dir=tmp_path / "rows") if make is LazyMemmapStorage else make(3)
    buffer = ReplayBuffer(storage=storage)
    buffer.extend(rows)
    buffer.add(rows[1])
    buffer[0] = rows[1]
    assert buffer[:].flatten().tolist() == [3 - 4j, 3 - 4j, 3 - 4j]


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


@in_each_storage
def test_batch_dims_beyond_those_of_the_items_are_kept(make):
    buffer, data = TensorDictReplayBuffer(storage=make(10)), lanes(3, 4)
    buffer.extend(data)
    assert buffer[:].batch_size == (3, 4) and buffer[0].batch_size == (4,)
    assert buffer[:]["index"].tolist() == [[0] * 4, [1] * 4, [2] * 4]
    sample = buffer.sample(5)
    assert sample.batch_size == (5, 4) and sample["n"].batch_size == (5, 4)
    assert torch.equal(sample["a"], data["a"][sample["index"][:, 0]])


@in_tensors
def test_int_keys_come_back_as_ints(make):
    buffer = ReplayBuffer(storage=make(4))
    buffer.extend({1: torch.arange(3), 0: {2: torch.zeros(3)}})
    assert set(buffer[:]) == {0, 1} and buffer[0][1] == 0
    assert set(buffer.sample(2)[0]) == {2}


@pytest.mark.parametrize(
    "data",
    [{1: torch.arange(3), "1": torch.zeros(3)}, {"a": {1: torch.arange(3), "1": torch.zeros(3)}}],
    ids=["root", "nested"],
)
def test_two_keys_never_share_a_file(tmp_path, data):
    buffer = ReplayBuffer(storage=LazyMemmapStorage(4, scratch_dir=tmp_path / "rows"))
    try:
        buffer.extend(data)
    except ValueError:  # refused before anything is there
        assert len(buffer) == 0 and not (tmp_path / "rows").exists()
    else:
        check_same({"data": buffer[:]}, {"data": data})


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


# ------------------------------------------------------------------ copies, other parts


class Watched(LazyTensorStorage):
    """A user's storage that sees each write."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.seen = []

    def set(self, cursor, data, *, set_cursor=True):
        self.seen.append(cursor)
        super().set(cursor, data, set_cursor=set_cursor)


@pytest.mark.parametrize(
    "rows",
    [torch.arange(11), {"a": torch.arange(11)}, (torch.arange(11), torch.zeros(11)), list(torch.arange(11))],
    ids=["tensor", "dict", "tuple", "list"],
)
def test_a_storage_with_its_own_set_takes_more_rows_than_it_holds(rows):
    buffer, plain = ReplayBuffer(storage=Watched(4)), ReplayBuffer(storage=LazyTensorStorage(4))
    assert buffer.extend(rows).tolist() == plain.extend(rows).tolist()
    assert buffer.storage.seen
    check_same({"rows": buffer[:]}, {"rows": plain[:]})
    assert (len(buffer), buffer.write_count) == (4, 11)


@pytest.mark.parametrize(
    "again", [copy.deepcopy, lambda held: pickle.loads(pickle.dumps(held))], ids=["copy", "pickle"]
)
def test_a_buffer_over_named_files_can_be_copied(tmp_path, again):
    buffer = TensorDictReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=tmp_path / "rows"), batch_size=4)
    buffer.extend(lanes(3))
    other = again(buffer)
    assert len(other) == 3 and other.write_count == 3
    assert (other[:] == buffer[:]).all()
    assert other.sample().batch_size == (4,)
    other.extend(lanes(2))
    assert (len(buffer), len(other)) == (3, 5)


@in_tensors
@pytest.mark.parametrize("ndim", [1, 2])
def test_a_prioritized_sampler_takes_over_a_filled_buffer(make, ndim):
    buffer = ReplayBuffer(storage=make(20, ndim=ndim))
    buffer.extend(torch.arange(10.0).reshape(2, 5) if ndim == 2 else torch.arange(10.0))
    buffer.set_sampler(PrioritizedSampler(20, 1.0, 1.0, eps=0))
    assert buffer.sampler.priorities.tolist() == [1] * 10
    assert set(buffer.sample(1000).tolist()) == set(range(10))
