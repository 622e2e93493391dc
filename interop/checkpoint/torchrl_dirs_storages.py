"""What torchrl's storages wrote, read for a storage of the same kind here."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from fbuf.checkpoint import CheckpointMismatch, Fields, StoredColumns
from interop.checkpoint.torchrl_dirs_entries import Entry, Held, Plain, read_entries
from interop.checkpoint.torchrl_dirs_files import Folder, Tensor
from interop.data.bridge import DTYPES, numpy_view
from interop.data.layout import Branch, Layout, Leaf, LeafSpec

_TORCH = {held: dtype for dtype, held in DTYPES.items()}
_SINGLE = "_-single-tensor-_"  # what a storage of nothing but one tensor calls it
_METADATA = "storage_metadata.json"
_FLATTENED = "_storage_shape"  # an entry that torchrl's hooks for TED data add


class Rows(StoredColumns):
    """The items of a storage of tensors. Files hold all rows that there is room for; the first of them were written.

    Args:
        layout: of the items.
        files: one for each leaf of it, [room, *lanes, ...].
        rows: that were written.
        ndim: dims that count as items.
    """

    def __init__(self, layout: Layout, files: list[Tensor], rows: int, ndim: int) -> None:
        self.layout, self.files, self.rows = layout, files, rows
        self.room, *lanes = files[0].shape[:ndim]
        self.lanes = tuple(lanes)
        self.dtypes = [numpy_view(torch.zeros((), dtype=_TORCH[each.dtype], device="cpu")).dtype for each in files]
        self.shapes = [each.shape[1:] for each in files]

    def read_into(self, arrays: Sequence[np.ndarray | None]) -> None:
        for file, array in zip(self.files, arrays, strict=True):
            if array is not None:
                file.read_into(array)


def read_rows(folder: Folder, ndim: int, like: Layout | None) -> Rows:
    """The items of a tensor storage, whose first `ndim` dims count as items; `like` is the layout of the target.

    CheckpointMismatch where they are not what a storage of tensors holds here, or where the target must be known first.
    """
    where = folder.where(_METADATA)
    if not folder.kind(_METADATA):
        _refuse_others(folder)
    fields = Fields(folder.json(_METADATA), where)
    if fields.flag("is_pytree"):
        layout, files = _pytree(folder, fields.fields("metadata"), fields.any("metadata"), ndim, like)
    else:
        content = read_entries(folder)
        if isinstance(content, Held) and _FLATTENED in content.entries:
            raise CheckpointMismatch(
                f"{content.where}: a checkpointer of torchrl flattened these rows, which is not read here; there, set "
                "storage.checkpointer = TensorStorageCheckpointer() and save again"
            )
        layout, files = _tensordict(content, ndim, like)
    lead = files[0].shape[:ndim]
    if len(lead) < ndim or any(file.shape[:ndim] != lead for file in files):
        raise CheckpointMismatch(
            f"{folder.where()}: the tensors do not have the same {ndim} leading dims, which count as items here"
        )
    return Rows(layout, files, _filled(fields, lead, math.prod(files[0].shape), where), ndim)


def _refuse_others(folder: Folder) -> None:
    """CheckpointMismatch for the files of other storages."""
    names = {*folder.entries()}
    if any(name.endswith(".h5") for name in names):
        raise CheckpointMismatch(
            f"{folder.where()}: H5 files of torchrl are not read here; save without a checkpointer"
        )
    if {"compressed_data", "data_indices.json"} & names:
        raise CheckpointMismatch(f"{folder.where()}: was saved from a CompressedListStorage, here are tensors")


def _filled(fields: Fields, shape: tuple[int, ...], most: int, where: str) -> int:
    """How many rows of a storage of this shape were written; `most` items can be in its files by any count."""
    length, per_row = fields.whole("len", most=most), math.prod(shape[1:])
    if per_row == 0 or length % per_row or length > math.prod(shape):
        raise CheckpointMismatch(
            f"{where}: {length} items are no rows of {list(shape)}: the storage was saved with another ndim"
        )
    return length // per_row


# ---------------------------------------------------------------------- tensordicts


def _tensordict(held: Entry, ndim: int, like: Layout | None) -> tuple[Layout, list[Tensor]]:
    if not isinstance(held, Held):
        raise CheckpointMismatch(f"{held.where}: no tensordict, which is what a storage of tensors holds")
    if len(held.batch) < ndim:
        raise CheckpointMismatch(f"{held.where}: items have the dims {list(held.batch)}, the storage has ndim={ndim}")
    found: list[tuple[LeafSpec, Tensor]] = []
    others: list[str] = []
    root = _branch(held, (), ndim, like.root if like is not None else None, found, others)
    if others:
        raise CheckpointMismatch(
            f"{held.where}: {', '.join(others)} are no tensors: a tensor storage cannot hold them. Save without them"
        )
    if not found:
        raise CheckpointMismatch(f"{held.where}: there is no tensor in the items")
    return Layout(root, tuple(spec for spec, _ in found)), [file for _, file in found]


def _branch(
    held: Held, path: tuple[Any, ...], ndim: int, like: Any, found: list[tuple[LeafSpec, Tensor]], others: list[str]
) -> Branch:
    """The structure of a tensordict. Classes and the order of keys are those of the target, where it has them."""
    known = dict(zip(like.keys, like.children, strict=True)) if isinstance(like, Branch) else {}
    kind: Any = TensorDict
    if held.kind and isinstance(like, Branch) and like.kind.__name__ == held.kind.rpartition(".")[2]:
        kind = like.kind
    others += [repr(key) for key, value in held.attributes.items() if value is not None]
    keys = [key for key in known if key in held.entries] + [key for key in held.entries if key not in known]
    children: dict[str, Branch | Leaf] = {}
    for key in keys:
        entry, place = held.entries[key], (*path, key)
        if isinstance(entry, Held):
            children[key] = _branch(entry, place, ndim, known.get(key), found, others)
        elif isinstance(entry, Tensor):
            found.append((_spec(place, entry, ndim), entry))
            children[key] = Leaf()
        elif not (isinstance(entry, Plain) and entry.value is None):
            others.append(repr(key))
    return Branch(kind, tuple(children), tuple(children.values()), held.batch[ndim:])


def _spec(path: tuple[Any, ...], file: Tensor, ndim: int) -> LeafSpec:
    if file.dtype not in _TORCH:
        raise CheckpointMismatch(f"{file.where}: a tensor storage cannot hold {file.dtype}")
    return LeafSpec(path, file.shape[ndim:], _TORCH[file.dtype])


# ---------------------------------------------------------------------- other structures


def _pytree(
    folder: Folder, fields: Fields, described: dict[str, Any], ndim: int, like: Layout | None
) -> tuple[Layout, list[Tensor]]:
    """Files are named after the paths in the target: names that are described lead nowhere."""
    where = folder.where(_METADATA)
    if like is None and [*described] == [_SINGLE]:
        like = Layout(Leaf(), (LeafSpec((), (), torch.float32),))
    if like is None:
        raise CheckpointMismatch(
            f"{where}: what lists, tuples and dicts the tensors {[*described][:8]} were in was not saved: write one item "
            "into the storage first, its structure will be used"
        )
    names = [_SINGLE if not spec.path else "/".join(map(str, spec.path)) for spec in like.leaves]
    missing = [name for name in names if name.replace("/", ".") not in described]
    unknown = [key for key in described if key not in {name.replace("/", ".") for name in names}]
    if missing or unknown:
        raise CheckpointMismatch(
            f"{where}: the tensors differ from those of the storage; missing: {missing}, unknown: {unknown}"
        )
    files, specs = [], []
    for name, spec in zip(names, like.leaves, strict=True):
        entry = fields.fields(name.replace("/", "."))
        file = _below(folder, f"{name}.memmap".split("/"), entry.any("dtype"), entry.any("shape"))
        files.append(file)
        specs.append(_spec(spec.path, file, ndim))
    return Layout(like.root, tuple(specs)), files


def _below(folder: Folder, names: list[str], dtype: Any, shape: Any) -> Tensor:
    if len(names) == 1:
        return folder.tensor(names[0], dtype, shape)
    with folder.folder(names[0]) as inner:
        return _below(inner, names[1:], dtype, shape)
