"""What was consumed of a memory map in a folder stays consumed when the folder is opened again."""

import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from interop import (
    ConsumingSampler,
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    PromptGroupSampler,
    TensorDictReplayBuffer,
)
from interop.engine.kept_values import KeptValues
from tests.interop.rows import check_same


def rows(ids):
    return TensorDict({"prompt_id": torch.as_tensor(ids), "x": torch.as_tensor(ids) * 10.0}, [len(ids)])


def made(folder, sampler, capacity=12, **kwargs):
    try:
        storage = LazyMemmapStorage.open(folder)
    except FileNotFoundError:
        storage = LazyMemmapStorage(capacity, scratch_dir=folder)
    return TensorDictReplayBuffer(storage=storage, sampler=sampler, **kwargs)


def groups_of(sampler, order=list):
    """The groups: slots, uses, and whether a group can be drawn or goes on, by number."""
    saved = sampler.state()["groups"]
    parts = np.split(saved["slots"], np.cumsum(saved["rows"])[:-1]) if len(saved["rows"]) else []
    ready, opened = set(saved["ready"].tolist()), set(saved["open"].tolist())
    every = zip(saved["numbers"].tolist(), parts, saved["uses"].tolist(), strict=True)
    return {
        number: (order(part.tolist()), uses, at in ready, at in opened) for at, (number, part, uses) in enumerate(every)
    }


def draws_of(sampler):
    saved = sampler.state()
    return saved["drawn"].tolist(), sorted(saved["order"][: saved["live"]].tolist())


def in_order(sampler):
    """The groups in the order in which they were begun, without their numbers."""
    return [group for _, group in sorted(groups_of(sampler).items())]


@pytest.mark.parametrize("choice", ["group_size", "size_key", "no bound"])
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_groups_go_on_as_if_the_folder_had_stayed_open(tmp_path_factory, choice, data):
    folder = tmp_path_factory.mktemp("groups") / "rows"
    most, size, capacity = (
        data.draw(st.integers(1, 3)),
        data.draw(st.integers(1, 3)),
        data.draw(st.sampled_from([5, 12])),
    )

    def sampler():
        if choice == "size_key":
            return PromptGroupSampler(size_key="tries", max_uses=most)
        return PromptGroupSampler(size, max_uses=None if choice == "no bound" else most)

    def change(call):
        for each in (buffer, unbroken):
            call(each)

    buffer = made(folder, sampler(), capacity)
    unbroken = TensorDictReplayBuffer(storage=LazyTensorStorage(capacity), sampler=sampler())
    written = False
    kinds = ["write", "write", "open", "open", "look", "draw"] + ["edit", "empty"] * (choice != "no bound")
    for _ in range(data.draw(st.integers(2, 14))):
        kind = data.draw(st.sampled_from(kinds))
        if kind == "write":
            ids = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=min(9, capacity)))
            change(lambda each, ids=ids: each.extend(rows(ids).set("tries", torch.tensor([1 + id_ for id_ in ids]))))
            written = True
        elif kind == "draw" and written and unbroken.sampler.num_ready:
            count = unbroken.sampler.num_ready  # all: the order of the groups may differ
            change(lambda each, count=count: each.sample(count * (1 if choice == "size_key" else size)))
        elif kind == "edit" and written and len(buffer.storage):
            slot, id_ = (data.draw(st.integers(0, most)) for most in (len(buffer.storage) - 1, 3))
            change(lambda each, slot=slot, id_=id_: edit(each, slot, id_))
        elif kind == "empty" and written:
            change(lambda each: each.empty())
        elif kind == "open" and written:
            if choice == "no bound" and any(
                not (is_ready or is_open) for _, _, is_ready, is_open in in_order(unbroken.sampler)
            ):
                break  # a folder without uses does not say which groups are broken
            buffer.storage.close()
            buffer = made(folder, sampler())
        elif kind == "look":
            assert in_order(buffer.sampler) == in_order(unbroken.sampler)
    assert len(buffer) == len(unbroken)
    assert in_order(buffer.sampler) == in_order(unbroken.sampler)


def edit(buffer, slot, id_):
    buffer.set_at_("tries", torch.tensor([1 + id_]), torch.tensor([slot]))
    buffer.set_at_("prompt_id", torch.tensor([id_]), torch.tensor([slot]))
    len(buffer)  # reads the edit


