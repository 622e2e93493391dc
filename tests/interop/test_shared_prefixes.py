"""Ragged rows that begin alike: stored once, read as without sharing, also after kills, copies and reclaimed space."""

import copy
import os
import pickle
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict, lazy_stack

import interop
from interop import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer
from interop.data.packed import PackedValues
from interop.data.shared_prefixes import SharedPrefixes, moved, pieces_of, whole_rows
from interop.engine.table import Table
from tests.faults.children import forked
from tests.faults.memmap import killed_at_line

STORAGES: dict[str, Callable[[Path, int], Any]] = {
    "tensors": lambda path, size: LazyTensorStorage(size, shared_prefixes=["tokens"]),
    "files": lambda path, size: LazyMemmapStorage(size, scratch_dir=path, shared_prefixes=["tokens"]),
}


def rows(lists: list[list[int]]) -> Any:
    return lazy_stack([TensorDict({"tokens": torch.tensor(row, dtype=torch.int64), "n": len(row)}) for row in lists])


def held(buffer: ReplayBuffer) -> list[list[int]]:
    return [row.tolist() for row in buffer.storage[:]["tokens"].unbind()]


def stored_bytes(buffer: ReplayBuffer) -> int:
    """The bytes that rows use, each counted once."""
    table: Table = buffer.storage.table  # type: ignore[attr-defined]  # tensors
    spans = np.concatenate(table.used_spans())
    spans = spans[spans[:, 0].argsort()]
    ends = np.maximum.accumulate(spans[:, 0] + (spans[:, 1] >> 2))
    return int((ends - np.maximum(spans[:, 0], np.append(0, ends[:-1]))).clip(0).sum())


def branches(rng: random.Random, depth: int, turn: int) -> list[list[int]]:
    """The 2**depth paths of a tree of turns."""
    paths: list[list[int]] = [[]]
    for _ in range(depth + 1):
        paths = [path + [rng.randrange(1 << 40) for _ in range(turn)] for path in paths for _ in range(2)]
    return paths


@pytest.mark.parametrize("kind", STORAGES)
def test_64_completions_of_a_prompt_and_64_branches_take_their_unique_tokens(kind: str, tmp_path: Path) -> None:
    rng = random.Random(0)
    prompt = [rng.randrange(1 << 40) for _ in range(2000)]
    group = [prompt + [rng.randrange(1 << 40) for _ in range(200)] for _ in range(64)]
    tree = branches(rng, 5, 120)
    for name, lists in {"group": group, "tree": tree}.items():
        buffer = ReplayBuffer(storage=STORAGES[kind](tmp_path / name, 64))
        buffer.extend(rows(lists))
        assert held(buffer) == lists
        unique = len({tuple(row[: at + 1])[-1] for row in lists for at in range(len(row))})
        assert stored_bytes(buffer) <= 1.1 * 8 * unique, name
        plain = ReplayBuffer(storage=LazyTensorStorage(64, ragged=["tokens"]))
        plain.extend(rows(lists))
        assert stored_bytes(plain) > 2.9 * stored_bytes(buffer)
        shares = {share.part: share for share in buffer.storage.plan().shares}
        assert "share their beginnings" in shares["values"].key
    if kind == "files":
        assert "prefixes shared" in str(interop.inspect(tmp_path / "tree"))


def test_a_conversation_that_branches_and_grows() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(8, shared_prefixes=["tokens"]))
    model = [list(range(1000))]
    buffer.extend(rows(model))
    for turn in range(6):
        buffer.append_to(0, {"tokens": torch.full((300,), turn)})
        model[0] = model[0] + [turn] * 300
        branch = model[0] + [-turn]
        buffer.extend(rows([branch]))
        model.append(branch)
        assert held(buffer) == model
    assert stored_bytes(buffer) < 1.1 * 8 * (1000 + 6 * 300 + 6)


