"""The compiled programs of a functional buffer whose batches torch uses."""

import functools
import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

import fbuf
from fbuf import Draw, Fifo, Mixture, MixtureDraw, Shuffled
from interop import compiled

Leaves = tuple[Any, ...]
Path = tuple[str, ...]
WORDS = {("index",), ("index", "index"), ("index", "buffer_ids")}  # entries of int64, which come as pairs of int32


class Programs:
    """Programs over the flat leaves of a state. Those that are donated come back first. One trace for each shape.

    Args:
        buffer, structure: the rules, and the tree structure of their state.
        items, paths: the tree structure of an item, and the paths of its leaves.
        truncated: path of the flag that ends a slice, with "done" and "terminated" beside it; () for no flags.
    """

    def __init__(
        self, buffer: fbuf.Buffer | Mixture, structure: Any, items: Any, paths: tuple[Path, ...], truncated: Path
    ) -> None:
        self.buffer, self._structure, self._items, self._paths = buffer, structure, items, paths
        self._truncated = truncated
        self.members = buffer.buffers if isinstance(buffer, Mixture) else (buffer,)
        self.extend = jax.jit(self._extend, static_argnums=(2, 3), donate_argnums=0, compiler_options=compiled.IN_ORDER)
        self.update = jax.jit(self._update, donate_argnums=0)
        self.clear = jax.jit(self._clear, donate_argnums=0)
        self.read = jax.jit(self._read, static_argnums=2)
        self.draws = functools.cache(self._draws)

    def states(self, leaves: Iterable[Any]) -> list[Any]:
        """The state of each member."""
        state = jax.tree.unflatten(self._structure, leaves)
        return list(state) if isinstance(self.buffer, Mixture) else [state]

    def _extend(self, leaves: Leaves, rows: list[Any], member: int, lanes_first: bool) -> tuple[Leaves, Array]:
        """The state after a write, and the slots in the order of time, then lanes."""
        states, buffer = self.states(leaves), self.members[member]
        batch = jax.tree.unflatten(self._items, rows)
        states[member], slots = buffer.extend(states[member], batch, lanes_first=lanes_first)
        slots = jnp.moveaxis(slots, -1, 0) if lanes_first else slots
        return tuple(jax.tree.leaves(states)), _words(slots.reshape(-1), buffer.lanes)

    def _update(self, leaves: Leaves, slots: Array, members: Array, priorities: Array) -> tuple[Leaves]:
        states: Any = self.states(leaves)
        if isinstance(self.buffer, Mixture):
            known, one = jnp.ones(slots.shape, jnp.bool_), jnp.ones((), jnp.int32)
            draw = MixtureDraw(slots, known.astype(jnp.float32), known, one, one, member=members)
            states = self.buffer.update(tuple(states), draw, priorities)
        else:
            states = self.buffer.update(states[0], slots, priorities)
        return (tuple(jax.tree.leaves(states)),)

    def _clear(self, leaves: Leaves) -> tuple[Leaves]:
        cleared = [each.clear(state) for each, state in zip(self.members, self.states(leaves), strict=True)]
        return (tuple(jax.tree.leaves(cleared)),)

    def _read(self, leaves: Leaves, slots: Array, member: int) -> list[Array]:
        return jax.tree.leaves(self.members[member].read(self.states(leaves)[member], slots))

    # ------------------------------------------------------------------ draws

    def described(self, batch_size: int, leaves: Leaves) -> tuple[tuple[bool, ...], dict[Path, Any], int]:
        """Which leaves of the state a draw changes, the specs of the info by path, and the number of draws."""
        moves: list[bool] = []
        paths: list[Path] = []

        def draw(*leaves: Array) -> tuple[list[Array], Array]:
            key = jax.random.key(0, impl="threefry2x32")
            after, _, info, _, valid = self._drawn(leaves, key, jnp.zeros((), jnp.float32), batch_size)
            moves.extend(new is not old for new, old in zip(after, leaves, strict=True))
            paths.extend(info)
            return list(info.values()), valid

        info, valid = jax.eval_shape(draw, *leaves)
        return tuple(moves), dict(zip(paths, info, strict=True)), valid.size

    def _draws(self, batch_size: int, moves: tuple[bool, ...], order: tuple[Path, ...]) -> Any:
        """A program from the leaves that a draw changes, the others, a raw key and beta.

        Its results: the changed leaves; the entries in this order; how many draws are valid and whether an epoch ended,
        int32 [2]; and which rows are valid.
        """

        def draw(moving: Leaves, still: Leaves, key: Array, beta: Array) -> tuple[Leaves, list[Array], Array, Array]:
            parts = iter(moving), iter(still)
            leaves = [next(parts[not is_moving]) for is_moving in moves]
            typed = jax.random.wrap_key_data(key, impl="threefry2x32")
            after, items, info, facts, valid = self._drawn(leaves, typed, beta, batch_size)
            entries = items | info
            valid = jnp.repeat(valid, next(iter(entries.values())).shape[0] // valid.size)
            changed = tuple(leaf for leaf, is_moving in zip(after, moves, strict=True) if is_moving)
            return changed, [entries[path] for path in order], facts, valid

        return jax.jit(draw, donate_argnums=0, compiler_options=compiled.IN_ORDER)

    def _drawn(
        self, leaves: Iterable[Array], key: Array, beta: Array, batch_size: int
    ) -> tuple[list[Array], dict[Path, Array], dict[Path, Array], Array, Array]:
        leaves = tuple(leaves)
        state = jax.tree.unflatten(self._structure, leaves)
        after, items, draw = self.buffer.sample(state, key, batch_size)
        ended = _has_ended(self.members, self.states(leaves), self.states(jax.tree.leaves(after)))
        rows = draw.slots.size
        flat = [leaf.reshape(rows, *leaf.shape[draw.slots.ndim :]) for leaf in jax.tree.leaves(items)]
        entries = dict(zip(self._paths, flat, strict=True))
        info = self._info(entries, draw, beta)
        facts = jnp.stack([jnp.sum(draw.valid, dtype=jnp.int32), ended.astype(jnp.int32)])
        return jax.tree.leaves(after), entries, info, facts, draw.valid

    def _info(self, items: dict[Path, Array], draw: Draw, beta: Array) -> dict[Path, Array]:
        """What the sampler says about the rows of a batch."""
        info: dict[Path, Array] = {}
        slots = draw.slots.reshape(-1)
        rows, time = slots.size, slots.size // draw.valid.size
        if isinstance(draw, MixtureDraw):
            info["index", "index"] = _words(slots, ())
            info["index", "buffer_ids"] = _words(jnp.repeat(draw.member, time), ())
        else:
            info["index",] = _words(slots, self.members[0].lanes, column=draw.mask is not None)
        if any(each.sampler.keeps_priorities for each in self.members):
            info["priority_weight",] = jnp.repeat(fbuf.importance_weights(draw, beta), time)
        if draw.mask is None:
            return info
        mask = draw.mask
        if self._truncated:
            info[self._truncated] = ends = (mask & ~jnp.pad(mask[:, 1:], ((0, 0), (0, 1)))).reshape(-1, 1)
            for name, also in (("done", ends), ("terminated", jnp.zeros_like(ends))):
                stored = items.get(path := (*self._truncated[:-1], name))
                info[path] = also if stored is None else also | jnp.any(stored.reshape(rows, -1) != 0, 1, keepdims=True)
        sampler: Any = self.members[0].sampler
        if sampler.shortest < sampler.length or sampler.burn_in or any(each.frames for each in self.members):
            info["collector", "mask"] = mask.reshape(-1)
        if (begun := items.get(("is_init",))) is not None:
            begins = jnp.arange(rows) % time == 0
            info["is_init",] = begun | begins.reshape(-1, *(1 for _ in begun.shape[1:]))
        return info


programs = functools.lru_cache(maxsize=64)(Programs)


def _words(slots: Array, lanes: tuple[int, ...], column: bool = False) -> Array:
    """Slots, or their coordinates [n, dims] in rows of lanes, as int64 in pairs of int32: low word, high word.

    JAX has no int64 by default. `column` makes single slots [n, 1].
    """
    parts = [slots]
    if lanes:
        per_row = math.prod(lanes)
        parts = [slots // per_row, *jnp.unravel_index(slots % per_row, lanes)]
    whole = jnp.stack(parts, -1).astype(jnp.int32)
    pairs = jnp.stack([whole, whole >> 31], -1)
    return pairs.reshape(slots.shape[0], -1) if lanes or column else pairs.reshape(-1)


def _has_ended(members: Iterable[fbuf.Buffer], before: Any, after: Any) -> Array:
    """Whether this draw was the last one of an epoch of a member, or emptied its queue."""
    ended = jnp.zeros((), jnp.bool_)
    for member, *states in zip(members, before, after, strict=True):
        starts: Any = getattr(member.sampler, "starts", None)
        rule: Any = next(filter(_goes_in_epochs, (member.sampler, starts, getattr(starts, "trajectories", None))), None)
        if rule is None:
            continue
        old, new = (state.sampler if rule is member.sampler else state.sampler.starts for state in states)
        if isinstance(rule, Fifo):
            ended |= new.unread == 0
            continue
        taken = new.position - jnp.where(new.epoch == old.epoch, old.position, 0)
        ended |= (taken > 0) & (new.length - new.position < (taken if rule.drop_last else 1))
    return ended


def _goes_in_epochs(rule: object) -> bool:
    return isinstance(rule, Shuffled | Fifo)
