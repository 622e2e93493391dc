"""Builds a tree from the graph of a forest: a graph walk over ints, one gather of rows, then vertices as views."""

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict, TensorDictBase
from torch import Tensor

from interop.data.tensordicts import unchecked
from interop.maps.node_map import NodeMap
from interop.maps.tree import Parents, Tree, as_tree

Read = Callable[[Tensor], TensorDictBase]  # rows of the data map -> their steps: "next" and the actions
_EMPTY = torch.Size(())


@dataclass
class Vertices:
    """The vertices of a tree in breadth-first order.

    Args:
        rollouts: the rows of the steps of each vertex.
        outgoing: the rows that follow each vertex.
        children, parents: the vertex numbers of children and parents.
    """

    rollouts: list[list[int]] = field(default_factory=list)
    outgoing: list[list[int]] = field(default_factory=list)
    children: list[list[int]] = field(default_factory=list)
    parents: list[list[int]] = field(default_factory=list)

    @classmethod
    def walk(cls, nodes: NodeMap, root: int, max_depth: int | None, compact: bool) -> Self:
        """Expand a node by the rules of `MCTSForest.get_tree`. O(steps), without recursion."""
        made = cls()
        numbers: dict[int, int] = {}  # first row -> vertex

        def append(outgoing: list[int], above: list[int]) -> None:
            rollout: list[int] = []
            known: set[int] = set()
            while len(outgoing) == 1 and outgoing[0] not in known:
                rollout += outgoing
                outgoing = nodes.after(outgoing[0])
                if not compact:
                    break
                known.add(rollout[-1])
            made.rollouts.append(rollout)
            made.outgoing.append(outgoing)
            made.children.append([])
            made.parents.append(above)

        append(nodes.rows(root), [])
        least, level, stop = 2 if compact else 1, 0, 1  # vertices before `stop` are at or above this level
        shares = False
        for at, outgoing in enumerate(made.outgoing):  # grows while it is read
            if at == stop:
                level, stop = level + 1, len(made.outgoing)
            if (max_depth is not None and level > max_depth) or len(outgoing) < least:
                continue
            for row in outgoing:
                number = numbers.setdefault(row, len(made.outgoing))
                if number == len(made.outgoing):
                    append([row], [at])
                else:
                    shares = True
                    made.parents[number].append(at)
                made.children[at].append(number)
        if shares:
            made._cut_cycles()
        return made

    def _cut_cycles(self) -> None:
        """Remove the back edges of a depth-first search in the order of children."""
        kept: list[list[int]] = [[] for _ in self.children]
        state = bytearray(len(self.children))  # 0: unvisited, 1: on the current path, 2: done
        way = [(0, iter(self.children[0]))]
        state[0] = 1
        while way:
            vertex, below = way[-1]
            for child in below:
                if state[child] == 1:
                    self.parents[child].remove(vertex)
                    continue
                kept[vertex].append(child)
                if not state[child]:
                    state[child] = 1
                    way.append((child, iter(self.children[child])))
                    break
            else:
                state[vertex] = 2
                way.pop()
        is_cut = kept != self.children
        self.children = kept
        if is_cut:
            self._renumber()

    def _renumber(self) -> None:
        """Renumber the vertices breadth first."""
        order, numbers = [0], {0: 0}
        for vertex in order:  # grows while it is read
            for child in self.children[vertex]:
                if numbers.setdefault(child, len(order)) == len(order):
                    order.append(child)
        self.rollouts, self.outgoing = [self.rollouts[at] for at in order], [self.outgoing[at] for at in order]
        self.children = [[numbers[child] for child in self.children[at]] for at in order]
        self.parents = [sorted(numbers[above] for above in self.parents[at]) for at in order]


def build(nodes: NodeMap, root: TensorDictBase, read: Read, max_depth: int | None, compact: bool) -> Tree:
    """Build the tree below an observation, a tensordict without batch dims. See `MCTSForest.get_tree`."""
    with _without_gc():
        return _build(nodes, root, read, max_depth, compact)