@pytest.mark.parametrize("way", ["again", "copied", "pickled", "loaded", "state_dict"])
@pytest.mark.parametrize("kind", STORAGES)
def test_random_histories_are_those_of_plain_rows(
    kind: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("interop.data.packed._LEAST", 1 << 12)  # space is reclaimed often
    rng = random.Random(f"{kind} {way}")
    shared = ReplayBuffer(storage=STORAGES[kind](tmp_path / "rows", 9))
    plain = ReplayBuffer(storage=LazyTensorStorage(9, ragged=["tokens"]))
    beginnings = [[rng.randrange(1 << 30) for _ in range(300)] for _ in range(3)]
    for turn in range(80):
        if turn == 40:
            shared = otherwise(shared, kind, way, tmp_path)
        lists = [
            rng.choice(beginnings)[: rng.randrange(300)] + [turn] * rng.choice([0, 1, 90])
            for _ in range(rng.randrange(1, 5))
        ]
        stored = len(plain.storage)
        for buffer in (shared, plain):
            if turn % 3 or not stored:
                buffer.extend(rows(lists))
            elif turn % 2:
                buffer.append_to(turn % stored, {"tokens": torch.arange(turn)})
            else:
                buffer[turn % stored] = rows(lists[:1])[0]
        if turn % 10 == 0:
            beginnings[turn % 3] = held(plain)[turn % len(plain.storage)] + [turn] * 40
        assert held(shared) == held(plain)
        some = [rng.randrange(len(plain.storage)) for _ in range(4)]
        assert torch.equal(shared.storage[some]["tokens"].values(), plain.storage[some]["tokens"].values())
        assert torch.equal(shared.storage[some[0]]["tokens"], plain.storage[some[0]]["tokens"])
    sizes = shared.storage.table.layout.values, plain.storage.table.layout.values  # type: ignore[attr-defined]
    assert sizes[0].bytes < sizes[1].bytes * 2


def otherwise(buffer: ReplayBuffer, kind: str, way: str, folder: Path) -> ReplayBuffer:
    """The same content: opened again, copied, pickled, or saved and loaded."""
    if way == "again" and kind == "files":
        buffer.storage.close()  # type: ignore[attr-defined]  # a memory map
        return ReplayBuffer(storage=LazyMemmapStorage.open(folder / "rows"))
    if way in ("again", "copied"):
        return ReplayBuffer(storage=copy.deepcopy(buffer.storage))
    if way == "pickled":
        return ReplayBuffer(storage=pickle.loads(pickle.dumps(buffer.storage)))
    loaded = ReplayBuffer(storage=STORAGES[kind](folder / "loaded", 9))
    if way == "loaded":
        buffer.dumps(folder / "saved")
        assert torch.equal(
            interop.open(folder / "saved").storage[:]["tokens"].values(), buffer.storage[:]["tokens"].values()
        )
        loaded.loads(folder / "saved")
    else:
        loaded.load_state_dict(buffer.state_dict())
    assert stored_bytes(loaded) <= 1.1 * stored_bytes(buffer)
    return loaded


def test_a_reopened_folder_goes_on_sharing_also_with_further_keys_and_after_empty(tmp_path: Path) -> None:
    lists = [[*range(500), at] for at in range(5)]
    buffer = ReplayBuffer(storage=STORAGES["files"](tmp_path / "rows", 5))
    buffer.extend(rows(lists))
    buffer.storage.close()  # type: ignore[attr-defined]  # a memory map
    buffer = ReplayBuffer(storage=LazyMemmapStorage.open(tmp_path / "rows"))
    buffer[:] = rows(lists).set("more", torch.arange(5))
    assert held(buffer) == lists and stored_bytes(buffer) < 1.2 * 8 * 505
    buffer.empty()
    buffer.extend(TensorDict({"tokens": torch.arange(500).repeat(5, 1), "new": torch.arange(5)}, [5]))
    assert held(buffer) == [[*range(500)]] * 5 and stored_bytes(buffer) < 1.2 * 8 * 505


def test_checkpoints_of_both_kinds_load_into_both(tmp_path: Path) -> None:
    lists = [[*list(range(500)), at] for at in range(5)]
    kinds = {"shared": {"shared_prefixes": ["tokens"]}, "plain": {"ragged": ["tokens"]}}
    for name, given in kinds.items():
        buffer = ReplayBuffer(storage=LazyTensorStorage(5, **given))  # type: ignore[arg-type]
        buffer.extend(rows(lists))
        buffer.dumps(tmp_path / name)
        for into in kinds.values():
            loaded = ReplayBuffer(storage=LazyTensorStorage(5, **into))  # type: ignore[arg-type]
            loaded.loads(tmp_path / name)
            assert held(loaded) == lists


def test_rows_that_are_moved_still_share() -> None:
    values, known, rng = PackedValues(), SharedPrefixes(), np.random.default_rng(0)
    prompt = rng.bytes(4000)
    data = [memoryview(prompt[: 1000 * (at % 4 + 1)] + rng.bytes(50)) for at in range(12)]
    spans = known.append(values, data)
    before = whole_rows(values, spans)
    again = moved(values, spans)
    assert all((one == other).all() for one, other in zip(whole_rows(values, again), before, strict=True))
    old, new = (np.unique(pieces_of(values, each)[0], axis=0) for each in (spans, again))
    assert len(old) == len(new) and not np.isin(new[:, 0], old[:, 0]).any()


def test_a_kill_at_any_line_leaves_whole_rows(tmp_path: Path) -> None:
    prompt = list(range(400))
    buffer = ReplayBuffer(storage=STORAGES["files"](tmp_path / "rows", 4))
    buffer.extend(rows([[*prompt, at] for at in range(4)]))
    buffer.storage.close()  # type: ignore[attr-defined]  # a memory map
    line, killed, how = 1, 0, "killed"

    def do() -> None:
        child = ReplayBuffer(storage=LazyMemmapStorage.open(tmp_path / "rows"))
        killed_at_line(line, False)
        child.extend(rows([prompt + [7] * 60, prompt + [8] * 60]))
        child.append_to([0, 1], {"tokens": torch.arange(100).reshape(2, 50)})
        os._exit(0)

    while how == "killed":
        how, told = forked(do, None)
        assert how in ("killed", "done"), told
        storage = LazyMemmapStorage.open(tmp_path / "rows")
        for row, count in zip(storage[:]["tokens"].unbind(), storage[:]["n"].tolist(), strict=True):
            assert row[:400].tolist() == prompt and (len(row) - count) % 50 == 0
            assert row[400:count].unique().numel() == 1
        storage.close()
        line += 60
        killed += how == "killed"
    assert killed > 10


def test_another_process_shares_with_what_this_one_wrote(tmp_path: Path) -> None:
    buffer = ReplayBuffer(storage=STORAGES["files"](tmp_path / "rows", 40))
    prompt = list(range(500))
    buffer.extend(rows([[*prompt, 0]]))
    buffer.share()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads that a child does not have
        child = os.fork()
    for turn in range(15):
        buffer.extend(rows([[*prompt, turn, os.getpid()]]))
    if not child:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    found = held(buffer)
    assert len(found) == 31 and all(row[:500] == prompt for row in found)
    assert stored_bytes(buffer) < 2 * 8 * 500
