"""A tree of rollouts: each vertex holds the steps that lead to it and a stack of the vertices after it."""

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self, cast

import torch
from tensordict import LazyStackedTensorDict, TensorClass, TensorDictBase
from torch import Tensor

from interop.specs.composite import Composite

Path = tuple[int, ...]
_KEY_TYPES = ("hash", "id", "path")


def node_data_of(vertex: "Tree") -> dict[str, Any]:
    """The `node_data` of a vertex as a dict."""
    return {} if vertex.node_data is None else cast(dict[str, Any], vertex.node_data.to_dict())


def _of_specs(*key: str) -> property:
    """An entry of `specs`."""

    def read(tree: "Tree") -> Any:
        if tree.specs is None:
            raise RuntimeError(f"the tree has no specs, so no {key[-1]}: set tree.specs = env.specs")
        return tree.specs[key]

    return property(read, doc=f"`specs[{key}]`.")


class Parents:
    """Weak references to the vertices above one, and what is above each. Copies share them, pickling drops them."""

    def __init__(self) -> None:
        self._links: list[tuple[weakref.ref[TensorDictBase], Parents | None]] = []

    def __reduce__(self) -> tuple[type["Parents"], tuple[()]]:
        return Parents, ()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Parents":
        return self

    def add(self, vertex: TensorDictBase, above: "Parents | None") -> "Parents":
        """Refer to one more vertex, and to what is above it."""
        self._links.append((weakref.ref(vertex), above))
        return self

    def alive(self) -> list[tuple[TensorDictBase, "Parents | None"]]:
        """The vertices that were not deleted since, and what is above them."""
        return [(vertex, above) for link, above in self._links if (vertex := link()) is not None]


@dataclass(frozen=True)
class _Graph:
    """The distinct vertices below a root in breadth-first order, and the positions of the children of each."""

    vertices: list["Tree"]
    children: list[list[int]]

    def unrolled(self) -> list[tuple[int, int, int]]:
        """Each way from the root to a vertex, breadth first: vertex, position of the previous way, number of the child."""
        ways = [(0, -1, -1)]
        for at, (vertex, _, _) in enumerate(ways):  # grows while it is read
            ways += [(child, at, number) for number, child in enumerate(self.children[vertex])]
        return ways


class Tree(TensorClass["nocast"]):  # type: ignore[name-defined]  # an option, not a type
    """A vertex and, in `subtree`, all vertices below it. A tensorclass: fields are assigned, `clone` and `to` are those.

    `MCTSForest.get_tree` builds trees; `make_node` and assigning `subtree` build them by hand. A vertex that several others
    lead to is one vertex with several parents. No vertex is below itself. Methods are O(edges), but for those that follow
    paths. `clone`, `to` and saving recurse into `subtree`, so trees deeper than Python's recursion limit cannot take them.

    Args:
        count: how often the vertex was visited.
        wins: the sum of what was won below it.
        index: rows of the forest's data map that hold the steps from this vertex, None where no step is known.
        hash: of the observation and action that lead to it, None for a root.
        node_id: the number of the vertex in breadth-first order, 0 for the root.
        rollout: the steps that lead to the vertex, in the TED format, [steps]; None where there are none.
        node_data: the observation of the vertex.
        subtree: the vertices below it, stacked; None for a leaf.
        specs: what `env.specs` gives; the properties `full_*_spec` read it.
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
        # The vertices of a built tree are views of the same memory, all of which would be pickled with each of them.
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
        """A vertex of a tensordict: an observation, or steps in the TED format that lead to a single child."""
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
        """The first actions of the rollouts of the children, stacked; None for a leaf, or where a child has no rollout."""
        actions = [child.branching_action for child in self.children()]
        found = [action for action in actions if action is not None]
        return torch.stack(found) if found and len(found) == len(actions) else None

    @property
    def is_terminal(self) -> bool | Tensor:
        """Whether the last step of the rollout is done; False without a rollout."""
        return False if self.rollout is None else self.rollout["next", "done"][..., -1, :].squeeze(-1)

    @property
    def num_children(self) -> int:
        """How many vertices are directly below."""
        return 0 if self.subtree is None else len(self.subtree)

    @property
    def parent(self) -> "Tree | None":
        """The vertex above, as a new object over its data; a stack of them where there are several, None for a root.

        References are weak: it is None once the parents were deleted, or in what was pickled. A copy refers to the parents
        of what was copied until its `subtree` is assigned.
        """
        found = [] if self._parent is None else self._parent.alive()
        if not found:
            return None
        if len(found) > 1:
            return as_tree(LazyStackedTensorDict(*(vertex for vertex, _ in found)))
        ((vertex, above),) = found
        return as_tree(vertex, _parent=above if vertex.get("_parent", None) is None else None)

    def children(self) -> Sequence["Tree"]:
        """The vertices directly below."""
        return () if self.subtree is None else self.subtree.unbind(0)

    def fully_expanded(self, env: Any) -> bool:
        """Whether there is a child for each action that `env.cardinality` counts."""
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
        """The vertices in breadth-first order, by "hash", "id" or "path"; by path a shared vertex is there for each path."""
        if key_type not in _KEY_TYPES:
            raise ValueError(f"key_type must be either 'hash', 'id' or 'path'. Got {key_type}.")
        graph = self._graph()
        if key_type == "path":
            ways = graph.unrolled()
            return {_path(ways, at): graph.vertices[vertex] for at, (vertex, _, _) in enumerate(ways)}
        field = "hash" if key_type == "hash" else "node_id"
        return {getattr(vertex, field): vertex for vertex in graph.vertices}

    def num_vertices(self, *, count_repeat: bool = False) -> int:
        """How many vertices there are; with `count_repeat` a shared vertex counts once a path."""
        graph = self._graph()
        return len(graph.unrolled()) if count_repeat else len(graph.vertices)

    def edges(self) -> list[tuple[Any, Any]]:
        """The node ids of parents and children, breadth first; those below a shared vertex are there for each path."""
        graph = self._graph()
        ids = [vertex.node_id for vertex in graph.vertices]
        ways = graph.unrolled()
        return [(ids[ways[above][0]], ids[vertex]) for vertex, above, _ in ways[1:]]

    def valid_paths(self) -> Iterator[Path]:
        """The paths to leaves as numbers of children, shorter ones first; `()` for a lone root."""
        graph = self._graph()
        ways = graph.unrolled()
        return (_path(ways, at) for at, (vertex, _, _) in enumerate(ways) if not graph.children[vertex])

    def max_length(self) -> int:
        """How many edges the longest path has. O(edges)."""
        children = self._graph().children
        waiting = [0] * len(children)  # edges to a vertex that were not followed yet
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
        """The rollouts of this vertex and of those along a path, one after the other; None if none has any."""
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
        """The tree as text, depth first: a line for each path to a vertex that has a rollout.

        Args:
            node_format_fn: gives what is written of a vertex behind its path, by default its `node_data` as a dict.
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
        """A picture of the tree: a figure of plotly or of matplotlib. See `tree_plot.plot`."""
        from interop.maps import tree_plot

        return tree_plot.plot(self, backend, figure, info, make_labels, path)


def as_tree(data: TensorDictBase, **beside: Any) -> Tree:
    """A vertex, or a stack of them, over the tensordict of its fields. Fields that it lacks are None."""
    made: Any = Tree
    return cast(Tree, made.from_tensordict(data, dict.fromkeys(made.__expected_keys__) | beside))


def _path(ways: list[tuple[int, int, int]], at: int) -> Path:
    found = []
    while at:
        _, at, number = ways[at]
        found.append(number)
    return tuple(reversed(found))
