"""The buffer that is at a path: made of what its files say, without its rows being read."""

import os
from pathlib import Path

from interop.buffers import ReplayBuffer
from interop.buffers.sampled import Sampled
from interop.formats import H5StorageCheckpointer
from interop.formats.h5 import shape_of
from interop.formats.torchrl_folder import open_torchrl
from interop.looking.path_kinds import MEANINGS, Kind, UnknownPathError, below, kind_of
from interop.opening.checkpoints import Components, Mode, check_components, opened_checkpoint, over
from interop.shared.journal import ReadOnly
from interop.storages import LazyMemmapStorage, LazyTensorStorage
from interop.writers import ImmutableDatasetWriter

_LOCAL: dict[Kind, str] = {
    "hub": "HubFolderExperienceReplay",
    "lerobot": "LeRobotExperienceReplay",
    "minari": "MinariExperienceReplay",
}

_SHOWN = 8  # of what is in a folder


def open(
    path: str | os.PathLike[str],
    mode: Mode = "r",
    *,
    components: Components | None = None,
    batch_size: int | None = None,
    allow_pickle: bool = False,
) -> Sampled:
    """The buffer that a checkpoint, a folder of rows, or a dataset is, with its components.

    - A checkpoint (of `dumps`, ensembles too): buffer, storage, sampler, writer and their states. Only the manifest and
      the state of the components are read. Rows of tensors, with text and ragged rows, stay in the files, are mapped, and
      are read where they are drawn; they stay readable when another checkpoint replaces this one. Read at once are items
      of lists, frames of a `LazyFrameStorage`, and rows that a checkpointer or hook of TED data or H5 files has changed.
      The checksums of rows are not compared: that is `verify`. Sampler and transforms work as in the saved buffer. Of a
      storage that was saved by itself: a buffer over it, with a `RandomSampler`, or the given one.
    - A folder of rows: as `LazyMemmapStorage.open`, in a buffer with a `RandomSampler`, or the given one.
    - A folder of torchrl: the buffer that `convert_torchrl` makes, with its rows mapped in these files.
    - A dataset: a folder that was converted; a hub folder, a Minari or a LeRobot folder, which are converted at the first
      use, see `interop.datasets`. An H5 file of `H5StorageCheckpointer`, which is read at once.
    - A folder with exactly one of these below it: that one.

    Nothing in the files is executed or imported: they name classes of this library, and plain arguments.

    Args:
        path: the file or folder.
        mode: "r" to read: writes of rows are a RuntimeError. "r+" to go on writing: a folder of rows itself; a checkpoint
            is loaded into memory as by `loads`, and stays as it is until the next `dumps`.
        components: what the files do not have, or what replaces what they name. "storage", "sampler", "writer": the
            component, built as it was, or its class, which gets the saved arguments. "transform": the chain, or None to
            read rows as they are stored. "collate_fn". "buffer": a class, or a function that is called with storage,
            sampler, writer, transform and batch_size. "members": for an ensemble, a list of such dicts.
        batch_size: of `sample()`; that of the checkpoint by default.
        allow_pickle: read pickled objects of a list: this runs code that the file names.

    Raises:
        FileNotFoundError: nothing is there.
        UnknownPathError: it is nothing that this library reads.
        CheckpointCorrupt: it is damaged.
        CheckpointMismatch: a class or argument is not known; the message says what to pass.
        RuntimeError: with "r+", another storage has the folder open.
    """
    if mode not in ("r", "r+"):
        raise ValueError(f"mode must be 'r' or 'r+', got {mode!r}")
    root, given = Path(path), dict(components or {})
    check_components(given)
    kind = kind_of(root)
    if kind == "checkpoint":
        buffer = opened_checkpoint(root, mode, given, allow_pickle)
        if batch_size is not None:
            buffer.batch_size = batch_size
        return buffer
    if given.get("storage") is not None:
        raise ValueError(f"components has 'storage', which only a checkpoint takes: {root} is {MEANINGS[kind]}")
    if kind == "rows":
        return _rows(root, mode, given, batch_size)
    if mode == "r+" and kind != "h5":
        raise ValueError(
            f"{root} is {MEANINGS[kind]}, which is only read. Convert it once, and open the result: "
            f"fbuf convert {root} TARGET"
        )
    if kind == "dataset":
        return _rows(root, "r", {"writer": ImmutableDatasetWriter(), **given}, batch_size)
    if kind in _LOCAL:
        from interop import datasets  # here: a program without datasets does not load them

        arguments = {
            name: given[name] for name in ("sampler", "transform", "collate_fn") if given.get(name) is not None
        }
        dataset: Sampled = getattr(datasets, _LOCAL[kind])(
            root.absolute().name, batch_size, from_local=root, **arguments
        )
        return dataset
    if kind == "h5":
        return _h5(root, mode, given, batch_size)
    if kind == "torchrl":
        return _torchrl(root, given, batch_size)
    found = below(root)
    if len(found) == 1:
        return open(found[0], mode, components=components, batch_size=batch_size, allow_pickle=allow_pickle)
    inside = [str(each.relative_to(root)) for each in found]
    raise UnknownPathError(
        f"{root} is a folder with {len(inside)} of these in it, open one: {', '.join(inside[:_SHOWN])}"
    )


def open_as_stored(path: str | os.PathLike[str]) -> Sampled:
    """`open`, to look at or convert: of a checkpoint without its transforms, which a program would have to pass."""
    return open(path, components={"transform": None} if kind_of(path) == "checkpoint" else None)


def _rows(root: Path, mode: Mode, given: Components, batch_size: int | None) -> ReplayBuffer:
    storage = LazyMemmapStorage.open(root, mode)
    try:
        return over(storage, given, batch_size)
    except BaseException:
        storage.close()
        raise


def _h5(root: Path, mode: Mode, given: Components, batch_size: int | None) -> ReplayBuffer:
    items, ndim = shape_of(root)
    storage = LazyTensorStorage(items, ndim=ndim)
    storage.checkpointer = H5StorageCheckpointer()
    storage.loads(root)
    buffer = over(storage, given, batch_size)
    if mode == "r":
        storage.guard.journal = ReadOnly(str(root))
    return buffer


def _torchrl(root: Path, given: Components, batch_size: int | None) -> ReplayBuffer:
    found = open_torchrl(root)
    parts = {"sampler": found.sampler, "writer": found.writer} | {name: each for name, each in given.items() if each}
    buffer = over(found.storage, parts, found.batch_size if batch_size is None else batch_size)
    buffer.storage.guard.journal = ReadOnly(str(root))
    return buffer
