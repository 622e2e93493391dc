"""Rows of items by key, in a hash table that works inside `jax.jit`."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Int, PyTree, UInt32

from fbuf import checks, storage
from fbuf.keywords import checked
from fbuf.row_words import packed
from fbuf.short_text import ShortText

_EMPTY = np.iinfo(np.int32).max
_LARGEST = 2**29  # keys: places are int32, and a batch is numbered behind the capacity
_CLIP = "clip"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class HashTableState(ShortText):
    """Keys and items by slot, in the order of insertion, and the hash table of slots.

    Attributes:
        size: [] int32: slots in use, always 0 to size - 1.
        entries: [power of two, at least 2 * capacity] int32: slots, or _EMPTY.
        hashes: [capacity] uint32.
        keys: of [capacity, ...].
        items: of [capacity, ...].

    Attributes:
        size: TODO.
        entries: TODO.
        hashes: TODO.
        keys: TODO.
        items: TODO.
    """

    size: Array
    entries: Array
    hashes: Array
    keys: PyTree
    items: PyTree


@checked
@dataclasses.dataclass(frozen=True)
class HashTable:
    """A map of at most `capacity` keys to items. Every method is a pure function of its state, for use inside `jax.jit`.

    Keys and items are pytrees of arrays; a batch has one more leading dim. Keys are compared in full and by their bits: -0.0
    and 0.0 are two keys, a nan is found again. Keys are never removed one by one. Open addressing with triangular probing,
    at most half full; all keys of a batch probe at once: O(batch) expected. Donate the state and it is written in place.

    Args:
        capacity: how many keys fit, at most 2^29.

    Args:
        capacity: how many keys fit, at most 2^29.
    """

    capacity: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "capacity", checks.as_int("capacity", self.capacity))
        if self.capacity > _LARGEST:
            raise ValueError(f"capacity must be at most {_LARGEST}, got {self.capacity}")

    def init(self, key: PyTree, item: PyTree) -> HashTableState:
        """An empty table for keys and items like these, without a batch dim: arrays or `jax.ShapeDtypeStruct`."""
        return HashTableState(
            size=jnp.zeros((), jnp.int32),
            entries=jnp.full(max(16, 1 << (2 * self.capacity - 1).bit_length()), _EMPTY, jnp.int32),
            hashes=jnp.zeros(self.capacity, jnp.uint32),
            keys=storage.init(self.capacity, (), checks.item_spec(key)),
            items=storage.init(self.capacity, (), checks.item_spec(item)),
        )

    def insert(
        self, state: HashTableState, keys: PyTree, items: PyTree
    ) -> tuple[HashTableState, Int[Array, " batch"], Bool[Array, " batch"]]:
        """Store items under keys. Of equal keys in a batch the last wins.

        Returns the slot of each key, and whether it is stored. A new key of a full table is not stored; its slot is -1. The
        keys of a batch that is larger than `capacity` may be inserted one by one.
        """
        if not self._length(state, keys, items):
            return state, jnp.zeros(0, jnp.int32), jnp.zeros(0, jnp.bool_)
        return _insert(state, keys, items)

    def find(self, state: HashTableState, keys: PyTree) -> tuple[Int[Array, " batch"], Bool[Array, " batch"]]:
        """The slot of each key, -1 if it is not stored, and whether it is stored."""
        if not self._length(state, keys):
            return jnp.zeros(0, jnp.int32), jnp.zeros(0, jnp.bool_)
        slots = _find(state, keys)
        return slots, slots >= 0

    def read(self, state: HashTableState, slots: Int[Array, " batch"]) -> PyTree:
        """A copy of the items at slots. Slots out of range are clipped."""
        checks.in_memory(state.entries)
        return storage.read(state.items, jnp.clip(checks.slots(slots), 0, self.capacity - 1))

    def update(
        self, state: HashTableState, keys: PyTree, items: PyTree
    ) -> tuple[HashTableState, Int[Array, " batch"], Bool[Array, " batch"]]:
        """Replace the items of stored keys. Of equal keys the last wins. Returns the slots, and which keys are stored."""
        if not self._length(state, keys, items):
            return state, jnp.zeros(0, jnp.int32), jnp.zeros(0, jnp.bool_)
        return _update(state, keys, items)

    def clear(self, state: HashTableState) -> HashTableState:
        """The table without keys. O(capacity)."""
        checks.in_memory(state.entries)
        return dataclasses.replace(state, size=jnp.zeros_like(state.size), entries=jnp.full_like(state.entries, _EMPTY))

    def _length(self, state: HashTableState, keys: PyTree, items: PyTree = None) -> int:
        """Rows of a batch, checked against the state while tracing."""
        checks.in_memory(state.entries)
        if state.hashes.shape != (self.capacity,):
            raise ValueError(
                f"the table has capacity {self.capacity}, the state {state.hashes.shape[0]}: another made it"
            )
        count = checks.batch_length(state.keys, keys, (), 0)
        if items is not None and (other := checks.batch_length(state.items, items, (), 0)) != count:
            raise ValueError(f"{count} keys were given for {other} items")
        return count


@jax.jit
def _find(state: HashTableState, keys: PyTree) -> Array:
    words = packed(keys)
    state, places = _probe(state, words, _hashed(words), jnp.ones(len(words), jnp.bool_), claims=False)
    return _slots_at(state, places)


@jax.jit
def _update(state: HashTableState, keys: PyTree, items: PyTree) -> tuple[HashTableState, Array, Array]:
    if len(words := packed(keys)) == 1:
        return _twice(_update, state, keys, items)
    state, places = _probe(state, words, _hashed(words), jnp.ones(len(words), jnp.bool_), claims=False)
    slots = _slots_at(state, places)
    return _write(state, slots, places, items), slots, slots >= 0


@jax.jit
def _insert(state: HashTableState, keys: PyTree, items: PyTree) -> tuple[HashTableState, Array, Array]:
    words = packed(keys)
    count, capacity = len(words), state.hashes.shape[0]
    if count == 1:
        return _twice(_insert, state, keys, items)
    if count > len(state.entries) // 2:  # there may be more new keys than places

        def one(state: HashTableState, row: Any) -> tuple[HashTableState, Any]:
            state, *found = _insert(state, *jax.tree.map(lambda leaf: leaf[None], row))
            return state, found

        state, (slots, valid) = jax.lax.scan(one, state, jax.tree.map(jnp.asarray, (keys, items)))
        return state, slots[:, 0], valid[:, 0]
    rows, hashes, no_place = jnp.arange(count, dtype=jnp.int32), _hashed(words), len(state.entries)
    state, places = _probe(state, words, hashes, jnp.ones(count, jnp.bool_), claims=True)
    # Read once, before the entries are written: a read that is fused into a later write would copy them all.
    found, entries = jax.lax.optimization_barrier((state.entries[places], state.entries))
    state = dataclasses.replace(state, entries=entries)
    owner = found - capacity  # the first row with this key, if it is a new one
    new, first = owner >= 0, owner == rows
    numbers = state.size + jnp.cumsum(first, dtype=jnp.int32) - 1
    slots = jnp.where(new, numbers.at[owner].get(mode=_CLIP), found)
    valid = slots < capacity
    stored = first & valid
    # If some keys have no room, all claims are undone and made again without them: another key may lie behind such a key.
    full = ~valid.all()
    entries = state.entries.at[jnp.where(full & first, places, no_place)].set(_EMPTY, mode="drop")
    again = full & stored
    state, second = _probe(dataclasses.replace(state, entries=entries), words, hashes, again, claims=True)
    places = jnp.where(full & new, second.at[owner].get(mode=_CLIP), places)
    at = jnp.where(stored, slots, capacity)
    state = dataclasses.replace(
        state,
        size=jnp.minimum(numbers[-1] + 1, capacity),
        hashes=state.hashes.at[at].set(hashes, mode="drop"),
        keys=jax.tree.map(lambda kept, rows: kept.at[at].set(rows, mode="drop"), state.keys, keys),
    )
    slots = jnp.where(valid, slots, -1)
    return _write(state, slots, places, items), slots, valid


def _twice(function: Any, state: HashTableState, *batch: Any) -> tuple[HashTableState, Array, Array]:
    """A batch of one row as two equal rows: XLA turns a scatter of one row into a slice, and then copies the table."""
    state, slots, valid = function(state, *jax.tree.map(lambda leaf: jnp.repeat(leaf, 2, 0), batch))
    return state, slots[:1], valid[:1]


def _slots_at(state: HashTableState, places: Array) -> Array:
    entries = state.entries[places]
    return jnp.where(entries == _EMPTY, -1, entries)


def _write(state: HashTableState, slots: Array, places: Array, items: PyTree) -> HashTableState:
    """Write items at slots that are not -1; of equal slots the last wins. The entries at places find the last one."""
    rows, places = jnp.arange(len(slots), dtype=jnp.int32), jnp.where(slots < 0, len(state.entries), places)
    entries = state.entries.at[places].set(-1, mode="drop").at[places].max(rows, mode="drop")
    last = entries.at[places].get(mode=_CLIP)
    at = jnp.where((slots >= 0) & (last == rows), slots, state.hashes.shape[0])
    equal = slots.at[last].get(mode=_CLIP)  # equal to slots, but XLA sees that entries are read before they are written
    return dataclasses.replace(
        state,
        entries=entries.at[places].set(equal, mode="drop"),
        items=jax.tree.map(lambda kept, rows: kept.at[at].set(rows, mode="drop"), state.items, items),
    )


def _probe(
    state: HashTableState,
    words: UInt32[Array, "batch words"],
    hashes: UInt32[Array, " batch"],
    active: Bool[Array, " batch"],
    *,
    claims: bool,
) -> tuple[HashTableState, Int[Array, " batch"]]:
    """The place of each active key in the entries, or an empty place if the key is not stored.

    With `claims` a new key takes the empty entry, which then is `capacity` + its row. If several rows reach an empty entry
    in one iteration, the first wins. Rows with equal keys take the same steps and end at the same place. The loops carry
    arrays that they only read, behind a barrier: XLA copies an array that a loop closes over if it is written later.
    """
    capacity, mask = state.hashes.shape[0], len(state.entries) - 1
    rows = jnp.arange(len(words), dtype=jnp.int32)

    def passes(entries: Array, kept: Array, places: Array) -> Array:
        """Whether the key at a place has another hash."""
        found = entries[places]
        stored, claimed = kept.at[found].get(mode=_CLIP), hashes.at[found - capacity].get(mode=_CLIP)
        return (found != _EMPTY) & (jnp.where(found < capacity, stored, claimed) != hashes)

    def move(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        entries, kept, places, steps, moving = carry
        moving = moving & passes(entries, kept, places)
        steps = steps + moving
        places = jnp.where(moving, (places + steps) & mask, places)
        return *jax.lax.optimization_barrier((entries, kept)), places, steps, moving

    def body(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        entries, kept, keys, places, steps, left = carry
        entries, kept, places, steps, _ = jax.lax.while_loop(
            lambda carry: carry[-1].any(), move, (entries, kept, places, steps, left)
        )
        if claims:
            # Before the claims: a read that is fused into the write would copy all entries.
            free = jax.lax.optimization_barrier(jnp.where(left & (entries[places] == _EMPTY), places, mask + 1))
            entries = entries.at[free].min(capacity + rows, mode="drop")
        found = entries[places]
        stored = packed(jax.tree.map(lambda leaf: leaf.at[found].get(mode=_CLIP), keys))
        other = jnp.where((found < capacity)[:, None], stored, words.at[found - capacity].get(mode=_CLIP))
        left = left & (found != _EMPTY) & (other != words).any(-1)
        steps = steps + left  # past a key of the same hash
        places = jnp.where(left, (places + steps) & mask, places)
        return *jax.lax.optimization_barrier((entries, kept, keys)), places, steps, left

    start = (hashes & np.uint32(mask)).astype(jnp.int32)
    entries, kept, keys, places, *_ = jax.lax.while_loop(
        lambda carry: carry[-1].any(),
        body,
        (state.entries, state.hashes, state.keys, start, jnp.zeros_like(rows), active),
    )
    return dataclasses.replace(state, entries=entries, hashes=kept, keys=keys), places


def _hashed(words: UInt32[Array, "batch words"]) -> UInt32[Array, " batch"]:
    """A hash of each row: the sum of its words, each mixed with a constant of its place."""
    total = jnp.sum(_mixed(words ^ _constants(words.shape[1])[None]), axis=1, dtype=jnp.uint32)
    return _mixed(total)


def _mixed(bits: Array) -> Array:
    """A permutation of 32 bits in which each depends on all (the last step of MurmurHash3)."""
    bits = (bits ^ (bits >> 16)) * np.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> 13)) * np.uint32(0xC2B2AE35)
    return bits ^ (bits >> 16)


@functools.lru_cache(maxsize=64)
def _constants(count: int) -> np.ndarray:
    return (np.random.PCG64(0x5EED).random_raw(count) >> np.uint64(32)).astype(np.uint32)
