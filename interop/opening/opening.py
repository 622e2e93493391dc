"""The buffer that is at a path: made of what its files say, without its rows being read."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from interop.buffers import ReplayBuffer, TensorDictReplayBuffer
from interop.buffers.sampled import Sampled
from interop.checkpoint.layouts import layout_of
from interop.looking.path_kinds import MEANINGS, Kind, UnknownPathError, kind_of
from interop.opening.checkpoints import Components, Mode, check_components, opened_checkpoint
from interop.shared.folder_description import description
from interop.shared.journal import ReadOnly
from interop.storages import LazyMemmapStorage, LazyTensorStorage
from interop.writers import ImmutableDatasetWriter

_LOCAL: dict[Kind, str] = {
    "hub": "HubFolderExperienceReplay",
    "lerobot": "LeRobotExperienceReplay",
    "minari": "MinariExperienceReplay",
}


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
      the state of the components are read. Rows of tensors stay in the files, are mapped, and are read where they are
      drawn; they stay readable when another checkpoint replaces this one. Text, items of lists and frames are read at once.
      The checksums of rows are not compared: that is `verify`. Sampler and transforms work as in the saved buffer.
    - A folder of rows: as `LazyMemmapStorage.open`, in a buffer with a `RandomSampler`, or the given one.
    - A dataset: a folder that was converted; a hub folder, a Minari or a LeRobot folder, which are converted at the first
      use, see `interop.datasets`; an H5 file of `H5StorageCheckpointer`, which is read.

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
    if kind == "rows":
        return _rows(root, mode, given, batch_size)
    if mode == "r+" and kind != "h5":
        raise ValueError(f"{root} is {MEANINGS[kind]}, which is only read: copy its rows into another storage")
    if kind == "dataset":
        storage = LazyMemmapStorage.open(root, "r")
        return _over(storage, ImmutableDatasetWriter(), given, batch_size)
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
        raise UnknownPathError(
            f"{root} was written by torchrl: convert it once, by interop.convert_torchrl({os.fspath(root)!r}, new_folder)"
        )
    raise UnknownPathError(
        f"{root} is a folder with several of these in it: open one of them; interop.inspect lists them"
    )


def _rows(root: Path, mode: Mode, given: Mapping[str, object], batch_size: int | None) -> ReplayBuffer:
    layout = layout_of(description(root).any("layout"), str(root))
    storage = LazyMemmapStorage.open(root, mode)
    default = TensorDictReplayBuffer if layout.is_tensordict else ReplayBuffer
    try:
        return _over(storage, given.get("writer"), given, batch_size, default)
    except BaseException:
        storage.close()
        raise


def _over(
    storage: LazyMemmapStorage | LazyTensorStorage,
    writer: object,
    given: Mapping[str, object],
    batch_size: int | None,
    kind: Callable[..., ReplayBuffer] = TensorDictReplayBuffer,
) -> ReplayBuffer:
    """A buffer over a storage, with the components that were given."""
    if given.get("storage") is not None:
        raise ValueError("components has 'storage': the rows of a folder are their own storage")
    parts = {name: given[name] for name in ("sampler", "transform", "collate_fn") if given.get(name) is not None}
    make = given.get("buffer") or kind
    buffer: ReplayBuffer = make(storage=storage, writer=writer, batch_size=batch_size, **parts)  # type: ignore[operator]
    return buffer


def _h5(root: Path, mode: Mode, given: Mapping[str, object], batch_size: int | None) -> ReplayBuffer:
    from interop.formats import H5StorageCheckpointer
    from interop.looking import inspect

    rows = [each["shape"][0] for each in inspect(root).keys if each["shape"]]
    storage = LazyTensorStorage(max(sum(rows), 1))
    storage.checkpointer = H5StorageCheckpointer()
    storage.loads(root)
    buffer = _over(storage, given.get("writer"), given, batch_size)
    if mode == "r":
        storage.guard.journal = ReadOnly(str(root))
    return buffer
