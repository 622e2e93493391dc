"""TensorDictMap over every kind of storage, against a dict; what is refused changes nothing; checkpoints."""

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict, lazy_stack

from fbuf import CheckpointError
from interop import (
    CompressedListStorage,
    HashToInt,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    QueryModule,
    TensorDictMap,
    TensorMap,
)
from tests.interop.test_threads import together

STORAGES = [LazyTensorStorage, LazyMemmapStorage, ListStorage, LazyStackStorage, CompressedListStorage]
SAVED = STORAGES[:4]


def a_map(storage, max_size=8, **options):
    return TensorDictMap(query_module=QueryModule(["k", "n"]), storage=storage(max_size), **options)


def keys_of(numbers):
    numbers = torch.as_tensor(numbers, dtype=torch.int64)
    return TensorDict({"k": numbers.double()[..., None] * 0.5, "n": numbers % 2, "other": numbers}, numbers.shape)


def values_of(numbers):
    numbers = torch.as_tensor(numbers, dtype=torch.int64)
    return TensorDict({"v": numbers[..., None].expand(*numbers.shape, 2), "w": {"x": numbers.float()}}, numbers.shape)


def summed(new, old=None):
    return new if old is None else new + old.contiguous()


BATCHES = st.lists(st.integers(0, 9), max_size=7)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("write_fn", [None, summed])
@settings(max_examples=6)
@given(steps=st.lists(st.tuples(BATCHES, st.integers(0, 3)), max_size=5))
def test_a_map_is_a_dict(storage, write_fn, steps):
    held, model, value = a_map(storage, write_fn=write_fn), {}, 0
    assert isinstance(held, TensorMap) and len(held) == 0 and held
    for numbers, what in steps:
        key, new = keys_of(numbers), values_of([value + place for place in range(len(numbers))])
        if what == 0:
            held.clear()
            model = {}
        after = dict(model)
        for place, number in enumerate(numbers):
            after[number] = value + place + (after.get(number, 0) if write_fn else 0)
        if len(after) > held.max_size:
            with pytest.raises(IndexError, match="do not fit"):
                held[key] = new
            assert set(key.keys()) == {"k", "n", "other"}
        else:
            held[key] = new
            model = after
            assert key["_index"].tolist() == [list(model).index(number) for number in numbers]
            if write_fn and len(set(numbers)) == len(numbers):
                assert new["w", "x"].tolist() == [model[number] for number in numbers]
        value += 100
        assert len(held) == len(model)
        every = keys_of(range(10))
        assert held.contains(every).tolist() == [number in model for number in range(10)]
        if model:
            found = held[keys_of(list(model))]
            assert found["v"].tolist() == [[each] * 2 for each in model.values()]
            assert found["w", "x"].tolist() == list(model.values())


@pytest.mark.parametrize("storage", STORAGES)
def test_batches_of_any_shape(storage):
    held = a_map(storage)
    assert not hasattr(held, "out_keys")
    with pytest.raises(KeyError, match="no values"):
        held[keys_of([])]
    one, grid = keys_of(3), keys_of([[3, 4, 5], [5, 5, 3]])
    held[one] = values_of(30)
    assert one["_index"].shape == one["_hash"].shape == () and one in held and keys_of(4) not in held
    assert held[keys_of(3)]["v"].tolist() == [30, 30] and held[keys_of(3)].batch_size == ()
    held[grid] = values_of([[1, 2, 3], [4, 5, 6]])
    assert grid["_index"].tolist() == [[0, 1, 2], [2, 2, 0]] and len(held) == 3
    read = keys_of([[3], [4], [5]])
    assert held[read]["w", "x"].tolist() == [[6], [2], [5]] and held[read].batch_size == (3, 1)
    assert set(read.keys()) == {"k", "n", "other"}
    assert held.contains(keys_of([[4], [6]])).tolist() == [[True], [False]]
    assert set(held.out_keys) == {"v", ("w", "x")} and held.in_keys == ["k", "n"] and held.index_key == "_index"
    held[keys_of([])] = values_of([])
    assert held.contains(keys_of([])).shape == (0,) and len(held) == 3 and held[keys_of([])]["v"].shape == (0, 2)


