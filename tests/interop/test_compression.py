"""What CompressedListStorage keeps of an item: nothing is lost, and memory is saved."""

import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorStack, TensorDict, lazy_stack

from interop import CompressedListStorage, ReplayBuffer
from interop.storages import compressed
from tests.interop.bits import edges as extreme
from tests.interop.bits import of_each_dtype, same_bits
from tests.interop.rows import Pair, check_same, flat_td, nested_td, plain_tensor, steps, trajectories

SHAPES = {
    "matrix": lambda values: values.reshape(2, 3),
    "scalar": lambda values: values[3],
    "empty": lambda values: values[:0].reshape(0, 4),
    "transposed": lambda values: values.reshape(2, 3).t(),
    "expanded": lambda values: values[:1].expand(5),
}


def there_and_back(item, **kwargs):
    storage = CompressedListStorage(3, **kwargs)
    storage.set(0, item)
    return storage.get(0)


def buffer_of(items, kind=ReplayBuffer, capacity=9, **kwargs):
    buffer = kind(storage=CompressedListStorage(capacity), **kwargs)
    buffer.extend(items)
    return buffer


# ------------------------------------------------------------------ nothing is lost


@of_each_dtype
@pytest.mark.parametrize("name", SHAPES)
def test_every_bit_of_a_tensor_comes_back(name, dtype):
    item = SHAPES[name](extreme(dtype))
    assert same_bits(there_and_back(item), item)
    assert same_bits(there_and_back(TensorDict(deep=TensorDict(a=item)))["deep", "a"], item)


def test_views_with_pending_operations_come_back():
    item = torch.tensor([1 + 2j, 3 - 4j])
    check_same(there_and_back(item.conj()), item.conj().resolve_conj())
    check_same(there_and_back(item.conj().imag), item.conj().imag.resolve_neg())


@pytest.mark.parametrize("rows", [plain_tensor, flat_td, nested_td, steps, trajectories])
def test_items_of_each_kind_come_back(rows):
    wanted = rows([1, 2, 3])
    buffer = buffer_of(wanted)
    for slot in range(3):
        check_same(buffer[slot], wanted[slot])
        assert type(buffer[slot]) is type(wanted[slot])
    got, info = buffer.sample(6, return_info=True)
    check_same(got.contiguous() if isinstance(got, LazyStackedTensorDict) else got, rows(info["index"] + 1))


def test_batch_sizes_names_and_devices_come_back():
    below = TensorDict(b=torch.ones(2, 3), batch_size=[2, 3])
    item = TensorDict({"a": torch.zeros(2, 5), "below": below}, batch_size=[2], names=["time"])
    got = there_and_back(item)
    assert got.batch_size == (2,) and got.names == ["time"] and got["below"].batch_size == (2, 3)
    assert got.device is None and got["below"].device is None
    assert there_and_back(item.to("cpu")).device == torch.device("cpu")
    assert there_and_back(item, device=None).device is None
    check_same(got, item)


def test_entries_that_are_no_tensors_come_back():
    item = TensorDict(a=torch.zeros(2), text="text", deep=TensorDict(what=Path("a")), batch_size=[])
    got = there_and_back(item)
    assert got["text"] == "text" and got["deep", "what"] == Path("a")
    several = TensorDict(a=torch.zeros(2), texts=NonTensorStack("x", "y"), batch_size=[2])
    assert there_and_back(several)["texts"] == ["x", "y"]
    got["text"] = "other"
    assert got["text"] == "other" and item["text"] == "text"


def test_stacks_of_unlike_tensordicts_come_back():
    parts = [TensorDict(a=torch.zeros(each)) for each in (2, 3)]
    got = there_and_back(TensorDict(deep=lazy_stack(parts), batch_size=[2]))["deep"]
    assert isinstance(got, LazyStackedTensorDict) and got.stack_dim == 0
    assert [each["a"].shape for each in got.tensordicts] == [(2,), (3,)]
    check_same(there_and_back(lazy_stack(parts))[1], parts[1])


def test_other_objects_are_kept():
    item = {"a": torch.ones(3), "b": ["text", None]}
    check_same(there_and_back(item), item)
    assert item["b"] is not there_and_back(item)["b"]
    what = object()
    assert there_and_back(what) is what
    assert there_and_back("text") == "text"
    pair = Pair(torch.ones(2), torch.zeros(2))
    assert type(there_and_back(pair)) is Pair
    check_same(there_and_back(pair), pair)


@pytest.mark.parametrize(
    "item",
    [
        torch.eye(3).to_sparse(),
        torch.zeros(3, device="meta"),
        torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged),
    ],
    ids=["sparse", "meta", "nested"],
)
def test_tensors_that_are_not_dense_are_refused(item):
    storage = CompressedListStorage(3, device=None)
    storage.set([0, 1], plain_tensor([1, 2]))
    for data in ([plain_tensor([7])[0], item], [plain_tensor([7])[0], TensorDict(a=item)]):
        with pytest.raises(TypeError, match="dense"):
            storage.set([0, 1], data)
    check_same(torch.stack(list(storage)), plain_tensor([1, 2]))


