"""The graph of a forest: the steps that start at each observation."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, NestedKey, TensorDict, TensorDictBase
from torch import Tensor

from fbuf.checkpoint import CheckpointCorrupt, Fields
from interop.checkpoint.state import EXACT, Apply, LoadOptions, as_arrays
from interop.maps.kinds import Kinds, kinds_of
from interop.maps.map import TensorMap
from interop.maps.table import row_bytes

_NONE = -1  # a row without a target


class NodeMap(TensorMap):
    """Maps observations to the rows of a data map that hold the steps from there. Not thread-safe.

    `node_map[td]` has "_index" (the rows, in order of first appearance), "_hash" (the hash of each row) and "count" (the
    number of written steps). A batch of observations gives a lazy stack, as the numbers of rows differ.

    Each observation at the start or end of a step is a node. Writing n steps is O(n).

    Args:
        in_keys: the entries of an observation.
        identify: maps observations to identifying integers of their batch size; by default their bytes identify them.
    """

    def __init__(
        self, in_keys: Sequence[NestedKey], identify: Callable[[TensorDictBase], Tensor] | None = None
    ) -> None:
        self.in_keys = list(in_keys)
        self._identify = identify
        self.clear()

    def clear(self) -> None:
        """Remove all observations. The next ones may have another shape or dtype."""
        self._numbers: dict[bytes, int] = {}  # observation -> node
        self._rows: list[dict[int, None]] = []  # node -> rows that start there, in order
        self._counts: list[int] = []  # node -> number of written steps
        self._targets: list[int] = []  # row -> the node at its end
        self._hashes: list[int] = []  # row -> hash
        self._kinds: Kinds | None = None

    def __len__(self) -> int:
        """The number of observations where steps start."""
        return sum(map(bool, self._rows))

    def __bool__(self) -> bool:
        return True  # an empty map is truthy

    # ------------------------------------------------------------------ reading

    def contains(self, key: TensorDictBase) -> Tensor:
        """Whether a step starts at each observation: bool, of the batch size."""
        found = [node is not None and bool(self._rows[node]) for node in map(self._numbers.get, self._keys_of(key))]
        return torch.tensor(found, dtype=torch.bool).reshape(key.batch_size)

    def __getitem__(self, key: TensorDictBase) -> TensorDictBase:
        found = [self._entry(node) for node in self.nodes(key)]
        return LazyStackedTensorDict(*found).reshape(key.batch_size) if key.ndim else found[0]

    def nodes(self, key: TensorDictBase) -> list[int]:
        """The nodes of observations, as a flat list. KeyError for an observation without steps."""
        nodes = [self._numbers.get(name, _NONE) for name in self._keys_of(key)]
        missing = [place for place, node in enumerate(nodes) if node < 0 or not self._rows[node]]
        if missing:
            first = key.select(*self.in_keys).reshape(-1)[missing[0]]
            shown = {name: first.get(name).flatten()[:6].tolist() for name in self.in_keys}
            raise KeyError(
                f"no step starts at {len(missing)} of {len(nodes)} observations; the first of them begins with {shown}"
            )
        return nodes

    def rows(self, node: int) -> list[int]:
        """The rows of the steps that start at a node."""
        return [*self._rows[node]]

    def after(self, row: int) -> list[int]:
        """The rows of the steps that follow a row."""
        return [*self._rows[node]] if (node := self._targets[row]) >= 0 else []

    def hashes(self, rows: Sequence[int]) -> list[int]:
        """The hashes of rows."""
        return [self._hashes[row] for row in rows]

    def _entry(self, node: int) -> TensorDict:
        rows = self.rows(node)
        found = {"_index": torch.tensor(rows), "_hash": torch.tensor(self.hashes(rows))}
        return TensorDict({**found, "count": torch.tensor(self._counts[node], dtype=torch.int32)}, [])

    # ------------------------------------------------------------------ writing

    def __setitem__(self, key: TensorDictBase, value: TensorDictBase) -> None:
        """Add rows ("_index" and "_hash") to observations. Other entries are ignored."""
        entries = value.unbind(0) if key.ndim else [value]
        for node, each in zip(self._made(self._keys_of(key), key), entries, strict=True):
            self._connect([node] * each["_index"].numel(), each["_index"].flatten(), each["_hash"].flatten())

    def prepare(self, before: TensorDictBase, after: TensorDictBase) -> Callable[[Tensor, Tensor], None]:
        """Check observations before and after steps. Returns a function that commits rows and hashes, and cannot fail.

        KeyError for a missing entry, ValueError for a shape or dtype that differs from stored observations.
        """
        keys, next_keys = self._keys_of(before), self._keys_of(after)
        kinds_of(self.in_keys, after, kinds_of(self.in_keys, before))

        def write(rows: Tensor, hashes: Tensor) -> None:
            nodes = self._made(keys + next_keys, before)
            self._connect(nodes, rows, hashes)
            for node, target, row in zip(nodes, nodes[len(keys) :], rows.tolist(), strict=False):
                self._counts[node] += 1
                self._targets[row] = target

        return write

    def _keys_of(self, key: TensorDictBase) -> list[bytes]:
        """The bytes that identify each observation."""
        kinds_of(self.in_keys, key, self._kinds)
        tensors = [self._identify(key)] if self._identify else [key.get(name) for name in self.in_keys]
        return _as_bytes(row_bytes(tensors, key.batch_size))

    def _made(self, keys: list[bytes], like: TensorDictBase) -> list[int]:
        """The nodes of observations; new observations get a node."""
        if keys:
            self._kinds = kinds_of(self.in_keys, like)
        nodes = [self._numbers.setdefault(key, len(self._numbers)) for key in keys]
        new = len(self._numbers) - len(self._rows)
        self._rows += [{} for _ in range(new)]
        self._counts += [0] * new
        return nodes

    def _connect(self, nodes: Sequence[int], rows: Tensor, hashes: Tensor) -> None:
        """Append rows to nodes, without duplicates."""
        new = int(rows.max()) + 1 - len(self._targets) if len(rows) else 0
        self._targets += [_NONE] * new
        self._hashes += [0] * new
        for node, row, hash_ in zip(nodes, rows.tolist(), hashes.tolist(), strict=False):
            self._rows[node][row] = None
            self._hashes[row] = hash_

    # ------------------------------------------------------------------ checkpoints

    def state(self) -> dict[str, Any]:
        """The graph as plain values and arrays."""
        keys = np.frombuffer(b"".join(self._numbers), np.uint8).reshape(len(self._numbers), -1 if self._numbers else 0)
        pairs = [(node, row) for node, rows in enumerate(self._rows) for row in rows]
        return {
            "keys": keys.copy(),
            "pairs": np.array(pairs, np.int64).reshape(-1, 2),
            "counts": np.array(self._counts, np.int64),
            "rows": np.array([self._targets, self._hashes], np.int64),
            "kinds": [{"dtype": dtype, "shape": shape} for dtype, shape in self._kinds or ()],
        }

    def with_state(self, tree: object, options: LoadOptions = EXACT) -> Apply:
        """Check a result of `state`. The returned function puts it in, and cannot fail."""
        where = "the graph of a forest"
        fields = Fields(as_arrays(tree, self), where)
        made = NodeMap(self.in_keys, self._identify)
        keys = _as_bytes(np.ascontiguousarray(fields.array("keys", np.uint8, (None, None))))
        made._numbers = {key: number for number, key in enumerate(keys)}
        made._rows = [{} for _ in keys]
        made._counts = np.asarray(fields.array("counts", np.int64, (len(keys),))).tolist()
        targets, hashes = np.asarray(fields.array("rows", np.int64, (2, None)))
        made._targets, made._hashes = targets.tolist(), hashes.tolist()
        pairs = np.asarray(fields.array("pairs", np.int64, (None, 2)))
        limits = (targets, _NONE, len(keys)), (pairs[:, 0], 0, len(keys)), (pairs[:, 1], 0, len(targets))
        in_range = all(not part.size or least <= part.min() <= part.max() < limit for part, least, limit in limits)
        if not in_range or len(made._numbers) != len(keys):
            raise CheckpointCorrupt(f"{where}: not the graph that was saved")
        for node, row in pairs.tolist():
            made._rows[node][row] = None
        entries = [Fields(each, where) for each in fields.items("kinds")]
        made._kinds = [(each.text("dtype"), list(each.wholes("shape"))) for each in entries] or None
        return lambda: self.__dict__.update(made.__dict__)


def _as_bytes(rows: np.ndarray) -> list[bytes]:
    """Rows of uint8 [B, W] as B bytes objects."""
    return rows.view(f"V{rows.shape[1]}").ravel().tolist() if rows.shape[1] else [b""] * len(rows)
