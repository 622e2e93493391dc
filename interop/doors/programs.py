"""The compiled programs of a functional buffer whose batches torch uses."""

import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

import fbuf
from fbuf import Draw, Fifo, Mixture, MixtureDraw, Shuffled, Slices
from interop.data.layout import Path
from interop.doors.items import Items
from interop.host import compiled

Leaves = tuple[Any, ...]
Entries = dict[Path, Any]


class Programs:
    """Programs over the flat leaves of a state. Those that are donated come back first. One trace for each shape.

    Args:
        buffer, items: the rules, and what an item is.
        truncated: path of the flag that ends a slice, with "done" and "terminated" beside it; () for no flags.
    """

    def __init__(self, buffer: fbuf.Buffer | Mixture, items: Items, truncated: Path) -> None:
        self.buffer, self._items, self._truncated = buffer, items, truncated
        self.like = jax.eval_shape(lambda: buffer.init(items.spec))
        self.members = buffer.buffers if isinstance(buffer, Mixture) else (buffer,)
        self.extend = jax.jit(self._extend, static_argnums=2, donate_argnums=0, compiler_options=compiled.IN_ORDER)
        self.update = jax.jit(self._update, donate_argnums=0)
        self.clear = jax.jit(self._clear, donate_argnums=0)
        self.read = jax.jit(self._read, static_argnums=2)
        self.draw = functools.cache(self._draw)

    def states(self, leaves: Iterable[Any]) -> list[Any]:
        """The state of each member."""
        state = jax.tree.unflatten(jax.tree.structure(self.like), leaves)
        return list(state) if isinstance(self.buffer, Mixture) else [state]

    def _extend(self, leaves: Leaves, rows: list[Any], member: int) -> tuple[Leaves, Array]:
        """The state after a write, and the index of each item in the order of time, then lanes."""
        states, buffer = self.states(leaves), self.members[member]
        states[member], slots = buffer.extend(states[member], jax.tree.unflatten(self._items.structure, rows))
        return tuple(jax.tree.leaves(states)), _coordinates(slots.reshape(-1), buffer)

    def _update(self, leaves: Leaves, slots: Array, members: Array, priorities: Array) -> tuple[Leaves]:
        states = self.states(leaves)
        for number, each in enumerate(self.members):
            if each.sampler.keeps_priorities:
                own = members == number  # -1 names no slot
                states[number] = each.update(states[number], jnp.where(own, slots, -1), jnp.where(own, priorities, 1))
        return (tuple(jax.tree.leaves(states)),)

    def _clear(self, leaves: Leaves) -> tuple[Leaves]:
        cleared = [each.clear(state) for each, state in zip(self.members, self.states(leaves), strict=True)]
        return (tuple(jax.tree.leaves(cleared)),)

    def _read(self, leaves: Leaves, slots: Array, member: int) -> list[Array]:
        return jax.tree.leaves(self.members[member].read(self.states(leaves)[member], slots))

    # ------------------------------------------------------------------ draws

    def _draw(self, batch_size: int) -> tuple[Any, bool, Entries]:
        """A program, whether draws change the state, and the specs of the info by path.

        The program takes the leaves, a raw key and beta. It returns the leaves, items and info by path, and which rows are
        valid; the last flag says whether an epoch has ended. Draws that change the state have it donated. Others return no
        leaves, which would be copies.
        """
        moves = False

        def draw(leaves: Leaves, key: Array, beta: Array) -> tuple[Any, ...]:
            nonlocal moves
            after, *drawn = self._drawn(leaves, key, beta, batch_size)
            moves = any(new is not old for new, old in zip(after, leaves, strict=True))
            return after if moves else (), *drawn

        key, beta = jax.ShapeDtypeStruct((2,), jnp.uint32), jax.ShapeDtypeStruct((), jnp.float32)
        info = jax.eval_shape(draw, tuple(jax.tree.leaves(self.like)), key, beta)[2]
        return jax.jit(draw, donate_argnums=0 if moves else (), compiler_options=compiled.IN_ORDER), moves, info

    def _drawn(
        self, leaves: Leaves, key: Array, beta: Array, batch_size: int
    ) -> tuple[Leaves, Entries, Entries, Array]:
        state = jax.tree.unflatten(jax.tree.structure(self.like), leaves)
        typed = jax.random.wrap_key_data(key, impl="threefry2x32")
        state, items, draw = self.buffer.sample(state, typed, batch_size)
        after, rows = tuple(jax.tree.leaves(state)), draw.slots.size
        flat = [leaf.reshape(rows, *leaf.shape[draw.slots.ndim :]) for leaf in jax.tree.leaves(items)]
        entries = dict(zip(self._items.paths, flat, strict=True))
        ended = _has_ended(self.members, self.states(leaves), self.states(after))
        valid = jnp.append(jnp.repeat(draw.valid, rows // draw.valid.size), ended)
        return after, entries, self._info(entries, draw, beta), valid

    def _info(self, items: Entries, draw: Draw, beta: Array) -> Entries:
        """What the sampler says about the rows of a batch. The only integers in it are slots and members."""
        info: Entries = {}
        slots, mask = draw.slots.reshape(-1), draw.mask
        time = slots.size // draw.valid.size
        if isinstance(draw, MixtureDraw):
            info["index", "index"], info["index", "buffer_ids"] = slots, jnp.repeat(draw.member, time)
        else:
            index = _coordinates(slots, self.members[0])
            info["index",] = index if mask is None else index.reshape(slots.size, -1)
        if any(each.sampler.keeps_priorities for each in self.members):
            info["priority_weight",] = jnp.repeat(fbuf.importance_weights(draw, beta), time)
        if mask is None:
            return info
        if self._truncated:
            info[self._truncated] = ends = (mask & ~jnp.pad(mask[:, 1:], ((0, 0), (0, 1)))).reshape(-1, 1)
            for name, flags in (("done", ends), ("terminated", jnp.zeros_like(ends))):
                stored = items.get(path := (*self._truncated[:-1], name))
                info[path] = (
                    flags if stored is None else flags | jnp.any(stored.reshape(slots.size, -1) != 0, 1, keepdims=True)
                )
        sampler: Any = self.members[0].sampler
        if sampler.shortest < sampler.length or sampler.burn_in or any(each.frames for each in self.members):
            info["collector", "mask"] = mask.reshape(-1)
        if (begun := items.get(("is_init",))) is not None:
            begins = jnp.arange(slots.size) % time == 0
            info["is_init",] = begun | begins.reshape(-1, *(1 for _ in begun.shape[1:]))
        return info


programs = functools.lru_cache(maxsize=64)(Programs)


def _coordinates(slots: Array, buffer: fbuf.Buffer) -> Array:
    """Slots [n], or with lanes their rows and lanes [n, dims]."""
    return jnp.stack(jnp.unravel_index(slots, (buffer.capacity, *buffer.lanes)), -1) if buffer.lanes else slots


def _has_ended(members: Iterable[fbuf.Buffer], before: list[Any], after: list[Any]) -> Array:
    """Whether a draw was the last one of an epoch of a member, or emptied its queue."""
    ended = jnp.zeros((), jnp.bool_)
    for member, *states in zip(members, before, after, strict=True):
        rule, old, new = member.sampler, *(state.sampler for state in states)
        if isinstance(rule, Slices):
            starts, old, new = rule.starts, old.starts, new.starts
            rule = starts.trajectories if isinstance(starts, fbuf.PerTrajectory) else starts
        if isinstance(rule, Fifo):
            ended |= (old.unread > 0) & (new.unread == 0)
        elif isinstance(rule, Shuffled):
            taken = new.position - jnp.where(new.epoch == old.epoch, old.position, 0)
            ended |= (taken > 0) & (new.length - new.position < (taken if rule.drop_last else 1))
    return ended
