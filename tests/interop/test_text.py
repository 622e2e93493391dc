"""Text, other Python values and ragged rows in every storage: as a plain list would keep them."""

import copy
import io
import os
import pickle
import random
import re
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorData, NonTensorStack, TensorDict, lazy_stack, tensorclass

from fbuf.checkpoint import CheckpointCorrupt, CheckpointMismatch
from interop import (
    H5StorageCheckpointer,
    LazyFrameStorage,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictReplayBuffer,
)
from interop.data import packed

CAPACITY = 12
STORAGES = {
    "tensors": lambda folder: LazyTensorStorage(CAPACITY),
    "anonymous": lambda folder: LazyMemmapStorage(CAPACITY),
    "files": lambda folder: LazyMemmapStorage(CAPACITY, scratch_dir=folder / str(random.random())),
    "list": lambda folder: ListStorage(CAPACITY),
    "lazy stack": lambda folder: LazyStackStorage(CAPACITY),
}
TENSORS = ["tensors", "anonymous", "files"]
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
values = plain | st.text(max_size=300) | st.binary(max_size=40) | st.just("\ud800 half")


@pytest.fixture(autouse=True)
def small_segments(monkeypatch):
    """Segments of few bytes, so that they are filled, reclaimed and emptied."""
    monkeypatch.setattr(packed, "_LEAST", 64)


def rows(number, texts):
    """Items of an id and a value each."""
    held = NonTensorStack(*map(NonTensorData, texts))
    ids = torch.arange(number, number + len(texts))
    return TensorDict({"id": ids, "inner": {"text": held}}, [len(texts)])


def check(buffer, model):
    """The model has the value of each id."""
    stored = buffer[:]
    ids = stored["id"].tolist()
    found = stored["inner", "text"]
    for number, value in zip(ids, found, strict=True):
        assert value == model[number] and type(value) is type(model[number])
    for place, number in enumerate(ids):
        assert buffer[place]["inner", "text"] == model[number]
    return ids


# ------------------------------------------------------------------ one law over all storages


