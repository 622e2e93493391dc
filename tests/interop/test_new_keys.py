"""Keys that come after the first batch: added to all rows by `rb[:] = data` and the like, or by `extend` with `fill`."""

import copy
import functools
import os
import pickle
import shutil
import sys
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from fbuf.checkpoint import CheckpointMismatch
from interop import (
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    TensorDictReplayBuffer,
    TensorStorage,
)
from interop.engine.places import heap
from tests.interop.rows import check_same, refused

CAPACITY = 12


def rows(first, count):
    ids = torch.arange(first, first + count)
    return TensorDict({"id": ids, "next": {"x": ids[:, None].float()}}, [count])


def given(capacity):
    storage = TensorStorage(rows(0, capacity).set("index", torch.arange(capacity)))
    storage.clear()
    return storage


KINDS = {
    "memory": LazyTensorStorage,
    "consolidated": functools.partial(LazyTensorStorage, consolidated=True),
    "memory of JAX": LazyTensorStorage,
    "memory of the user": given,
    "anonymous maps": LazyMemmapStorage,
    "folder": None,
}
COUNTS = {"part": 5, "full": CAPACITY, "wrapped": CAPACITY + 5}


@pytest.fixture(
    params=[
        pytest.param(kind, marks=[pytest.mark.slow] if kind in ("consolidated", "memory of the user") else [])
        for kind in KINDS
    ]
)
def make(request, tmp_path, monkeypatch):
    if request.param == "memory of JAX":  # as on an accelerator
        monkeypatch.setattr(heap, "rows_in_jax", lambda device: True)
    return KINDS[request.param] or functools.partial(LazyMemmapStorage, scratch_dir=tmp_path / "rows")


def filled(storage, count=5, **options):
    buffer = TensorDictReplayBuffer(storage=storage, batch_size=8, **options)
    buffer.extend(rows(0, count))
    return buffer


def with_returns(data):
    """The same with further keys, that follow from the ids."""
    data = data.clone().contiguous()
    data["return"] = data["id"] * 2.0
    data["next", "value"] = data["id"][:, None].expand(-1, 3).double()
    return data.set("adv", TensorDict({"gae": -data["id"]}, data.batch_size))


WAYS = {
    "rb[:] =": lambda rb, data: rb.__setitem__(slice(None), data),
    "rb[...] =": lambda rb, data: rb.__setitem__(..., data),
    "storage[:] =": lambda rb, data: rb.storage.__setitem__(slice(None), data),
    "write_all": lambda rb, data: rb.write_all(data),
    "update_ by a tensordict": lambda rb, data: rb.update_(data),
    "update_ by a dict": lambda rb, data: rb.update_(
        {"return": data["return"].numpy(), ("next", "value"): data["next", "value"], "adv": {"gae": data["adv", "gae"]}}
    ),
    "update_ of some": lambda rb, data: rb.update_(data, keys_to_update=["return", ("next", "value"), "adv"]),
    "rb[key] =": lambda rb, data: [rb.__setitem__(key, data[key]) for key in ("return", ("next", "value"), "adv")],
}


@pytest.mark.parametrize("way", WAYS)
def test_keys_are_added_to_all_rows(make, way):
    buffer = filled(make(CAPACITY), list(COUNTS.values())[list(WAYS).index(way) % 3])
    before, standing = buffer[:].clone(), (len(buffer), buffer.writer.cursor, buffer.write_count)
    wanted = with_returns(before)
    WAYS[way](buffer, wanted.clone())
    assert (len(buffer), buffer.writer.cursor, buffer.write_count) == standing
    check_same(buffer[:].contiguous(), wanted)
    batch = buffer.sample()
    check_same(batch.contiguous(), with_returns(batch.select("id", ("next", "x"), "index")))
    for twin in (copy.deepcopy(buffer), pickle.loads(pickle.dumps(buffer)), buffer):
        twin.extend(with_returns(rows(100, 3)))
        assert sorted(twin["id"].tolist())[-3:] == [100, 101, 102]
        check_same(twin[:].contiguous(), with_returns(twin[:].select("id", ("next", "x"), "index").contiguous()))
    with refused(buffer, KeyError, "unknown: .*fill"):
        buffer.extend(with_returns(rows(0, 1)).set("more", torch.zeros(1)))
    with refused(buffer, KeyError, "missing: .*return"):
        buffer.extend(rows(0, 1))