def test_what_is_read_is_a_copy_and_a_lazy_stack():
    kept = ReplayBuffer(storage=CompressedListStorage(3), collate_fn=lambda items: items)
    kept.extend([{"a": torch.ones(2)}])
    kept[0]["a"].zero_()
    kept.sample(2)[0]["a"].zero_()
    assert kept[0]["a"].all()
    plain = CompressedListStorage(3)
    plain.set(0, {"b": ["text"], "c": np.zeros(1)})
    plain.load_state_dict(plain.state_dict())
    plain.get(0)["b"].append(1)
    plain.get(0)["c"][:] = 1
    assert plain.get(0) == {"b": ["text"], "c": np.zeros(1)}
    assert isinstance(buffer_of(flat_td([1, 2]))[:], LazyStackedTensorDict)
    check_same(buffer_of(plain_tensor([1, 2, 3]))[:], plain_tensor([1, 2, 3]))
    check_same(buffer_of([{"a": torch.ones(2)}] * 2)[:], {"a": torch.ones(2, 2)})
    with pytest.raises(TypeError, match="collate_fn"):
        buffer_of([None, None])[:]


# ------------------------------------------------------------------ what is kept


def test_memory_is_saved_also_of_nested_entries():
    td = TensorDict(obs=torch.zeros(10, 3, 84, 84), next=TensorDict(obs=torch.zeros(10, 3, 84, 84)), batch_size=[10])
    buffer = buffer_of(td, capacity=10)
    given_bytes = 2 * 10 * 3 * 84 * 84 * 4
    assert 0 < buffer.storage.bytes() < given_bytes / 500


def test_bytes_of_an_empty_storage_are_none():
    storage = CompressedListStorage(3)
    with pytest.warns(UserWarning, match="empty"):
        assert storage.bytes() == 0
    storage.set(0, "text")
    assert storage.bytes() == 0
    storage.set(1, torch.zeros(0))
    assert storage.bytes() > 0
    storage._empty()
    with pytest.warns(UserWarning, match="empty"):
        assert storage.bytes() == 0


def test_a_higher_level_is_smaller():
    item = torch.randint(0, 4, (20000,), dtype=torch.uint8)
    sizes = []
    for level in (-5, 3, 22):
        storage = CompressedListStorage(3, compression_level=level)
        storage.set(0, item)
        check_same(storage.get(0), item)
        sizes.append(storage.bytes())
    assert sizes[0] > sizes[1] > sizes[2]


def test_a_byte_stream_is_the_bytes():
    storage = CompressedListStorage(3)
    item = torch.tensor([[1, 2], [3, 4]], dtype=torch.int16).t()
    assert storage.to_bytestream(item) == np.array([[1, 3], [2, 4]], np.int16).tobytes()
    assert storage.to_bytestream(item.numpy()) == storage.to_bytestream(item)
    assert storage.to_bytestream(torch.tensor(True)) == b"\x01" and storage.to_bytestream(torch.zeros(0)) == b""
    for wrong in ("text", [1, 2], None, np.array([None]), TensorDict()):
        with pytest.raises(TypeError):
            storage.to_bytestream(wrong)


# ------------------------------------------------------------------ functions and libraries


def test_functions_of_the_user_compress_and_decompress():
    calls = []

    def halved(tensor):
        calls.append(tensor)
        return tensor.to(torch.float16)

    def doubled(kept, metadata):
        calls.append(metadata)
        return kept.to(metadata["dtype"])

    storage = CompressedListStorage(3, compression_fn=halved, decompression_fn=doubled)
    buffer = ReplayBuffer(storage=storage)
    buffer.extend(TensorDict(a=torch.arange(4.0).reshape(2, 2), batch_size=[2]))
    check_same(buffer[1]["a"], torch.tensor([2.0, 3.0]))
    check_same(calls[0], torch.tensor([0.0, 1.0]))
    assert calls[-1] == {"type": "tensor", "shape": (2,), "dtype": torch.float32, "device": torch.device("cpu")}
    assert storage.bytes() == 8


def test_functions_that_hand_memory_on_share_none():
    storage = CompressedListStorage(
        3, compression_fn=lambda tensor: tensor, decompression_fn=lambda kept, metadata: kept.view(metadata["shape"])
    )
    item = torch.arange(3.0)
    storage.set(0, item)
    item.zero_()
    got = storage.get(0)
    got.zero_()
    check_same(storage.get(0), torch.arange(3.0))


def test_functions_come_in_pairs():
    for alone in ({"compression_fn": lambda tensor: tensor}, {"decompression_fn": lambda kept, metadata: kept}):
        with pytest.raises(ValueError, match="both"):
            CompressedListStorage(3, **alone)
    with pytest.raises(TypeError, match="callable"):
        CompressedListStorage(3, compression_fn=3, decompression_fn=3)