@contextlib.contextmanager
def _without_gc() -> Iterator[None]:
    """Pause garbage collection: all new objects stay alive, and scanning them takes longer than creating them."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _build(nodes: NodeMap, root: TensorDictBase, read: Read, max_depth: int | None, compact: bool) -> Tree:
    (start,) = nodes.nodes(root)
    vertices = Vertices.walk(nodes, start, max_depth, compact)
    lengths = np.array([len(each) for each in vertices.rollouts])
    rows = np.array([row for rollout in vertices.rollouts for row in rollout] or vertices.outgoing[0], np.int64)
    stops = np.cumsum(lengths)
    ends = np.where(lengths > 0, stops - 1, -1)  # the last step of each vertex; -1: before the first step
    previous = np.arange(len(rows)) - 1
    above = np.array([parents[0] for parents in vertices.parents[1:]], np.int64)
    previous[(stops - lengths)[1:]] = ends[above]
    steps = read(torch.from_numpy(rows))
    observed = root.select(*nodes.in_keys).unsqueeze(0)
    observed = torch.cat([observed.to(steps.device), steps["next"].select(*nodes.in_keys)])  # step n at n + 1
    steps.update(observed[torch.from_numpy(previous + 1)])
    sizes = lengths[lengths > 0].tolist()
    rollouts = [None] * (len(lengths) - len(sizes)) + _split(steps[: stops[-1]], sizes)
    node_data = observed[torch.from_numpy(ends + 1)].unbind(0)
    hashes = nodes.hashes([rollout[0] for rollout in vertices.rollouts[1:]])
    return _linked(vertices, rollouts, node_data, [None, *hashes])


def _linked(
    vertices: Vertices, rollouts: Sequence[Any], node_data: Sequence[Any], hashes: Sequence[int | None]
) -> Tree:
    """The vertices as tensordicts, linked to their stacked children. None values are left out."""
    count = len(rollouts)
    wins, counts = torch.zeros(count).unbind(0), torch.zeros(count, dtype=torch.int32).unbind(0)
    outgoing = torch.tensor([row for rows in vertices.outgoing for row in rows], dtype=torch.int64)
    index = outgoing.split([len(rows) for rows in vertices.outgoing])
    made = []
    for number, (rollout, hash_, rows) in enumerate(zip(rollouts, hashes, index, strict=True)):
        entries = {"count": counts[number], "wins": wins[number], "node_data": node_data[number]}
        entries["node_id"] = _plain(number)
        if len(rows):
            entries["index"] = rows
        if hash_ is not None:
            entries["hash"] = _plain(hash_)
        if rollout is not None:
            entries["rollout"] = rollout
        made.append(unchecked(entries, _EMPTY, None, None))
    links = [Parents() for _ in made]
    for link, parents in zip(links, vertices.parents, strict=True):
        for above in parents:
            link.add(made[above], links[above])
    shares = any(len(parents) > 1 for parents in vertices.parents)
    for vertex, children in zip(made, vertices.children, strict=True):
        if children:  # siblings share one reference to their parent, unless some have more parents
            for child in children if shares else ():
                made[child].set("_parent", NonTensorData(links[child]))
            stack = LazyStackedTensorDict(*(made[child] for child in children))
            vertex.set("subtree", as_tree(stack, _parent=None if shares else links[children[0]]))
    return as_tree(made[0])


def _plain(value: int) -> Any:
    made: Any = NonTensorData
    return made.from_tensordict(unchecked({}, _EMPTY, None, None), {"data": value})


def _split(data: TensorDictBase, sizes: list[int]) -> list[Any]:
    """Split a tensordict into views of the given sizes."""
    columns = [_split(each, sizes) if type(each) is TensorDict else each.split(sizes) for each in data.values()]
    keys, device = tuple(data.keys()), data.device
    return [
        unchecked(dict(zip(keys, parts, strict=True)), torch.Size((size,)), device, None)
        for size, *parts in zip(sizes, *columns, strict=True)
    ]
