"""Tensordicts in folders: a file for each tensor, a folder for each tensordict below, and a meta.json that names them."""

import re
from dataclasses import dataclass, field
from typing import Any

from fbuf.checkpoint import CheckpointCorrupt, CheckpointMismatch, Fields
from interop.checkpoint.torchrl_dirs_files import Folder, Tensor, encoded

_DEPTH = 64
_META = "meta.json"
_TENSORDICTS = re.compile(r"tensordict\.(_td|tensordict|_tensordict)\.TensorDict")
_STACKS = re.compile(r"tensordict\.(_lazy|_tensordict|tensordict)\.LazyStackedTensorDict")
_CLASS = re.compile(r"<class '([^']{1,500})'>")
_RESERVED = (
    "shape",
    "device",
    "_type",
)  # a key of this name is lost when it is written: the entry of meta.json is another
_PICKLES = ("other.pickle", "pickle.pkl")


@dataclass(frozen=True)
class Plain:
    """A value that is no tensor; a list of them where it was a stack."""

    value: Any
    where: str


@dataclass(frozen=True)
class Held:
    """A tensordict; `kind` is the class of a tensorclass as torchrl wrote it, "" for none."""

    batch: tuple[int, ...]
    entries: dict[str, "Entry"]
    where: str
    kind: str = ""
    attributes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Stack:
    """Tensordicts that are stacked when they are read."""

    dim: int
    items: list["Entry"]
    where: str


Entry = Tensor | Plain | Held | Stack


def read_entries(folder: Folder, depth: int = 0) -> Entry:
    """What is in a folder. The sizes of all files are looked at, and no values are read.

    CheckpointCorrupt where a file is missing or not as it is described, CheckpointMismatch for what is of a kind that
    cannot be read here, such as pickled objects.
    """
    if depth > _DEPTH:
        raise CheckpointCorrupt(f"{folder.where()}: nested more than {_DEPTH} deep")
    where = folder.where(_META)
    described = folder.json(_META)
    meta = Fields(described, where)
    kind = _CLASS.fullmatch(meta.text("_type"))
    if kind is None:
        raise CheckpointCorrupt(f"{where}: '_type' is no class")
    for pickled in _PICKLES:
        if folder.kind(pickled):
            raise CheckpointMismatch(
                f"{folder.where(pickled)}: objects were saved by pickle, which runs what it reads: it is never opened. "
                "Save without these entries"
            )
    name = kind[1]
    if _TENSORDICTS.fullmatch(name):
        return _tensordict(folder, described, depth)
    if name in ("tensordict.tensorclass.NonTensorData", "tensordict.tensorclass.NonTensorStack"):
        return Plain(meta.any("data"), folder.where())
    if _STACKS.fullmatch(name):
        return _stack(folder, meta.whole("stack_dim", most=_DEPTH), depth)
    if name.startswith("tensordict.") or folder.kind("_tensordict") != "folder":
        raise CheckpointMismatch(f"{where}: a {name[:100]} cannot be read here")
    with folder.folder("_tensordict") as inner:
        held = read_entries(inner, depth + 1)
    if not isinstance(held, Held):
        raise CheckpointCorrupt(f"{where}: a tensorclass must be over a tensordict")
    attributes = {key: value for key, value in described.items() if key != "_type"}
    return Held(held.batch, held.entries, held.where, name, attributes)


def _tensordict(folder: Folder, described: dict[str, Any], depth: int) -> Held:
    meta = Fields(described, folder.where(_META))
    lost = [key for key in _RESERVED if folder.kind(f"{key}.memmap")]
    if lost:
        raise CheckpointCorrupt(f"{folder.where(_META)}: how the entries {lost} look was lost when they were written")
    batch = meta.wholes("shape")
    entries: dict[str, Entry] = {}
    for key, value in described.items():
        if isinstance(value, dict):
            entries[key] = _entry(folder, key, meta.fields(key), depth)
        elif key not in _RESERVED:
            raise meta.wrong(key, "a description", value)
    for key, entry in entries.items():
        shape = entry.batch if isinstance(entry, Held) else entry.shape if isinstance(entry, Tensor) else batch
        if shape[: len(batch)] != batch:
            raise CheckpointCorrupt(
                f"{folder.where(_META)}: {key[:60]!r} has the shape {list(shape)}, not the batch dims {list(batch)}"
            )
    return Held(batch, entries, folder.where())


def _entry(folder: Folder, key: str, described: Fields, depth: int) -> Entry:
    if "type" in described:
        return _collection(folder, key, depth)
    if "is_nested" in described and described.flag("is_nested"):
        raise CheckpointMismatch(f"{folder.where(key)}: a storage of tensors cannot hold nested tensors")
    return folder.tensor(_file_of(folder, key, ".memmap"), described.any("dtype"), described.any("shape"))


def _collection(folder: Folder, key: str, depth: int) -> Entry:
    with folder.folder(_file_of(folder, key, "")) as inner:
        return read_entries(inner, depth + 1)


def _file_of(folder: Folder, key: str, ending: str) -> str:
    """The name of an entry's file: early versions wrote keys as they are."""
    name, plain = encoded(key) + ending, key + ending
    return plain if name != plain and "/" not in key and not folder.kind(name) and folder.kind(plain) else name


def _stack(folder: Folder, dim: int, depth: int) -> Stack:
    numbers = sorted(int(name) for name in folder.entries() if name.isdecimal() and str(int(name)) == name)
    if numbers != list(range(len(numbers))):
        raise CheckpointCorrupt(f"{folder.where()}: some of the items are missing, {len(numbers)} are there")
    items: list[Entry] = []
    for number in numbers:
        with folder.folder(str(number)) as inner:
            items.append(read_entries(inner, depth + 1))
    return Stack(dim, items, folder.where())
