"""Ragged rows of every length and width in every storage: read back, also through files, or refused before a write."""

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torch import Tensor

import interop
from fbuf.checkpoint import CheckpointCorrupt, Fields
from interop import (
    CompressedListStorage,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    TensorDictReplayBuffer,
)
from interop.checkpoint.layouts import layout_of
from interop.shared.folder_description import sealed

STORAGES: dict[str, Callable[[Path], Any]] = {
    "tensors": lambda path: LazyTensorStorage(8),
    "declared": lambda path: LazyTensorStorage(8, ragged=["r"]),
    "files": lambda path: LazyMemmapStorage(8, scratch_dir=path),
    "list": lambda path: ListStorage(8),
    "stack": lambda path: LazyStackStorage(8),
    "compressed": lambda path: CompressedListStorage(8),
}
PACKED = ["tensors", "declared", "files"]
LENGTHS = [[1, 0, 3], [0, 0, 0], [2, 2, 2], [0, 4], [0]]
SHAPES = [(), (2,), (0,), (2, 0), (0, 3)]


def parts_of(lengths: list[int], shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    return [(torch.arange(torch.Size((n, *shape)).numel()) % 7).reshape(n, *shape).to(dtype) for n in lengths]


def in_holes(parts: list[Tensor]) -> Tensor:
    """A jagged tensor with gaps between its rows."""
    starts = torch.arange(len(parts) + 1) * (max(map(len, parts)) + 2)
    values = torch.full((int(starts[-1]), *parts[0].shape[1:]), 1).to(parts[0].dtype)
    for start, part in zip(starts.tolist(), parts, strict=False):
        values[start : start + len(part)] = part
    lengths = torch.tensor([*map(len, parts)])
    return torch.nested.nested_tensor_from_jagged(values, starts, lengths=lengths)


WRITES: dict[str, Callable[[list[Tensor]], Any]] = {
    "jagged": lambda parts: torch.nested.nested_tensor(parts, layout=torch.jagged),
    "with gaps": in_holes,
    "stacked": lambda parts: parts,
}


def batch(parts: list[Tensor], way: str) -> Any:
    """The rows as a batch with a second entry."""
    ids = torch.arange(len(parts))
    if way == "stacked":
        return lazy_stack([TensorDict({"r": part, "id": at}) for part, at in zip(parts, ids, strict=True)])
    return TensorDict({"r": WRITES[way](parts), "id": ids}, [len(parts)])


def check(found: Any, parts: list[Tensor]) -> None:
    """Whether a batch has these rows."""
    items = found if isinstance(found, list) else found.unbind(0)
    assert len(items) == len(parts)
    for item, part in zip(items, parts, strict=True):
        assert (item["r"].dtype, item["r"].shape) == (part.dtype, part.shape) and torch.equal(item["r"], part)


@pytest.mark.parametrize("way", WRITES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", STORAGES)
def test_rows_come_back_or_are_refused_by_name(kind: str, shape: tuple[int, ...], way: str, tmp_path: Path) -> None:
    chosen = LENGTHS if (kind, way) in (("tensors", "jagged"), ("files", "stacked")) else LENGTHS[:1]
    for number, (lengths, dtype) in enumerate(
        zip(chosen, [torch.bfloat16, torch.bool, torch.float32] * 2, strict=False)
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        parts = parts_of(lengths, shape, dtype)
        buffer = ReplayBuffer(storage=STORAGES[kind](folder / "rows"), batch_size=2, collate_fn=lambda items: items)
        is_dense = way == "stacked" and len(set(lengths)) == 1 and kind != "declared"
        if kind in PACKED and 0 in shape and not is_dense:
            with pytest.raises(TypeError, match=r"'r': ragged rows of shape \[any length.*leave the entry out"):
                buffer.extend(batch(parts, way))
            assert len(buffer) == 0 and not [*folder.rglob("*.memmap")] and not [*folder.rglob("*.bytes")]
            continue
        buffer.extend(batch(parts, way))
        buffer.extend(batch(parts, way))
        parts = parts * 2
        check(buffer[:], parts)
        check([buffer[at] for at in range(len(parts))], parts)
        assert len(buffer.sample()) == 2
        buffer.dumps(folder / "saved")
        loaded = ReplayBuffer(storage=STORAGES[kind](folder / "loaded"), collate_fn=lambda items: items)
        loaded.loads(folder / "saved")
        check(loaded[:], parts)
        again = ReplayBuffer(storage=STORAGES[kind](folder / "again"), collate_fn=lambda items: items)
        again.load_state_dict(buffer.state_dict())
        check(again[:], parts)
        if kind == "files":
            check(LazyMemmapStorage.open(folder / "rows", "r")[:], parts)
        else:
            check(pickle.loads(pickle.dumps(buffer.storage))[:], parts)
            check(copy.deepcopy(buffer.storage)[:], parts)
        buffer[0] = buffer[len(parts) - 1]
        check(buffer[:], [parts[-1], *parts[1:]])


@pytest.mark.parametrize("shape", [(0,), (2, 0)])
def test_single_rows_and_items_without_values_are_refused(shape: tuple[int, ...]) -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(8, ragged=["r"]))
    with pytest.raises(TypeError, match="'r': ragged rows of shape"):
        buffer.add(TensorDict({"r": torch.zeros(3, *shape)}))
    with pytest.raises(TypeError, match="nothing was written"):
        ReplayBuffer(storage=LazyTensorStorage(8)).extend(
            {"r": torch.nested.nested_tensor([torch.zeros(3, *shape)], layout=torch.jagged)}
        )
    buffer.add(TensorDict({"r": torch.zeros(3, 1)}))
    with pytest.raises(RuntimeError, match="'r': items are"):
        buffer.add(TensorDict({"r": torch.zeros(3, *shape)}))
    assert len(buffer) == 1


def test_a_layout_of_such_rows_is_damage() -> None:
    saved = {"root": {"varied": "float32", "shape": [0]}, "leaves": [[[], [2], "int64"]]}
    with pytest.raises(CheckpointCorrupt, match="ragged rows without values"):
        layout_of(Fields({"layout": saved}, "here").any("layout"), "here")


# ------------------------------------------------------------------ what the storage was told of stays


def jagged(lengths: list[int]) -> Any:
    nested = torch.nested.nested_tensor([torch.arange(n) for n in lengths], layout=torch.jagged)
    return TensorDict({"r": nested, "n": {"s": nested * 2}, "id": torch.arange(len(lengths))}, [len(lengths)])


def resized(buffer: Any, path: Path) -> Any:
    buffer.resize(12, scratch_dir=path if in_folder(buffer) else None)
    return buffer


def in_folder(buffer: Any) -> bool:
    return getattr(buffer.storage, "scratch_dir", None) is not None


def reopened(buffer: Any, path: Path) -> Any:
    folder = buffer.storage.scratch_dir
    buffer.storage.close()
    return TensorDictReplayBuffer(storage=LazyMemmapStorage.open(folder, "r+"), batch_size=2)


def emptied(buffer: Any, path: Path) -> Any:
    buffer.empty()
    return reopened(buffer, path)


def opened(buffer: Any, path: Path) -> Any:
    buffer.dumps(path)
    return interop.open(path, mode="r+", batch_size=2)


def opened_empty(buffer: Any, path: Path) -> Any:
    buffer.empty()
    return opened(buffer, path)


def state_dict(buffer: Any, path: Path) -> Any:
    other = TensorDictReplayBuffer(storage=copy.deepcopy(buffer.storage), batch_size=2)
    other.empty()
    other.load_state_dict(buffer.state_dict())
    return other


WAYS: dict[str, Callable[[Any, Path], Any]] = {
    "resize": resized,
    "dumps": opened,
    "empty, dumps": opened_empty,
    "state_dict": state_dict,
}
WAYS_OF_FOLDERS: dict[str, Callable[[Any, Path], Any]] = {
    "open": reopened,
    "empty, open": emptied,
    "resize, open": lambda buffer, path: reopened(resized(buffer, path), path),
    "open, resize": lambda buffer, path: resized(reopened(buffer, path), path),
}
GIVEN: dict[str, dict[str, Any]] = {
    "ragged": {"ragged": ["r", ("n", "s")]},
    "both": {"ragged": [("n", "s")], "shared_prefixes": ["r"]},
    "none": {},
}


@pytest.mark.parametrize("given", ["both", "none"])
@pytest.mark.parametrize(
    ("kind", "way"),
    [
        *((kind, way) for kind in ("tensors", "anonymous", "files") for way in WAYS),
        *(("files", way) for way in WAYS_OF_FOLDERS),
    ],
)
def test_declared_entries_have_any_length_also_later(kind: str, way: str, given: str, tmp_path: Path) -> None:
    make: Any = LazyTensorStorage if kind == "tensors" else LazyMemmapStorage
    folder = {"scratch_dir": tmp_path / "rows"} if kind == "files" else {}
    buffer = TensorDictReplayBuffer(storage=make(8, **folder, **GIVEN[given]), batch_size=2)
    buffer.extend(jagged([3, 0, 5]))
    declared = buffer.storage.table.ragged, buffer.storage.table.shared_prefixes
    buffer = {**WAYS, **WAYS_OF_FOLDERS}[way](buffer, tmp_path / "new")
    assert (buffer.storage.table.ragged, buffer.storage.table.shared_prefixes) == declared
    buffer.empty()
    first, other = ({"r": torch.arange(n), "n": {"s": torch.arange(n) * 2}, "id": torch.tensor(n)} for n in (3, 4))
    buffer.add(TensorDict(first))
    if given == "none":
        assert not buffer.storage.table.layout.varied  # one length, as before
        return
    buffer.add(TensorDict(other))
    buffer.append_to(0, {"r": torch.tensor([7, 8])})
    assert [buffer[place]["r"].tolist() for place in (0, 1)] == [[0, 1, 2, 7, 8], [0, 1, 2, 3]]
    assert [buffer[place]["n", "s"].tolist() for place in (0, 1)] == [[0, 2, 4], [0, 2, 4, 6]]


@pytest.mark.parametrize("given", ["ragged", "both"])
def test_a_folder_of_an_earlier_version_declares_what_it_holds(given: str, tmp_path: Path) -> None:
    path = tmp_path / "rows"
    buffer = TensorDictReplayBuffer(storage=LazyMemmapStorage(8, scratch_dir=path, **GIVEN[given]), batch_size=2)
    buffer.extend(jagged([3, 0, 5]))
    buffer.storage.close()
    text = json.loads((path / "storage.json").read_text())["storage"]
    del text["ragged"], text["shared_prefixes"]
    (path / "storage.json").write_text(sealed(text))
    table = LazyMemmapStorage.open(path, "r").table
    assert table.ragged == {("r",), ("n", "s")} and table.shared_prefixes == {
        key if isinstance(key, tuple) else (key,) for key in GIVEN[given].get("shared_prefixes", ())
    }
    text["ragged"], text["shared_prefixes"] = [[1.5]], []
    (path / "storage.json").write_text(sealed(text))
    with pytest.raises(CheckpointCorrupt, match="keys are texts or integers"):
        LazyMemmapStorage.open(path, "r")
