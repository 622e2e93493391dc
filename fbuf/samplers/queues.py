"""The ring of slots that slices are drawn from, while it grows."""

import jax
import jax.numpy as jnp
from jax import Array

from fbuf.fusion import entry, one_kernel_loop, put, two_or_more, zero_after

FEW = 16  # items up to which a loop over them is faster on the CPU than kernels over all


@jax.jit
def push(queue: Array, last: Array, entered: Array, entries: Array) -> Array:
    """The queue with the entries that entered behind its last one."""
    return (one_kernel_loop(_pushed_one_by_one, _pushed) if entered.size <= FEW else _pushed)(
        queue, last, entered, entries
    )


def _pushed(queue: Array, last: Array, entered: Array, entries: Array) -> Array:
    room = jnp.uint32(queue.size - 1)
    place = (last + jnp.cumsum(entered, dtype=jnp.uint32) - entered) % room
    at, values = jnp.where(entered, place, room), jnp.where(entered, entries, 0)
    return queue.at[two_or_more(at)].set(two_or_more(values), mode="promise_in_bounds")


def _pushed_one_by_one(queue: Array, last: Array, entered: Array, entries: Array) -> Array:
    room = jnp.uint32(queue.size - 1)

    def body(k: Array, held: tuple[Array, Array]) -> tuple[Array, Array]:
        queue, place = held
        enters = entry(entered, k)
        queue = put(queue, jnp.where(enters, entry(entries, k), 0), jnp.where(enters, place, room))
        place = place + enters
        return queue, jnp.where(place == room, 0, place)

    return jax.lax.fori_loop(zero_after(last), entered.size, body, (queue, last))[0]