@pytest.mark.parametrize("way", [way for way in WAYS if "..." not in way])
def test_keys_are_added_to_the_items_of_a_stack(way):
    buffer = filled(LazyStackStorage(CAPACITY))
    wanted = with_returns(buffer[:])
    WAYS[way](buffer, wanted.clone())
    check_same(buffer[:].contiguous(), wanted)


BAD = {
    "a part of the rows": (lambda rb, data: rb.__setitem__(slice(0, 3), data[:3]), KeyError),
    "fewer rows": (lambda rb, data: rb.__setitem__(slice(None), data[:3]), RuntimeError),
    "more rows": (lambda rb, data: rb.storage.__setitem__(slice(None), torch.cat([data, data])), RuntimeError),
    "fewer keys": (lambda rb, data: rb.__setitem__(slice(None), data.exclude("id")), KeyError),
    "another dtype": (lambda rb, data: rb.__setitem__(slice(None), data.set("id", data["id"].float())), RuntimeError),
    "an object": (lambda rb, data: rb.__setitem__(slice(None), data.set_non_tensor("object", {1})), TypeError),
    "set_": (lambda rb, data: rb.set_("return", data["return"]), KeyError),
    "extend": (lambda rb, data: rb.extend(data), KeyError),
}


@pytest.mark.parametrize("bad", BAD)
def test_what_does_not_fit_adds_nothing(make, bad):
    buffer = filled(make(CAPACITY))
    call, error = BAD[bad]
    with refused(buffer, error):
        call(buffer, with_returns(buffer[:].clone()))


def test_priorities_are_kept_and_batches_drawn_ahead_are_drawn_anew(make):
    for sampler in (PrioritizedSampler(CAPACITY, 1.0, 1.0), SamplerWithoutReplacement()):
        buffer = filled(make(CAPACITY), CAPACITY, sampler=sampler, prefetch=2)
        if isinstance(sampler, PrioritizedSampler):
            buffer.update_priority(torch.arange(CAPACITY), torch.arange(CAPACITY) + 1.0)
            priorities = buffer.sampler.priorities.clone()
        buffer.sample()
        buffer[:] = with_returns(buffer[:])
        for _ in range(5):
            batch = buffer.sample()
            check_same(batch["return"].contiguous(), batch["id"] * 2.0)
        if isinstance(sampler, PrioritizedSampler):
            check_same(buffer.sampler.priorities, priorities)
        if (folder := getattr(buffer.storage, "scratch_dir", None)) is not None:
            buffer.storage.close()
            shutil.rmtree(folder)


def test_checkpoints_hold_the_new_keys(make, tmp_path):
    buffer = filled(make(CAPACITY), CAPACITY + 3)
    old = copy.deepcopy(buffer)
    buffer["return"] = buffer["id"] * 2.0
    buffer.dumps(tmp_path / "saved")
    for twin in (filled(LazyTensorStorage(CAPACITY)), TensorDictReplayBuffer(storage=LazyMemmapStorage(CAPACITY))):
        if len(twin):
            with refused(twin, CheckpointMismatch, "return"):
                twin.loads(tmp_path / "saved")
            twin["return"] = torch.zeros(5)
        twin.loads(tmp_path / "saved")
        check_same(twin[:].contiguous(), buffer[:].contiguous())
        twin["return"].zero_()
        twin.load_state_dict(buffer.state_dict())
        check_same(twin[:].contiguous(), buffer[:].contiguous())
    with refused(buffer, CheckpointMismatch, "return"):
        buffer.load_state_dict(old.state_dict())


# ------------------------------------------------------------------ fill


@pytest.fixture(params=["memory", "anonymous maps", "folder"])
def make_filling(request, tmp_path):
    made = KINDS[request.param] or functools.partial(LazyMemmapStorage, scratch_dir=tmp_path / "rows")
    return functools.partial(made, fill={"return": -1, ("next", "value"): [1, 2, 3], "adv": 0, ("adv", "gae"): 7})


