"""Hashes, queries and maps beside TorchRL, where that is: the same numbers, shapes and dtypes."""

import warnings

import pytest
import torch
from tensordict import TensorDict

import interop as ours

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("torchrl")
    from torchrl import data as theirs

pytestmark = pytest.mark.filterwarnings("ignore")


def same(one, other):
    assert one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)


@pytest.mark.parametrize("shape", [(8,), (3, 8), (2, 3, 4), (5, 12)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32])
def test_bits(shape, dtype):
    bits = torch.randint(0, 2, shape)
    made = [library.BinaryToDecimal(4, "cpu", dtype) for library in (ours, theirs)]
    same(*(module(bits) for module in made))
    signs = torch.randn(shape)
    made = [library.BinaryToDecimal(4, "cpu", torch.float32, convert_to_binary=True) for library in (ours, theirs)]
    same(*(module(signs) for module in made))


@pytest.mark.parametrize("shape", [(3,), (4, 2), (4, 2, 3)])
def test_bytes_and_numbers_of_rows(shape):
    rows = torch.randint(0, 2, shape).float()
    assert ours.SipHash(as_tensor=False)(rows) == theirs.SipHash(as_tensor=False)(rows)
    found = [library.SipHash()(rows) for library in (ours, theirs)]
    assert found[0].shape == found[1].shape and found[0].dtype == found[1].dtype
    same(*(library.HashToInt()(each, extend=True) for library, each in zip((ours, theirs), found, strict=True)))
    numbers = [library.HashToInt() for library in (ours, theirs)]
    for values, extend in (([5, 6, 5], True), ([9, 6, 8], False), ([8, 5], True)):
        same(*(each(torch.tensor(values), extend=extend) for each in numbers))


@pytest.mark.parametrize("storage", ["LazyTensorStorage", "ListStorage"])
@pytest.mark.parametrize("keys", [["a"], ["a", ("b", "c")]], ids=str)
def test_maps_that_are_written_without_repetition(storage, keys):
    maps = [
        library.TensorDictMap(
            query_module=library.QueryModule(in_keys=keys, index_key="_index"),
            storage=getattr(library, storage)(40),
            # Of a tensor storage TorchRL takes new keys for known ones: its length counts all written rows.
            write_fn=None
            if storage == "LazyTensorStorage"
            else lambda new, old=None: new if old is None else new + old,
        )
        for library in (ours, theirs)
    ]
    for _ in range(4):
        key = TensorDict({"a": torch.randperm(9)[:5], "b": {"c": torch.zeros(5, 2)}}, [5])
        value = TensorDict({"x": torch.randn(5, 3)}, [5])
        written = [(key.clone(), value.clone()) for _ in maps]
        for held, (some, new) in zip(maps, written, strict=True):
            held[some] = new
        (one, _), (other, _) = written
        same(one["_index"], other["_index"])
        assert one["_hash"].shape == other["_hash"].shape and set(one.keys()) == set(other.keys())
        same(*(held[key.clone()]["x"] for held in maps))
        same(*(held[key[2].clone()]["x"] for held in maps))
        same(*(held.contains(key.clone()) for held in maps))
