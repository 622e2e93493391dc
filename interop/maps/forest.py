"""A store of rollouts with shared observations, and the trees built from it."""

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from tensordict import NestedKey, TensorDictBase, unravel_key

from fbuf.checkpoint import Fields, Reading, Verify, Writing, load
from interop.checkpoint.state import EXACT, Apply, Component, LoadOptions, as_tensors, described, state_for
from interop.data.arguments import whole
from interop.host.threads import Lock
from interop.maps.map import TensorDictMap, TensorMap
from interop.maps.node_map import NodeMap
from interop.maps.pending_steps import PendingSteps
from interop.maps.query import QueryModule
from interop.maps.tree import Path, Tree, node_data_of
from interop.maps.tree_builder import build
from interop.storages.lazy import LazyTensorStorage

_DEFAULT_SIZE = 1000
Keys = NestedKey | Sequence[NestedKey]


class _Keys:
    """Descriptor for a list of keys with a default."""

    def __init__(self, *default: str) -> None:
        self._default = list(default)

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, forest: "MCTSForest", owner: type | None = None) -> list[NestedKey]:
        return forest.given_keys.get(self._name, self._default)

    def __set__(self, forest: "MCTSForest", value: Any) -> None:
        if not isinstance(value, str | tuple | list | None):
            raise ValueError(f"{self._name} must be a key or a list of keys, got {type(value).__name__}")
        if value is not None:
            forest.given_keys[self._name] = [
                unravel_key(key) for key in (value if isinstance(value, list) else [value])
            ]


