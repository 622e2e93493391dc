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
from interop.formats import H5StorageCheckpointer
from interop.looking import seal
from interop.looking.path_kinds import MEANINGS, kind_of
from interop.opening import open, open_as_stored
from interop.storages import LazyMemmapStorage, LazyTensorStorage, TensorStorage

_ROWS = 4096  # at once


def convert(source: str, target: str, to: str | None, exclude: Sequence[str] = ()) -> Path:
    """Write the rows at a path in another format. Returns where they are."""
    return merge([source], target, to, exclude)


def merge(sources: Sequence[str], target: str, to: str | None, exclude: Sequence[str] = ()) -> Path:
    """Write the rows of several paths, one after the other. Returns where they are.

    Entries of `exclude`, such as "next.info", are left out. The target of "minari" is the id of a dataset below
    `MINARI_DATASETS_PATH`; of other formats a path.
    """
    to = to or ("h5" if Path(target).suffix in (".h5", ".hdf5") else "checkpoint")
    path = _minari_root() / target if to == "minari" else Path(target)
    if to == "minari" and (Path(target).is_absolute() or target.startswith(".")):
        raise ValueError(
            f"{target} is no id of a Minari dataset, such as toy/line-v0: it is written below {_minari_root()}"
        )
    if to == "h5" and path.suffix != ".h5":
        raise ValueError(f"the name of an H5 file ends with .h5, got {target}")
    if os.path.lexists(path):
        raise FileExistsError(f"{path} is there already: give the name of something new")
    if len(sources) == 1 and to == "checkpoint" and not exclude and kind_of(sources[0]) in ("checkpoint", "torchrl"):
        _opened(sources[0]).dumps(path)  # with its sampler
        return path
    buffers = [buffer for each in sources for buffer in _rows_of(each)]
    joined = _joined(buffers, path if to == "rows" else None, _keys(buffers, exclude))
    try:
        if to == "checkpoint":
            joined.dumps(path)
        elif to == "hub":
            to_hub_folder(joined, path)
        elif to == "h5":
            _to_h5(joined, path)
        elif to == "minari":
            to_minari(joined, target)
    except BaseException:
        if to == "rows":
            remove_folder(path)
        raise
    joined.storage.close()  # type: ignore[attr-defined]  # it is a LazyMemmapStorage
    return path


def _minari_root() -> Path:
    """Where Minari has its datasets."""
    given = os.environ.get("MINARI_DATASETS_PATH")
    return Path(given) if given else Path.home() / ".minari" / "datasets"


def _to_h5(joined: ReplayBuffer, path: Path) -> None:
    storage = LazyTensorStorage(max(len(joined), 1))  # which the checkpointer of H5 files takes
    ReplayBuffer(storage=storage).extend(joined.storage[:])
    try:
        H5StorageCheckpointer().dumps(storage, path)
    except ValueError as error:
        raise ValueError(
            f"an H5 file has steps in the order of episodes, with numbers alone: {error}. Other rows are written with --to "
            "rows, hub or checkpoint"
        ) from error


def resize(source: str, target: str, items: int) -> Path:
    """Write a checkpoint or a folder of rows with another capacity. Returns where it is."""
    path, kind = Path(target), kind_of(source)
    if os.path.lexists(path):
        raise FileExistsError(f"{path} is there already: give the name of something new")
    if kind not in ("checkpoint", "rows"):
        raise ValueError(
            f"{source} is {MEANINGS[kind]}, not a checkpoint or a folder of rows. "
            + ("Resize one of them" if kind == "folder" else f"Convert it first: fbuf convert {source} CHECKPOINT")
        )
    buffer = open(source, "r")
    members = buffer.members if isinstance(buffer, ReplayBufferEnsemble) else [buffer]
    for each in members:
        assert isinstance(each, ReplayBuffer)
        if kind == "rows":
            each.resize(items, scratch_dir=path)
            storage = each.storage
            assert isinstance(storage, LazyMemmapStorage)
            storage.close()
            seal(path)
        else:
            each.resize(items)
    if kind == "checkpoint":
        buffer.dumps(path)
    return path


def _opened(path: str) -> ReplayBuffer | ReplayBufferEnsemble:
    """What is at a path, whose rows are as they are stored."""
    buffer = open_as_stored(path)
    assert isinstance(buffer, ReplayBuffer | ReplayBufferEnsemble)
    return buffer


def _rows_of(path: str) -> list[ReplayBuffer]:
    """The buffer at a path; of an ensemble, its members one after the other."""
    buffer = _opened(path)
    if isinstance(buffer, ReplayBuffer):
        return [buffer]
    members = list(buffer.members)
    if not all(isinstance(each, ReplayBuffer) for each in members):
        raise CheckpointMismatch(f"{path} is an ensemble with members that are ensembles: open it, and take these")
    return members


def _keys(buffers: Sequence[ReplayBuffer], exclude: Sequence[str]) -> list[tuple[str, ...]]:
    """The keys of entries by their names. KeyError for one that no buffer has."""
    stored = {
        path for each in buffers if (layout := each.storage.contents.layout) is not None for path in layout.places
    }
    keys = [tuple(name.split(".")) for name in exclude]
    for name, key in zip(exclude, keys, strict=True):
        if not any(path[: len(key)] == key for path in stored):
            there = ", ".join(sorted(".".join(map(str, path)) for path in stored))
            raise KeyError(f"--exclude {name}: there is no such entry, but {there or 'items without names'}")
    return keys


def _joined(buffers: Sequence[ReplayBuffer], folder: Path | None, exclude: Sequence[tuple[str, ...]]) -> ReplayBuffer:
    """A buffer with the rows of several ones without some entries, in files of a folder, or in anonymous maps."""
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
            data = data.exclude(*exclude) if exclude else data
            try:
                joined.writer.extend(data)
            except (TypeError, RuntimeError) as error:
                if isinstance(buffer.storage, TensorStorage):
                    raise
                raise ValueError(
                    f"the items of a {type(buffer.storage).__name__} differ in structure, shape or dtype ({error}). Only a "
                    "checkpoint has such items: --to checkpoint, from one SOURCE"
                ) from error
    return joined
