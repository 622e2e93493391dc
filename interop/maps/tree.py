"""A tree of rollouts. A vertex holds the steps that lead to it, and a stack of its children."""

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self, cast

import torch
from tensordict import LazyStackedTensorDict, TensorClass, TensorDictBase
from torch import Tensor

from interop.maps import tree_plot
from interop.maps.tree_plot import Path
from interop.specs.composite import Composite

_KEY_TYPES = ("hash", "id", "path")


def node_data_of(vertex: "Tree") -> dict[str, Any]:
    """The `node_data` of a vertex as a dict."""
    return {} if vertex.node_data is None else cast(dict[str, Any], vertex.node_data.to_dict())


def _of_specs(*key: str) -> property:
    """A property that reads an entry of `specs`."""

    def read(tree: "Tree") -> Any:
        if tree.specs is None:
            raise RuntimeError(f"the tree has no specs, so no {key[-1]}: set tree.specs = env.specs")
        return tree.specs[key]

    return property(read, doc=f"`specs[{key}]`.")


class Parents:
    """Weak references to the parents of a vertex, and to their own `Parents`. Copies share them, pickling drops them."""

    def __init__(self) -> None:
        self._links: list[tuple[weakref.ref[TensorDictBase], Parents | None]] = []

    def __reduce__(self) -> tuple[type["Parents"], tuple[()]]:
        return Parents, ()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Parents":
        return self

    def add(self, vertex: TensorDictBase, above: "Parents | None") -> "Parents":
        """Add a reference to a parent and its `Parents`."""
        self._links.append((weakref.ref(vertex), above))
        return self

    def alive(self) -> list[tuple[TensorDictBase, "Parents | None"]]:
        """The parents that still exist, with their `Parents`."""
        return [(vertex, above) for link, above in self._links if (vertex := link()) is not None]


@dataclass(frozen=True)
class _Graph:
    """The distinct vertices below a root in breadth-first order, and the positions of their children."""

    vertices: list["Tree"]
    children: list[list[int]]

    def unrolled(self) -> list[tuple[int, int, int]]:
        """All paths from the root, breadth first, as (vertex, position of the previous path, number of the child)."""
        ways = [(0, -1, -1)]
        for at, (vertex, _, _) in enumerate(ways):  # grows while it is read
            ways += [(child, at, number) for number, child in enumerate(self.children[vertex])]
        return ways


