"""What `convert`, `merge` and `resize` do: rows in the order of time, from formats that are read to those written."""

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from fbuf.checkpoint import CheckpointMismatch
from fbuf.checkpoint.files import remove_folder
from interop.buffers import ReplayBuffer, ReplayBufferEnsemble, TensorDictReplayBuffer
from interop.buffers.resizing import pieces_in_order, rows_in_order
from interop.datasets import to_hub_folder, to_minari
from interop.formats import H5StorageCheckpointer, convert_torchrl
from interop.looking.path_kinds import kind_of
from interop.opening import open
from interop.storages import LazyMemmapStorage, LazyTensorStorage

_ROWS = 4096  # at once


def convert(source: str, target: str, to: str | None) -> Path:
    """Write the rows at a path in another format. Returns where they are."""
    return merge([source], target, to)


def merge(sources: Sequence[str], target: str, to: str | None) -> Path:
    """Write the rows of several paths, one after the other. Returns where they are."""
    path, to = Path(target), to or ("h5" if Path(target).suffix in (".h5", ".hdf5") else "checkpoint")
    if to != "minari" and os.path.lexists(path):
        raise FileExistsError(f"{path} is there already: give the name of something new")
    if len(sources) == 1 and kind_of(sources[0]) == "torchrl":
        if to != "checkpoint":
            raise ValueError("a folder of torchrl is converted to a checkpoint, and that one to other formats")
        convert_torchrl(sources[0], path)
        return path
    buffers = [_rows_of(each) for each in sources]
    if to == "checkpoint" and len(buffers) == 1 and kind_of(sources[0]) == "checkpoint":
        buffers[0].dumps(path)  # with its sampler
        return path
    joined = _joined(buffers, path if to == "rows" else None)
    try:
        if to == "checkpoint":
            joined.dumps(path)
        elif to == "hub":
            to_hub_folder(joined, path)
        elif to == "h5":
            storage = LazyTensorStorage(max(len(joined), 1))  # which the checkpointer of H5 files takes
            ReplayBuffer(storage=storage).extend(joined.storage[:])
            H5StorageCheckpointer().dumps(storage, path)
        elif to == "minari":
            to_minari(joined, target)
            root = os.environ.get("MINARI_DATASETS_PATH") or os.path.join(
                os.path.expanduser("~"), ".minari", "datasets"
            )
            return Path(root) / target
    except BaseException:
        if to == "rows":
            remove_folder(path)
        raise
    joined.storage.close()  # type: ignore[attr-defined]  # it is a LazyMemmapStorage
    return path


def resize(source: str, target: str, items: int) -> Path:
    """Write a checkpoint or a folder of rows with another capacity. Returns where it is."""
    path, kind = Path(target), kind_of(source)
    if os.path.lexists(path):
        raise FileExistsError(f"{path} is there already: give the name of something new")
    if kind not in ("checkpoint", "rows"):
        raise ValueError(f"{source} is no checkpoint and no folder of rows: convert it first")
    buffer = open(source, "r")
    members = buffer.members if isinstance(buffer, ReplayBufferEnsemble) else [buffer]
    for each in members:
        assert isinstance(each, ReplayBuffer)
        if kind == "rows":
            each.resize(items, scratch_dir=path)
            storage = each.storage
            assert isinstance(storage, LazyMemmapStorage)
            storage.close()
        else:
            each.resize(items)
    if kind == "checkpoint":
        buffer.dumps(path)
    return path


def _rows_of(path: str) -> ReplayBuffer:
    """The buffer at a path, whose rows are as they are stored."""
    kind = kind_of(path)
    buffer = open(path, components={"transform": None} if kind == "checkpoint" else None)
    if not isinstance(buffer, ReplayBuffer):
        raise CheckpointMismatch(
            f"{path} is an ensemble: its members are no rows in one order. Use interop.open(path)[i]"
        )
    return buffer


def _joined(buffers: Sequence[ReplayBuffer], folder: Path | None) -> ReplayBuffer:
    """A buffer with the rows of several ones, in files of a folder, or in anonymous maps."""
    storages = [each.storage for each in buffers]
    dims = {each.ndim for each in storages}
    if len(dims) > 1:
        raise ValueError(f"the sources have items of {sorted(dims)} dims: merge those with equal ones")
    total = sum(map(len, buffers))
    if not total:
        raise ValueError("the sources hold no items")
    storage = LazyMemmapStorage(total, ndim=dims.pop(), scratch_dir=folder, checksums=folder is not None)
    tensordicts = all(
        layout is not None and layout.is_tensordict for layout in (each.contents.layout for each in storages)
    )
    joined = (TensorDictReplayBuffer if tensordicts else ReplayBuffer)(storage=storage)
    for buffer in buffers:
        rows = rows_in_order(buffer.storage, buffer.writer)
        for part in pieces_in_order(buffer.storage, rows, _ROWS):
            data = buffer.storage.get(torch.from_numpy(part))
            joined.writer.extend(data)
    return joined