@pytest.mark.parametrize("kind", STORAGES)
@settings(max_examples=12)
@given(data=st.data())
def test_values_come_back_whatever_is_done(kind, tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("text")
    make = lambda: ReplayBuffer(storage=STORAGES[kind](folder), batch_size=3)  # noqa: E731
    buffer, model, fresh = make(), {}, 0
    for _ in range(data.draw(st.integers(1, 8))):
        step = data.draw(st.sampled_from(["extend", "extend", "add", "set", "empty", "dump", "state", "copy"]))
        if step in ("extend", "add") or not len(buffer):
            texts = data.draw(st.lists(values, min_size=1, max_size=1 if step == "add" else CAPACITY + 3))
            new = rows(fresh, texts)
            buffer.add(new[0]) if step == "add" else buffer.extend(new)
            model.update(enumerate(texts, fresh))
            fresh += len(texts)
        elif step == "set":
            count = data.draw(st.integers(1, len(buffer)))
            texts = [data.draw(values) for _ in range(count)]
            buffer[:count] = rows(fresh, texts)
            model.update(enumerate(texts, fresh))
            fresh += count
        elif step == "empty":
            buffer.empty()
        elif step == "copy":
            before, buffer = buffer, data.draw(st.sampled_from([copy.deepcopy, clone]))(buffer)
            before.extend(rows(-1, ["of another"]))  # which the copy does not see
        else:
            other = make()
            if data.draw(st.booleans()):
                other.extend(rows(-5, ["stays", "not"]))
            if step == "dump":
                path = folder / str(random.random())
                buffer.dumps(path)
                other.loads(path)
            else:
                other.load_state_dict(reloaded(buffer.state_dict()))
            buffer = other
        if len(buffer):
            check(buffer, model)
            batch = buffer.sample()
            assert [model[number] for number in batch["id"].tolist()] == list(batch["inner", "text"])
    assert len(buffer) <= CAPACITY


def clone(buffer):
    return pickle.loads(pickle.dumps(buffer))


def reloaded(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("kind", TENSORS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16])
def test_ragged_rows_come_back(kind, dtype, tmp_path):
    rng = random.Random(0)
    buffer, model = ReplayBuffer(storage=STORAGES[kind](tmp_path), batch_size=5), []
    for width in (1, 4, 20, 2):
        ragged = [torch.randn(rng.randrange(7), 2).mul(9).to(dtype) for _ in range(width)]
        nested = torch.nested.nested_tensor(ragged, layout=torch.jagged)
        buffer.extend(TensorDict({"rows": nested, "id": torch.arange(width) + len(model)}, [width]))
        model += ragged
    buffer.extend(lazy_stack([TensorDict({"rows": model[n][:1], "id": torch.tensor(n + 100)}) for n in (4, 1)]))
    buffer.extend(TensorDict({"rows": torch.ones(1, 3, 2).to(dtype), "id": torch.tensor([200])}, [1]))
    model = {**dict(enumerate(model)), 104: model[4][:1], 101: model[1][:1], 200: torch.ones(3, 2).to(dtype)}
    path = tmp_path / "dump"
    buffer.dumps(path)
    loaded = ReplayBuffer(storage=STORAGES[kind](tmp_path))
    loaded.loads(path)
    for each in (buffer[:], buffer.sample(), buffer[torch.tensor([3, 3, 0])], buffer[2:3], loaded[:]):
        for number, found in zip(each["id"].tolist(), each["rows"].unbind(), strict=True):
            assert found.dtype == dtype and torch.equal(found, model[number])
    assert torch.equal(buffer[0]["rows"], model[buffer[0]["id"].item()])
    assert buffer[torch.zeros(0, dtype=torch.int64)]["rows"].shape[0] == 0


def test_declared_ragged_rows_are_added_one_by_one():
    buffer = ReplayBuffer(storage=LazyTensorStorage(8, ragged=[("a", "tokens")]), batch_size=2)
    for length in (3, 0, 5):
        buffer.add(TensorDict({"a": {"tokens": torch.arange(length)}, "b": torch.zeros(2)}))
    buffer.extend([TensorDict({"a": {"tokens": torch.arange(n)}, "b": torch.ones(2)}) for n in (2, 7)])
    assert [len(each) for each in buffer[:]["a", "tokens"].unbind()] == [3, 0, 5, 2, 7]


# ------------------------------------------------------------------ kinds of items


@tensorclass
class Sample:
    text: str
    score: torch.Tensor


def test_texts_are_entries_of_every_kind_of_item(tmp_path):
    for kind in TENSORS:
        make = lambda kind=kind: ReplayBuffer(storage=STORAGES[kind](tmp_path), batch_size=2)  # noqa: E731
        texts = make()
        texts.extend(["a", "é", ""])
        texts.add("d")
        assert texts[:] == ["a", "é", "", "d"] and texts[1] == "é" and set(texts.sample()) <= {"a", "é", "", "d"}
        trees = make()
        trees.add({"t": b"x", "n": (torch.zeros(2), "y")})
        trees.extend({"t": [b"1", b"2", b""], "n": (torch.ones(3, 2), ["3", "4", "5"])})
        assert trees[:]["t"] == [b"x", b"1", b"2", b""] and trees[2]["n"][1] == "4"
        samples = make()
        samples.extend(Sample(text=["p", "q"], score=torch.ones(2), batch_size=[2]))
        assert isinstance(samples[:], Sample) and list(samples[:].text) == ["p", "q"] and samples[1].text == "q"
        same = make()
        same.extend(TensorDict({"env": NonTensorData("CartPole", batch_size=[9]), "x": torch.zeros(9)}, [9]))
        assert same.sample()["env"] == ["CartPole"] * 2


def test_texts_of_several_item_dims():
    buffer = ReplayBuffer(storage=LazyTensorStorage(12, ndim=2), batch_size=4)
    texts = [[f"{env}/{t}" for t in range(6)] for env in range(3)]
    data = TensorDict({"text": NonTensorStack.from_list(texts), "n": torch.arange(18).reshape(3, 6)}, [3, 6])
    buffer.extend(data)
    stored = buffer[:]
    for found, number in zip(flat(stored["text"]), stored["n"].reshape(-1).tolist(), strict=True):
        assert found == f"{number // 6}/{number % 6}"
    batch = buffer.sample()
    assert batch["text"] == [f"{n // 6}/{n % 6}" for n in batch["n"].tolist()]


def flat(nested):
    return [each for inner in nested for each in inner]


def test_columns_are_added_later_beside_and_of_texts_and_ragged_rows(tmp_path):
    for kind in TENSORS:
        buffer = TensorDictReplayBuffer(storage=STORAGES[kind](tmp_path))
        buffer.extend(TensorDict({"id": torch.arange(2)}, [2]))
        buffer["inner"] = rows(0, ["a", "b"])["inner"]
        buffer.extend(buffer[:])
        assert check(buffer, {0: "a", 1: "b"}) == [0, 1, 0, 1]
    buffer = ReplayBuffer(storage=LazyTensorStorage(8, ragged=["r"], fill={"y": 7, "text": 0}))
    buffer.add(TensorDict({"r": torch.tensor([2j]).conj()}))
    buffer.add(TensorDict({"r": torch.zeros(3).cfloat(), "y": torch.tensor(1)}))
    assert buffer[:]["y"].tolist() == [7, 1] and buffer[0]["r"].tolist() == [-2j]
    with pytest.raises(KeyError, match="text"):
        buffer.add(TensorDict({"r": torch.zeros(3).cfloat(), "y": torch.tensor(1), "text": "no text for the others"}))


# ------------------------------------------------------------------ what reads them


@pytest.mark.parametrize(
    "sampler",
    [
        lambda: PrioritizedSampler(40, 0.7, 0.5),
        SamplerWithoutReplacement,
        lambda: SliceSampler(slice_len=2, traj_key="traj", strict_length=False),
    ],
    ids=["prioritized", "without replacement", "slices"],
)
def test_samplers_and_prefetch_read_texts(sampler):
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(40), sampler=sampler(), batch_size=4, prefetch=2)
    model = {}
    for start in range(0, 200, 10):
        texts = [f"text {n}" for n in range(start, start + 10)]
        data = rows(start, texts).set("traj", torch.full((10,), start))
        buffer.extend(data)
        model.update(enumerate(texts, start))
        batch = buffer.sample()
        assert batch["inner", "text"] == [model[n] for n in batch["id"].tolist()]