class Tree(TensorClass["nocast"]):  # type: ignore[name-defined]  # an option, not a type
    """A vertex and, in `subtree`, all vertices below it. A tensorclass: supports field assignment, `clone` and `to`.

    `MCTSForest.get_tree` builds trees; build them by hand with `make_node` and assignments to `subtree`. A vertex may have
    several parents. Cycles are not allowed. Methods are O(edges), except those that follow paths. `clone`, `to` and saving
    recurse into `subtree`, so they fail for trees deeper than Python's recursion limit.

    Args:
        count: the number of visits.
        wins: the sum of rewards below it.
        index: rows of the forest's data map with the steps from this vertex; None without steps.
        hash: the hash of the observation and action that lead to it; None for a root.
        node_id: the number in breadth-first order, 0 for the root.
        rollout: the steps that lead to the vertex, in TED format, [steps]; None without steps.
        node_data: the observation of the vertex.
        subtree: the children, stacked; None for a leaf.
        specs: `env.specs`, read by the properties `full_*_spec`.
    """

    count: Tensor | int | None = None
    wins: Tensor | float | None = None
    index: Tensor | None = None
    hash: int | None = None
    node_id: int | None = None
    rollout: TensorDictBase | None = None
    node_data: TensorDictBase | None = None
    subtree: "Tree | None" = None
    _parent: Parents | None = None
    specs: Composite | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "subtree" and value is not None:
            known = "_parent" in {*self._tensordict.keys(), *self._non_tensordict}
            value.set("_parent", Parents().add(self._tensordict, self._parent if known else None))
        if name in self.__expected_keys__:
            self.set(name, value)
        else:
            object.__setattr__(self, name, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The vertices of a built tree are views of shared memory, which would be pickled in full with each vertex.
        vertex = self.reshape(-1)[0] if self.ndim and self.numel() else self
        leaves = () if vertex.node_data is None else vertex.node_data.values(True, True)
        is_view = any(isinstance(leaf, Tensor) and leaf.untyped_storage().nbytes() > leaf.nbytes for leaf in leaves)
        return object.__reduce_ex__(self.clone() if is_view else self, protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return cast(Self, self.clone())

    @classmethod
    def make_node(
        cls, data: TensorDictBase, *, device: Any = None, batch_size: Any = None, specs: Composite | None = None
    ) -> Self:
        """Make a vertex from an observation, or from steps in TED format that lead to a single child."""
        rollout = subtree = None
        if "next" in data:
            rollout = data if data.ndim else data.unsqueeze(0)
            subtree = cast(Self, LazyStackedTensorDict.lazy_stack([cls.make_node(rollout["next"][..., -1])]))
        counts = {"count": torch.zeros((), dtype=torch.int32), "wins": torch.zeros(())}
        node_data = data.exclude("action", "next")
        made: Any = cls
        return cast(
            Self,
            made(
                **counts, rollout=rollout, node_data=node_data, subtree=subtree, specs=specs, device=device,
                batch_size=() if batch_size is None else batch_size,
            ),
        )  # fmt: skip

    # ------------------------------------------------------------------ a vertex

    @property
    def visits(self) -> Tensor | int | None:
        """Alias of `count`."""
        return self.count

    @visits.setter
    def visits(self, value: Tensor | int) -> None:
        self.count = value

    @property
    def node_observation(self) -> Tensor:
        """The entry "observation" of `node_data`."""
        return self._data_of("node_data")["observation"]

    @property
    def node_observations(self) -> TensorDictBase:
        """`node_data` with the entry "observation" only."""
        return self._data_of("node_data").select("observation")

    @property
    def branching_action(self) -> Tensor | None:
        """The first action of the rollout; None without one."""
        return None if self.rollout is None else self.rollout["action"][..., 0]

    @property
    def prev_action(self) -> Tensor | None:
        """The last action of the rollout; None without one."""
        return None if self.rollout is None else self.rollout["action"][..., -1]

    @property
    def selected_actions(self) -> Tensor | None:
        """The first actions of the children's rollouts, stacked; None for a leaf, or if a child has no rollout."""
        actions = [child.branching_action for child in self.children()]
        found = [action for action in actions if action is not None]
        return torch.stack(found) if found and len(found) == len(actions) else None

    @property
    def is_terminal(self) -> bool | Tensor:
        """Whether the last step of the rollout is done; False without a rollout."""
        return False if self.rollout is None else self.rollout["next", "done"][..., -1, :].squeeze(-1)

    @property
    def num_children(self) -> int:
        """The number of children."""
        return 0 if self.subtree is None else len(self.subtree)

    @property
    def parent(self) -> "Tree | None":
        """The parent, as a new object over its data; a stack of several parents, None for a root.

        References are weak: the result is None after the parents were deleted, or after unpickling. A copy refers to the
        original's parents until its `subtree` is assigned.
        """
        found = [] if self._parent is None else self._parent.alive()
        if not found:
            return None
        if len(found) > 1:
            return as_tree(LazyStackedTensorDict(*(vertex for vertex, _ in found)))
        ((vertex, above),) = found
        return as_tree(vertex, _parent=above if vertex.get("_parent", None) is None else None)

    def children(self) -> Sequence["Tree"]:
        """The children."""
        return () if self.subtree is None else self.subtree.unbind(0)

    def fully_expanded(self, env: Any) -> bool:
        """Whether there are as many children as `env.cardinality` counts actions."""
        return bool(env.cardinality(self.node_data) == self.num_children)

    full_observation_spec = _of_specs("output_spec", "full_observation_spec")
    full_reward_spec = _of_specs("output_spec", "full_reward_spec")
    full_done_spec = _of_specs("output_spec", "full_done_spec")
    full_state_spec = _of_specs("input_spec", "full_state_spec")
    full_action_spec = _of_specs("input_spec", "full_action_spec")

    def _data_of(self, field: str) -> TensorDictBase:
        data = getattr(self, field)
        if data is None:
            raise RuntimeError(f"the vertex has no {field}: set tree.{field}, or use Tree.make_node")
        return cast(TensorDictBase, data)

    # ------------------------------------------------------------------ the vertices below

    def _graph(self) -> _Graph:
        vertices, children, known = list[Tree]([self]), list[list[int]](), {self.node_id: 0}
        for vertex in vertices:  # grows while it is read
            positions = []
            for child in vertex.children():
                name = child.node_id
                at = len(vertices) if name is None else known.setdefault(name, len(vertices))
                if at == len(vertices):
                    vertices.append(child)
                positions.append(at)
            children.append(positions)
        return _Graph(vertices, children)

    def _find(self, field: str, value: int) -> "Tree":
        for vertex in self._graph().vertices:
            if getattr(vertex, field) == value:
                return vertex
        raise ValueError(f"Node with {field.removeprefix('node_')} {value} not found.")

    def get_vertex_by_id(self, id: int) -> "Tree":
        """The vertex with this `node_id`. ValueError if there is none."""
        return self._find("node_id", id)

    def get_vertex_by_hash(self, hash: int) -> "Tree":
        """The first vertex with this `hash`. ValueError if there is none."""
        return self._find("hash", hash)

    def __contains__(self, other: "Tree") -> bool:
        return any(vertex.hash == other.hash for vertex in self._graph().vertices)

    def vertices(self, *, key_type: str = "hash") -> dict[Any, "Tree"]:
        """The vertices, breadth first, by "hash", "id" or "path". By path, a shared vertex has one entry per path."""
        if key_type not in _KEY_TYPES:
            raise ValueError(f"key_type must be either 'hash', 'id' or 'path'. Got {key_type}.")
        graph = self._graph()
        if key_type == "path":
            ways = graph.unrolled()
            return {_path(ways, at): graph.vertices[vertex] for at, (vertex, _, _) in enumerate(ways)}
        field = "hash" if key_type == "hash" else "node_id"
        return {getattr(vertex, field): vertex for vertex in graph.vertices}

    def num_vertices(self, *, count_repeat: bool = False) -> int:
        """The number of vertices; with `count_repeat`, a shared vertex counts once per path."""
        graph = self._graph()
        return len(graph.unrolled()) if count_repeat else len(graph.vertices)

    def edges(self) -> list[tuple[Any, Any]]:
        """The (parent id, child id) pairs, breadth first. Edges below a shared vertex are repeated for each path."""
        graph = self._graph()
        ids = [vertex.node_id for vertex in graph.vertices]
        ways = graph.unrolled()
        return [(ids[ways[above][0]], ids[vertex]) for vertex, above, _ in ways[1:]]

    def valid_paths(self) -> Iterator[Path]:
        """The paths to the leaves as tuples of child numbers, shorter ones first; `()` for a lone root."""
        graph = self._graph()
        ways = graph.unrolled()
        return (_path(ways, at) for at, (vertex, _, _) in enumerate(ways) if not graph.children[vertex])

    def max_length(self) -> int:
        """The number of edges of the longest path. O(edges)."""
        children = self._graph().children
        waiting = [0] * len(children)  # edges to each vertex not followed yet
        for below in children:
            for child in below:
                waiting[child] += 1
        depth, ready = [0] * len(children), deque([0])
        while ready:
            vertex = ready.popleft()
            for child in children[vertex]:
                depth[child] = max(depth[child], depth[vertex] + 1)
                waiting[child] -= 1
                if not waiting[child]:
                    ready.append(child)
        return max(depth)

    def rollout_from_path(self, path: Path) -> TensorDictBase | None:
        """The concatenated rollouts of this vertex and those along a path; None if none has a rollout."""
        vertex: Tree = self
        rollouts = [vertex.rollout]
        for number in path:
            if vertex.subtree is None:
                raise IndexError(f"the path {path} is longer than the tree is deep")
            vertex = vertex.subtree[number]
            rollouts.append(vertex.rollout)
        found = [each for each in rollouts if each is not None]
        return cast(TensorDictBase, torch.cat(found, -1)) if found else None

    def to_string(self, node_format_fn: Callable[["Tree"], Any] = node_data_of) -> str:
        """The tree as text, depth first, one line per path to a vertex that has a rollout.

        Args:
            node_format_fn: vertex -> the text after its path; by default `node_data` as a dict.
        """
        graph, lines = self._graph(), list[str]()
        open_: list[tuple[int, Path]] = [(0, ())]
        while open_:
            vertex, path = open_.pop()
            if graph.vertices[vertex].rollout is not None:
                lines.append(f"{' ' * (len(path) - 1)}{path} {node_format_fn(graph.vertices[vertex])}")
            below = graph.children[vertex]
            open_ += [(below[number], (*path, number)) for number in reversed(range(len(below)))]
        return "\n".join(lines)

    def plot(
        self,
        backend: str = "plotly",
        figure: str = "tree",
        info: Sequence[str] | None = None,
        make_labels: Callable[["Tree", Path], str] | None = None,
        *,
        path: str | None = None,
    ) -> Any:
        """Plot the tree. A shared vertex is drawn once per path.

        Args:
            backend: "plotly" returns a `plotly.graph_objects.Figure`, "matplotlib" a `matplotlib.figure.Figure`.
            figure: "tree" draws vertices and edges, "box" nested boxes, as wide as their number of leaves.
            info: the vertex fields or properties in the labels, by default "node_id", "visits" and "wins".
            make_labels: (vertex, path) -> label.
            path: an output file: ".html" for plotly, an image for matplotlib. Images of plotly need Chrome.

        Raises:
            NotImplementedError: another backend or figure.
            ImportError: the backend is not installed.
        """
        fields = ("node_id", "visits", "wins") if info is None else info

        def label(vertex: Tree, way: Path) -> str:
            return "\n".join(f"{name}: {_shown(getattr(vertex, name))}" for name in fields)

        vertices, make = self.vertices(key_type="path"), make_labels or label
        labels = [str(make(vertex, way)) for way, vertex in vertices.items()]
        return tree_plot.plot(list(vertices), labels, backend, figure, path)


def as_tree(data: TensorDictBase, **beside: Any) -> Tree:
    """A vertex, or a stack of vertices, over the tensordict of its fields. Missing fields are None."""
    made: Any = Tree
    return cast(Tree, made.from_tensordict(data, dict.fromkeys(made.__expected_keys__) | beside))


def _shown(value: object) -> str:
    return str(value.tolist() if hasattr(value, "tolist") else value)


def _path(ways: list[tuple[int, int, int]], at: int) -> Path:
    found = []
    while at:
        _, at, number = ways[at]
        found.append(number)
    return tuple(reversed(found))
