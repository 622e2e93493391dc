"""Which steps start at an observation: the graph of a forest, as arrays."""

import collections
import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, NestedKey, TensorDict, TensorDictBase
from torch import Tensor

from fbuf.checkpoint import CheckpointCorrupt, Fields
from interop.maps.growable import Columns
from interop.maps.map import TensorMap
from interop.maps.table import row_bytes

_NONE = -1  # no further edge, or no observation
_Form = list[tuple[str, list[int]]]  # dtype and shape of each entry of an observation


class NodeMap(TensorMap):
    """From observations to the rows of a data map that hold the steps from there. Not thread-safe.

    `node_map[td]` has "_index" (the rows, in the order of their first appearance), "_hash" (the hash of each) and "count"
    (how many steps from there were written). A batch of observations gives a lazy stack, for their numbers of rows differ.

    Each observation is a node, whether steps start there or lead there only; each distinct step is an edge. The edges of a
    node form a linked list in arrays: n steps are written in O(n), without a Python loop, whatever the nodes hold.

    Args:
        in_keys: the entries that make an observation.
        identify: gives integers that tell observations apart, in their batch size; by default their bytes do.
    """

    def __init__(
        self, in_keys: Sequence[NestedKey], identify: Callable[[TensorDictBase], Tensor] | None = None
    ) -> None:
        self.in_keys = list(in_keys)
        self._identify = identify
        self.clear()

    def clear(self) -> None:
        """Forget all observations. The next ones may be of another shape or dtype."""
        self._numbers: defaultdict[bytes, int] = defaultdict(itertools.count().__next__)  # of nodes
        self._edge_numbers: defaultdict[int, int] = defaultdict(itertools.count().__next__)  # of node << 32 | row
        self._nodes = Columns(first=_NONE, last=_NONE, degree=0, count=0)
        self._edges = Columns(row=0, after=_NONE)
        self._rows = Columns(target=_NONE, hash=0)  # of the data map
        self._form: _Form | None = None

    def __len__(self) -> int:
        """The number of observations where steps start."""
        return int(np.count_nonzero(self._nodes["degree"]))

    def __bool__(self) -> bool:
        return True  # a map without observations is one

    # ------------------------------------------------------------------ reading

    def contains(self, key: TensorDictBase) -> Tensor:
        """Whether a step starts at each observation: bool, in the batch size."""
        return torch.from_numpy(self._degrees(self._find(key)) > 0).reshape(key.batch_size)

    def __getitem__(self, key: TensorDictBase) -> TensorDictBase:
        found = [self._entry(node) for node in self.known(key)]
        return LazyStackedTensorDict(*found).reshape(key.batch_size) if key.ndim else found[0]

    def known(self, key: TensorDictBase) -> list[int]:
        """The nodes of observations, in one dim. KeyError if no step starts at one of them."""
        nodes = self._find(key)
        missing = np.flatnonzero(self._degrees(nodes) == 0)
        if missing.size:
            first = key.select(*self.in_keys).reshape(-1)[int(missing[0])]
            shown = {name: first.get(name).flatten()[:6].tolist() for name in self.in_keys}
            raise KeyError(
                f"no step starts at {missing.size} of {nodes.size} observations; the first of them begins with {shown}"
            )
        return nodes.tolist()

    def walker(self) -> tuple[Callable[[int], list[int]], memoryview]:
        """A function from a node to its rows, and the node that each row leads to. Valid until the next write."""
        first, row, after = self._nodes["first"].data, self._edges["row"].data, self._edges["after"].data

        def rows_of(node: int) -> list[int]:
            found, edge = [], first[node] if node >= 0 else _NONE
            while edge >= 0:
                found.append(row[edge])
                edge = after[edge]
            return found

        return rows_of, self._rows["target"].data

    def hashes(self, rows: Any) -> np.ndarray:
        """The hashes of rows."""
        return self._rows["hash"][rows]

    def _find(self, key: TensorDictBase) -> np.ndarray:
        keys = self._keys_of(key)
        return np.fromiter(map(self._numbers.get, keys, itertools.repeat(_NONE)), np.int64, len(keys))

    def _degrees(self, nodes: np.ndarray) -> np.ndarray:
        return np.append(self._nodes["degree"], 0)[nodes]  # -1 is behind the last node

    def _entry(self, node: int) -> TensorDict:
        rows = np.array(self.walker()[0](node), np.int64)
        count = torch.tensor(int(self._nodes["count"][node]), dtype=torch.int32)
        found = {"_index": torch.from_numpy(rows), "_hash": torch.from_numpy(self.hashes(rows)), "count": count}
        return TensorDict(found, [])

    # ------------------------------------------------------------------ writing

    def __setitem__(self, key: TensorDictBase, value: TensorDictBase) -> None:
        """Add rows, "_index" with their "_hash", to those of observations. Other entries are ignored."""
        entries = value.unbind(0) if key.ndim else [value]
        rows = [each["_index"].reshape(-1).numpy() for each in entries]
        hashes = np.concatenate([each["_hash"].reshape(-1).numpy() for each in entries])
        nodes = np.repeat(self._number(self._keys_of(key), key), [len(each) for each in rows])
        self._connect(nodes, np.concatenate(rows), hashes)

    def prepare(self, before: TensorDictBase, after: TensorDictBase) -> Callable[[np.ndarray, np.ndarray], None]:
        """Check the observations before and after steps. Returns a function that writes their rows and hashes, and does not
        fail.

        KeyError for a missing entry, ValueError for one of another shape or dtype than before.
        """
        keys, next_keys = self._keys_of(before), self._keys_of(after)
        if _form_of(self.in_keys, before) != (form := _form_of(self.in_keys, after)):
            raise ValueError(
                f"{self.in_keys} are {_form_of(self.in_keys, before)} before a step and {form} after it: they must agree"
            )

        def write(rows: np.ndarray, hashes: np.ndarray) -> None:
            nodes = self._number(keys + next_keys, before)
            starts = nodes[: len(keys)]
            self._connect(starts, rows, hashes)
            np.add.at(self._nodes["count"], starts, 1)
            self._rows["target"][rows] = nodes[len(keys) :]

        return write

    def _keys_of(self, key: TensorDictBase) -> list[bytes]:
        """What tells observations apart."""
        form = _form_of(self.in_keys, key)
        if self._form not in (None, form):
            raise ValueError(f"{self.in_keys} are {form}, the observations that were written {self._form}")
        tensors = [self._identify(key)] if self._identify else [key.get(name) for name in self.in_keys]
        return _as_bytes(row_bytes(tensors, key.batch_size))

    def _number(self, keys: list[bytes], like: TensorDictBase) -> np.ndarray:
        """The nodes of observations, made where they are new."""
        self._form = self._form or _form_of(self.in_keys, like)
        nodes = np.fromiter(map(self._numbers.__getitem__, keys), np.int64, len(keys))
        self._nodes.grow(len(self._numbers))
        return nodes

    def _connect(self, nodes: np.ndarray, rows: np.ndarray, hashes: np.ndarray) -> None:
        """Append rows to the lists of their nodes, but for those that are in there."""
        if not rows.size:
            return
        self._rows.grow(int(rows.max()) + 1)
        self._rows["hash"][rows] = hashes
        known, pairs = len(self._edges), (nodes << 32 | rows).tolist()
        edges = np.fromiter(map(self._edge_numbers.__getitem__, pairs), np.int64, len(pairs))
        if len(self._edge_numbers) == known:
            return
        self._edges.grow(len(self._edge_numbers))
        self._edges["row"][edges] = rows
        owners = np.empty(len(self._edges) - known, np.int64)  # of the new edges
        is_new = edges >= known
        owners[edges[is_new] - known] = nodes[is_new]
        order = np.argsort(owners, kind="stable")  # those of a node side by side, in the order of their numbers
        owners, added = owners[order], order + known
        starts = np.flatnonzero(np.diff(owners, prepend=-1))
        stops = np.append(starts[1:], len(owners)) - 1
        node, after, last = owners[starts], self._edges["after"], self._nodes["last"]
        after[added[:-1]] = added[1:]
        after[added[stops]] = _NONE
        has_edges = self._nodes["degree"][node] > 0
        self._nodes["first"][node[~has_edges]] = added[starts[~has_edges]]
        after[last[node[has_edges]]] = added[starts[has_edges]]
        last[node] = added[stops]
        self._nodes["degree"][node] += stops - starts + 1

    # ------------------------------------------------------------------ checkpoints

    def __getstate__(self) -> dict[str, Any]:  # counters of itertools cannot be pickled
        return {"in_keys": self.in_keys, "identify": self._identify, "saved": self.saved()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.in_keys, self._identify = state["in_keys"], state["identify"]
        self.restoring(state["saved"], "a pickled NodeMap")()

    def saved(self) -> dict[str, Any]:
        """The graph as a tree of plain values and arrays."""
        keys = np.frombuffer(b"".join(self._numbers), np.uint8).reshape(len(self._numbers), -1 if self._numbers else 0)
        arrays = {"nodes": self._nodes.saved(), "edges": self._edges.saved(), "rows": self._rows.saved()}
        form = None if self._form is None else [{"dtype": dtype, "shape": shape} for dtype, shape in self._form]
        return {"keys": keys.copy(), "pairs": np.fromiter(self._edge_numbers, np.int64), "form": form, **arrays}

    def restoring(self, saved: Any, where: str) -> Callable[[], None]:
        """Check what `saved` gave. The function that is returned puts it in, and does not fail."""
        fields = Fields(saved, where)
        keys = _as_bytes(np.ascontiguousarray(fields.array("keys", np.uint8, (None, None))))
        pairs = np.asarray(fields.array("pairs", np.int64, (None,))).tolist()
        nodes = np.asarray(fields.array("nodes", np.int64, (4, len(keys))))
        edges = np.asarray(fields.array("edges", np.int64, (2, len(pairs))))
        rows = np.asarray(fields.array("rows", np.int64, (2, None)))
        limits = [(nodes[:2], len(pairs)), (edges[1], len(pairs)), (rows[0], len(keys)), (edges[0], rows.shape[1])]
        in_range = all(not part.size or _NONE <= part.min() <= part.max() < limit for part, limit in limits)
        after = edges[1]
        ends = bool(((after > np.arange(len(pairs))) | (after == _NONE)).all())  # lists lead to later edges
        if not (in_range and ends and len({*keys}) == len(keys) and len({*pairs}) == len(pairs)):
            raise CheckpointCorrupt(f"{where}: not the graph that was saved")
        entries = [Fields(each, where) for each in (fields.items("form") if len(keys) else ())]
        form = [(each.text("dtype"), list(each.wholes("shape"))) for each in entries]

        def put() -> None:
            self.clear()
            self._form = form or None
            for numbers, names in ((self._numbers, keys), (self._edge_numbers, pairs)):
                collections.deque(map(numbers.__getitem__, names), maxlen=0)
            for columns, values in ((self._nodes, nodes), (self._edges, edges), (self._rows, rows)):
                columns.restore(values)

        return put


def _as_bytes(rows: np.ndarray) -> list[bytes]:
    """Rows of uint8 [B, W] as B bytes objects."""
    return rows.view(f"V{rows.shape[1]}").ravel().tolist() if rows.shape[1] else [b""] * len(rows)


def _form_of(names: Sequence[NestedKey], key: TensorDictBase) -> _Form:
    """The dtypes and shapes of the entries of an observation."""
    found, dims = [], key.ndim
    for name in names:
        value = key.get(name, None)
        if not isinstance(value, Tensor):
            there = sorted(map(repr, key.keys(True, True)))
            raise KeyError(f"the observation needs the tensor {name!r}; there are {there}. Set observation_keys")
        found.append((str(value.dtype), list(value.shape[dims:])))
    return found