@pytest.mark.parametrize("storage", STORAGES)
def test_rows_of_the_storage_are_read_by_number(storage):
    held = a_map(storage)
    key = keys_of([3, 4, 5])
    held[key] = values_of([30, 40, 50])
    for shape in ((3,), (3, 1), (1, 3, 1)):
        index = key["_index"].reshape(shape).to(torch.int32)
        assert held[index].batch_size == shape and held[index]["w", "x"].flatten().tolist() == [30, 40, 50]
        assert held.contains(index - 1).flatten().tolist() == [False, True, True]
    assert held[torch.tensor(1)]["v"].tolist() == held[1]["v"].tolist() == [40, 40]
    for unknown in (torch.tensor([[0], [3]]), torch.tensor(3), -1):
        with pytest.raises(KeyError, match=f"1 keys have no value.*with {torch.as_tensor(unknown).flatten()[-1]}"):
            held[unknown]
    for wrong in (torch.tensor([0.0]), torch.tensor([True])):
        with pytest.raises(TypeError, match="by integers"):
            held[wrong]


def test_rows_that_differ_are_kept_in_a_lazy_stack():
    rows = [TensorDict({"tokens": torch.arange(n), "text": NonTensorData(f"row {n}")}, []) for n in range(1, 5)]
    held = a_map(LazyStackStorage)
    held[keys_of([1, 2, 3, 4])] = lazy_stack(rows)
    found = held[keys_of([4, 2])]
    assert isinstance(found, LazyStackedTensorDict)
    assert [len(each) for each in found.get("tokens", as_list=True)] == [4, 2]
    assert [each["text"] for each in found] == ["row 4", "row 2"]


def test_unknown_keys_are_named():
    held = a_map(LazyTensorStorage)
    for key in (keys_of(7), keys_of([7])):
        with pytest.raises(KeyError, match="1 keys have no value"):
            held[key]
    held[keys_of([1, 2])] = values_of([1, 2])
    with pytest.raises(KeyError, match=r"2 keys .*\[\(0, 1\), \(1, 1\)\].*'k': \[3.5\], 'n': \[1\]"):
        held[keys_of([[1, 7], [2, 8]])]
    held.query_module(keys_of([9]))  # known to the query alone: it has a row, and no value
    assert keys_of(9) not in held and len(held) == 2
    with pytest.raises(KeyError, match="no value"):
        held[keys_of(9)]


@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
@pytest.mark.parametrize("reason", ["storage", "write_fn", "hash", "values", "batch", "locked", "keys"])
def test_a_write_that_fails_changes_nothing(storage, reason, monkeypatch):
    held = a_map(storage, write_fn=summed)
    held[keys_of([1, 2])] = values_of([1, 2])
    key, new = keys_of([3, 1, 3, 4]), values_of([1, 2, 3, 4])

    def fails(*_, **__):
        raise OSError("the disk is full")

    with monkeypatch.context() as patch:
        if reason == "storage":
            patch.setattr(type(held.storage), "set", fails)
        elif reason == "write_fn":
            patch.setattr(held, "write_fn", lambda new, old=None: fails() if old is not None else new)
        elif reason == "hash":
            patch.setattr(type(held.query_module), "hashes", fails)
        elif reason == "values":
            patch.setattr(held, "write_fn", lambda new, old=None: new[:0])
        elif reason == "batch":
            new = new[:3]
        elif reason == "locked":
            key.lock_()
        else:
            key["n"] = key["n"].float()
        with pytest.raises((OSError, KeyError, ValueError, RuntimeError)):
            held[key] = new
    assert len(held) == 2 and held.query_module.size == 2
    assert held.contains(keys_of([1, 2, 3, 4])).tolist() == [True, True, False, False]
    assert held[keys_of([2, 1])]["v"].tolist() == [[2, 2], [1, 1]] and "_index" not in list(key.keys())
    held[keys_of([5, 3])] = values_of([5, 3])
    assert held[keys_of([3, 5, 1])]["v"][:, 0].tolist() == [3, 5, 1]