class MCTSForest(Component):
    """Stores rollouts by observation and action. `get_tree` returns the tree below an observation.

    `data_map` holds the actions and "next" entries of each distinct (observation, action) pair; the last write wins.
    `node_map` holds, for each observation, the rows of `data_map` that start there. Both are created by the first write.
    Thread-safe.

    Short rollouts are queued and written in one batch, which is many times faster. Queued steps are already validated, have
    room, and are written before any read. Queueing ends when a map is passed in or accessed.

    Args:
        data_map: a `TensorDictMap` keyed by observation and action; by default over a `LazyTensorStorage`.
        node_map: a `NodeMap` of another forest with the same `data_map`, or an empty `TensorDictMap` keyed by observation
            over a `ListStorage`. The forest mirrors its entries into the latter, O(entry) per write.
        max_size: the maximum number of distinct pairs; by default that of the given maps, or 1000.
        done_keys, reward_keys, observation_keys, action_keys: by default ["done", "terminated", "truncated"], ["reward"],
            ["observation"] and ["action"]. `get_keys_from_env` sets the keys that were not given.
        excluded_keys: entries, also of "next", that are not stored.
        consolidated: passed to the default storage.

    Raises:
        ValueError: keys of a wrong type, unequal sizes, or a `node_map` with entries that is not a `NodeMap`.
    """

    done_keys = _Keys("done", "terminated", "truncated")
    reward_keys = _Keys("reward")
    observation_keys = _Keys("observation")
    action_keys = _Keys("action")
    excluded_keys = _Keys()

    def __init__(
        self,
        *,
        data_map: TensorDictMap | None = None,
        node_map: TensorDictMap | NodeMap | None = None,
        max_size: int | None = None,
        done_keys: Keys | None = None,
        reward_keys: Keys | None = None,
        observation_keys: Keys | None = None,
        action_keys: Keys | None = None,
        excluded_keys: Keys | None = None,
        consolidated: bool | None = None,
    ) -> None:
        self.given_keys: dict[str, list[NestedKey]] = {}
        self.done_keys, self.reward_keys = done_keys, reward_keys
        self.observation_keys, self.action_keys = observation_keys, action_keys
        self.excluded_keys, self.consolidated = excluded_keys, consolidated
        self._data_map, self._lock = data_map, Lock()
        self._copy: TensorDictMap | None = None  # mirror of the node map
        self._nodes: NodeMap | None = None
        self.is_shared = bool(data_map or node_map)  # whether the maps are visible outside: then nothing is queued
        self._pending: PendingSteps | None = None
        if isinstance(node_map, NodeMap):
            self._nodes = node_map
        elif node_map is not None:
            if len(node_map):
                raise ValueError(f"node_map has {len(node_map)} entries: pass an empty one, or a NodeMap")
            query = node_map.query_module
            self._copy, self._nodes = node_map, NodeMap(node_map.in_keys, query.hash_to_int and query.hashes)
        max_size = None if max_size is None else whole("max_size", max_size)
        sizes = {
            size for size in (max_size, data_map and data_map.max_size, self._copy and self._copy.max_size) if size
        }
        if len(sizes) > 1:
            raise ValueError(f"Conflicting max_size: {sorted(sizes)}")
        self._max_size = sizes.pop() if sizes else None

    @property
    def max_size(self) -> int | None:
        """The maximum number of (observation, action) pairs; None before the first write if not given."""
        return self._max_size

    @property
    def data_map(self) -> TensorDictMap | None:
        """The map from observations and actions to results; None before the first write."""
        self._share()
        return self._data_map

    @property
    def node_map(self) -> TensorMap | None:
        """The map from observations to rows of `data_map`; None before the first write."""
        self._share()
        return self._copy or self._nodes

    def __len__(self) -> int:
        """The number of distinct (observation, action) pairs."""
        with self._lock:
            self._flush()
            return 0 if self._data_map is None else len(self._data_map)

    def __bool__(self) -> bool:
        return True  # an empty forest is truthy

    def get_keys_from_env(self, env: Any) -> None:
        """Set the keys that were not given from an environment."""
        for name in ("reward_keys", "done_keys", "action_keys", "observation_keys"):
            if name not in self.given_keys:
                setattr(self, name, list(getattr(env, name)))

    # ------------------------------------------------------------------ writing

    def extend(self, rollout: TensorDictBase, *, return_node: bool = False) -> Tree | None:
        """Store the steps of a rollout in TED format, with at least one batch dim. The rollout is not modified. O(steps).

        Args:
            rollout: has observations, actions and "next". Other root entries are not stored.
            return_node: return the tree below the first observation.

        Raises:
            KeyError: an observation or action is missing.
            ValueError: an entry's shape or dtype differs from stored steps, the rollout has no batch dim or, with
                `return_node`, without steps.
            IndexError: more than `max_size` pairs. After an error nothing is stored.
        """
        with self._lock:
            if return_node and not rollout.batch_size.numel():
                raise ValueError("a rollout without steps has no first observation: return_node needs one")
            if return_node or self._pending is None or not self._pending.add(rollout, self._room()):
                self._flush()
                self._write(rollout)
            return self.get_tree(rollout.reshape(-1)[0]) if return_node else None

    def add(self, step: TensorDictBase, *, return_node: bool = False) -> Tree | None:
        """Store one step, a tensordict without batch dims. See `extend`."""
        return self.extend(step.unsqueeze(0), return_node=return_node)

    def _write(self, rollout: TensorDictBase) -> None:
        if not rollout.ndim:
            raise ValueError("extend takes rollouts with batch dims: use add for a single step")
        steps = whole = rollout if rollout.ndim == 1 else rollout.reshape(-1)
        after = steps.get("next", None)
        if not isinstance(after, TensorDictBase):
            raise KeyError("the rollout needs a tensordict 'next', as in the TED format")
        if self.excluded_keys:
            steps, after = (each.exclude(*self.excluded_keys) for each in (steps, after))
        names = [*self.observation_keys, *self.action_keys]
        missing = [name for name in names if steps.get(name, None) is None]
        missing += [("next", name) for name in self.observation_keys if after.get(name, None) is None]
        if missing:
            raise KeyError(f"the rollout has no {missing}: set observation_keys and action_keys in the constructor")
        keys, value = steps.select(*names), steps.select(*self.action_keys).set("next", after)
        data_map, nodes = self._made_maps()
        write = nodes.prepare(keys, after)
        data_map[keys] = value
        query = data_map.query_module
        write(keys[query.index_key], keys[query.hash_key])
        if self._copy is not None:
            before = keys.select(*self.observation_keys)
            self._copy[before] = nodes[before]
        self._data_map, self._nodes = data_map, nodes
        if self._pending is None and not self.is_shared:
            self._pending = PendingSteps.like(whole)

    def _flush(self) -> None:
        """Write the queued steps."""
        steps = None if self._pending is None else self._pending.take()
        if steps is not None:
            self._write(steps)

    def _room(self) -> int:
        """A lower bound of the number of pairs that still fit."""
        return 0 if self._data_map is None else self._data_map.max_size - len(self._data_map)

    def _share(self) -> None:
        with self._lock:
            self._flush()
            self._pending, self.is_shared = None, True

    def _made_maps(self) -> tuple[TensorDictMap, NodeMap]:
        nodes = NodeMap(self.observation_keys) if self._nodes is None else self._nodes
        if self._data_map is not None:
            return self._data_map, nodes
        self._max_size = self._max_size or _DEFAULT_SIZE
        query = QueryModule([*self.observation_keys, *self.action_keys])
        storage = LazyTensorStorage(self._max_size, consolidated=bool(self.consolidated))
        return TensorDictMap(query_module=query, storage=storage), nodes

    # ------------------------------------------------------------------ reading

    def get_child(self, key: TensorDictBase) -> TensorDictBase:
        """`data_map[key]`: the results of observations and actions. KeyError for an unknown pair."""
        with self._lock:
            data_map, _ = self._written_maps()
            found: TensorDictBase = data_map[key]
            return found

    def get_tree(self, root: TensorDictBase, *, max_depth: int | None = None, compact: bool = True) -> Tree:
        """The tree of stored steps below an observation. O(steps of the tree), at any depth.

        Vertices are numbered breadth first, children by first appearance. A vertex stands for an (observation, action) pair;
        all its parents share it. If steps lead back to an earlier observation, a rollout ends before it repeats a step. An
        edge that would close a cycle is left out; `index` still lists it.

        Args:
            root: the observation, without batch dims or with one element; other entries are ignored.
            max_depth: vertices below this depth get no children; with 0 only the root has children.
            compact: merge each chain of steps between branches into one vertex; otherwise one vertex per step.

        Raises:
            KeyError: no step starts at the observation.
            ValueError: the observation differs from stored ones in shape or dtype, or there are several.
        """
        if root.batch_size.numel() != 1:
            raise ValueError(f"the root must be one observation, got a batch of {list(root.batch_size)}: index it")
        with self._lock:
            data_map, nodes = self._written_maps()
            start = root.reshape(()) if root.ndim else root
            return build(nodes, start, lambda rows: data_map.collate_fn(data_map.storage.get(rows)), max_depth, compact)

    @classmethod
    def valid_paths(cls, tree: Tree) -> Iterator[Path]:
        """Alias of `tree.valid_paths()`."""
        return tree.valid_paths()

    def to_string(self, td_root: TensorDictBase, node_format_fn: Callable[[Tree], Any] = node_data_of) -> str:
        """The tree below an observation as text, see `Tree.to_string`."""
        return self.get_tree(td_root).to_string(node_format_fn)

    # ------------------------------------------------------------------ checkpoints

    def state(self) -> dict[str, Any]:
        with self._lock:
            data_map, nodes = self._written_maps()
            return {"data_map": data_map.state(), "nodes": nodes.state()}

    def with_state(self, tree: object, options: LoadOptions = EXACT) -> Apply:
        fields = Fields(tree, "the state of a forest")
        with self._lock:
            data_map, nodes = self._made_maps()
            put_nodes = nodes.with_state(fields.any("nodes"), options)
            return self._with_maps(data_map, nodes, put_nodes, data_map.with_state(fields.any("data_map"), options))

    def state_dict(self) -> dict[str, Any]:
        """A copy of all rollouts as tensors and plain values, for `torch.load(weights_only=True)`."""
        with self._lock:
            data_map, nodes = self._written_maps()
            return {"data_map": data_map.state_dict(), "nodes": as_tensors(nodes.state())}

    def dumps(self, path: str | os.PathLike[str]) -> None:
        """Save all rollouts to a folder, atomically and flushed to disk. KeyError for an empty forest.

        If the process is killed, the folder holds the previous checkpoint or the new one, complete.
        """
        with Writing(path) as out, self._lock:
            data_map, nodes = self._written_maps()
            data_map.dumps(out.folder("data_map"))
            out.write(described(self, nodes.state()))

    def loads(
        self,
        path: str | os.PathLike[str],
        *,
        verify: Verify = "full",
        strict: bool = True,
        cast: bool = False,
        allow_pickle: bool = False,
    ) -> None:
        """Load a checkpoint of `dumps` into a forest with the same configuration.

        After an error nothing has changed. No code in the folder is executed. FileNotFoundError if there is no checkpoint,
        `CheckpointCorrupt` for damage, `CheckpointMismatch` for a checkpoint of another object. The options are those of
        `ReplayBuffer.loads`.
        """
        options = LoadOptions(strict, cast, allow_pickle)

        def use(source: Reading) -> Apply:
            folder = source.folder("data_map")
            data_map, nodes = self._made_maps()
            put_nodes = nodes.with_state(state_for(self, source.tree, str(source.path)), options)
            put_values = partial(
                data_map.loads, folder, verify=verify, strict=strict, cast=cast, allow_pickle=allow_pickle
            )
            return self._with_maps(data_map, nodes, put_nodes, put_values)

        with self._lock:
            load(path, use, verify)()

    def _written_maps(self) -> tuple[TensorDictMap, NodeMap]:
        self._flush()
        if self._data_map is None or self._nodes is None:
            raise KeyError("the forest has no rollouts: call extend first")
        return self._data_map, self._nodes

    def _with_maps(self, data_map: TensorDictMap, nodes: NodeMap, put_nodes: Apply, put_values: Apply) -> Apply:
        """Returns a function that fills both maps, the values first, and uses them."""

        def put() -> None:
            with self._lock:
                put_values()
                put_nodes()
                self._data_map, self._nodes, self._pending = data_map, nodes, None

        return put
