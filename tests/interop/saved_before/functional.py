"""States of `fbuf`, as its checkpoints, and buffers of torch over them."""

import dataclasses
from pathlib import Path
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import torch

import fbuf
from fbuf import (
    Buffer,
    BufferState,
    Fifo,
    Frames,
    HashTable,
    HighestRanked,
    Mixture,
    PerTrajectory,
    Prioritized,
    Shuffled,
    Slices,
    Trajectories,
)
from interop import FunctionalReplayBuffer, from_fbuf
from tests.fbuf.compiled import jit
from tests.interop.saved_before.case import SETTLED, Case, from_folder, through_folder
from tests.interop.saved_before.plain import Seen, flat

CAPACITY, BATCH = 8, 4
Batch: TypeAlias = dict[str, np.ndarray]
ROUNDED = (*SETTLED, "probability", "state")  # a tree has powers of priorities


def items(first: int, count: int, lanes: tuple[int, ...]) -> Batch:
    """Steps of episodes of four, with stacks of two frames."""
    ids = np.arange(first, first + count, dtype=np.int32)
    if lanes:
        ids = ids[:, None] + 1000 * np.arange(*lanes, dtype=np.int32)
    step = ids % 4
    frames = ids[..., None] - step[..., None] + np.maximum(step[..., None] + np.arange(-1, 2, dtype=np.int32), 0)
    return {
        "id": ids,
        "done": step == 3,
        "rank": (7 * ids % 13 + ids / 1024).astype(np.float32),
        "obs": frames[..., :2],
        "next_obs": frames[..., 1:],
    }


@dataclasses.dataclass(frozen=True)
class Rules:
    """A buffer, and what its items have."""

    buffer: Buffer
    keys: tuple[str, ...] = ("id", "done")

    def batch(self, first: int, count: int) -> Batch:
        every = items(first, count, self.buffer.lanes)
        return {key: every[key] for key in self.keys}

    def empty(self) -> BufferState:
        """Shapes and dtypes alone: what is loaded needs no arrays."""
        item = {key: value[0] for key, value in items(0, 1, ()).items() if key in self.keys}
        found: BufferState = jax.eval_shape(lambda: self.buffer.init(item))
        return found

    def turn(self, state: BufferState, first: int, updates: bool) -> tuple[BufferState, object]:
        """A draw, new priorities of what was drawn, and three rows."""
        return _turn(self.buffer, state, self.batch(first, 3), jax.random.key(first), updates)

    def case(self) -> Case["Held"]:
        def make() -> Held:
            return Held(self.empty())

        def fill(held: Held) -> None:
            item = {key: value[0] for key, value in items(0, 1, ()).items() if key in self.keys}
            held.state = jax.jit(self.buffer.init)(item)
            for turn in range(4):
                held.state, _ = self.turn(held.state, 3 * turn, self._updates)

        def load(held: Held, path: Path) -> Held:
            return Held(fbuf.load_state(path, like=held.state))

        def go_on(held: Held, scratch: Path) -> Seen:
            seen = flat(held.state, "state")
            for turn in range(4, 7):
                held.state, drawn = self.turn(held.state, 3 * turn, self._updates)
                seen |= flat(drawn, f"draw {turn}")
            fbuf.save_state(scratch / "again", held.state)
            again = fbuf.load_state(scratch / "again", like=self.empty())
            assert flat(again) == flat(held.state)
            return seen

        return Case(make, fill, lambda held, path: fbuf.save_state(path, held.state), load, go_on, ROUNDED)

    @property
    def _updates(self) -> bool:
        return "Prioritized(" in repr(self.buffer.sampler)


@dataclasses.dataclass
class Held:
    """A state that changes."""

    state: BufferState


def _turned(
    buffer: Buffer, state: BufferState, batch: Batch, key: jax.Array, updates: bool
) -> tuple[BufferState, object]:
    state, found, draw = buffer.sample(state, key, BATCH)
    if updates:
        priorities = jnp.arange(draw.slots.size, dtype=jnp.float32).reshape(draw.slots.shape)
        state = buffer.update(state, draw.slots, priorities)
    state, slots = buffer.extend(state, batch)
    return state, {"items": found, "draw": draw, "slots": slots}


_turn = jit(_turned, static_argnums=(0, 4))

TRAJECTORIES = Trajectories(terminated="done")
LANES = (2,)
RULES: dict[str, Rules] = {
    "uniform": Rules(Buffer(CAPACITY)),
    "prioritized": Rules(Buffer(CAPACITY, Prioritized())),
    "shuffled": Rules(Buffer(CAPACITY, Shuffled())),
    "fifo": Rules(Buffer(CAPACITY, Fifo())),
    "highest": Rules(Buffer(CAPACITY, writer=HighestRanked("rank")), ("id", "rank")),
    "frames": Rules(
        Buffer(CAPACITY, frames=Frames(stack=2), trajectories=TRAJECTORIES), ("id", "done", "obs", "next_obs")
    ),
    "slices, prioritized": Rules(Buffer(CAPACITY, Slices(2, Prioritized()), lanes=LANES, trajectories=TRAJECTORIES)),
    "slices, of trajectories": Rules(Buffer(CAPACITY, Slices(2, PerTrajectory(Shuffled())), trajectories=TRAJECTORIES)),
}


# ------------------------------------------------------------------ other states


@dataclasses.dataclass
class Tree:
    """Any pytree."""

    tree: object


