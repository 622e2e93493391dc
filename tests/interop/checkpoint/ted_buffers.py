"""Buffers of TED data, and what to say of two of them."""

import copy
from pathlib import Path
from typing import Any

import h5py
import torch

from fbuf.checkpoint import Writing
from interop import H5StorageCheckpointer, LazyTensorStorage, ReplayBuffer
from tests.interop.ted.model import Written, differences, paths, write

CAPACITY = 5
ENDS = {(1, 0), (4, 1), (4, 0), (7, 1)}


def steps(count: int, lanes: tuple[int, ...] = (), seed: int = 0, **options: Any) -> Written:
    """So many steps of each lane, one after the other."""
    return write(count, lanes, count, ENDS, seed=seed, **options)


def extended(buffer: Any, written: Written) -> Any:
    """The buffer, with these steps written into it."""
    data = written.data
    buffer.extend(data.transpose(0, 1) if data.ndim > 1 else data)
    return buffer


def buffer_of(checkpointer: Any, lanes: tuple[int, ...] = (), storage: Any = LazyTensorStorage, **options: Any) -> Any:
    """An empty buffer."""
    items = CAPACITY * max(1, int(torch.tensor(lanes).prod()))
    return ReplayBuffer(storage=storage(items, ndim=1 + len(lanes), **options), checkpointer=checkpointer)


def state(buffer: Any) -> Any:
    """What a buffer holds and where it stands."""
    writer = buffer.writer.state_dict()
    held = buffer[:] if len(buffer) else None
    bits = (
        {str(key): held.get(key).contiguous().view(-1).view(torch.uint8).tolist() for key in paths(held)}
        if held is not None
        else None
    )
    return len(buffer), writer["_cursor"], writer["_write_count"], bits


def check_same(one: Any, another: Any) -> None:
    """The same rows, bit for bit, and the same place to go on at."""
    assert len(one) == len(another)
    assert not differences(one[:], another[:])
    assert state(one) == state(another)


def rewritten(path: Path, checkpointer: Any, storage: Any, change: Any) -> None:
    """A checkpoint with sums that are right and another description."""
    with Writing(path) as out:
        described = copy.deepcopy(checkpointer.write(storage, out))
        change(described["content"])
        out.write(described)


def put(*steps_: Any) -> Any:
    """What puts a value, or what it makes of the one that is there, at a place in a tree."""
    *path, last, value = steps_

    def change(tree: Any) -> None:
        for step in path:
            tree = tree[step]
        tree[last] = value(tree[last]) if callable(value) else value

    return change


def everything(path: Path) -> dict[str, Any]:
    """The datasets of a file."""
    found: dict[str, Any] = {}
    with h5py.File(path) as opened:
        opened.visititems(lambda name, held: found.update({name: held[()]}) if isinstance(held, h5py.Dataset) else None)
    return found


def alone(tmp_path: Path, lanes: tuple[int, ...] = (), count: int = 8, **options: Any) -> tuple[Any, Path]:
    """A buffer, and a file by itself of its rows."""
    rows = steps(count, lanes, observations={"obs": ((3,), torch.float32), ("deep", "more"): ((), torch.int16)})
    buffer = extended(buffer_of(H5StorageCheckpointer(**options), lanes), rows)
    buffer.storage.dumps(tmp_path / "rows.h5")
    return buffer, tmp_path / "rows.h5"
