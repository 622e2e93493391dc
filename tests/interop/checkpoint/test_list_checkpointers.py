"""List storages in checkpoints, alone and in buffers, and as a state_dict."""

import io

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, TensorDict

from fbuf.checkpoint import CheckpointError, CheckpointMismatch
from interop import (
    CompressedListStorage,
    CompressedListStorageCheckpointer,
    LazyStackStorage,
    ListStorage,
    ListStorageCheckpointer,
)
from tests.interop.checkpoint.list_storages import (
    KINDS,
    each_kind,
    filled,
    fingerprint,
    others,
    tensordict_of,
    unchanged,
)
from tests.interop.checkpoint.saved_values import same, through_json

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
    assert (back.ring.cursor, back.ring.written) == (storage.ring.cursor, storage.ring.written)
    twin = kind(20)
    twin.with_state(through_json(storage.state()))()
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
    assert (back.ring.cursor, back.ring.written) == (storage.ring.cursor, storage.ring.written)


def test_the_documented_keys():
    data = TensorDict({"a": torch.ones(2), "b": {"c": torch.zeros(2)}}, [2])
    state = filled(ListStorage, ["text", torch.ones(2), data, {"k": [1, (2.0, None)]}]).state_dict()
    assert state["_storage"][0] == "text" and state["_storage"][3] == {"k": [1, (2.0, None)]}
    saved = state["_storage"][2]
    assert set(saved) == {"a", "b.c"}
    assert same(TensorDict({}, []).load_state_dict(saved, strict=False), data)
    state = filled(CompressedListStorage, [data]).state_dict()
    (leaves,), (metadata,) = state["_storage"], state["_metadata"]
    assert [each.dtype for each in leaves] == [torch.uint8] * 2 and metadata["shapes"] == [[2], [2]]


def test_a_state_dict_as_others_write_it():
    data = TensorDict({"a": torch.ones(2), "b": {"c": torch.zeros(2)}}, [2])
    storage = ListStorage(5)
    storage.load_state_dict({"_storage": [data.state_dict(), torch.ones(1), "text"]})
    assert same(storage[0], data) and storage[2] == "text" and storage.ring.cursor == 3


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
    for held in state["_storage"][0] if kind is CompressedListStorage else [state["_storage"][0]["t"]]:
        held[...] = torch.tensor(5)
    assert not back.get(0)["t"].any()


@pytest.mark.parametrize(
    "wrong",
    [
        {1, 2}, object(), np.ones(2), NonTensorData("a"), TensorDict({}, []), {"k": {3}}, [lambda: 0],
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
                with pytest.raises(CheckpointError, match="_metadata"):
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


# ---------------------------------------------------------------------- pickles


class Custom:
    def __init__(self, value):
        self.value = value


@each_kind
def test_other_objects_are_pickled_by_leave_at_both_ends(kind, tmp_path):
    storage = filled(kind, ["a", {"env": Custom(3)}])
    for save in (lambda: storage.dumps(tmp_path / "c"), storage.state_dict, storage.state):
        with pytest.raises(TypeError, match=r"item 1(, .*)?: .*Custom cannot be saved.*"):
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
    back.loads(tmp_path / "c", allow_pickle=True)
    assert back.get(1)["env"].value == 3
    other = kind(20)
    other.checkpointer = checkpointer(allow_pickle=True)
    other.loads(tmp_path / "c")
    assert other.get(1)["env"].value == 3


# ---------------------------------------------------------------------- buffers and hooks


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
    with pytest.raises(CheckpointMismatch, match="capacity of 20"):
        target.loads(tmp_path / "c")
    assert list(target) == ["aa", "bb", "more"]
