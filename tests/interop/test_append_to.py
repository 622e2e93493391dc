"""Rollouts that grow where they are stored: every place beside a plain model, killed, interrupted, and read meanwhile."""

import contextlib
import copy
import os
import pickle
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torch import Tensor

from interop import (
    CompressedListStorage,
    ImmutableDatasetWriter,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    PromptGroupSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    RoundRobinWriter,
    StalenessAwareSampler,
    StorageEnsemble,
    TensorDictReplayBuffer,
)
from interop.data.packed import PackedValues
from tests.faults.children import forked
from tests.faults.interrupts import Interrupt, Tracer
from tests.faults.memmap import killed_at_line

CAPACITY = 6
STORAGES: dict[str, Callable[[Path], Any]] = {
    "tensors": lambda path: LazyTensorStorage(CAPACITY, ragged=["tokens"]),
    "files": lambda path: LazyMemmapStorage(CAPACITY, scratch_dir=path, ragged=["tokens"]),
    "list": lambda path: ListStorage(CAPACITY),
    "stack": lambda path: LazyStackStorage(CAPACITY),
    "compressed": lambda path: CompressedListStorage(CAPACITY),
}


def buffer_on(storage: Any, **more: Any) -> ReplayBuffer:
    return ReplayBuffer(storage=storage, collate_fn=lambda items: items, batch_size=2, **more)


def item(tokens: list[int], text: str, version: int) -> TensorDict:
    return TensorDict(
        {"tokens": torch.tensor(tokens, dtype=torch.int64), "text": text, "version": torch.tensor(version)}
    )


def held(buffer: Any) -> list[tuple[list[int], str, int]]:
    """What is stored, as the model has it."""
    found = [buffer.storage[slot] for slot in range(len(buffer.storage))]
    return [(each["tokens"].tolist(), each["text"], int(each["version"])) for each in found]


class Model:
    """Items in a plain list, around a ring."""

    def __init__(self) -> None:
        self.items: list[tuple[list[int], str, int]] = []
        self.next = 0

    def add(self, tokens: list[int], text: str, version: int) -> None:
        self.items[self.next : self.next + 1] = [(tokens, text, version)]
        self.next = (self.next + 1) % CAPACITY

    def append(self, slot: int, tokens: list[int], text: str, version: int | None) -> None:
        before, said, old = self.items[slot]
        self.items[slot] = before + tokens, said + text, old if version is None else version


def reopened(kind: str, buffer: ReplayBuffer, folder: Path) -> ReplayBuffer:
    """The same content in another way: saved and loaded, copied, pickled, or its folder opened again."""
    if kind == "files" and folder.name == "again":
        buffer.storage.close()  # type: ignore[attr-defined]  # a memory map
        return buffer_on(LazyMemmapStorage.open(buffer.storage.scratch_dir))  # type: ignore[attr-defined]
    if folder.name == "copied":
        return buffer_on(copy.deepcopy(buffer.storage))
    if folder.name == "pickled":
        return buffer_on(pickle.loads(pickle.dumps(buffer.storage)))
    buffer.dumps(folder / "saved")
    loaded = buffer_on(STORAGES[kind](folder / "rows"))
    loaded.loads(folder / "saved")
    return loaded


@pytest.mark.parametrize("way", ["again", "copied", "pickled", "loaded"])
@pytest.mark.parametrize("kind", STORAGES)
def test_random_histories_leave_what_a_list_has(kind: str, way: str, tmp_path: Path) -> None:
    (folder := tmp_path / way).mkdir()
    rng, model, buffer = random.Random(f"{kind} {way}"), Model(), buffer_on(STORAGES[kind](tmp_path / "rows"))
    for turn in range(120):
        if turn == 60:
            buffer = reopened(kind, buffer, folder)
            assert held(buffer) == model.items
        tokens, text = [rng.randrange(99) for _ in range(rng.randrange(9))], rng.choice(["", "a", "é", "xyz" * 50])
        if rng.random() < 0.2 or not model.items:
            buffer.add(item(tokens, text, turn))
            model.add(tokens, text, turn)
            continue
        slots = rng.sample(range(len(model.items)), rng.randrange(1, len(model.items) + 1))
        version = rng.choice([None, turn])
        replace = None if version is None else {"version": turn}
        if len(slots) == 1:
            more: Any = {"tokens": torch.tensor(tokens, dtype=torch.int64), "text": text}
            buffer.append_to(slots[0] - rng.choice([0, len(model.items)]), more, replace=replace)
        else:
            rows = [torch.tensor(tokens[:at], dtype=torch.int64) for at in range(len(slots))]
            many: Any = rows if rng.random() < 0.5 else torch.nested.nested_tensor(rows, layout=torch.jagged)
            buffer.append_to(torch.tensor(slots), {"tokens": many, "text": [text] * len(slots)}, replace=replace)
        for at, slot in enumerate(slots):
            model.append(slot, tokens if len(slots) == 1 else tokens[:at], text, version)
        assert held(buffer) == model.items
    batch = buffer.sample()
    assert len(batch) == 2