# ------------------------------------------------------------------ space


@pytest.mark.parametrize("kind", TENSORS)
@pytest.mark.parametrize("write", ["around the ring", "anywhere"])
def test_space_of_texts_that_were_written_over_is_used_again(kind, write, tmp_path, monkeypatch):
    monkeypatch.setattr(packed, "_LEAST", 1 << 10)
    rng = random.Random(1)
    storage = STORAGES[kind](tmp_path)
    buffer, model = ReplayBuffer(storage=storage), {}
    for step in range(400):
        text = f"{step} " + "x" * rng.randrange(1000)
        model[step] = text
        if write == "around the ring" or len(buffer) < CAPACITY:
            buffer.extend(rows(step, [text]))
        else:
            buffer[rng.randrange(CAPACITY // 2)] = rows(step, [text])[0]  # the other rows are never written again
    check(buffer, model)
    assert storage.table.layout.values.bytes < 4 * sum(len(model[n]) for n in buffer[:]["id"].tolist()) + (8 << 10)


@pytest.mark.parametrize("kind", ["tensors", "files"])
def test_loads_over_and_over_take_no_more_space(kind, tmp_path):
    buffer = ReplayBuffer(storage=STORAGES[kind](tmp_path))
    buffer.extend(rows(0, ["x" * 1000] * CAPACITY))
    buffer[0] = rows(20, ["y" * 999])[0]
    buffer.dumps(tmp_path / "dump")
    for _ in range(5):
        buffer.loads(tmp_path / "dump")
        buffer.load_state_dict(buffer.state_dict())
    assert buffer.storage.table.layout.values.bytes < 12_000


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="tells what is mapped")
def test_readers_give_back_segments_that_a_writer_removed(tmp_path):
    buffer = ReplayBuffer(storage=LazyMemmapStorage(4, scratch_dir=tmp_path / "a"))
    buffer.extend(rows(0, ["first"]))
    reader = ReplayBuffer(storage=LazyMemmapStorage.open(tmp_path / "a", "r"))
    for step in range(40):
        buffer.extend(rows(step, [f"{step} " * 50]))
        assert reader[0]["inner", "text"]
    assert len(re.findall(f"{tmp_path}.*bytes .deleted.", Path("/proc/self/maps").read_text())) < 5


def test_a_folder_is_renamed_removed_or_damaged_while_it_is_open(tmp_path):
    buffer = ReplayBuffer(storage=LazyMemmapStorage(CAPACITY, scratch_dir=tmp_path / "a"))
    buffer.extend(rows(0, ["a", "b"]))
    reader = ReplayBuffer(storage=LazyMemmapStorage.open(tmp_path / "a", "r"))
    (tmp_path / "a").rename(tmp_path / "b")
    buffer[1] = rows(2, ["c" * 100])[0]  # in another segment
    assert check(buffer, {0: "a", 2: "c" * 100}) == check(reader, {0: "a", 2: "c" * 100}) == [0, 2]
    assert not (tmp_path / "a").exists()
    buffer.storage.close()
    buffer = ReplayBuffer(storage=LazyMemmapStorage.open(tmp_path / "b"))
    segment = max((tmp_path / "b" / "storage.values").iterdir())
    os.truncate(segment, 50)
    with pytest.raises(RuntimeError, match="damaged"):
        buffer[:]
    shutil.rmtree(tmp_path / "b")
    with pytest.raises(RuntimeError, match=r"b/storage\.values was removed"):
        buffer.extend(rows(3, ["d"]))
    assert len(buffer) == 2


def test_ten_thousand_texts_take_little_more_than_their_bytes():
    buffer = ReplayBuffer(storage=LazyTensorStorage(10_000))
    buffer.extend([f"{n:08d}" + "x" * 192 for n in range(10_000)])
    values = buffer.storage.table.layout.values
    assert values.bytes + 16 * 10_000 <= 1.1 * 200 * 10_000


def of_values(each):
    return NonTensorStack(*map(NonTensorData, each))


# ------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("data", "error", "match"),
    [
        (rows(0, [{1, 2}]), TypeError, "set.*ListStorage"),
        (rows(0, [{1: "a"}]), TypeError, "keys that are no texts"),
        (rows(0, [("a", 1)]), TypeError, "tuple"),
        (TensorDict({"id": torch.zeros(2).long(), "inner": {"text": torch.zeros(2)}}, [2]), TypeError, "text"),
        (rows(0, ["a"]).set("more", of_values(["b"])), KeyError, "more"),
        (rows(0, ["a"]).update({"id": of_values(["b"])}), TypeError, "id"),
    ],
    ids=["set", "keys", "tuple", "tensor", "another key", "text for a tensor"],
)
@pytest.mark.parametrize("kind", TENSORS)
def test_what_does_not_fit_is_refused_and_nothing_is_written(data, error, match, kind, tmp_path):
    buffer = ReplayBuffer(storage=STORAGES[kind](tmp_path))
    buffer.extend(rows(0, ["a", "b"]))
    with pytest.raises(error, match=match):
        buffer.extend(data)
    assert check(buffer, {0: "a", 1: "b"}) == [0, 1] and buffer.write_count == 2


