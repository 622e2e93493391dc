"""Every stored item once before any comes again."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Int, UInt32

from fbuf.fusion import by_device, computed_once
from fbuf.keywords import checked
from fbuf.samplers.chances import Chances, Reason
from fbuf.samplers.protocol import Draw, Sampler, equal_chances
from fbuf.samplers.uniform import below
from fbuf.short_text import ShortText

_CLIP = "promise_in_bounds"  # every index below is made to be in bounds; JAX's default would test it again


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class ShuffledState(ShortText):
    """The position in the epoch.

    At the beginning of an epoch position p holds slot p. `moved` has the positions that hold another slot, each with the
    epoch that moved it; entries of other epochs do not count.

    Attributes:
        moved: [capacity + 1, 2] uint32: slot and epoch; the last entry belongs to no position.
        epoch: [] uint32: the number of this epoch; any but the last one.
        position: [] int32: items returned in this epoch.
        length: [] int32: items that the epoch was begun with.
        finished: [] uint32: epochs that came to their end.

    Attributes:
        moved: TODO.
        epoch: TODO.
        position: TODO.
        length: TODO.
        finished: TODO.
    """

    moved: Array | None
    epoch: Array
    position: Array
    length: Array
    finished: Array


@checked
@dataclasses.dataclass(frozen=True)
class Shuffled(Sampler):
    """Without replacement: an epoch returns each stored item once, in uniformly random order (to 2^-32 of its chance).

    A batch never spans two epochs. If fewer than batch_size items are left, they come first and `draw.valid` is False for
    the other rows. With `drop_last` they are skipped and the next epoch begins; no row is valid while the buffer holds
    fewer than batch_size. With `shuffle=False` items come in the order of their slots.

    Another epoch begins when the number of stored items changes, so until the ring is full each write begins one. Later
    writes do not: a new item takes the position of the item that it replaced. `draw.probability` is always 1 / size.

    O(batch * log batch) at any capacity; 8 bytes a slot.

    Args:
        drop_last: whether the last items of an epoch are skipped if they do not fill a batch.
        shuffle: whether the order is random.

    Args:
        drop_last: whether the last items of an epoch are skipped if they do not fill a batch.
        shuffle: whether the order is random.
    """

    keeps_priorities = False
    needs_order = False
    without_replacement = True

    drop_last: bool = False
    shuffle: bool = True

    def __post_init__(self) -> None:
        for name in ("drop_last", "shuffle"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}")

    def init(self, capacity: int) -> ShuffledState:
        return ShuffledState(
            moved=jnp.zeros((capacity + 1, 2), jnp.uint32) if self.shuffle else None,
            epoch=jnp.ones((), jnp.uint32),
            position=jnp.zeros((), jnp.int32),
            length=jnp.zeros((), jnp.int32),
            finished=jnp.zeros((), jnp.uint32),
        )

    def written(self, state: ShuffledState, slots: Int[Array, " batch"]) -> ShuffledState:
        return state

    def sample(
        self, state: ShuffledState, key: Array, batch_size: int, size: Int[Array, ""]
    ) -> tuple[ShuffledState, Draw]:
        left = jnp.where(size == state.length, size - state.position, 0)
        enough = batch_size if self.drop_last else 1
        anew, used = left < enough, state.position > 0
        skipped = anew & used & (left > 0)
        position = jnp.where(anew, 0, state.position)
        left = size - position
        left = jnp.where(left < enough, 0, left)
        epoch = state.epoch + (anew & used).astype(jnp.uint32)
        left, position, epoch, length = computed_once((left, position, epoch, size))
        moved, slots = state.moved, position + jnp.arange(batch_size, dtype=jnp.int32)
        if moved is not None:
            moved, slots = take(moved, epoch, key, batch_size, position, left)
        valid = jnp.arange(batch_size) < left
        draw = equal_chances(computed_once(jnp.where(valid, slots, 0)), valid, size)
        emptied = (left > 0) & (left <= batch_size)
        after = ShuffledState(
            moved=moved,
            epoch=epoch,
            position=position + jnp.minimum(left, batch_size),
            length=length,
            finished=state.finished + skipped.astype(jnp.uint32) + emptied.astype(jnp.uint32),
        )
        return after, draw

    def clear(self, state: ShuffledState) -> ShuffledState:
        return self.init(1 if state.moved is None else state.moved.shape[0] - 1)

    def restart(self, state: ShuffledState) -> ShuffledState:
        """State at the beginning of an epoch; one that is under way does not count as finished. O(1)."""
        used = (state.position > 0).astype(jnp.uint32)
        return dataclasses.replace(state, epoch=state.epoch + used, position=jnp.zeros_like(state.position))

    def chances(self, state: ShuffledState, size: int) -> Chances:
        """The items that are left in the epoch alike, or of a new epoch all. O(size)."""
        order = self._order(state, size)
        left = order[self._drawn(state, size) :]
        mass, reason = np.zeros(size), np.full(size, Reason.CONSUMED, np.uint8)
        if self.shuffle:
            mass[left] = 1
        else:
            reason[left] = Reason.WAITING
            mass[left[:1]] = 1
        return Chances.of(mass, reason)

    def _drawn(self, state: ShuffledState, size: int) -> int:
        """How many of `size` items the epoch of the next draw has returned: 0 if it begins with the draw."""
        position = int(state.position)
        return position if position < size == int(state.length) else 0

    def _order(self, state: ShuffledState, size: int) -> np.ndarray:
        """The slots at the positions of the epoch of the next draw."""
        order = np.arange(size)
        if state.moved is not None and self._drawn(state, size):
            moved = np.asarray(state.moved)[:size].astype(np.int64)
            order = np.where(moved[:, 1] == int(state.epoch), moved[:, 0], order)
        return order

    def resized(self, state: ShuffledState, size: int, slots: np.ndarray, capacity: int) -> ShuffledState:
        """The epoch goes on: items that it has returned do not come again. O(capacity).

        With `shuffle=False` it goes on only if these items keep their slots; otherwise another epoch begins.
        """
        after = dataclasses.replace(
            self.init(capacity), finished=state.finished, epoch=state.epoch, length=_number(slots.size)
        )
        if int(state.length) != size:  # a write has ended the epoch
            return after
        is_drawn = np.isin(slots, self._order(state, size)[: int(state.position)])
        count = int(is_drawn.sum())
        if after.moved is None:
            return after if not is_drawn[:count].all() else dataclasses.replace(after, position=_number(count))
        order = np.concatenate([np.flatnonzero(is_drawn), np.flatnonzero(~is_drawn)])
        moved = np.zeros(after.moved.shape, np.uint32)
        moved[: slots.size, 0], moved[: slots.size, 1] = order, int(state.epoch)
        return dataclasses.replace(after, moved=jnp.array(moved), position=_number(count))


def _number(value: int) -> Int[Array, ""]:
    return jnp.asarray(value, jnp.int32)


def take(
    moved: UInt32[Array, "entries 2"],
    epoch: UInt32[Array, ""],
    key: Array,
    count: int,
    start: Int[Array, ""],
    left: Int[Array, ""],
) -> tuple[UInt32[Array, "entries 2"], Int[Array, " count"]]:
    """Move `count` random positions of [start, start + left) to the front; returns the positions and these slots.

    If `left` is less than `count`, the last slots mean nothing. In place when `moved` is donated. O(count * log count).
    """
    spare = moved.shape[0] - 1
    sources, holes, fillers = swaps(key, count, left, spare.bit_length())
    # Epochs are numbered modulo 2^32. Each entry is cleared once before its number is used again.
    cleared = (epoch % max(spare, 1)).astype(jnp.int32)[None]
    origin = jnp.concatenate([sources, fillers])
    origin = jnp.concatenate([jnp.where(origin < left, start + origin, spare), cleared])
    target = jnp.concatenate([jnp.arange(count, dtype=jnp.int32), holes])
    target = jnp.where(target < left, start + target, spare)
    held = moved.at[origin].get(mode=_CLIP)
    slots = jnp.where(held[:, 1] == epoch, held[:, 0], origin.astype(jnp.uint32))
    stays = jnp.any(target == cleared) | (held[-1, 1] == epoch)
    target = jnp.concatenate([target, jnp.where(stays, spare, cleared)])
    entries = jnp.stack([slots, jnp.broadcast_to(epoch, slots.shape).at[-1].add(0xFFFFFFFF)], axis=1)
    # A barrier: XLA would fuse the read into the write and then copy all entries.
    target, entries = computed_once((target, jnp.where((target < spare)[:, None], entries, 0)))
    return moved.at[target].set(entries, mode=_CLIP), entries[:count, 0].astype(jnp.int32)


@functools.partial(jax.jit, static_argnums=(1, 3))
def swaps(
    key: Array, count: int, left: Int[Array, ""], bits: int
) -> tuple[Int[Array, " count"], Int[Array, " count"], Int[Array, " count"]]:
    """All swaps of `count` steps of Durstenfeld's shuffle of `left` entries at once: sources, holes and fillers.

    Step i exchanges entry i with a random one at or behind it. Afterwards entry i is that of sources[i], and the entry of
    fillers[j] is at holes[j] >= count. Holes at or above `left`, which has at most `bits` bits, do not count.
    """
    rows = jnp.arange(count, dtype=jnp.int32)
    target = computed_once(rows + below(key, count, jnp.maximum(left - rows, 1)))
    # At step k entry k holds what the last earlier step with target k left there: the entry of that step's own number,
    # for which the same holds. So it is a chain of decreasing numbers.
    own = jnp.where((target < count) & (target != rows), target, count)
    earlier = jnp.full(count + 1, -1, jnp.int32).at[own].max(rows, mode=_CLIP)[:count]
    origin = _followed_to_the_end(jnp.where(earlier < 0, rows, earlier))

    step = _sorting(target, bits)
    target = target.at[step].get(mode=_CLIP)
    again = jnp.concatenate([jnp.zeros(1, bool), target[1:] == target[:-1]])
    before = jnp.where(again, origin.at[jnp.roll(step, 1)].get(mode=_CLIP), target)
    sources = jnp.zeros(count, jnp.int32).at[step].set(before, mode=_CLIP, unique_indices=True)
    last = jnp.concatenate([~again[1:], jnp.ones(1, bool)])
    holes = jnp.where(last & (target >= count), target, jnp.iinfo(jnp.int32).max)
    return sources, holes, origin.at[step].get(mode=_CLIP)


def _followed_to_the_end(pointers: Int[Array, " count"]) -> Int[Array, " count"]:
    """The end of each chain of pointers; an end points to itself. O(count * log of the longest chain)."""
    return by_device(_followed_while_they_move, _followed_halfway_each_time)(pointers)


def _further(pointers: Array) -> Array:
    return pointers.at[pointers].get(mode=_CLIP)


def _followed_while_they_move(pointers: Array) -> Array:
    return jax.lax.while_loop(
        lambda ways: jnp.any(ways[0] != ways[1]),
        lambda ways: (ways[1], _further(ways[1])),
        (pointers, _further(pointers)),
    )[1]


def _followed_halfway_each_time(pointers: Array) -> Array:
    """As often as the longest chain that there can be needs: a GPU would ask the host after each round."""
    for _ in range((pointers.shape[0] - 1).bit_length()):
        pointers = _further(pointers)
    return pointers


def _sorting(values: Int[Array, " count"], bits: int) -> Int[Array, " count"]:
    """The order of positions that sorts values of at most `bits` bits; equal ones stay in order.

    It sorts single words of some bits of the value above the position: on the CPU five times as fast as a sort of pairs.
    """
    count = values.shape[0]
    low = (count - 1).bit_length()
    rows = jnp.arange(count, dtype=jnp.uint32)
    step = rows
    for digit in range(0, bits, 32 - low):
        word = values.at[step].get(mode=_CLIP).astype(jnp.uint32) >> digit
        word = jax.lax.sort((word << low) | rows) & jnp.uint32((1 << low) - 1)
        step = step.at[word].get(mode=_CLIP)
    return step.astype(jnp.int32)