def test_a_rollout_grows_in_its_place_and_costs_half_of_it_more() -> None:
    buffer = buffer_on(LazyTensorStorage(64, ragged=["tokens"]))
    buffer.extend(lazy_stack([TensorDict({"tokens": torch.arange(100)}) for _ in range(64)]))
    values: PackedValues = buffer.storage.table.layout.values  # type: ignore[attr-defined]  # tensors
    addresses = set()
    for turn in range(200):
        buffer.append_to(slice(None), {"tokens": torch.full((64, 10), turn)})
        addresses.add(int(buffer.storage.table.rows.tensors[0][7, 0]))  # type: ignore[attr-defined]
    assert len(addresses) <= 10  # 100 to 2,100 tokens, by halves
    assert torch.equal(buffer[7]["tokens"], torch.cat([torch.arange(100), torch.arange(200).repeat_interleave(10)]))
    assert values.bytes < 4 * 64 * 2100 * 8


def test_two_rows_that_share_bytes_grow_apart() -> None:
    buffer = buffer_on(LazyTensorStorage(4))
    buffer.extend({"text": ["prompt"] * 3})  # one span
    for turn in range(4):
        for slot in (1, 0, 2):
            buffer.append_to(slot, {"text": f" {slot}{turn}"})
    assert buffer[:]["text"] == [f"prompt {slot}0 {slot}1 {slot}2 {slot}3" for slot in range(3)]


def test_python_values_of_other_kinds(tmp_path: Path) -> None:
    from tensordict import NonTensorStack

    buffer = buffer_on(LazyMemmapStorage(4, scratch_dir=tmp_path / "rows"))
    values: list[Any] = [b"ab", [], [1, 2], ["x"]]
    buffer.extend(TensorDict({"v": NonTensorStack(*values)}, [4]))
    buffer.append_to([0, 1, 2, 3], {"v": [b"c", [7], [2**70], [None]]})
    assert buffer.storage[:]["v"] == [b"abc", [7], [1, 2, 2**70], ["x", None]]
    with pytest.raises(TypeError, match="to which a str cannot be added"):
        buffer.append_to(0, {"v": "text"})


def test_several_item_dims_and_nested_keys() -> None:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(8, ndim=2), batch_size=2)
    texts = [[f"{row}{lane}" for lane in range(2)] for row in range(3)]
    data = TensorDict({"log": {"text": [text for row in texts for text in row]}}, [6])
    buffer.extend(data.reshape(3, 2).transpose(0, 1))
    buffer.append_to(torch.tensor([[0, 1], [2, 0]]), {"log": {"text": ["!", "?"]}})
    buffer.append_to((1, 1), {("log", "text"): "."})
    found = buffer.storage[:]["log", "text"]
    assert found == [["00", "01!"], ["10", "11."], ["20?", "21"]]


# ------------------------------------------------------------------ samplers


@pytest.mark.parametrize("kind", ["tensors", "list"])
def test_the_version_follows(kind: str, tmp_path: Path) -> None:
    sampler = StalenessAwareSampler(max_staleness=2, version_key="version")
    buffer = buffer_on(STORAGES[kind](tmp_path), sampler=sampler)
    for _ in range(3):
        buffer.add(item([1], "", 0))
    sampler.consumer_version = 9
    with pytest.raises(RuntimeError, match="staler than"):
        buffer.sample()
    buffer.append_to(1, {"tokens": torch.tensor([2])})
    assert [version for *_, version in held(buffer)] == [0, 9, 0]
    _, info = buffer.sample(return_info=True)
    assert info["index"].tolist() == [1] * 2 and not info["staleness"].any()
    buffer.append_to(2, {"tokens": torch.tensor([2])}, replace={"version": 8})
    sampler.consumer_version = 5
    buffer.append_to(1, {"tokens": torch.tensor([3])})  # does not make it older
    assert [version for *_, version in held(buffer)] == [0, 9, 8]


def test_of_groups_the_version_follows_and_uses_stay() -> None:
    staleness = StalenessAwareSampler(max_staleness=1, version_key="version")
    sampler = PromptGroupSampler(2, group_key="id", max_uses=2, staleness=staleness)
    buffer = ReplayBuffer(storage=LazyTensorStorage(8, ragged=["tokens"]), sampler=sampler, batch_size=2)
    rows = {"tokens": torch.zeros(4, 3), "id": torch.tensor([0, 0, 1, 1]), "version": torch.zeros(4, dtype=torch.int64)}
    buffer.extend(TensorDict(rows, [4]))
    staleness.consumer_version = 3
    buffer.append_to([2, 3], {"tokens": torch.ones(2, 1)})
    for _ in range(2):
        assert buffer.sample()["id"].tolist() == [1, 1]
        buffer.append_to([2, 3], {"tokens": torch.ones(2, 1)})
    with pytest.raises(RuntimeError):
        buffer.sample()


