"""Hooks of TED data with each storage and checkpointer: the rows come back bit for bit, or an error names the way out."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import NonTensorData, TensorDict

from fbuf.checkpoint import CheckpointMismatch
from interop import (
    CompressedListStorage,
    Flat2TED,
    FlatStorageCheckpointer,
    H5Combine,
    H5Split,
    H5StorageCheckpointer,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    ListStorageCheckpointer,
    Nested2TED,
    NestedStorageCheckpointer,
    ReplayBuffer,
    StorageEnsemble,
    TED2Flat,
    TED2Nested,
    TensorStorageCheckpointer,
)
from interop.checkpoint.values import decode, encode
from tests.interop.checkpoint.ted_buffers import CAPACITY, check_same, extended, steps

HOOKS: dict[str, tuple[list[Any], list[Any]]] = {
    "flat": ([TED2Flat], [Flat2TED]),
    "nested": ([TED2Nested], [Nested2TED]),
    "parts": ([TED2Nested, H5Split], [H5Combine, Nested2TED]),
}
each_pair = pytest.mark.parametrize("hooks", HOOKS)
TENSORS = [LazyTensorStorage, LazyMemmapStorage]
LISTS = [ListStorage, LazyStackStorage, CompressedListStorage]
OBSERVATIONS = {
    "obs": ((3,), torch.float32),
    ("deep", "more"): ((), torch.int16),
    "none": ((0,), torch.float32),
    "half": ((2,), torch.bfloat16),
    "bits": ((), torch.uint16),
    "waves": ((1,), torch.complex64),
}


def hooked(storage: Any, hooks: str, checkpointer: Any = None) -> Any:
    """The storage, with these hooks to save and to load."""
    storage.checkpointer = checkpointer
    for save in HOOKS[hooks][0]:
        storage.register_save_hook(save())
    for load in HOOKS[hooks][1]:
        storage.register_load_hook(load())
    return storage


@each_pair
@pytest.mark.parametrize("kind", TENSORS)
@pytest.mark.parametrize("lanes", [(), (2,)])
@pytest.mark.parametrize("count", [1, 3, CAPACITY, 8])
def test_rows_come_back(kind: Any, hooks: str, lanes: tuple[int, ...], count: int, tmp_path: Path) -> None:
    def made() -> ReplayBuffer:
        storage = kind(CAPACITY * max(1, *lanes, 1), ndim=1 + len(lanes))
        return ReplayBuffer(storage=hooked(storage, hooks, TensorStorageCheckpointer()))

    buffer, other = extended(made(), steps(count, lanes, observations=OBSERVATIONS)), made()
    buffer.dumps(tmp_path / "saved")
    other.loads(tmp_path / "saved")
    check_same(buffer, other)
    buffer.storage.dumps(tmp_path / "alone")
    alone = made()
    alone.storage.loads(tmp_path / "alone")
    assert (alone[:] == buffer[:]).all()


@each_pair
def test_members_of_an_ensemble(hooks: str, tmp_path: Path) -> None:
    def made() -> Any:
        return StorageEnsemble(*(hooked(LazyTensorStorage(CAPACITY), hooks) for _ in range(2)))

    saved, target = made(), made()
    for place, member in enumerate(saved.members):
        extended(ReplayBuffer(storage=member), steps(4, seed=place))
    saved.dumps(tmp_path / "saved")
    target.loads(tmp_path / "saved")
    for one, another in zip(saved.members, target.members, strict=True):
        assert (one[:] == another[:]).all()


REFUSED: list[tuple[str, Callable[[], Any], str]] = [
    *(
        (f"{kind.__name__}, {hooks}", lambda kind=kind, hooks=hooks: hooked(kind(CAPACITY), hooks), "LazyTensorStorage")
        for kind in LISTS
        for hooks in HOOKS
    ),
    *(
        (
            f"{checkpointer.__name__}, {hooks}",
            lambda checkpointer=checkpointer, hooks=hooks: hooked(LazyTensorStorage(CAPACITY), hooks, checkpointer()),
            "TensorStorageCheckpointer",
        )
        for checkpointer in (FlatStorageCheckpointer, NestedStorageCheckpointer, H5StorageCheckpointer)
        for hooks in HOOKS
    ),
    *(
        (
            f"{kind.__name__} by a {checkpointer.__name__}",
            lambda kind=kind, checkpointer=checkpointer: hooked(kind(CAPACITY), "flat", checkpointer()),
            "use its default checkpointer, storage.checkpointer = None",
        )
        for kinds, checkpointer in ((LISTS, TensorStorageCheckpointer), (TENSORS, ListStorageCheckpointer))
        for kind in kinds
    ),
]


@pytest.mark.parametrize(("make", "way"), [each[1:] for each in REFUSED], ids=[each[0] for each in REFUSED])
def test_other_storages_and_checkpointers_are_refused(make: Any, way: str, tmp_path: Path) -> None:
    with pytest.raises((TypeError, ValueError), match=way):
        extended(ReplayBuffer(storage=make()), steps(4)).dumps(tmp_path / "saved")
    assert not [*tmp_path.iterdir()]


def registered(*hooks: Any) -> Any:
    storage = LazyTensorStorage(CAPACITY)
    for hook in hooks:
        storage.register_save_hook(hook)
    return extended(ReplayBuffer(storage=storage), steps(4))


@pytest.mark.parametrize(("hooks", "match"), [
    ([H5Split()], r"register TED2Nested\(\) before H5Split\(\)"),
    ([TED2Flat(), H5Split()], r"register TED2Nested\(\) before H5Split\(\)"),
    ([TED2Flat(), TED2Nested()], "flat already"),
    ([TED2Nested(), TED2Nested()], "flat already"),
    ([lambda data, path=None: {1, 2}], "an object of type set cannot be saved; save tensors and plain values instead$"),
])  # fmt: skip
def test_hooks_that_do_not_follow_each_other(hooks: list[Any], match: str, tmp_path: Path) -> None:
    with pytest.raises((TypeError, ValueError), match=match):
        registered(*hooks).dumps(tmp_path / "saved")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("value", [
    NonTensorData("text", batch_size=[4]),
    torch.nested.nested_tensor([torch.ones(size) for size in (1, 0, 2, 1)], layout=torch.jagged),
])  # fmt: skip
@each_pair
def test_rows_that_are_no_tensors(value: Any, hooks: str, tmp_path: Path) -> None:
    rows = steps(4).data
    rows["odd"] = value
    buffer = ReplayBuffer(storage=hooked(LazyTensorStorage(CAPACITY), hooks))
    buffer.extend(rows)
    with pytest.raises(TypeError, match="'odd': only"):
        buffer.dumps(tmp_path / "saved")
    assert not [*tmp_path.iterdir()]


def test_only_one_side_with_hooks(tmp_path: Path) -> None:
    plain, to_load = extended(ReplayBuffer(storage=LazyTensorStorage(CAPACITY)), steps(4)), LazyTensorStorage(CAPACITY)
    to_load.register_load_hook(Flat2TED())
    plain.storage.dumps(tmp_path / "plain")
    with pytest.raises(CheckpointMismatch, match="a storage without load hooks"):
        to_load.loads(tmp_path / "plain")
    registered(TED2Nested()).storage.dumps(tmp_path / "nested")
    with pytest.raises(CheckpointMismatch, match="register load hooks that undo them"):
        LazyTensorStorage(CAPACITY).loads(tmp_path / "nested")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.uint16, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("shapes", [[(2, 3), (0, 3), (1, 3)], [(2, 0)], [(1, 2), (3, 1)], [(4,), (0,)], [(0, 2)]])
def test_nested_tensors_are_saved(shapes: list[tuple[int, ...]], dtype: torch.dtype, tmp_path: Path) -> None:
    from interop.data.nested_tensors import joined

    parts = [torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype) for shape in shapes]
    back = decode(encode({"a": [joined(parts)], "b": TensorDict({"c": joined(parts)}, [len(parts)])}, "value"))
    for found in (back["a"][0], back["b"]["c"]):
        assert found.is_nested and found.layout == torch.strided and found.dtype == dtype
        for one, another in zip(found.unbind(0), parts, strict=True):
            assert one.shape == another.shape and torch.equal(one, another)


def test_parts_that_are_no_nested_tensor() -> None:
    from interop.data.nested_tensors import joined

    for parts in ([], [torch.ones(2), 1], [torch.ones(2), torch.ones(2).int()], [torch.ones(()), torch.ones(())]):
        with pytest.raises(ValueError, match="nested tensor"):
            joined(parts)