def test_calls_that_texts_do_not_take_say_so(tmp_path):
    buffer = ReplayBuffer(storage=LazyTensorStorage(8))
    with pytest.raises(TypeError, match="add"):
        buffer.extend("one text")
    buffer.extend(rows(0, ["a", "b"]))
    with pytest.raises(RuntimeError, match=r"rb\[index\] = data"):
        buffer.set_(("inner", "text"), ["c", "d"])
    with pytest.raises(ValueError, match="TensorStorageCheckpointer"):
        H5StorageCheckpointer().dumps(buffer.storage, tmp_path / "h5")
    with pytest.raises(TypeError, match="LazyTensorStorage"):
        ReplayBuffer(storage=LazyFrameStorage(8, obs_key="obs", stack=2)).extend(rows(0, ["a"]))
    with pytest.raises(ValueError, match="consolidated"):
        ReplayBuffer(storage=LazyTensorStorage(8, consolidated=True)).extend(rows(0, ["a"]))
    ragged = TensorDict({"r": torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged)}, [1])
    buffer = ReplayBuffer(storage=LazyTensorStorage(8))
    buffer.extend(ragged)
    for wrong, error in ((torch.ones(1, 2).double(), "float64"), (torch.ones(1, 2, 2), "shape")):
        with pytest.raises(RuntimeError, match=error):
            buffer.extend(TensorDict({"r": wrong}, [1]))


def test_spans_that_point_outside_are_corrupt():
    buffer = ReplayBuffer(storage=LazyTensorStorage(8))
    buffer.extend(rows(0, ["abc", "de"]))
    for place, value in ((0, -1), (0, 1 << 45), (1, 1 << 20)):
        state = buffer.state_dict()
        state["_storage"]["_storage"]["inner.text"][1, place] = value
        other = ReplayBuffer(storage=LazyTensorStorage(8))
        with pytest.raises(CheckpointCorrupt):
            other.load_state_dict(state)
        assert len(other) == 0


