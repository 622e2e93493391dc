"""A format of the user's, the zip file of docs/do/extending.md: exact, atomic, checked, without pickle."""

import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from fbuf.checkpoint import CheckpointCorrupt, CheckpointError, CheckpointMismatch
from interop import (
    CompressedListStorage,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSliceSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    StorageCheckpointerBase,
    TensorDictMaxValueWriter,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from interop.checkpoint.state_bytes import pack, unpack
from interop.transforms import VecNorm
from tests.interop.page import names_of
from tests.interop.rows import check_same


@pytest.fixture(scope="module")
def page() -> Any:
    """The functions of the page."""
    return names_of("def save_zip")


def rows(count: int = 13, start: int = 0) -> TensorDict:
    step = torch.arange(start, start + count)
    return TensorDict(
        {
            "x": step[:, None].expand(-1, 3).bfloat16(),
            "reward": step[:, None].float(),
            "done": step % 5 == 4,
            "text": NonTensorStack(*[f"text {number}" for number in step.tolist()]),
        },
        [count],
    )


def objects(count: int = 13, start: int = 0) -> list[Any]:
    return [
        {"a": number, 3: "text", "c": (1, np.ones(number % 4)), "d": b"abc", "e": float("nan")}
        for number in range(start, start + count)
    ]


def prioritized(storage: Any, **more: Any) -> Any:
    generator = torch.Generator().manual_seed(1)
    return TensorDictPrioritizedReplayBuffer(
        alpha=0.7, beta=0.5, storage=storage, generator=generator, batch_size=4, **more
    )


def of_kind(storage: Any, kind: Any = TensorDictReplayBuffer, **more: Any) -> Any:
    return kind(storage=storage, generator=torch.Generator().manual_seed(1), batch_size=4, **more)


def ensemble() -> Any:
    members = of_kind(LazyTensorStorage(10)), prioritized(LazyMemmapStorage(10))
    return ReplayBufferEnsemble(*members, batch_size=4, p=[0.3, 0.7], generator=torch.Generator().manual_seed(2))


def sharing() -> Any:
    """Members on one storage."""
    storage = LazyTensorStorage(10)
    return ReplayBufferEnsemble(
        prioritized(storage), prioritized(storage), batch_size=4, generator=torch.Generator().manual_seed(2)
    )


BUFFERS: dict[str, Any] = {
    "prioritized": lambda: prioritized(LazyTensorStorage(10), prefetch=2),
    "memory map": lambda: prioritized(LazyMemmapStorage(10)),
    "slices": lambda: of_kind(
        LazyTensorStorage(10), sampler=PrioritizedSliceSampler(10, 0.7, 0.5, slice_len=2, end_key="done")
    ),
    "epochs": lambda: of_kind(LazyTensorStorage(10), sampler=SamplerWithoutReplacement(), prefetch=1),
    "ranks": lambda: of_kind(LazyTensorStorage(10), writer=TensorDictMaxValueWriter("reward")),
    "list": lambda: of_kind(ListStorage(10), ReplayBuffer, collate_fn=list),
    "list of tensordicts": lambda: of_kind(ListStorage(10)),
    "compressed": lambda: of_kind(CompressedListStorage(10)),
    "transforms": lambda: of_kind(LazyTensorStorage(10), transform=VecNorm(in_keys=["reward"])),
    "ensemble": ensemble,
    "ensemble on one storage": sharing,
}


def filled(name: str) -> Any:
    buffer = BUFFERS[name]()
    for member in buffer.members if isinstance(buffer, ReplayBufferEnsemble) else [buffer]:
        member.extend(objects() if name == "list" else rows())
        if isinstance(member, TensorDictPrioritizedReplayBuffer):
            member.update_priority(torch.arange(5), torch.rand(5))
    buffer.sample()
    return buffer


def same(one: Any, other: Any) -> None:
    if isinstance(one, list):
        assert repr(one) == repr(other)
    else:
        check_same(one, other)


@pytest.mark.parametrize("name", BUFFERS)
def test_a_loaded_buffer_goes_on(name: str, page: Any, tmp_path: Path) -> None:
    saved, loaded, beside = filled(name), BUFFERS[name](), BUFFERS[name]()
    page["save_zip"](saved, tmp_path / "buffer.zip")
    page["load_zip"](loaded, tmp_path / "buffer.zip")
    beside.load_state_dict(saved.state_dict())
    assert [each.name for each in tmp_path.iterdir()] == ["buffer.zip"]
    for _ in range(3):
        batch = saved.sample()
        same(loaded.sample(), batch)
        same(beside.sample(), batch)
    if hasattr(saved, "members"):
        saved, loaded = saved[1], loaded[1]
    for buffer in (saved, loaded):
        buffer.extend(objects(4, 50) if name == "list" else rows(4, 50))
    if saved.prefetch_queue is None:  # batches that were drawn ahead are as before the write, however many there are
        same(loaded.sample(), saved.sample())
    same(loaded[:], saved[:])


@pytest.mark.parametrize("name", ["prioritized", "memory map", "list", "ensemble"])
def test_damage_is_found_and_changes_nothing(name: str, page: Any, tmp_path: Path) -> None:
    saved, target, path = filled(name), filled(name), tmp_path / "buffer.zip"
    page["save_zip"](saved, path)
    expected, before = repr(saved.state_dict()), repr(target.state_dict())
    content = path.read_bytes()
    random = np.random.default_rng(0)
    refused = 0
    for case in range(120):
        changed = bytearray(content)
        place = int(random.integers(len(content)))
        if case % 4:
            changed[place] ^= 1 << int(random.integers(8))
        else:
            del changed[place:]
        path.write_bytes(changed)
        try:
            page["load_zip"](target, path)
        except CheckpointError:
            refused += 1
            assert repr(target.state_dict()) == before
        else:  # a bit that means nothing, such as in a date
            assert repr(target.state_dict()) == expected
            target = filled(name)
            before = repr(target.state_dict())
    assert refused > 90


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failed_save_leaves_the_file_before(
    call: str, page: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved, path = filled("prioritized"), tmp_path / "buffer.zip"
    page["save_zip"](saved, path)
    content = path.read_bytes()
    saved.extend(rows(3))

    def full(*args: object) -> None:
        raise OSError(28, "no space left")

    monkeypatch.setattr(os, call, full)
    with pytest.raises(OSError, match="no space"):
        page["save_zip"](saved, path)
    monkeypatch.undo()
    assert path.read_bytes() == content
    assert [each.name for each in tmp_path.iterdir()] == ["buffer.zip"]


def test_states_of_something_else_are_refused(page: Any, tmp_path: Path) -> None:
    page["save_zip"](filled("ensemble"), tmp_path / "ensemble.zip")
    page["save_zip"](filled("prioritized"), tmp_path / "buffer.zip")
    three = ReplayBufferEnsemble(*(of_kind(LazyTensorStorage(10)) for _ in range(3)), batch_size=3)
    cases = [("ensemble", "prioritized"), ("buffer", "ensemble"), ("buffer", "list"), ("buffer", "ranks")]
    for name, target in [*((name, filled(target)) for name, target in cases), ("ensemble", three)]:
        before = repr(target.state_dict()) if target is not three else ""
        with pytest.raises(CheckpointError):
            page["load_zip"](target, tmp_path / f"{name}.zip")
        if target is not three:
            assert repr(target.state_dict()) == before
    with pytest.raises(CheckpointMismatch, match="2 buffers were saved, 3 are here"):
        page["load_zip"](three, tmp_path / "ensemble.zip")


def test_components_by_themselves(page: Any, tmp_path: Path) -> None:
    saved, loaded = filled("memory map"), BUFFERS["memory map"]()
    for part in ("storage", "sampler", "writer", "transform"):
        page["save_zip"](getattr(saved, part), tmp_path / part)
        page["load_zip"](getattr(loaded, part), tmp_path / part)
    loaded.generator.set_state(saved.generator.get_state())
    same(loaded.sample(), saved.sample())


def test_a_checkpointer_writes_the_rows_in_this_format(page: Any, tmp_path: Path) -> None:
    class Zip(StorageCheckpointerBase):
        def dumps(self, storage: Any, path: Any) -> None:
            Path(path).mkdir()
            page["save_zip"](storage, Path(path) / "rows.zip")

        def loads(self, storage: Any, path: Any, **options: Any) -> None:
            page["load_zip"](storage, Path(path) / "rows.zip")

    saved, loaded = filled("prioritized"), BUFFERS["prioritized"]()
    for buffer in (saved, loaded):
        buffer.storage.checkpointer = Zip()
    saved.dumps(tmp_path / "c")
    loaded.loads(tmp_path / "c")
    same(loaded.sample(), saved.sample())
    [found] = (tmp_path / "c").rglob("rows.zip")
    assert zipfile.is_zipfile(found)


# ---------------------------------------------------------------------- pack and unpack


def test_values_come_back_as_they_were() -> None:
    state = {
        "bytes": b"\x00\xff",
        "pair": (1, 2.5, None, float("inf")),
        "text": "\ud800 é",
        "inner": [{"t": torch.arange(3, dtype=torch.int16)}, {"$array": "no mark"}],
        "empty": torch.zeros(0, 3).bfloat16(),
        3: np.float64(2),
        "td": TensorDict({"x": torch.ones(2, 1)}, [2]),
    }
    text, arrays = pack(state)
    found = unpack(text, [bytearray(array) for array in arrays])
    assert repr(found) == repr(state)
    read_only = unpack(text, [array.tobytes() for array in arrays])
    read_only["inner"][0]["t"] += 1  # was copied
    assert b"pickle" not in text


def test_impossible_shapes_are_found() -> None:
    text, arrays = pack({"x": np.zeros((3, 0))})
    changed = text.replace(b'"raw":{"$array":["uint8",[0]]}', b'"raw":{"$array":["uint8",[0,1180591620717411303424]]}')
    assert changed != text
    with pytest.raises(CheckpointCorrupt, match="no array has the shape"):
        unpack(changed, arrays)


def test_objects_are_refused() -> None:
    with pytest.raises(TypeError, match=r"save tensors and plain values instead"):
        pack({"what": object()})


def test_arrays_that_are_missing_or_wrong_are_found() -> None:
    text, arrays = pack({"x": torch.arange(4), "y": torch.ones(2, 2)})
    for wrong in (arrays[:-1], [*arrays, arrays[0]], [*arrays[:-1], arrays[-1][1:]], arrays[::-1], []):
        with pytest.raises(CheckpointCorrupt, match="here"):
            unpack(text, wrong, "here")
    for changed in (
        text[:-1],
        b"",
        b"[]",
        text.replace(b'"$array"', b'"$other"'),
        text.replace(b"float32", b"float99"),
        text.replace(b'["uint8",[', b'["uint8",[-1,'),
        text.replace(b'["uint8",[', b'["uint8",[4611686018427387904,'),
        text.replace(b'"$array":["uint8"', b'"$array":[["uint8"]'),
    ):
        assert changed != text
        with pytest.raises(CheckpointCorrupt):
            unpack(changed, arrays, "here")