def test_priorities_and_generations_stay() -> None:
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(4, ragged=["tokens"]),
        sampler=PrioritizedSampler(4, 1.0, 0.0),
        writer=RoundRobinWriter(track_generations=True),
        batch_size=4,
    )
    buffer.extend(TensorDict({"tokens": torch.zeros(4, 3)}, [4]))
    buffer.update_priority(torch.arange(4), torch.tensor([0.0, 1.0, 0.0, 0.0]))
    buffer.append_to([0, 1], {"tokens": torch.ones(2, 2)})
    _, info = buffer.sample(return_info=True)
    assert info["index"].tolist() == [1] * 4
    assert buffer.writer.generations_of(torch.arange(4)).tolist() == [0] * 4


# ------------------------------------------------------------------ refusals

CALLS: list[tuple[type[Exception], str, Any, Any, Any]] = [
    (IndexError, "out of range", 3, {"text": "x"}, None),
    (IndexError, "one dim", [[0, 1]], {"text": ["x"]}, None),
    (ValueError, "named twice", [1, -2], {"text": ["x", "y"]}, None),
    (ValueError, "no entry to append to", 0, {}, {"version": 1}),
    (ValueError, "in more and in replace", 0, {"text": "x"}, {"text": "y"}),
    (KeyError, "not stored", 0, {"txt": "x"}, None),
    (KeyError, "not stored", 0, {"text": "x"}, {"versoin": 1}),
    ((TypeError, RuntimeError), "replace", 0, {"version": torch.tensor([1])}, None),  # type: ignore[list-item]
    (RuntimeError, "float32", 0, {"tokens": torch.zeros(2)}, None),
    (RuntimeError, "1 values for 2 items", [0, 1], {"text": ["x"]}, None),
    (TypeError, "cannot be added|text or other", 0, {"text": 7}, None),
    (RuntimeError, "version", 0, {"text": "x"}, {"version": 1.5}),
    (RuntimeError, "version", 0, {"text": "x"}, {"version": torch.zeros(2, dtype=torch.int64)}),
    (TypeError, "must be a dict", 0, "x", None),
]


@pytest.mark.parametrize("case", CALLS, ids=lambda case: case[1])
@pytest.mark.parametrize("kind", STORAGES)
def test_what_does_not_fit_changes_nothing(kind: str, case: Any, tmp_path: Path) -> None:
    error, match, index, more, replace = case
    buffer = buffer_on(STORAGES[kind](tmp_path / "rows"))
    for version in range(3):
        buffer.add(item([1, 2], "a", version))
    before = held(buffer), buffer.storage.ring.counts
    with pytest.raises(error, match=match):
        buffer.append_to(index, more, replace=replace)
    assert (held(buffer), buffer.storage.ring.counts) == before


def test_what_is_read_only_and_what_does_not_grow_is_refused_with_the_reason(tmp_path: Path) -> None:
    buffer = buffer_on(LazyMemmapStorage(4, scratch_dir=tmp_path / "rows"))
    buffer.add(item([1], "a", 0))
    with pytest.raises(RuntimeError, match="opened with mode='r'"):
        buffer_on(LazyMemmapStorage.open(tmp_path / "rows", "r")).append_to(0, {"text": "b"})
    dataset = buffer_on(buffer.storage, writer=ImmutableDatasetWriter())
    with pytest.raises(RuntimeError, match=r"doesn't allow writing. append_to\(\) needs another writer"):
        dataset.append_to(0, {"text": "b"})
    several = ReplayBufferEnsemble(buffer, batch_size=1)
    assert isinstance(several.storage, StorageEnsemble) and not hasattr(several, "append_to")
    plain = ReplayBuffer(storage=ListStorage(2), collate_fn=lambda items: items)
    plain.extend([torch.zeros(2), "text"])
    with pytest.raises(TypeError, match="only entries of tensordicts and dicts grow, the item in slot 0"):
        plain.append_to([0], {"x": ["b"]})
    with pytest.raises(IndexError):
        buffer_on(LazyTensorStorage(2)).append_to(0, {"x": "b"})
    assert held(buffer) == [([1], "a", 0)]