def test_a_hash_to_int_of_the_users_decides_the_rows():
    tens = QueryModule(["n"], hash_module=lambda x: x // 10, hash_to_int=HashToInt())
    held = TensorDictMap(query_module=tens, storage=ListStorage(2))
    key = TensorDict({"n": torch.tensor([11, 25, 19])}, [3])
    held[key] = values_of([1, 2, 3])
    assert len(held) == 2 and held[key]["v"][:, 0].tolist() == [3, 2, 3]
    assert held.contains(TensorDict({"n": torch.tensor([30, 29])}, [2])).tolist() == [False, True]
    with pytest.raises(IndexError, match="has 2 rows"):
        held[TensorDict({"n": torch.tensor([30])}, [1])] = values_of([1])
    held.clear()
    assert not held.contains(key).any()


def test_a_map_for_a_pair_of_tensordicts():
    source = TensorDict({"small": torch.randn(14, 4), "large": torch.randn(14, 40)}, [14])
    dest = TensorDict({"next": torch.randn(14, 4)}, [14])
    held = TensorDictMap.from_tensordict_pair(source, dest, ["small", "large"])
    assert [type(each).__name__ for each in held.query_module.hash_module.values()] == [
        "SipHash",
        "RandomProjectionHash",
    ]
    assert len(held) == 0 and held.max_size == 1000
    held[source] = dest
    assert source["_index"].tolist() == list(range(14)) and (held[source] == dest).all()
    other = TensorDictMap.from_tensordict_pair(
        source, dest, ["small"], ["next"], storage_constructor=lambda consolidated: ListStorage(3), consolidated=True
    )
    assert other.max_size == 3 and other.out_keys == ["next"]


@pytest.mark.parametrize("storage", SAVED)
@pytest.mark.parametrize("by", ["dumps", "state_dict", "state"])
def test_a_checkpoint_restores_a_map(storage, by, tmp_path):
    held, other = a_map(storage), a_map(storage)
    held[keys_of([1, 2])] = values_of([1, 2])
    other[keys_of([9, 8, 7])] = values_of([1, 2, 3])

    def transfer():
        if by == "dumps":
            held.dumps(tmp_path / "map")
            other.loads(tmp_path / "map")
        elif by == "state":
            other.with_state(held.state())()
        else:
            other.load_state_dict(held.state_dict())

    for more in ([3], []):
        held[keys_of(more)] = values_of(more)
        transfer()
        assert len(other) == 3 and other.contains(keys_of([9, 1, 3, 2])).tolist() == [False, True, True, True]
        assert (other[keys_of([3, 2, 1])] == held[keys_of([3, 2, 1])]).all()
    if storage is not LazyMemmapStorage:
        other = pickle.loads(pickle.dumps(copy.deepcopy(other)))
    key = keys_of([5, 2])
    other[key] = values_of([5, 4])
    assert key["_index"].tolist() == [3, 1] and len(held) == 3
    held.clear()
    transfer()
    assert len(other) == 0 and not other.contains(key).any()
    other[key] = values_of([5, 4])
    assert other[key]["v"][:, 0].tolist() == [5, 4]


def test_a_checkpoint_of_something_else_changes_nothing(tmp_path):
    held = a_map(LazyTensorStorage)
    held[keys_of([1])] = values_of([1])
    held.dumps(tmp_path / "map")
    held.storage.dumps(tmp_path / "storage")
    ListStorage(3).dumps(tmp_path / "list")
    other = TensorDictMap(query_module=QueryModule(["k"]), storage=LazyTensorStorage(1))
    other[keys_of([4])] = values_of([4])
    for name in ("storage", "list", "map"):
        if name == "map":  # damaged
            file = max((tmp_path / "map").rglob("small"), key=lambda each: each.stat().st_size)
            content = bytearray(file.read_bytes())
            content[0] ^= 1
            file.write_bytes(content)
        with pytest.raises(CheckpointError):
            other.loads(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        other.loads(tmp_path / "missing")
    assert other[keys_of([4])]["v"].tolist() == [[4, 4]]


def test_threads_take_turns():
    held = a_map(LazyTensorStorage, 2000, write_fn=summed)
    numbers = torch.arange(1000)

    def write():
        for some in numbers[torch.randperm(1000)].split(50):
            held[keys_of(some)] = values_of(torch.ones_like(some))

    assert together(write, write, write, write) == []
    assert len(held) == 1000 and (held[keys_of(numbers)]["v"] == 4).all()
