"""List storages in checkpoints, alone and in buffers, and as a state_dict."""

import io

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict, lazy_stack

from fbuf.checkpoint import CheckpointCorrupt, CheckpointError, CheckpointMismatch
from interop import (
    CompressedListStorage,
    CompressedListStorageCheckpointer,
    LazyStackStorage,
    ListStorage,
    ListStorageCheckpointer,
    ReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from interop.checkpoint.rule import Rule
from tests.interop.checkpoint.saved_values import Pair, Settings, Step, same, through_json

KINDS = [ListStorage, LazyStackStorage, CompressedListStorage]
each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


def tensordict_of(n):
    entries = {"obs": torch.full((n % 3 + 1, 2), float(n)), "name": f"n{n}", "n": torch.tensor(n)}
    return TensorDict({**entries, "next": TensorDict({"obs": torch.arange(n, dtype=torch.uint8)}, [])}, [])


def others(n):
    return [
        torch.arange(n, dtype=torch.bfloat16),
        TensorDict({"x": torch.full((2, 3), n), "s": NonTensorData({"k": n}, batch_size=[2])}, [2], names=["t"]),
        Step(obs=torch.full((2, 1), n), note=f"{n}", more=(n,), batch_size=[2]),
        lazy_stack([TensorDict({"x": torch.ones(2, n % 4 + 1)}, [2]), TensorDict({"x": torch.zeros(2, 1)}, [2])], 1),
        {"a": torch.ones(n), "b": [n, None, "é"]},
        Pair(n, Settings(float(n))),
        f"text {n}",
        TensorDict({"x": torch.ones(3), "e": torch.zeros(3, 0)}, [3], device="cpu"),
    ][n % 8]  # fmt: skip


def filled(kind, items, capacity=20, **kwargs):
    storage = kind(capacity, **kwargs)
    for place, item in enumerate(items):
        storage.set(place % capacity, item)
    return storage


def fingerprint(storage):
    """All that a storage is."""
    state = {name: list(storage.__dict__[name]) for name in ("_storage", "_metadata") if name in storage.__dict__}
    return state, storage._last_cursor, storage._ledger.end, storage._ledger.written, storage._ledger.edits


def unchanged(storage, before):
    after = fingerprint(storage)
    return same(after[0], before[0]) and after[1:] == before[1:]


CONTENTS = {
    "tensordicts": lambda: [tensordict_of(n) for n in range(27)],
    "others": lambda: [others(n) for n in range(17)],
    "one": lambda: ["a"],
    "none": list,
}


@pytest.mark.parametrize("content", CONTENTS)
@each_kind
def test_a_storage_comes_back(kind, content, tmp_path):
    items = CONTENTS[content]()
    storage = filled(kind, items)
    storage.dumps(tmp_path / "c")
    back = filled(kind, ["old"] * 3)
    back.loads(tmp_path / "c")
    assert len(back) == len(storage) == min(len(items), 20)
    assert all(same(back.get(n), storage.get(n)) for n in range(len(storage)))
    assert (back._last_cursor, back._ledger.end, back._ledger.written) == (
        storage._last_cursor, storage._ledger.end, storage._ledger.written,
    )  # fmt: skip
    twin = kind(20)
    twin._restoring(through_json(storage._saved()))()
    twin.dumps(tmp_path / "d")
    again = kind(20)
    again.load(tmp_path / "d")
    assert same(fingerprint(again)[0], fingerprint(back)[0])


@pytest.mark.parametrize("content", CONTENTS)
@each_kind
def test_a_state_dict_comes_back_through_a_file(kind, content):
    storage = filled(kind, CONTENTS[content]())
    file = io.BytesIO()
    torch.save(storage.state_dict(), file)
    file.seek(0)
    back = kind(20)
    back.load_state_dict(torch.load(file, weights_only=True))
    assert len(back) == len(storage)
    assert all(same(back.get(n), storage.get(n)) for n in range(len(storage)))
    assert (back._ledger.end, back._ledger.written) == (storage._ledger.end, storage._ledger.written)


def test_the_documented_keys():
    data = TensorDict({"a": torch.ones(2), "b": {"c": torch.zeros(2)}}, [2])
    state = filled(ListStorage, ["text", torch.ones(2), data, {"k": [1, (2.0, None)]}]).state_dict()
    assert state["_storage"][0] == "text" and state["_storage"][3] == {"k": [1, (2.0, None)]}
    saved = state["_storage"][2]
    assert type(saved) is dict and saved["__batch_size"] == (2,)
    assert same(TensorDict({}, []).load_state_dict(saved, strict=False), data)
    state = filled(CompressedListStorage, [data]).state_dict()
    assert state["_storage"][0].keys() == {"a", "b"} and state["_storage"][0]["a"].dtype == torch.uint8
    assert state["_metadata"][0]["fields"]["a"] == {
        "type": "tensor", "shape": torch.Size([2]), "dtype": torch.float32, "device": torch.device("cpu"),
    }  # fmt: skip


def test_a_state_dict_as_others_write_it():
    data = TensorDict({"a": torch.ones(2), "b": {"c": torch.zeros(2)}}, [2])
    storage = ListStorage(5)
    storage.load_state_dict({"_storage": [data.state_dict(), torch.ones(1), "text"]})
    assert same(storage[0], data) and storage[2] == "text" and storage._ledger.end == 3


@each_kind
def test_a_state_dict_is_a_snapshot(kind):
    item = {"t": torch.zeros(2), "l": [torch.zeros(1)], "a": np.zeros(2)}
    storage = filled(kind, [item, tensordict_of(1)])
    state = storage.state_dict()
    storage.set(0, "new")
    item["t"][:], item["l"][0][:], item["a"][:] = 1, 1, 1
    back = kind(20)
    back.load_state_dict(state)
    first = back.get(0)
    assert not first["t"].any() and not first["l"][0].any() and not first["a"].any()
    state["_storage"][0]["t"][:] = 5
    assert not back.get(0)["t"].any()


@pytest.mark.parametrize(
    "wrong",
    [
        {1, 2}, object(), np.ones(2), NonTensorData("a"), TensorDict({}, []), {"k": {3}}, [lambda: 0],
        {"__batch_size": [2], "a": torch.ones(3)}, {"__batch_size": [2], "a": "text"}, {"__batch_size": "x"},
    ],
    ids=lambda wrong: type(wrong).__name__,
)  # fmt: skip
@each_kind
def test_a_state_dict_that_cannot_be_taken_changes_nothing(kind, wrong):
    storage = filled(kind, [tensordict_of(1), "a"])
    before, state = fingerprint(storage), filled(kind, ["b", "c", "d"]).state_dict()
    state["_storage"][1] = wrong
    with pytest.raises(TypeError, match="item 1"):
        storage.load_state_dict(state)
    for other in (None, [], 3):
        with pytest.raises((TypeError, CheckpointError)):
            storage.load_state_dict(other)
    assert unchanged(storage, before)


@each_kind
def test_other_capacities_are_refused(kind, tmp_path):
    storage = filled(kind, [tensordict_of(n) for n in range(7)], capacity=5)
    storage.dumps(tmp_path / "c")
    state = storage.state_dict()
    for capacity in (3, 4, 6, 50):
        target = filled(kind, ["a", "b"], capacity=capacity)
        before = fingerprint(target)
        with pytest.raises(CheckpointMismatch, match=f"capacity is 5, in the storage {capacity}"):
            target.loads(tmp_path / "c")
        with pytest.raises(CheckpointMismatch, match="capacity"):
            target.load_state_dict(state)
        assert unchanged(target, before)
    del state["_ring"]
    with pytest.raises(CheckpointMismatch, match="5 items, the storage a capacity of 3"):
        kind(3).load_state_dict(state)


def test_lists_without_bound(tmp_path):
    storage = ListStorage()
    storage.set(range(3), ["a", "b", "c"])
    storage.dumps(tmp_path / "c")
    back = ListStorage()
    back.loads(tmp_path / "c")
    assert list(back) == ["a", "b", "c"]


def test_other_kinds_of_storages_are_refused(tmp_path):
    for n, saved in enumerate(KINDS):
        filled(saved, [tensordict_of(1)]).dumps(tmp_path / str(n))
        for kind in KINDS:
            target = filled(kind, ["a"])
            before = fingerprint(target)
            if kind is not saved:
                with pytest.raises(CheckpointMismatch):
                    target.loads(tmp_path / str(n))
            if CompressedListStorage in {kind, saved} and kind is not saved:
                with pytest.raises(CheckpointMismatch, match="_metadata"):
                    target.load_state_dict(filled(saved, [tensordict_of(1)]).state_dict())
            assert unchanged(target, before)
    filled(LazyStackStorage, [tensordict_of(1)], stack_dim=-1).dumps(tmp_path / "s")
    with pytest.raises(CheckpointMismatch, match="stack_dim is -1, in the storage 0"):
        LazyStackStorage(20).loads(tmp_path / "s")
    own = {"compression_fn": lambda tensor: tensor + 1, "decompression_fn": lambda tensor, metadata: tensor - 1}
    filled(CompressedListStorage, [torch.ones(2)], **own).dumps(tmp_path / "o")
    with pytest.raises(CheckpointMismatch, match="compression is of the user, in the storage zstd"):
        CompressedListStorage(20).loads(tmp_path / "o")
    back = CompressedListStorage(20, **own)
    back.loads(tmp_path / "o")
    assert same(back.get(0), torch.ones(2))


@each_kind
def test_the_cursor_of_the_last_write(kind):
    for cursor in (3, slice(1, 3), [0, 2], torch.tensor([1, 0]), np.array([2]), range(2), None):
        storage = filled(kind, ["a", "b", "c", "d"]) if cursor is not None else kind(20)
        if cursor is not None:
            storage.set(cursor, "x" if isinstance(cursor, int) else ["x"] * len(np.arange(4)[cursor]))
        back = kind(20)
        back._restoring(through_json(storage._saved()))()
        places = [
            [] if c is None else np.arange(20)[c].ravel().tolist() for c in (back._last_cursor, storage._last_cursor)
        ]
        assert places[0] == places[1]


def test_tensors_go_to_the_device_of_the_storage(tmp_path):
    filled(ListStorage, [{"a": torch.ones(2)}, tensordict_of(3)]).dumps(tmp_path / "c")
    back = ListStorage(20, device="meta")
    back.loads(tmp_path / "c")
    assert back.get(0)["a"].is_meta and back.get(1)["obs"].is_meta


# ---------------------------------------------------------------------- pickles


class Custom:
    def __init__(self, value):
        self.value = value


@each_kind
def test_other_objects_are_pickled_by_leave_at_both_ends(kind, tmp_path):
    storage = filled(kind, ["a", {"env": Custom(3)}])
    for save in (lambda: storage.dumps(tmp_path / "c"), storage.state_dict, storage._saved):
        with pytest.raises(TypeError, match=r"item 1, key 'env'.*Custom cannot be saved.*"):
            save()
    assert not (tmp_path / "c").exists()
    checkpointer = CompressedListStorageCheckpointer if kind is CompressedListStorage else ListStorageCheckpointer
    assert type(storage.checkpointer) is checkpointer
    storage.checkpointer = checkpointer(allow_pickle=True)
    storage.dumps(tmp_path / "c")
    back = filled(kind, ["x"])
    before = fingerprint(back)
    with pytest.raises(CheckpointMismatch, match="allow_pickle=True"):
        back.loads(tmp_path / "c")
    assert unchanged(back, before)
    back.loads(tmp_path / "c", rule=Rule(allow_pickle=True))
    assert back.get(1)["env"].value == 3
    other = kind(20)
    other.checkpointer = checkpointer(allow_pickle=True)
    other.loads(tmp_path / "c")
    assert other.get(1)["env"].value == 3


# ---------------------------------------------------------------------- buffers and hooks


@each_kind
def test_a_buffer_goes_on_as_it_would_have(kind, tmp_path):
    def built(seed):
        return TensorDictReplayBuffer(storage=kind(10), batch_size=4, generator=torch.Generator().manual_seed(seed))

    buffer = built(0)
    for n in range(13):
        buffer.add(tensordict_of(n))
    buffer.sample()
    buffer.dumps(tmp_path / "c")
    back = built(1)
    back.loads(tmp_path / "c")
    for n in range(13, 20):
        for each in (buffer, back):
            each.add(tensordict_of(n))
        left, right = buffer.sample(), back.sample()
        assert left["index"].tolist() == right["index"].tolist() and left["name"] == right["name"]
    assert isinstance(back[:], LazyStackedTensorDict) or kind is ListStorage


def test_a_list_of_texts_with_a_sampler_saves_and_loads(tmp_path):
    buffer = ReplayBuffer(storage=ListStorage(10), batch_size=3, collate_fn=list)
    buffer.extend(["a", "b", "c"])
    buffer.dumps(tmp_path / "c")
    back = ReplayBuffer(storage=ListStorage(10), batch_size=3, collate_fn=list)
    back.loads(tmp_path / "c")
    assert back[:] == ["a", "b", "c"] and set(back.sample()) <= {"a", "b", "c"}
    state = ReplayBuffer(storage=ListStorage(10), collate_fn=list)
    state.load_state_dict(buffer.state_dict())
    assert state[:] == ["a", "b", "c"]


def test_priorities_stay_with_their_items(tmp_path):
    def built():
        storage = CompressedListStorage(5)
        return TensorDictPrioritizedReplayBuffer(alpha=1.0, beta=1.0, eps=0.0, storage=storage, batch_size=8)

    buffer = built()
    buffer.extend(TensorDict({"obs": torch.arange(3.0), "td_error": torch.tensor([0.0, 2.0, 0.0])}, [3]))
    buffer.sample()
    buffer.dumps(tmp_path / "c")
    back = built()
    back.loads(tmp_path / "c")
    assert set(back.sample()["index"].tolist()) == {1}


def test_hooks_change_what_is_saved(tmp_path):
    storage = filled(ListStorage, ["a", "b"])
    storage.register_save_hook(lambda items, path=None: [item * 2 for item in items])
    storage.dumps(tmp_path / "c")
    target = filled(ListStorage, ["x"])
    with pytest.raises(CheckpointMismatch, match="hooks"):
        target.loads(tmp_path / "c")
    target.register_load_hook(lambda items, out=None: [*items, "more"])
    target.loads(tmp_path / "c")
    assert list(target) == ["aa", "bb", "more"]
    target.register_load_hook(lambda items, out=None: items * 20)
    with pytest.raises(CheckpointMismatch, match="at most 20 items"):
        target.loads(tmp_path / "c")
    assert list(target) == ["aa", "bb", "more"]


# ---------------------------------------------------------------------- what was not saved so


def _metadata(storage, **changes):
    """What a compressed storage saves, with other metadata of its first item."""
    metadata = storage._metadata[0]
    storage._metadata[0] = {key: each for key, each in {**metadata, **changes}.items() if each is not ...}
    saved = through_json(storage._saved())
    storage._metadata[0] = metadata
    return saved


BOMB = torch.Size([2**40])


@pytest.mark.parametrize(
    ("item", "changes"),
    [
        *(
            (torch.ones(4), {name: each})
            for name in ("shape", "dtype", "device", "type")
            for each in (..., None, "float32")
        ),
        *((torch.ones(4), {"shape": each}) for each in (BOMB, torch.Size([5]), torch.Size([-1]), [4])),
        *((torch.ones(4), {"dtype": each}) for each in (torch.float64, torch.device("cpu"), torch.int8)),
        *((torch.ones(4), {"type": each}) for each in ("tensordict", "lazy_stack", "non_tensor", "x", ["tensor"])),
        *(
            (others(1), {"batch_size": each})
            for each in (torch.Size([3]), torch.Size([2, 9]), [2], ..., torch.Size([-1]))
        ),
        *((others(1), {"fields": each}) for each in ({}, [], {"x": {"type": "other"}, "s": {"type": "other"}}, ...)),
        *((others(1), {"names": each}) for each in (["t", "u"], "t", [3], {})),
        *((others(2), {"class": each}) for each in (Settings, "os:system", ...)),
        (others(2), {"attributes": {"new": 1}}),
        (others(2), {"attributes": [1]}),
        *((others(3), {"stack_dim": each}) for each in (-1, 9, None, True, "1")),
        *((others(3), {"items": each}) for each in ([], [{}], None, [{"type": "other"}] * 2)),
        ("text", {"more": 1}),
        ("text", {"type": "tensor", "shape": torch.Size([1]), "dtype": torch.int8, "device": torch.device("cpu")}),
    ],
    ids=lambda each: str(each)[:40].replace("\n", " "),
)
def test_metadata_that_does_not_agree_is_refused(item, changes):
    saved = _metadata(filled(CompressedListStorage, [item]), **changes)
    target = filled(CompressedListStorage, [others(5)])
    before = fingerprint(target)
    with pytest.raises(CheckpointCorrupt):
        target._restoring(saved)
    assert unchanged(target, before)


def test_bytes_that_are_no_frame_are_refused():
    for packed in (torch.zeros(20, dtype=torch.uint8), torch.ones(4), torch.zeros(0, dtype=torch.uint8)):
        storage = filled(CompressedListStorage, [torch.ones(4)])
        storage._storage[0] = packed
        with pytest.raises(CheckpointCorrupt):
            CompressedListStorage(20)._restoring(through_json(storage._saved()))


def test_entries_that_do_not_agree_are_refused():
    for kind in KINDS:
        saved = through_json(filled(kind, [tensordict_of(n) for n in range(4)])._saved())
        target = filled(kind, ["a"])
        before = fingerprint(target)
        for name in saved:
            for wrong in (..., None, -1, 2**63, "x", 1.5, [], {}, np.zeros(3), np.array([9]), True):
                if name == "cursor" and (wrong is None or str(wrong) == "-1"):
                    continue
                edited = {key: each for key, each in saved.items() if key != name}
                if wrong is not ...:
                    edited[name] = wrong
                with pytest.raises(CheckpointError):
                    target._restoring(edited)
                    pytest.fail(f"{name}={wrong!r} was taken")
        assert unchanged(target, before)
        for junk in (None, 3, [], {}, "x"):
            with pytest.raises(CheckpointError):
                target._restoring(junk)


def test_an_item_that_does_not_stack_is_refused():
    saved = through_json(filled(LazyStackStorage, [TensorDict({"x": torch.ones(2)}, [2])], stack_dim=1)._saved())
    flat = through_json(filled(LazyStackStorage, [TensorDict({"x": torch.ones(2)}, [])])._saved())
    with pytest.raises(CheckpointCorrupt, match="stack_dim=1"):
        LazyStackStorage(20, stack_dim=1)._restoring({**saved, "items": flat["items"]})