def test_items_of_a_list_in_the_hands_of_a_reader_stay() -> None:
    buffer = buffer_on(ListStorage(2))
    buffer.add({"tokens": torch.arange(2), "in": {"list": [1]}, "version": 0})
    seen = buffer[0]
    buffer.append_to(0, {"tokens": torch.tensor([5]), ("in", "list"): [2]}, replace={"version": 3})
    assert seen["tokens"].tolist() == [0, 1] and seen["in"] == {"list": [1]} and seen["version"] == 0
    found = buffer[0]
    assert found["tokens"].tolist() == [0, 1, 5] and found["in"] == {"list": [1, 2]} and found["version"] == 3


# ------------------------------------------------------------------ kills, interrupts, other processes


def grow(buffer: ReplayBuffer) -> None:
    """Everything in a row follows from its version, which all rows have in common."""
    version = int(buffer.storage[0]["version"])
    more = {"tokens": [torch.full((at + 1,), version) for at in range(3)], "text": [f"{version},"] * 3}
    buffer.append_to([0, 2, 1], more, replace={"version": version + 1})


def version_of(buffer: ReplayBuffer) -> int:
    """AssertionError for a torn row."""
    rows = held(buffer)
    [version] = {version for *_, version in rows}
    for (tokens, text, _), each in zip(rows, (1, 3, 2), strict=True):
        assert tokens == [number for number in range(version) for _ in range(each)]
        assert text == "".join(f"{number}," for number in range(version))
    return version


def begun(storage: Any, turns: int) -> ReplayBuffer:
    buffer = buffer_on(storage)
    for _ in range(3):
        buffer.add(item([], "", 0))
    for _ in range(turns):
        grow(buffer)
    return buffer


@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("turns", [0, 3])
@pytest.mark.parametrize("kind", STORAGES)
def test_an_interrupt_at_any_line_leaves_the_old_or_the_new_rows(
    kind: str, turns: int, step: int, tmp_path: Path
) -> None:
    before, outcomes, in_a_row = turns, set[int](), 0
    buffer = begun(STORAGES[kind](tmp_path / "rows"), turns)
    for at in range(0, 10**6, step):
        tracer = Tracer(at, at % 2 == 1)
        with contextlib.suppress(Interrupt), tracer:
            grow(buffer)
        found = version_of(buffer)
        assert found in (before, before + 1), tracer.where
        in_a_row = 0 if tracer.where else in_a_row + 1
        if in_a_row == 2:  # past the last line, and past the last place where Python looks for signals
            break
        outcomes.add(found - before)
        grow(buffer)
        before = version_of(buffer)
        assert before == found + 1
    assert at > 200 and outcomes == {0, 1}


@pytest.mark.parametrize("phase", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_kill_at_any_line_leaves_the_old_or_the_new_rows(phase: int, tmp_path: Path) -> None:
    storage = begun(LazyMemmapStorage(CAPACITY, scratch_dir=tmp_path / "rows", ragged=["tokens"]), 3).storage
    storage.close()
    step, line, killed, version = (40, 1, 0, 3) if not phase else (3, 2, 0, 3)

    def do() -> None:
        child = buffer_on(LazyMemmapStorage.open(tmp_path / "rows"))
        child.storage.guard.recover()
        killed_at_line(line, False)
        grow(child)
        os._exit(0)  # before the storage is closed

    outcomes = set()
    while True:
        how, told = forked(do, None)
        opened = buffer_on(LazyMemmapStorage.open(tmp_path / "rows"))
        found = version_of(opened)
        assert found in (version, version + 1), told
        outcomes.add((how, found - version))
        version = found
        opened.storage.close()
        if how != "killed":
            break
        killed += 1
        line += step
    assert killed > 5 and ("killed", 0) in outcomes and ("done", 1) in outcomes, (outcomes, killed)


@pytest.mark.parametrize("kind", ["tensors", "files"])
def test_another_process_reads_whole_rows_and_appends_too(kind: str, tmp_path: Path) -> None:
    storage = STORAGES[kind](tmp_path / "rows")
    buffer = begun(storage, 1)
    buffer.share()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads that a child does not have
        child = os.fork()
    if not child:
        try:
            for _ in range(60):
                with storage.lock.held():
                    version_of(buffer)
                    grow(buffer)
            os._exit(0)
        finally:
            os._exit(1)
    seen: set[int] = set()
    for _ in range(60):
        with storage.lock.held():
            seen.add(version_of(buffer))
            grow(buffer)
    assert os.waitpid(child, 0)[1] == 0
    assert version_of(buffer) == 121 and len(seen) == 60


def test_checkpoints_have_no_more_than_the_values(tmp_path: Path) -> None:
    buffer = begun(LazyTensorStorage(CAPACITY, ragged=["tokens"]), 50)
    state: Tensor = buffer.state_dict()["_storage"]["_values"]
    assert state.numel() == sum(8 * len(tokens) + len(text) for tokens, text, _ in held(buffer))