@pytest.mark.parametrize("other", [torch.ones(2, 2).long(), of_values(["a", "b"])], ids=["tensor", "text"])
def test_checkpoints_of_other_kinds_of_entries_do_not_fit(other, tmp_path):
    saved, buffer = (ReplayBuffer(storage=LazyTensorStorage(8)) for _ in range(2))
    saved.extend(TensorDict({"x": other, "more": torch.ones(2)}, [2]))
    saved.dumps(tmp_path / "dump")
    ragged = torch.nested.nested_tensor([torch.ones(1), torch.ones(3)], layout=torch.jagged)
    buffer.extend(TensorDict({"x": ragged}, [2]))
    with pytest.raises(CheckpointMismatch, match="ragged"):
        buffer.loads(tmp_path / "dump", strict=False)
    assert [len(each) for each in buffer[:]["x"].unbind()] == [1, 3]


# ------------------------------------------------------------------ texts are read when they are looked at

LOOKS = {
    "list": lambda data: data["text"],
    "get": lambda data: data.get("text").tolist(),
    "one": lambda data: data[3]["text"],
    "slice": lambda data: data[2:5]["text"],
    "places": lambda data: data[torch.tensor([4, 1])]["text"],
    "mask": lambda data: data[torch.arange(6) % 2 == 0]["text"],
    "reshaped": lambda data: data.reshape(2, 3)["text"],
    "unbound": lambda data: [each["text"] for each in data.unbind(0)],
    "iterated": lambda data: [each["text"] for each in data],
    "split": lambda data: [each["text"] for each in data.split(4)],
    "stacked": lambda data: torch.stack([data, data])["text"],
    "joined": lambda data: torch.cat([data, data])["text"],
    "cloned": lambda data: data.clone()["text"],
    "copied": lambda data: data.copy()["text"],
    "deep": lambda data: copy.deepcopy(data)["text"],
    "pickled": lambda data: pickle.loads(pickle.dumps(data))["text"],
    "dict": lambda data: data.to_dict()["text"],
    "moved": lambda data: data.to("cpu")["text"],
    "selected": lambda data: data.select("text")["text"],
    "printed": lambda data: repr(data.get("text")),
    "compared": lambda data: bool((data == data.clone()).all()),
    "set": lambda data: (data.__setitem__(slice(0, 2), data[2:4].clone()), data["text"])[1],
    "class": lambda data: (data.get("text").tensordicts, type(data.get("text")))[1],
    "size": lambda data: (data.get("text").batch_size, data.get("text").device, data.get("text").stack_dim),
}


KINDS_OF_TEXTS = [
    ["", "a", "bc", "def", "a", "g"],
    ["é", "a", "", "漢字", "b", "\ud800"],
    [b"1", None, {}, [2], 3.5, "x"],
]


@pytest.mark.parametrize("place", range(len(LOOKS)), ids=LOOKS)
def test_stored_texts_look_as_stacks_of_texts_do(place):
    look, texts = list(LOOKS.values())[place], KINDS_OF_TEXTS[place % 3]
    data = TensorDict({"text": NonTensorStack(*map(NonTensorData, texts)), "n": torch.arange(6)}, [6])
    rb = ReplayBuffer(storage=LazyTensorStorage(6))
    rb.extend(data)
    assert look(rb[:]) == look(data)
    assert look(rb[torch.arange(6)]) == look(data)


@pytest.mark.parametrize("make", [LazyTensorStorage, LazyMemmapStorage])
def test_texts_that_were_read_stay_though_rows_are_written_over(make):
    rb = ReplayBuffer(storage=make(6))
    for start in range(0, 600, 6):
        rb.extend(TensorDict({"text": [f"{start + n}" for n in range(6)]}, [6]))
        view, rows = rb[:], rb[torch.tensor([5, 0])]
        rb.extend(TensorDict({"text": ["x" * start] * 6}, [6]))
        assert view["text"] == [f"{start + n}" for n in range(6)]
        assert rows["text"] == [f"{start + 5}", f"{start}"]
        assert rb[:]["text"] == ["x" * start] * 6


@pytest.mark.parametrize("make", [LazyTensorStorage, LazyMemmapStorage])
def test_nothing_is_read_before_it_is_looked_at_and_locks_hold(make):
    rb = ReplayBuffer(storage=make(6))
    rb.extend(TensorDict({"text": list("abcdef")}, [6]))
    data = rb[:]
    assert "tensordicts" not in vars(data.get("text"))
    assert data.get("text").is_locked == data.is_locked
    assert "tensordicts" not in vars(data.get("text"))
    if data.is_locked:
        assert data.get("text").tensordicts[0].is_locked
        data.unlock_()
    assert not data.get("text").is_locked and not data.get("text").tensordicts[0].is_locked
    assert data["text"] == list("abcdef")