def _tree(filled: bool) -> object:
    """Keys, NumPy arrays, plain numbers, and arrays beside a state."""
    number = int(filled)
    return {
        "key": jax.random.key(3 * number),
        "keys": jax.random.split(jax.random.key(4 * number, impl="rbg"), 2),
        "half": jnp.arange(6, dtype=jnp.bfloat16) * number,
        "wide": np.array([2**62 + 1, -(2**63)]) * number,
        "double": np.array([0.1, np.inf]) * max(number, 0.5),
        "empty": jnp.zeros((0, 3), jnp.int8),
        "step": 7 * number,
        "rate": 0.1 * number,
        "on": filled,
    }


def _trees() -> Case[Tree]:
    def fill(held: Tree) -> None:
        held.tree = _tree(True)

    def save(held: Tree, path: Path) -> None:
        fbuf.save_state(path, held.tree, extra={"beside": np.arange(3)})

    def load(held: Tree, path: Path) -> Tree:
        tree, beside = fbuf.checkpoint.load_with_extra(path, held.tree)
        assert beside["beside"].tolist() == [0, 1, 2]
        return Tree(tree)

    return Case(lambda: Tree(_tree(False)), fill, save, load, lambda held, scratch: flat(held.tree))


MIXED = Mixture((Buffer(CAPACITY), Buffer(4, Prioritized())), shares=(1.0, 3.0))


def _mixture() -> Case[Tree]:
    rules = [Rules(buffer) for buffer in MIXED.buffers]
    sample = jit(Mixture.sample, static_argnums=(0, 3))

    def fill(held: Tree) -> None:
        states = []
        for place, each in enumerate(rules):
            item = {key: value[0] for key, value in items(0, 1, ()).items() if key in each.keys}
            state, _ = jit(Buffer.extend, static_argnums=0)(each.buffer, each.buffer.init(item), each.batch(place, 6))
            states.append(state)
        held.tree = tuple(states)

    def load(held: Tree, path: Path) -> Tree:
        return Tree(fbuf.load_state(path, like=held.tree))

    def go_on(held: Tree, scratch: Path) -> Seen:
        state, found, draw = sample(MIXED, held.tree, jax.random.key(1), 8)
        return flat(held.tree, "state") | flat([found, draw], "draw") | flat(state, "state after")

    return Case(
        lambda: Tree(tuple(each.empty() for each in rules)),
        fill,
        lambda held, path: fbuf.save_state(path, held.tree),
        load,
        go_on,
        ROUNDED,
    )


TABLE = HashTable(8)


def _table() -> Case[Tree]:
    def fill(held: Tree) -> None:
        empty = TABLE.init(jnp.zeros(2, jnp.int32), jnp.zeros(()))
        held.tree, _, _ = TABLE.insert(empty, jnp.array([[1, 2], [3, 4], [1, 2], [-5, 6]]), jnp.arange(4.0))

    def load(held: Tree, path: Path) -> Tree:
        return Tree(fbuf.load_state(path, like=held.tree))

    def go_on(held: Tree, scratch: Path) -> Seen:
        slots, stored = TABLE.find(held.tree, jnp.array([[1, 2], [9, 9], [-5, 6], [3, 4]]))
        after = TABLE.insert(held.tree, jnp.array([[1, 2], [3, 4], [7, 7], [-5, 6]]), jnp.arange(4.0) + 10)
        return flat(held.tree, "state") | flat([slots, stored], "found") | flat(after, "after")

    return Case(
        lambda: Tree(jax.eval_shape(lambda: TABLE.init(jnp.zeros(2, jnp.int32), jnp.zeros(())))),
        fill,
        lambda held, path: fbuf.save_state(path, held.tree),
        load,
        go_on,
    )


def _from_torch() -> Case[FunctionalReplayBuffer]:
    """A buffer of torch over a state; `fbuf` reads its checkpoints, too."""
    rules = RULES["prioritized"]
    item = {key: value[0] for key, value in items(0, 1, ()).items() if key in rules.keys}

    def make() -> FunctionalReplayBuffer:
        generator = torch.Generator().manual_seed(99)
        return from_fbuf(rules.buffer, rules.buffer.init(item), batch_size=BATCH, beta=0.6, generator=generator)

    def draws(held: FunctionalReplayBuffer, first: int) -> Seen:
        slots = held.extend({key: torch.from_numpy(value) for key, value in rules.batch(first, 5).items()})
        batch, info = held.sample(return_info=True)
        held.update_priority(info["index"], torch.arange(BATCH) + 1.0)
        return flat({"slots": slots, "batch": batch, "info": dict(info)}, f"draw {first}")

    def fill(held: FunctionalReplayBuffer) -> None:
        held.beta = 0.8
        draws(held, 0), draws(held, 5)

    def go_on(held: FunctionalReplayBuffer, scratch: Path) -> Seen:
        seen = flat({"length": len(held), "beta": held.beta, "state": held.state}, "loaded")
        return seen | draws(held, 10) | draws(held, 15)

    return Case(make, fill, through_folder, from_folder, go_on, ROUNDED)


STATES: dict[str, Case[Held] | Case[Tree] | Case[FunctionalReplayBuffer]] = {
    f"state: {name}": each.case() for name, each in RULES.items()
}
STATES |= {
    "state: tree": _trees(),
    "state: mixture": _mixture(),
    "state: hash table": _table(),
    "state: from torch": _from_torch(),
}
