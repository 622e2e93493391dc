"""Atomic folders of memory-mapped tensors."""

import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from interop.data.arguments import whole
from interop.shared.folder import reserve_again
from interop.shared.published_folder import RECORD, publish

_ROWS = 4096  # rows of a dataset in memory at once


def published(
    folder: Path, made_from: Mapping[str, Any], make: Callable[[Path], None], states: Collection[str] = ()
) -> TensorDictBase:
    """The memory-mapped tensors of a folder. Creates them by `make(scratch)` if missing or stale, see `publish`.

    A folder without a record is incomplete and is replaced.
    """
    publish(folder, made_from, make, replaces_foreign=True, states=states)
    _refuse_objects(folder)
    return TensorDict.load_memmap(folder)


def _refuse_objects(folder: Path) -> None:
    """ValueError for non-tensor files, whose load would unpickle values or import classes."""
    for path in folder.rglob("*"):
        is_tensor = path.suffix == ".memmap" or path.is_dir() or path == folder / RECORD
        if not (is_tensor or (path.name == "meta.json" and json.loads(path.read_bytes())["_type"] == str(TensorDict))):
            raise ValueError(f"{path} is no file of a tokenized dataset: remove {folder}, which is then made again")


@torch.no_grad()
def to_memmap(
    dataset: Any,
    data_dir: str | os.PathLike[str],
    prefix: NestedKey | None = None,
    features: Sequence[str] | None = None,
    batch_dims: int = 1,
    valid_mask_key: str | None = None,
) -> TensorDictBase:
    """Write columns of a dataset to memory-mapped tensors, 4,096 rows of a `datasets.Dataset` at a time.

    Args:
        dataset: a `datasets.Dataset`, a TensorDict, or a mapping of names to lists or tensors.
        data_dir: the folder of the files.
        prefix: the key of the TensorDict that holds the columns.
        features: the columns, by default all.
        batch_dims: the number of batch dims of the columns.
        valid_mask_key: a column of bools; rows with False are dropped.

    Returns:
        A TensorDict of batch size [] with the columns under `prefix`; without a prefix, the columns themselves.

    Raises:
        KeyError: a column is missing.
        ValueError: `batch_dims` is below 1, rows of a column differ in shape or columns in length, a column has
                non-numbers or None among integers, or no row is left.
        OSError: the disk is too small for the tensors.
    """
    columns = [*dataset.keys()] if isinstance(dataset, Mapping | TensorDictBase) else [*dataset.features]
    features = columns if features is None else [*features]
    if missing := {*features, valid_mask_key} - {*columns, None}:
        raise KeyError(f"the dataset has no columns {[*missing]}, it has {columns}")
    batch_dims = whole("batch_dims", batch_dims)
    source = _columns(dataset, features)
    is_kept = torch.ones(len(source), dtype=torch.bool)
    if valid_mask_key is not None:
        is_kept = torch.as_tensor(dataset[valid_mask_key][:], dtype=torch.bool)
        if is_kept.shape != (len(source),):
            raise ValueError(f"{valid_mask_key!r} must be bools of {len(source)} rows, its shape is {[*is_kept.shape]}")
    total = int(is_kept.sum())
    if total == 0 or not features:
        raise ValueError(f"there is nothing to write: {len(source)} rows, {total} of them valid, columns {features}")
    path = (prefix,) if isinstance(prefix, str) else tuple(prefix or ())
    out: Any = None
    written = 0
    for start in range(0, len(source), _ROWS):
        rows = _tensors(source, slice(start, start + _ROWS), features)
        shapes = {key: [*column.shape[1:]] for key, column in rows.items(True, True)}
        if out is None:
            first = shapes
            like = rows.apply(lambda column: column.new_empty(()).expand(total, *column.shape[1:]), batch_size=[total])
            like.auto_batch_size_(batch_dims)
            out = (TensorDict({path: like}) if path else like).memmap_like(os.fspath(data_dir))
            for file in Path(data_dir).rglob("*.memmap"):
                reserve_again(file)  # writing to a sparse file on a full disk kills the process
        if shapes != first:
            raise ValueError(f"the rows of a column differ in shape, there are {first} and {shapes}: pad them")
        rows = rows[is_kept[start : start + _ROWS]].auto_batch_size_(batch_dims)
        (out[path] if path else out)[written : written + len(rows)] = rows
        written += len(rows)
    return out


def _columns(dataset: Any, features: Sequence[NestedKey]) -> Any:
    """The dataset as a sliceable sequence of rows."""
    if isinstance(dataset, TensorDictBase):
        return dataset.select(*features)
    if isinstance(dataset, Mapping):
        tensors = {name: torch.as_tensor(dataset[name]) for name in features}
        lengths = {name: len(tensor) for name, tensor in tensors.items()}
        if len({*lengths.values()}) > 1:
            raise ValueError(f"columns must have the same length, they have {lengths}")
        return TensorDict(tensors).auto_batch_size_(1)
    return dataset.select_columns(list(features)).with_format("torch")


def _tensors(source: Any, rows_slice: slice, features: Sequence[NestedKey]) -> TensorDictBase:
    rows = source[rows_slice]
    if isinstance(rows, TensorDictBase):
        return rows
    for name in features:
        if not isinstance(rows[name], Tensor):
            shapes = {
                str([*value.shape]) if isinstance(value, Tensor) else type(value).__name__ for value in rows[name]
            }
            raise ValueError(
                f"the rows of a column must be numbers of one shape, those of {name!r} are {sorted(shapes)}: pad them, or "
                "leave the column out"
            )
        if rows[name].is_floating_point() and "float" not in str(source.features[name]):
            raise ValueError(f"the column {name!r} of integers has None: fill it, or leave the column out")
    return TensorDict({name: rows[name] for name in features}).auto_batch_size_(1)