def raw_of(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()


def tensor_of(raw, metadata):
    flat = torch.frombuffer(bytearray(raw), dtype=metadata["dtype"]) if raw else torch.zeros(0, dtype=metadata["dtype"])
    return flat.reshape(metadata["shape"])


# Each compresses the bytes of a tensor without loss, and gives back what its name says.
TO = {
    "bytes": lambda raw: zlib.compress(raw.tobytes()),
    "bytearray": lambda raw: bytearray(zlib.compress(raw.tobytes())),
    "memoryview": lambda raw: memoryview(zlib.compress(raw.tobytes())),
    "array": lambda raw: np.frombuffer(zlib.compress(raw.tobytes()), np.uint8),
    "tensor": lambda raw: torch.frombuffer(bytearray(zlib.compress(raw.tobytes())), dtype=torch.uint8),
    "several": lambda raw: {
        "codec": "zlib",
        "parts": [zlib.compress(raw.tobytes())],
        "count": (raw.size, np.float32(1)),
    },
}
BACK = {
    "tensor": tensor_of,
    "array": lambda raw, metadata: tensor_of(raw, metadata).numpy(),
    "bytes": lambda raw, metadata: bytes(raw),
    "bytearray": lambda raw, metadata: bytearray(raw),
}


def restored_by(back):
    def decompress(kept, metadata):
        kept = kept["parts"][0] if isinstance(kept, dict) else kept
        return BACK[back](zlib.decompress(kept if isinstance(kept, bytes) else bytes(np.asarray(kept))), metadata)

    return decompress


@pytest.mark.parametrize("back", BACK)
@pytest.mark.parametrize("to", TO)
def test_functions_of_any_form(to, back, tmp_path):
    made = {"compression_fn": lambda tensor: TO[to](raw_of(tensor)), "decompression_fn": restored_by(back)}
    items = [
        TensorDict({"a": torch.arange(6.0).reshape(2, 3) + n, "below": {"b": torch.arange(n)}, "text": "x"}, [])
        for n in range(3)
    ] + [torch.arange(1000), extreme(torch.float64), torch.zeros(0, 4), torch.tensor(True)]
    storage = CompressedListStorage(9, **made)
    storage.set(list(range(len(items))), items)
    storage.dumps(tmp_path / "checkpoint")
    states = tmp_path / "state.pt"
    torch.save(storage.state_dict(), states)
    loaded, opened = CompressedListStorage(9, **made), CompressedListStorage(9, **made)
    loaded.loads(tmp_path / "checkpoint")
    opened.load_state_dict(torch.load(states, weights_only=True))
    for each in (storage, loaded, opened):
        for slot, item in enumerate(items):
            check_same(each.get(slot), item)
        assert each.bytes() == storage.bytes() > 0


def test_what_was_compressed_is_owned():
    taken = bytearray(24)

    def into_one_memory(tensor):
        taken[:] = raw_of(tensor).tobytes()
        return {"raw": taken, "view": memoryview(taken), "array": np.frombuffer(taken, np.uint8)}

    for part in ("raw", "view", "array"):
        storage = CompressedListStorage(
            3, compression_fn=into_one_memory, decompression_fn=lambda kept, metadata, part=part: bytes(kept[part])
        )
        storage.set([0, 1], [torch.arange(3), torch.arange(3) + 5])
        check_same(storage.get(0), torch.arange(3))


def test_functions_must_return_data():
    for wrong in (object(), {1, 2}, np.array([object()]), [object()]):
        storage = CompressedListStorage(
            3, compression_fn=lambda tensor, wrong=wrong: wrong, decompression_fn=lambda kept, metadata: kept
        )
        with pytest.raises(TypeError, match="compression_fn must return bytes, a tensor or an array"):
            storage.set(0, torch.zeros(3))
        assert len(storage) == 0
    storage = CompressedListStorage(3, compression_fn=torch.clone, decompression_fn=lambda kept, metadata: b"12345")
    storage.set(0, torch.zeros(3))
    with pytest.raises(ValueError, match=r"5 bytes, a tensor of torch.float32 \[3\] has 12"):
        storage.get(0)
    storage = CompressedListStorage(3, compression_fn=torch.clone, decompression_fn=lambda kept, metadata: None)
    storage.set(0, torch.zeros(3))
    with pytest.raises(TypeError, match="decompression_fn must return a tensor"):
        storage.get(0)


@pytest.mark.parametrize(
    ("level", "error"), [(23, ValueError), (-(2**18), ValueError), (1.5, TypeError), ("3", TypeError)]
)
def test_levels_that_do_not_exist_are_refused(level, error):
    with pytest.raises(error, match="compression_level"):
        CompressedListStorage(3, compression_level=level)


def test_without_a_library_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(compressed, "_LIBRARIES", ("no_such_library",))
    with pytest.raises(ImportError, match=r"fbuf\[compression\]"):
        CompressedListStorage(3)
    CompressedListStorage(3, compression_fn=torch.clone, decompression_fn=lambda kept, metadata: kept)