@pytest.mark.parametrize("count", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("single", [False, True], ids=["extend", "add"])
def test_rows_from_before_get_what_fill_says(make_filling, count, single):
    buffer = filled(make_filling(CAPACITY), count)
    before, batch = buffer[:].clone(), with_returns(rows(100, 1 if single else 3))
    slots = torch.as_tensor(buffer.add(batch[0]) if single else buffer.extend(batch)).reshape(-1)
    wanted = with_returns(before)
    wanted["return"].fill_(-1), wanted["adv", "gae"].fill_(7)
    wanted["next", "value"].copy_(torch.tensor([1.0, 2, 3]))
    length = min(CAPACITY, count + len(batch))
    wanted = torch.cat([wanted, wanted])[:length]
    wanted[slots] = batch.set("index", slots)
    check_same(buffer[:].contiguous(), wanted)
    with refused(buffer, KeyError, "missing: .*return"):
        buffer.extend(rows(0, 2))
    with refused(buffer, KeyError, "unknown: .*more"):
        buffer.extend(batch.set("more", torch.zeros(len(batch))))


@pytest.mark.parametrize(
    ("fill", "error", "match"),
    [
        ({"return": 0.5}, RuntimeError, "'return': items are torch.int64, fill has torch.float32"),
        ({"return": [1, 2]}, RuntimeError, "expand"),
        (None, KeyError, "unknown"),
    ],
)
def test_a_fill_that_does_not_fit_is_refused(fill, error, match):
    buffer = filled(LazyTensorStorage(CAPACITY, fill=fill))
    with refused(buffer, error, match):
        buffer.extend(rows(5, 2).set("return", torch.zeros(2, 3, dtype=torch.int64)))


# ------------------------------------------------------------------ folders


def test_a_folder_is_opened_with_the_new_keys(tmp_path):
    buffer = filled(LazyMemmapStorage(CAPACITY, scratch_dir=tmp_path), CAPACITY + 2)
    wanted = with_returns(buffer[:])
    buffer[:] = wanted
    check_same(TensorDict.load_memmap(tmp_path).contiguous(), wanted)
    buffer.storage.close()
    again = TensorDictReplayBuffer(storage=LazyMemmapStorage.open(tmp_path))
    check_same(again[:].contiguous(), wanted)
    again["last"] = torch.arange(CAPACITY)
    again.extend(with_returns(rows(50, 1)).set("last", torch.zeros(1, dtype=torch.int64)))
    assert again["last"][2] == 0 and again["id"][2] == 50
    check_same(LazyMemmapStorage.open(tmp_path, "r")[:].contiguous(), again[:].contiguous())
    reading = ReplayBuffer(storage=LazyMemmapStorage.open(tmp_path, "r"))
    with refused(reading, RuntimeError, "mode='r'"):
        reading.update_({"more": torch.zeros(CAPACITY)})
    again.storage.cleanup()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize("extends", [False, True], ids=["rb[:] =", "extend"])
def test_whoever_is_killed_leaves_the_old_keys_or_the_new_ones(tmp_path, extends):
    fill = {"return": 0.0, ("next", "value"): 0.0, ("adv", "gae"): 0}
    buffer = filled(LazyMemmapStorage(CAPACITY, scratch_dir=tmp_path / "rows", fill=fill))
    old, new = buffer[:].clone(), with_returns(buffer[:])
    added = new.clone()
    if extends:
        added.update({key: torch.zeros_like(new[key]) for key in fill})
    found, states = [], []

    def trace(frame, event, _):
        if Path(frame.f_code.co_filename).name not in ("folder.py", "files.py", "table.py"):
            return None
        now = [(path, os.stat(path)) for path in sorted((tmp_path / "rows").rglob("*"))]
        if event == "line" and (not found or now != states[-1]):
            states.append(now)
            found.append(tmp_path / f"{len(found)}")
            shutil.copytree(tmp_path / "rows", found[-1])
        return trace

    sys.settrace(trace)
    try:
        if extends:
            buffer.extend(with_returns(rows(5, 2)))
        else:
            buffer[:] = new
    finally:
        sys.settrace(None)
    seen = []
    for left in found:
        opened = TensorDictReplayBuffer(storage=LazyMemmapStorage.open(left))
        seen.append("return" in opened[:].keys())  # noqa: SIM118
        check_same(opened[:5].contiguous(), added if seen[-1] else old)
        if len(opened) > 5:
            check_same(opened[5:].contiguous(), with_returns(opened[5:].select("id", ("next", "x"), "index")))
        if not seen[-1]:
            opened.write_all(new)
            check_same(opened[:].contiguous(), new)
    assert seen == sorted(seen) and set(seen) == {False, True}
