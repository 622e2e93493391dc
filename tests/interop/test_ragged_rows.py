"""Ragged rows of every length and width in every storage: read back, also through files, or refused before a write."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torch import Tensor

from fbuf.checkpoint import CheckpointCorrupt, Fields
from interop import (
    CompressedListStorage,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
)
from interop.checkpoint.layouts import layout_of

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
