"""Every item once, in the order in which items came."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Int

from fbuf.fusion import computed_once
from fbuf.keywords import checked
from fbuf.samplers.chances import Chances, Reason
from fbuf.samplers.protocol import Draw, Sampler, equal_chances
from fbuf.short_text import ShortText


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class FifoState(ShortText):
    """The unread items: the newest `unread` ones.

    Attributes:
        head: [] int32: the slot behind that of the newest item.
        unread: [] int32: how many items no draw has returned.
        lost: [] uint32: items that were overwritten before they were returned.
        capacity: slots; fixed while tracing.

    Attributes:
        head: TODO.
        unread: [] int32: how many items no draw has returned.
        lost: TODO.
        capacity: slots; fixed while tracing.
    """

    head: Array
    unread: Array
    lost: Array
    capacity: int = dataclasses.field(metadata={"static": True})


@checked
@dataclasses.dataclass(frozen=True)
class Fifo(Sampler):
    """First in, first out, for on-policy training: a draw is the oldest items that no draw has returned yet, in order.

    If fewer than batch_size are left, they come first, and `draw.valid` is False for the other rows. The items of a row
    come in the order of their lanes. `state.lost` counts items that were overwritten before they were returned.
    `draw.probability` is always 1 / size: each item is returned once, and importance weights are 1. O(batch).
    """

    keeps_priorities = False
    needs_order = True
    without_replacement = True

    def init(self, capacity: int) -> FifoState:
        return FifoState(
            head=jnp.zeros((), jnp.int32),
            unread=jnp.zeros((), jnp.int32),
            lost=jnp.zeros((), jnp.uint32),
            capacity=capacity,
        )

    def written(self, state: FifoState, slots: Int[Array, " batch"]) -> FifoState:
        """State after new items came into consecutive slots of the ring, perhaps several times around it."""
        if slots.shape[0] == 0:
            return state
        unread = state.unread.astype(jnp.uint32) + jnp.uint32(slots.shape[0])  # unsigned: it may pass 2^31
        held = jnp.minimum(unread, jnp.uint32(state.capacity))
        return dataclasses.replace(
            state,
            head=((slots[-1] + 1) % state.capacity).astype(jnp.int32),
            unread=held.astype(jnp.int32),
            lost=state.lost + (unread - held),
        )

    def sample(self, state: FifoState, key: Array, batch_size: int, size: Int[Array, ""]) -> tuple[FifoState, Draw]:
        taken = jnp.minimum(state.unread, batch_size)
        first = state.head - state.unread
        row = jnp.arange(batch_size, dtype=jnp.int32)
        valid = row < taken
        back = first + jnp.where(valid, row, 0)  # negative before the ring's end; no sum passes 2^31
        slots = jnp.where(taken > 0, jnp.where(back < 0, back + state.capacity, back), 0)
        draw = equal_chances(computed_once(slots), valid, size)
        return dataclasses.replace(state, unread=state.unread - taken), draw

    def clear(self, state: FifoState) -> FifoState:
        return self.init(state.capacity)

    def chances(self, state: FifoState, size: int) -> Chances:
        """The oldest unread item for sure; later ones wait. O(size)."""
        head, unread = int(state.head), int(state.unread)
        queue = (head - unread + np.arange(unread)) % state.capacity
        mass, reason = np.zeros(size), np.full(size, Reason.CONSUMED, np.uint8)
        reason[queue] = Reason.WAITING
        mass[queue[:1]] = 1
        return Chances.of(mass, reason)

    def resized(self, state: FifoState, size: int, slots: np.ndarray, capacity: int) -> FifoState:
        """The newest items stay unread. Unread ones that have no room count as lost. O(1)."""
        unread = min(int(state.unread), slots.size)
        return dataclasses.replace(
            state,
            head=jnp.asarray(slots.size % capacity, jnp.int32),
            unread=jnp.asarray(unread, jnp.int32),
            lost=state.lost + (state.unread - unread).astype(jnp.uint32),
            capacity=capacity,
        )