def test_a_row_without_a_number_breaks_its_group(tmp_path):
    """A buffer whose sampler keeps no groups overwrites the first completion of an incomplete group."""
    buffer = made(tmp_path / "rows", PromptGroupSampler(3, max_uses=2), capacity=8)
    buffer.extend(rows([1, 7, 7, 7, 8, 8, 8, 1]))
    buffer.storage.close()
    buffer = made(tmp_path / "rows", None)
    buffer.extend(rows([5]))
    buffer.storage.close()
    buffer = made(tmp_path / "rows", PromptGroupSampler(3, max_uses=2))
    buffer.extend(rows([1, 1]))
    assert sorted((group.id, group.slots, group.reason) for group in buffer.sampler.groups()) == [
        (1, (1, 2), "incomplete"),
        (1, (7,), "overwritten"),
        (5, (0,), "incomplete"),
        (7, (3,), "overwritten"),
        (8, (4, 5, 6), None),
    ]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_items_go_on_as_if_the_folder_had_stayed_open(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("items") / "rows"
    most = data.draw(st.integers(1, 3))
    buffer = made(folder, ConsumingSampler(most))
    for _ in range(data.draw(st.integers(2, 10))):
        kind = data.draw(st.sampled_from(["write", "write", "draw", "draw", "mark", "empty", "open"]))
        if kind == "write":
            buffer.extend(rows(data.draw(st.lists(st.integers(0, 99), min_size=1, max_size=9))))
        elif kind == "draw" and len(buffer.storage) and len(buffer):
            buffer.sample(data.draw(st.integers(1, 12)))
        elif kind == "mark" and len(buffer.storage):
            buffer.mark_update(torch.tensor([data.draw(st.integers(0, len(buffer.storage) - 1))]))
        elif kind == "empty" and len(buffer.storage):
            buffer.empty()
        elif kind == "open" and len(buffer.storage):
            before, left = draws_of(buffer.sampler), len(buffer)
            buffer.storage.close()
            buffer = made(folder, ConsumingSampler(most))
            assert len(buffer) == left
            assert draws_of(buffer.sampler) == before


@pytest.mark.parametrize("kind", ["groups", "items"])
def test_iterating_goes_on_behind_what_was_consumed(tmp_path, kind):
    def sampler():
        return PromptGroupSampler(2, max_uses=1) if kind == "groups" else ConsumingSampler()

    buffer = made(tmp_path / "rows", sampler(), batch_size=4)
    buffer.extend(rows([0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]))
    seen = [*buffer.sample()["index"].tolist()]
    buffer.storage.close()
    buffer = made(tmp_path / "rows", sampler(), batch_size=4)
    for batch in buffer:
        seen += batch["index"].tolist()
    assert sorted(seen) == list(range(12)) and len(buffer) == 0
    buffer.storage.close()
    buffer = made(tmp_path / "rows", sampler(), batch_size=4)
    assert len(buffer) == 0
    with pytest.raises(RuntimeError, match="Cannot sample"):
        buffer.sample()
    buffer.extend(rows([6, 6, 7, 7]))
    assert set(buffer.sample()["prompt_id"].tolist()) == {6, 7}


def test_rows_in_a_wrapped_ring_keep_their_groups(tmp_path):
    buffer = made(tmp_path / "rows", PromptGroupSampler(3, max_uses=2), capacity=7)
    buffer.extend(rows([5, 5, 5, 6, 6]))
    buffer.extend(rows([6, 7, 7, 7]))  # overwrites two rows of the first group
    before = groups_of(buffer.sampler)
    buffer.storage.close()
    buffer = made(tmp_path / "rows", PromptGroupSampler(3, max_uses=2))
    batch = buffer.sample(6)
    assert set(batch["prompt_id"].tolist()) == {6, 7} and set(batch["group_uses"].tolist()) == {1}
    assert batch["index"].reshape(2, 3).tolist() in ([[3, 4, 5], [6, 0, 1]], [[6, 0, 1], [3, 4, 5]])
    assert {number: found[0] for number, found in groups_of(buffer.sampler).items()} == {
        number: found[0] for number, found in before.items()
    }


def test_a_loaded_checkpoint_replaces_what_the_folder_says(tmp_path):
    buffer = made(tmp_path / "rows", PromptGroupSampler(2, max_uses=1), batch_size=2)
    buffer.extend(rows([0, 0, 1, 1, 2, 2]))
    first = buffer.sample()
    buffer.dumps(tmp_path / "checkpoint")
    buffer.sample()
    buffer.loads(tmp_path / "checkpoint")
    before = groups_of(buffer.sampler)
    buffer.storage.close()
    buffer = made(tmp_path / "rows", PromptGroupSampler(2, max_uses=1), batch_size=2)
    assert len(buffer) == 4 and groups_of(buffer.sampler) == before
    assert not set(buffer.sample()["prompt_id"].tolist()) & set(first["prompt_id"].tolist())


def test_a_reader_sees_what_was_consumed_and_changes_nothing(tmp_path):
    buffer = made(tmp_path / "rows", ConsumingSampler())
    buffer.extend(rows(range(8)))
    buffer.sample(5)
    reader = TensorDictReplayBuffer(
        storage=LazyMemmapStorage.open(tmp_path / "rows", mode="r"), sampler=ConsumingSampler()
    )
    assert len(reader) == 3
    reader.sample(3)
    buffer.storage.close()
    assert len(made(tmp_path / "rows", ConsumingSampler())) == 3


def test_a_folder_keeps_the_uses_or_the_priorities(tmp_path):
    buffer = made(tmp_path / "rows", ConsumingSampler())
    buffer.extend(rows(range(8)))
    buffer.sample(5)
    assert (tmp_path / "rows" / "storage.uses").stat().st_size == KeptValues.size(12)
    buffer.storage.close()
    buffer = made(tmp_path / "rows", PrioritizedSampler(12, 1.0, 1.0))
    buffer.update_priority(torch.arange(8), torch.arange(8.0))
    names = {each.name for each in (tmp_path / "rows").iterdir()}
    assert "storage.priorities" in names and "storage.uses" not in names
    buffer.storage.close()
    buffer = made(tmp_path / "rows", PrioritizedSampler(12, 1.0, 1.0))
    check_same(buffer.sampler.priorities, torch.arange(8.0))
    buffer.storage.close()
    buffer = made(tmp_path / "rows", ConsumingSampler())
    assert len(buffer) == 8  # nothing is known of their uses any more
    buffer.storage.cleanup()
    assert not list((tmp_path / "rows").iterdir())


def test_groups_without_a_bound_keep_nothing(tmp_path):
    buffer = made(tmp_path / "rows", PromptGroupSampler(2))
    buffer.extend(rows([0, 0]))
    buffer.sample(2)
    assert not (tmp_path / "rows" / "storage.uses").exists()
    with pytest.raises(ValueError, match="max_uses must be at most"):
        PromptGroupSampler(2, max_uses=1 << 22)
    in_memory = TensorDictReplayBuffer(storage=LazyTensorStorage(4), sampler=PromptGroupSampler(2, max_uses=1))
    in_memory.extend(rows([0, 0]))
    assert len(in_memory) == 2


def test_acknowledged_draws_of_a_killed_process_are_consumed(in_a_fork, tmp_path):
    told = in_a_fork(
        """
        import os, signal
        import torch
        from tensordict import TensorDict
        from interop import ConsumingSampler, LazyMemmapStorage, TensorDictReplayBuffer

        into, out = os.pipe()
        if (child := os.fork()) == 0:
            storage = LazyMemmapStorage(4096, scratch_dir=folder)
            buffer = TensorDictReplayBuffer(storage=storage, sampler=ConsumingSampler())
            buffer.extend(TensorDict({"x": torch.arange(4096)}, [4096]))
            while True:
                os.write(out, buffer.sample(3)["x"].numpy().tobytes())
        os.close(out)
        with os.fdopen(into, "rb") as reader:
            seen = reader.read(50 * 24)
            os.kill(child, signal.SIGKILL)
            seen += reader.read()
        os.waitpid(child, 0)
        print(seen.hex())
        """,
        folder=os.fspath(tmp_path / "rows"),
    )
    drawn = np.frombuffer(bytes.fromhex(told.strip()), np.int64).tolist()
    left = made(tmp_path / "rows", ConsumingSampler()).sample(4096)["x"].tolist()
    assert len(drawn) >= 150 and not set(drawn) & set(left)
    assert 4096 - len(left) - len(drawn) in (0, 3)  # the last call may have been on its way
