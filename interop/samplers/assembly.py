"""Batches built in one step of the leaves that were read and of what is told about them."""

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from interop.data.keys import as_path
from interop.data.layout import Branch, Layout, Leaf, of_entries
from interop.data.varied import Varied
from interop.host.rows import TorchRows
from interop.storages import TensorStorage

_KEPT = 8  # kinds of batches


class Told(dict[Any, Any]):
    """What is told about a batch, and in which data all of it already is."""

    __slots__ = ("_count", "_data")

    def __init__(self, told: Mapping[Any, Any]) -> None:
        super().__init__(told)
        self._data: Any = None
        self._count = 0

    def lies_in(self, data: Any) -> bool:
        """Whether data was built with it, and nothing more is told by now."""
        return self._data is data and self._count == len(self)

    def was_put_in(self, data: Any) -> None:
        """Data was built with it."""
        self._data, self._count = data, len(self)


class Assembly:
    """Where in tensordicts of a layout each leaf goes and each thing that is told, which takes the place of a leaf."""

    def __init__(self, known: Mapping[Any, int], more: Sequence[Any], nodes: Sequence[tuple[Any, Any]]) -> None:
        """`known` are the leaves in whose place something is told, `more` is told beside them. `nodes` are the keys of each
        tensordict, the inner ones first, and what picks its entries of all leaves, `more` and tensordicts before it."""
        self._known = known
        self._more = more
        self._nodes = nodes

    @classmethod
    def of(cls, layout: Layout, told: Sequence[Any]) -> "Assembly | None":
        """For what is told under these keys; None for other layouts than of plain tensordicts, and keys that do not fit."""
        nodes: dict[tuple[Any, ...], dict[Any, Any]] = {}
        if not _open(layout.root, (), nodes, layout.places):
            return None
        known: dict[Any, int] = {}
        more: list[Any] = []
        for key in told:
            path = as_path(key)
            place = layout.places.get(path)
            if place is not None and place not in known.values():
                known[key] = place
            elif place is None and path[:-1] in nodes and path[-1] not in nodes[path[:-1]]:
                nodes[path[:-1]][path[-1]] = len(layout.leaves) + len(more)
                more.append(key)
            else:
                return None
        inner, first = list(nodes)[::-1], len(layout.leaves) + len(more)
        made = {path: first + number for number, path in enumerate(inner)}
        picked = []
        for path in inner:
            at = [made[each] if isinstance(each, tuple) else each for each in nodes[path].values()]
            if not at:
                return None
            picked.append((tuple(nodes[path]), itemgetter(*at, at[-1])))  # a getter of one would give no tuple
        return cls(known, more, picked)

    def known(self, told: Mapping[Any, Tensor]) -> dict[int, Tensor]:
        """The leaves that need not be read."""
        return {place: told[key] for key, place in self._known.items()}

    def build(
        self, leaves: list[Any], told: Mapping[Any, Tensor], size: torch.Size, device: torch.device | None
    ) -> Any:
        """The tensordict; the list is taken over."""
        leaves.extend([told[key] for key in self._more])
        made: Any = None
        for keys, pick in self._nodes:
            made = of_entries(zip(keys, pick(leaves), strict=False), size, device)
            leaves.append(made)
        return made


def _open(node: Any, path: tuple[Any, ...], nodes: dict[Any, dict[Any, Any]], places: Mapping[Any, int]) -> bool:
    """Enter the entries of tensordicts, leaves by place and others by path; False where one is not plain."""
    if not isinstance(node, Branch) or node.kind is not TensorDict or node.names or node.batch:
        return False
    entries = nodes[path] = {}
    for key, child in zip(node.keys, node.children, strict=True):
        inner = (*path, key)
        entries[key] = places[inner] if isinstance(child, Leaf) else inner
        if isinstance(child, Varied) or (not isinstance(child, Leaf) and not _open(child, inner, nodes, places)):
            return False
    return True


class Assemblies:
    """Reads and builds batches of flat slots of a storage on the host; knows how those of one layout are built."""

    def __init__(self) -> None:
        self._known: tuple[Layout | None, dict[tuple[Any, ...], Assembly | None]] = None, {}

    def read(
        self,
        storage: TensorStorage,
        slots: Tensor,
        runs: tuple[np.ndarray | None, int],
        info: dict[Any, Any],
        marks: bool,
    ) -> tuple[Any, dict[Any, Any]]:
        """The items at slots and what to tell about them, with `marks` in them, too, where that can be done at once.

        `runs` are the rows where those runs of rows begin that the slots are, None if they are none, and their length.
        """
        rows, layout = storage.rows, storage.layout
        assert isinstance(rows, TorchRows) and layout is not None
        assembly = self._for(layout, tuple(info) if marks else ())
        told = _entries(info) if marks else {}
        if assembly is None or told is None or getattr(storage.build, "__func__", None) is not TensorStorage.build:
            return storage.build(_leaves(rows, slots, runs, {}), slots.shape), info
        leaves = _leaves(rows, slots, runs, assembly.known(told))
        device = storage.device if isinstance(storage.device, torch.device) else None
        data = assembly.build(leaves, told, slots.shape, device)
        if not marks:
            return data, info
        marked = Told(info)
        marked.was_put_in(data)
        return data, marked

    def _for(self, layout: Layout, keys: tuple[Any, ...]) -> Assembly | None:
        known = self._known  # once: another thread may draw from another storage
        if known[0] is not layout:
            known = self._known = layout, {}
        made = known[1]
        if keys not in made:
            if len(made) >= _KEPT:
                made.clear()
            made[keys] = Assembly.of(layout, keys)
        return made[keys]


def _leaves(
    rows: TorchRows, slots: Tensor, runs: tuple[np.ndarray | None, int], known: Mapping[int, Tensor]
) -> list[Tensor]:
    if runs[0] is None or rows.runs is None:
        return rows.read(slots, known)
    return rows.runs.read(runs[0], runs[1], slots, known)


def _entries(info: Mapping[Any, Any]) -> dict[Any, Tensor] | None:
    """What is told as one tensor for each key; None where one is elsewhere than on the host."""
    told: dict[Any, Tensor] = {}
    for key, value in info.items():
        if type(value) is tuple:
            value = value[0].unsqueeze(-1) if len(value) == 1 else torch.stack(value, -1)
        if type(value) is not Tensor or not value.is_cpu:
            return None
        told[key] = value
    return told
