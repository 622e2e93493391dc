"""Ensembles of datasets with a common batch layout."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from tensordict import TensorDictBase, is_leaf_nontensor
from tensordict.utils import NestedKey
from torch import Tensor

from interop.buffers import ReplayBuffer, ReplayBufferEnsemble
from interop.buffers.collate import stack
from interop.data.arguments import class_of
from interop.data.keys import as_path, entries_below
from interop.transforms import Transform

_Path = tuple[Any, ...]
_Kind = tuple[torch.dtype | str, torch.Size]  # dtype and row shape; "text" for non-tensors
_Layout = dict[_Path, _Kind]


def merged(
    *buffers: ReplayBuffer,
    p: Sequence[float] | Tensor | None = None,
    batch_size: int | None = None,
    keys: Iterable[NestedKey] | None = None,
    cast: bool | Mapping[NestedKey, torch.dtype] = False,
    num_buffer_sampled: int | None = None,
    transform: Transform | Callable[[Any], Any] | None = None,
    collate_fns: Sequence[Callable[[Any], Any] | None] | None = None,
    sample_from_all: bool = False,
    generator: torch.Generator | None = None,
    shared: bool = False,
    prefetch: int | None = None,
    pin_memory: bool = False,
) -> ReplayBufferEnsemble:
    """Merge buffers or datasets to an ensemble with a common layout: `merged(a, b, p=[0.8, 0.2], batch_size=256)`.

    Each entry must have the same shape and dtype in all buffers. This is checked on the first row of each buffer, after
    its transforms. Entries are dropped and cast when a batch is read; the buffers are not modified.

    Args:
        buffers: non-empty buffers of tensordicts. They keep their samplers and transforms.
        p: the fraction of each buffer, equal by default.
        batch_size: rows per sample. Samples are [parts, batch_size / parts], each part from one buffer.
        keys: the entries of batches; a key of nested entries selects all of them. By default the common entries.
        cast: True promotes different float dtypes, or integers and bools, to the smallest common dtype. A dict maps
            entries of any kind to dtypes.
        num_buffer_sampled: parts per batch. By default the smallest divisor of the batch size that is at least the number
            of buffers.
        transform, collate_fns, sample_from_all, generator, shared, prefetch, pin_memory: as for `ReplayBufferEnsemble`.

    Raises:
        ValueError: entries are missing, or differ in shape or dtype; the message has a table.
        RuntimeError: a buffer is empty.
        TypeError: items are not tensordicts.
    """
    if not buffers:
        raise ValueError("there is nothing to merge: give the buffers")
    layouts = [_layout(buffer, place) for place, buffer in enumerate(buffers)]
    paths = dict.fromkeys(path for layout in layouts for path in layout)
    names = (
        [path for path in paths if all(path in layout for layout in layouts)] if keys is None else [*map(as_path, keys)]
    )
    casts = {as_path(key): dtype for key, dtype in cast.items()} if isinstance(cast, Mapping) else {}
    types: dict[_Path, torch.dtype | str] = {}
    misfits = [key for key in (*names, *casts) if not any(_covers(key, path) for path in paths)]
    for path in paths:
        if any(_covers(name, path) for name in names):
            chosen_dtype = next((dtype for key, dtype in casts.items() if _covers(key, path)), None)
            common = _common([layout.get(path) for layout in layouts], chosen_dtype, cast is True)
            if common is None:
                misfits.append(path)
            else:
                types[path] = common
    if misfits or not types:
        raise ValueError(_table(misfits or [*paths], layouts, buffers))
    dropped = frozenset(paths.keys() - types.keys())
    dtypes = {path: kind for path, kind in types.items() if cast and isinstance(kind, torch.dtype)}
    if num_buffer_sampled is None and batch_size is not None and not sample_from_all:
        num_buffer_sampled = next((n for n in range(len(buffers), batch_size) if batch_size % n == 0), batch_size)
    aligned = _Aligned(dropped, dtypes) if dropped or dtypes else None
    return ReplayBufferEnsemble(
        *buffers,
        p=p,
        batch_size=batch_size,
        num_buffer_sampled=num_buffer_sampled,
        collate_fn=aligned,
        transform=transform,
        collate_fns=collate_fns,
        sample_from_all=sample_from_all,
        generator=generator,
        shared=shared,
        prefetch=prefetch,
        pin_memory=pin_memory,
    )


@dataclass(frozen=True)
class _Aligned:
    """Collates parts after dropping and casting entries."""

    dropped: frozenset[_Path]
    dtypes: Mapping[_Path, torch.dtype]

    def __call__(self, parts: Sequence[TensorDictBase]) -> TensorDictBase:
        batch: TensorDictBase = stack([self._aligned(part) for part in parts])
        return batch

    def _aligned(self, part: TensorDictBase) -> TensorDictBase:
        keys = part.keys(True, True, is_leaf=is_leaf_nontensor)
        selected: TensorDictBase = part.select(*(key for key in keys if as_path(key) not in self.dropped))
        for path, dtype in self.dtypes.items():
            selected[path] = selected[path].to(dtype)
        return selected


def _covers(key: _Path, path: _Path) -> bool:
    return path[: len(key)] == key


def _layout(buffer: ReplayBuffer, place: int) -> _Layout:
    """The kind of each entry of a row, after transforms."""
    if not isinstance(buffer, ReplayBuffer):
        raise TypeError(f"buffer {place} must be a ReplayBuffer, got {class_of(buffer)}")
    if not len(buffer.storage):
        raise RuntimeError(f"buffer {place} is empty, so its layout is unknown: write rows first")
    first = torch.zeros(1, dtype=torch.int64)
    rows = buffer[first if buffer.storage.ndim == 1 else (first,) * buffer.storage.ndim]
    if not isinstance(rows, TensorDictBase):
        raise TypeError(f"the items of buffer {place} must be tensordicts, got {class_of(rows)}")
    return {
        path: (value.dtype, value.shape[1:]) if isinstance(value, Tensor) else ("text", torch.Size())
        for path, value in entries_below(rows)
        if path[0] != "index"
    }


def _common(
    kinds: Sequence[_Kind | None], chosen_dtype: torch.dtype | None, promotes: bool
) -> torch.dtype | str | None:
    """The common dtype of an entry, or "text"; None if the buffers have none."""
    stored_kinds = {kind for kind in kinds if kind is not None}
    types = {kind[0] for kind in stored_kinds}
    dtypes = [kind_of_value for kind_of_value in types if isinstance(kind_of_value, torch.dtype)]
    if (
        None in kinds
        or len({kind[1] for kind in stored_kinds}) > 1
        or (len(dtypes) < len(types) and (dtypes or chosen_dtype))
    ):
        return None
    if chosen_dtype is not None or len(types) == 1:
        return chosen_dtype or types.pop()
    if not promotes or len({(dtype.is_floating_point, dtype.is_complex) for dtype in dtypes}) > 1:
        return None
    try:
        return reduce(torch.promote_types, dtypes)
    except RuntimeError:  # torch cannot promote uint16 and the like
        return None


def _table(paths: Sequence[_Path], layouts: Sequence[_Layout], buffers: Sequence[ReplayBuffer]) -> str:
    """A table of the dtype and shape of each entry in each buffer."""
    head = ["", *(f"{place}: {type(buffer).__name__}" for place, buffer in enumerate(buffers))]
    rows = [[".".join(map(str, path)), *(_shown(layout.get(path)) for layout in layouts)] for path in paths]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = ["  ".join(map(str.ljust, cells, widths)).rstrip() for cells in (head, *rows)]
    advice = "Leave entries out by keys=[...], or convert dtypes by cast=True or cast={key: dtype}"
    return "\n".join(["the buffers do not fit together:", *lines, advice])


def _shown(kind: _Kind | None) -> str:
    if kind is None:
        return "missing"
    return kind[0] if isinstance(kind[0], str) else f"{str(kind[0]).removeprefix('torch.')} {[*kind[1]]}"
