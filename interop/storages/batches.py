"""Rows are read, and become a batch in one step, with the info of the draw."""

import dataclasses
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from interop.data import staging
from interop.data.keys import as_path
from interop.data.layout import Branch, KeyPath, Layout, Leaf
from interop.data.tensordicts import of_entries
from interop.data.varied import Varied
from interop.host.rows import TorchRows
from interop.storages.tensors import TensorStorage

_CPU = torch.device("cpu")
_KEPT = 8  # builders of one layout
_SLOTS = object()  # the key of the slots beside an info


class BatchInfo(dict[Any, Any]):
    """The info of a batch, with the data that contains it as entries."""

    __slots__ = ("_count", "_data")

    def __init__(self, info: Mapping[Any, Any], data: Any) -> None:
        super().__init__(info)
        self._data, self._count = data, len(info)

    def is_in(self, data: Any) -> bool:
        """Whether data was built with this info, and the info has no later entries."""
        return self._data is data and self._count == len(self)


def read_batch(
    storage: TensorStorage, slots: Tensor, runs: tuple[np.ndarray | None, int], info: dict[Any, Any], marks: bool
) -> tuple[Any, dict[Any, Any]]:
    """The items at slots of rows on the host, and the info; with `marks` a `BatchInfo`, if one step builds both.

    `runs`: the first rows of runs of consecutive rows, or None, and the length of each run.
    """
    rows, layout = storage.table.rows, storage.table.layout
    assert isinstance(rows, TorchRows) and layout is not None
    builder, entries = None, dict[Any, Tensor]()
    here = info
    if not slots.is_cpu:  # of priorities on a device: one wait for slots and info
        here = info_on({**(info if marks else {}), _SLOTS: slots}, _CPU)
        slots = here.pop(_SLOTS)
    if marks and type(storage).build is TensorStorage.build:
        entries = _entries(here, _CPU)
        builder = _builder_for(layout, tuple(entries))
    known = {} if builder is None else {leaf: entries[key] for key, leaf in builder.replaced.items()}
    begins, length = runs
    if begins is None or rows.runs is None:
        leaves = rows.read(slots, known)
    else:
        leaves = rows.runs.read(begins, length, slots, known)
    if builder is None:
        return storage.build(leaves, slots.shape), info
    data = builder.build(
        leaves, entries, slots.shape, storage.device if isinstance(storage.device, torch.device) else None
    )
    return data, BatchInfo(info, data)


def batch_of(
    storage: TensorStorage, leaves: list[Tensor], shape: torch.Size, info: dict[Any, Any], marks: bool
) -> tuple[Any, dict[Any, Any]]:
    """The items of leaves that were read on a device, and the info; with `marks` a `BatchInfo`, as in `read_batch`."""
    layout = storage.table.layout
    assert layout is not None
    if marks and type(storage).build is TensorStorage.build:
        entries = _entries(info, leaves[0].device)
        builder = _builder_for(layout, tuple(entries))
        if builder is not None:
            leaves = [*leaves]
            for key, place in builder.replaced.items():
                leaves[place] = entries[key]
            data = builder.build(leaves, entries, shape, storage.table.place.known_device())
            return data, BatchInfo(info, data)
    return storage.build(leaves, shape), info


@dataclasses.dataclass(frozen=True)
class BatchBuilder:
    """Builds tensordicts of one layout with the entries of the info."""

    replaced: Mapping[Any, int]  # leaves that entries of the info replace
    added: Sequence[Any]  # the other entries of the info
    nodes: Sequence[tuple[Any, Any]]  # inner tensordicts first: keys, and the getter of their entries

    def build(
        self, leaves: list[Any], info: Mapping[Any, Tensor], size: torch.Size, device: torch.device | None
    ) -> Any:
        """The tensordict of leaves in the order of the layout. Appends to the list."""
        leaves.extend([info[key] for key in self.added])
        made: Any = None
        for keys, pick in self.nodes:
            made = of_entries(zip(keys, pick(leaves), strict=False), size, device)
            leaves.append(made)
        return made


def _builder_for(layout: Layout, keys: tuple[Any, ...]) -> BatchBuilder | None:
    builders = layout.builders
    if keys not in builders:
        if len(builders) >= _KEPT:
            builders.clear()
        builders[keys] = _builder(layout, keys)
    found: BatchBuilder | None = builders[keys]
    return found


def _builder(layout: Layout, keys: Sequence[Any]) -> BatchBuilder | None:
    """A builder for plain tensordicts; None for other layouts, and for keys that do not fit."""
    nodes: dict[KeyPath, dict[Any, Any]] = {}
    if not keys or not _open(layout.root, (), nodes, layout.places):
        return None
    replaced: dict[Any, int] = {}
    added: list[Any] = []
    for key in keys:
        path = as_path(key)
        place = layout.places.get(path)
        if place is not None and place not in replaced.values():
            replaced[key] = place
        elif place is None and path[:-1] in nodes and path[-1] not in nodes[path[:-1]]:
            nodes[path[:-1]][path[-1]] = len(layout.leaves) + len(added)
            added.append(key)
        else:
            return None
    inner, first = list(nodes)[::-1], len(layout.leaves) + len(added)
    made = {path: first + number for number, path in enumerate(inner)}
    picked = []
    for path in inner:
        at = [made[each] if isinstance(each, tuple) else each for each in nodes[path].values()]
        if not at:
            return None
        picked.append((tuple(nodes[path]), itemgetter(*at, at[-1])))  # a getter of one would give no tuple
    return BatchBuilder(replaced, added, picked)


def _open(node: Any, path: KeyPath, nodes: dict[KeyPath, dict[Any, Any]], places: Mapping[KeyPath, int]) -> bool:
    """Collect the entries of tensordicts, leaves by place and others by path; False if one is not plain."""
    if not isinstance(node, Branch) or node.kind is not TensorDict or node.names or node.batch:
        return False
    entries = nodes[path] = {}
    for key, child in zip(node.keys, node.children, strict=True):
        inner = (*path, key)
        entries[key] = places[inner] if isinstance(child, Leaf) else inner
        if isinstance(child, Varied) or (not isinstance(child, Leaf) and not _open(child, inner, nodes, places)):
            return False
    return True


def _entries(info: Mapping[Any, Any], device: torch.device) -> dict[Any, Tensor]:
    """The info as one tensor a key; empty if one is not on this device."""
    entries: dict[Any, Tensor] = {}
    for key, value in info.items():
        if type(value) is tuple:
            value = value[0].unsqueeze(-1) if len(value) == 1 else torch.stack(value, -1)
        if type(value) is not Tensor or value.device != device:
            return {}
        entries[key] = value
    return entries


def info_on(info: Mapping[Any, Any], device: torch.device) -> dict[Any, Any]:
    """The info with its tensors, and tuples of them, on this device. The host waits at most once for those of a GPU."""
    parts = [value if type(value) is tuple else (value,) for value in info.values()]
    away = {id(each): each for part in parts for each in part if isinstance(each, Tensor) and each.device != device}
    if not away:
        return dict(info)
    if device.type == "cpu":
        moved = staging.to_host(list(away.values()))
    else:
        moved = [staging.to_device(each, device) for each in away.values()]
    found = dict(zip(away, moved, strict=True))
    here = [tuple(found.get(id(each), each) for each in part) for part in parts]
    return {
        key: part if type(value) is tuple else part[0] for (key, value), part in zip(info.items(), here, strict=True)
    }
