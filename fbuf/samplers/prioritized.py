"""Items in proportion to their priority (arXiv:1511.05952)."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int, UInt32

from fbuf import checks, priority_tree, random_words, storage
from fbuf.fusion import (
    by_device,
    computed_once,
    entry,
    gather,
    is_few,
    loop_variant,
    map_entries,
    one_kernel_loop,
    put,
    two_or_more,
    word_of,
    zero_after,
    zero_after_reading,
)
from fbuf.keywords import checked
from fbuf.priority_tree import PriorityTree, two_sum
from fbuf.samplers.chances import Chances, Reason
from fbuf.samplers.protocol import Draw, Sampler
from fbuf.short_text import ShortText

_LARGEST_RULE = 1e30  # of alpha and eps: finite in float32, with room


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class PrioritizedState(ShortText):
    """The priorities that the user passed, so that alpha can change without loss, and the tree of their weights.

    Attributes:
        priorities: [width of the tree] as passed; -1 for no item; the last entry belongs to no slot.
        tree: over (priority + eps) ** alpha.
        ranks: over the priorities themselves, for new_items="highest_stored".
        alpha: [] the exponent of the weights, which `reweight` changes.
        highest: [] priority for the next new item.
        highest_slot: [] the slot of the item with this priority; -1 if none is known.
        refused: [] uint32: how many priorities were negative or not finite.
        excluded: [width of the tree] bool: items that cannot be drawn; None: all can.

    Attributes:
        priorities: TODO.
        tree: TODO.
        ranks: TODO.
        alpha: [] the exponent of the weights, which `reweight` changes.
        highest: TODO.
        highest_slot: TODO.
        refused: TODO.
        excluded: TODO.
    """

    priorities: Array
    tree: PriorityTree
    ranks: PriorityTree | None
    alpha: Array
    highest: Array
    highest_slot: Array
    refused: Array
    excluded: Array | None = None


@checked
@dataclasses.dataclass(frozen=True)
class Prioritized(Sampler):
    """Slots with probability (priority + eps) ** alpha over the sum of all; O(batch * log capacity) but for `reweight`.

    A new item gets the highest priority, 1 at first. With `new_items="highest_ever"` that is the highest one ever passed.
    With "highest_stored" it is that of one stored item: 1 again once this item is overwritten, and looked up among all
    items when its priority changes. With it all rows of one `extend` get the same priority, and XLA copies the priorities
    in each iteration of a loop that both extends and updates.

    With `stratified`, draw i falls into the i-th of batch_size equal shares of the total (section 3.3 and B.2.1 of the
    paper): the same probabilities, less variance. A zero priority with eps 0 is never drawn. Priorities that are negative
    or not finite are refused: the item keeps its priority, and `state.refused` counts them. Weights are limited to the
    largest value whose sum over all slots is finite.

    `dtype` is that of priorities and sums; "float64" needs 64-bit types on. In float32, items that weigh less than 2^-24
    of the total are drawn too often or too rarely; see `priority_tree.find`.

    Args:
        alpha: exponent of the priorities: 0 draws uniformly, 1 in proportion.
        eps: is added to each priority.
        stratified: whether each draw falls into its own share of the total.
        new_items: which priority a new item gets.
        dtype: of priorities and sums: "float32" or "float64".

    Args:
        alpha: exponent of the priorities: 0 draws uniformly, 1 in proportion.
        eps: is added to each priority.
        stratified: whether each draw falls into its own share of the total.
        new_items: which priority a new item gets.
        dtype: of priorities and sums: "float32" or "float64".
    """

    keeps_priorities = True
    needs_order = False
    without_replacement = False

    alpha: float = 0.6
    eps: float = 1e-8
    stratified: bool = False
    new_items: Literal["highest_ever", "highest_stored"] = "highest_ever"
    dtype: Literal["float32", "float64"] = "float32"

    def __post_init__(self) -> None:
        for name in ("alpha", "eps"):
            value = getattr(self, name)
            if not isinstance(value, int | float | np.integer | np.floating) or isinstance(value, bool):
                raise TypeError(f"{name} must be a number, got {value!r}")
            if not 0 <= value <= _LARGEST_RULE:
                raise ValueError(f"{name} must be from 0 to {_LARGEST_RULE:g}, got {value}")
            object.__setattr__(self, name, float(value))
        if not isinstance(self.stratified, bool):
            raise TypeError(f"stratified must be True or False, got {self.stratified!r}")
        if self.new_items not in ("highest_ever", "highest_stored"):
            raise ValueError(f"new_items must be 'highest_ever' or 'highest_stored', got {self.new_items!r}")
        if self.dtype not in ("float32", "float64"):
            raise ValueError(f"dtype must be 'float32' or 'float64', got {self.dtype!r}")
        if 0 < self.eps < np.finfo(self.dtype).tiny:
            raise ValueError(f"eps={self.eps} is zero in {self.dtype}: pass 0, or at least {np.finfo(self.dtype).tiny}")

    def init(self, capacity: int) -> PrioritizedState:
        tree = priority_tree.init(capacity, dtype=self.dtype)
        ranks = None
        if self.new_items == "highest_stored":
            ranks = priority_tree.init(capacity, dtype=self.dtype, minima=False, maxima=True)
        return PrioritizedState(
            priorities=jnp.full(tree.leaves.size, -1, self.dtype),
            tree=tree,
            ranks=ranks,
            alpha=jnp.asarray(self.alpha, self.dtype),
            highest=jnp.ones((), self.dtype),
            highest_slot=jnp.full((), -1, jnp.int32),
            refused=jnp.zeros((), jnp.uint32),
        )

    def init_excluding(self, capacity: int) -> PrioritizedState:
        state = self.init(capacity)
        return dataclasses.replace(state, excluded=jnp.zeros(state.priorities.size, jnp.bool_))

    def written_excluding(
        self,
        state: PrioritizedState,
        slots: Int[Array, " batch"],
        changed: Int[Array, " n"],
        allowed: Bool[Array, " n"],
    ) -> PrioritizedState:
        if not slots.shape[0]:
            return state
        return self.exclude(self._begun(state, two_or_more(slots)), changed, allowed)

    def exclude(
        self, state: PrioritizedState, changed: Int[Array, " n"], allowed: Bool[Array, " n"]
    ) -> PrioritizedState:
        """State after items were allowed or excluded. See `Excluding.written_excluding`."""
        if state.excluded is None:
            raise ValueError("this state cannot exclude items: make it by init_excluding()")
        spare = state.priorities.size - 1
        changed, allowed = (
            two_or_more(priority_tree.in_range(changed, state.tree.capacity, spare)),
            two_or_more(allowed),
        )
        excluded = state.excluded.at[changed].set(~allowed & (changed < spare), mode="promise_in_bounds")
        state = dataclasses.replace(state, excluded=excluded)
        held = gather(state.priorities, changed)
        values = jnp.where(allowed & (held >= 0), self.value(jnp.maximum(held, 0), state.alpha), 0)
        tree = priority_tree.update(state.tree, *computed_once((changed, values)), settled=True)
        return dataclasses.replace(state, tree=tree)

    def written(self, state: PrioritizedState, slots: Int[Array, " batch"]) -> PrioritizedState:
        """State after new items came into slots in range. O(batch * log capacity)."""
        if slots.shape[0] == 0:
            return state
        slots = two_or_more(slots)
        value = jnp.broadcast_to(self.value(state.highest, state.alpha), slots.shape)
        tree = priority_tree.update(state.tree, slots, value, settled=True)
        return dataclasses.replace(self._begun(state, slots), tree=tree)

    def _begun(self, state: PrioritizedState, slots: Array) -> PrioritizedState:
        """The state after new items came into slots; only its tree is not updated."""
        highest, slot = state.highest, state.highest_slot
        if self.new_items == "highest_stored":
            overwritten = jnp.any(slots == slot)
            highest = jnp.where(overwritten, 1, highest)
            slot = jnp.where(overwritten, -1, jnp.where(slot < 0, slots[0], slot))
        return dataclasses.replace(
            state,
            priorities=state.priorities.at[slots].set(state.highest, mode="promise_in_bounds"),
            ranks=_ranked(state.ranks, slots, jnp.broadcast_to(state.highest, slots.shape)),
            highest=highest,
            highest_slot=slot,
        )

    def sample(
        self, state: PrioritizedState, key: Array, batch_size: int, size: Int[Array, ""]
    ) -> tuple[PrioritizedState, Draw]:
        return state, self.draw(state.tree, key, batch_size, size)

    def draw(self, tree: PriorityTree, key: Array, batch_size: int, size: Int[Array, ""]) -> Draw:
        """A draw from a tree of weights."""
        masses = placed_masses(key, batch_size, priority_tree.total(tree), self.stratified)
        slots, probability, valid, smallest = _chances(tree, priority_tree.find_placed(tree, *masses))
        return Draw(slots=slots, probability=probability, valid=valid, smallest=smallest[0], size=size)

    def update(
        self, state: PrioritizedState, slots: Int[Array, " batch"], priorities: Float[Array, " batch"]
    ) -> PrioritizedState:
        """Of equal slots the last counts. Slots without an item are ignored. O(batch * log capacity)."""
        if slots.shape[0] == 0:
            return state
        if self.new_items != "highest_ever" or not is_few(slots.shape[0]):
            return self.update_together(state, slots, priorities)
        return _update_few(self, state, slots, priorities.astype(state.priorities.dtype))

    def update_together(self, state: PrioritizedState, slots: Array, priorities: Array) -> PrioritizedState:
        """`update` by operations on whole arrays."""
        priorities, spare = priorities.astype(state.priorities.dtype), state.priorities.size - 1
        good = jnp.isfinite(priorities) & (priorities >= 0)
        at = jnp.where(good, priority_tree.in_range(slots, state.tree.capacity, spare), spare)
        at = jnp.where(gather(state.priorities, at) >= 0, at, spare)
        at, priorities = two_or_more(computed_once(at)), two_or_more(priorities)
        held, settled = priority_tree.set_last(state.priorities, at, jnp.where(at < spare, priorities, -1))
        top, bad = by_device(_highest_and_refused, _both_at_once)(settled, good)
        state = dataclasses.replace(state, priorities=held, refused=state.refused + bad)
        weighs = settled >= 0
        if state.excluded is not None:
            weighs &= ~gather(state.excluded, at)
        values = jnp.where(weighs, self.value(jnp.maximum(settled, 0), state.alpha), 0)
        state = dataclasses.replace(
            state,
            tree=priority_tree.update(state.tree, at, values, settled=True),
            ranks=_ranked(state.ranks, at, settled),
        )
        return self._raise_highest(state, at, settled, top)

    def clear(self, state: PrioritizedState) -> PrioritizedState:
        """State without items; it keeps the alpha of `reweight`."""
        empty = self.init(state.tree.capacity) if state.excluded is None else self.init_excluding(state.tree.capacity)
        return dataclasses.replace(empty, alpha=state.alpha)

    def chances(self, state: PrioritizedState, size: int) -> Chances:
        """In proportion to the weights in the tree, summed in float64; the sums of the tree round. O(size)."""
        reason = np.full(size, Reason.ZERO_PRIORITY, np.uint8)
        if state.excluded is not None:
            reason[np.asarray(state.excluded)[:size]] = Reason.EXCLUDED
        return Chances.of(np.asarray(state.tree.leaves)[:size].astype(np.float64), reason)

    def priorities(self, state: PrioritizedState, size: int) -> np.ndarray:
        """Those of stored items. O(size)."""
        return np.asarray(state.priorities)[:size]

    def resized(self, state: PrioritizedState, size: int, slots: np.ndarray, capacity: int) -> PrioritizedState:
        """The items keep their priorities and weights. O(capacity)."""
        after, moved = self.init(capacity), storage.moved
        width = after.priorities.size

        at = np.flatnonzero(slots == int(state.highest_slot))
        kept = at.size > 0 or int(state.highest_slot) < 0
        return dataclasses.replace(
            after,
            priorities=moved(state.priorities, slots, width, -1),
            tree=_filled(after.tree, moved(state.tree.leaves, slots, capacity)),
            ranks=state.ranks and _filled(after.ranks, moved(state.ranks.leaves, slots, capacity)),
            alpha=state.alpha,
            highest=state.highest if kept else after.highest,
            highest_slot=jnp.asarray(at[0], jnp.int32) if at.size else after.highest_slot,
            refused=state.refused,
            excluded=None if state.excluded is None else moved(state.excluded, slots, width),
        )

    def reweight(self, state: PrioritizedState, alpha: Float[Array, ""] | float) -> PrioritizedState:
        """State with the weights of another alpha, which may be annealed without a new trace. O(capacity).

        An alpha that is negative or not finite is ignored.
        """
        checks.number("alpha", alpha)
        alpha = jnp.asarray(alpha, state.alpha.dtype)
        if alpha.shape != ():
            raise ValueError(f"alpha must be one number, got shape {alpha.shape}")
        alpha = jnp.where(jnp.isfinite(alpha) & (alpha >= 0), alpha, state.alpha)
        held = state.priorities[: state.tree.capacity]
        weighs = held >= 0 if state.excluded is None else (held >= 0) & ~state.excluded[: state.tree.capacity]
        values = jnp.where(weighs, self.value(jnp.maximum(held, 0), alpha), 0)
        return dataclasses.replace(state, alpha=alpha, tree=priority_tree.fill(state.tree, values))

    def value(self, priority: Array, alpha: Array) -> Array:
        """The weight of an item. Priority 0 without eps weighs 0, also with alpha 0."""
        base = priority + jnp.asarray(self.eps, priority.dtype)
        return jnp.where(base > 0, jnp.minimum(base**alpha, np.finfo(base.dtype).max), 0)

    def _raise_highest(self, state: PrioritizedState, at: Array, settled: Array, top: Array) -> PrioritizedState:
        above = top > state.highest
        if self.new_items == "highest_ever":
            return dataclasses.replace(state, highest=jnp.where(above, top, state.highest))
        known = state.highest_slot >= 0
        changed = jnp.any(at == state.highest_slot) & known
        assert state.ranks is not None
        stored = priority_tree.largest(state.ranks)
        adopt = above | (~known & (top >= 0))
        slot = jnp.where(changed, stored, jnp.where(adopt, at[jnp.argmax(settled)], state.highest_slot))
        held = state.priorities.at[jnp.maximum(slot, 0)].get(mode="promise_in_bounds")
        highest, slot = computed_once((jnp.where(changed | adopt, held, state.highest), slot))
        return dataclasses.replace(state, highest=highest, highest_slot=slot)


def _highest_and_refused(settled: Array, good: Array) -> tuple[Array, Array]:
    """The highest priority, and how many are not good, uint32."""
    return jnp.max(settled), jnp.sum(~good, dtype=jnp.uint32)


def _both_at_once(settled: Array, good: Array) -> tuple[Array, Array]:
    """The same in one reduction. Priorities are finite, so that no order of comparisons matters."""

    def join(one: tuple[Array, Array], other: tuple[Array, Array]) -> tuple[Array, Array]:
        return jnp.maximum(one[0], other[0]), one[1] + other[1]

    bad = jnp.pad((~good).astype(jnp.uint32), (0, settled.shape[0] - good.shape[0]))  # one entry is there twice
    none = jnp.full((), -1, settled.dtype), jnp.zeros((), jnp.uint32)
    found: tuple[Array, Array] = jax.lax.reduce((settled, bad), none, join, (0,))
    return found


@functools.partial(jax.jit, static_argnums=0)
def _update_few(rule: Prioritized, state: PrioritizedState, slots: Array, priorities: Array) -> PrioritizedState:
    one_by_one = functools.partial(_update_one_by_one, rule.value)
    return one_kernel_loop(one_by_one, rule.update_together)(state, slots, priorities)


def _update_one_by_one(
    value: Callable[[Array, Array], Array], state: PrioritizedState, slots: Array, priorities: Array
) -> PrioritizedState:
    """`update_together` in three loops: half the time for few slots. `value` computes weights."""
    spare, count = state.priorities.size - 1, slots.shape[0]

    def kept(k: Array) -> Array:
        return word_of(entry(state.priorities, priority_tree.in_range(entry(slots, k), state.tree.capacity, spare)))

    zero = zero_after_reading(count, kept, zero_after(slots))

    def note(k: Array, held: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        table, at, refused = held
        priority = entry(priorities, k)
        good = jnp.isfinite(priority) & (priority >= 0)
        slot = jnp.where(good, priority_tree.in_range(entry(slots, k), state.tree.capacity, spare), spare)
        slot = jnp.where(entry(table, slot) >= 0, slot, spare)
        at = put(at, slot, k)
        slot = entry(at, k)  # XLA then reads the table before it writes to it, and does not copy it
        return put(table, jnp.where(slot < spare, priority, -1), slot), at, refused + ~good

    held, at, refused = jax.lax.fori_loop(zero, count, note, (state.priorities, jnp.full(count, zero), state.refused))
    zero = zero_after(at)

    def weigh(k: Array, out: tuple[Array, Array]) -> tuple[Array, Array]:
        values, highest = out
        slot = entry(at, k)
        settled = entry(held, slot)
        weighs = settled >= 0
        if state.excluded is not None:
            weighs &= ~entry(state.excluded, slot)
        new = jnp.where(weighs, value(jnp.maximum(settled, 0), loop_variant(state.alpha, k)), 0)
        _slot, new = priority_tree.accepted(state.tree, slot, new)
        return put(values, new, k), jnp.maximum(highest, settled)

    values = jnp.full(count, zero.astype(held.dtype))
    values, highest = jax.lax.fori_loop(zero, count, weigh, (values, state.highest))
    tree = priority_tree.update_accepted(state.tree, at, values, settled=True)
    return dataclasses.replace(state, priorities=held, refused=refused, highest=highest, tree=tree)


@jax.jit
def _chances(tree: PriorityTree, slots: Int[Array, " batch"]) -> tuple[Array, Array, Array, Array]:
    """Found slots, the probability of each, whether there is any, and the smallest probability of all, for each slot.

    All are computed once (see `fusion.computed_once`): a later read would come after a write into the tree.
    """
    shared = priority_tree.total(tree), priority_tree.minimum(tree)
    return map_entries(_chance_at, slots.shape[0], tree.leaves, shared, slots, settled=True)


def _chance_at(leaves: Array, shared: tuple[Array, Array], _k: Array, slot: Array) -> tuple[Array, Array, Array, Array]:
    total, minimum = shared
    return slot, chance(entry(leaves, slot), total), total > 0, chance(minimum, total)


def chance(value: Array, total: Float[Array, ""]) -> Array:
    """The probability of weight `value`. It does not underflow, or importance weights relative to it would be zero."""
    return jnp.maximum(value / jnp.where(total > 0, total, 1), np.finfo(total.dtype).tiny)


_filled = jax.jit(priority_tree.fill)  # eagerly each of its operations would be a program


def _ranked(ranks: PriorityTree | None, slots: Array, priorities: Array) -> PriorityTree | None:
    return None if ranks is None else priority_tree.update(ranks, slots, priorities, settled=True)


@functools.partial(jax.jit, static_argnums=(1, 3))
def placed_masses(key: Array, count: int, total: Float[Array, ""], stratified: bool) -> tuple[Array, Array]:
    """Uniform masses in [0, total) of 48 random bits, as `priority_tree.find_placed` takes them, [count] each."""

    def mass_at(_tables: Any, shared: tuple[Array, Array], place: Array) -> tuple[Array, Array]:
        words, total = shared
        place = place[None]  # XLA reorders products of scalars, which may then overflow
        drawn = random_words.pairs_at(words, place, False)
        mass, low = priority_tree.placed(total, *_masses_of(count, stratified, total, place, *drawn))
        return mass[0], low[0]

    shared = random_words.words_of(key), total
    return map_entries(mass_at, count, (), shared, most=priority_tree.FOUND_IN_LOOPS)


def _masses_of(
    count: int, stratified: bool, total: Float[Array, ""], places: Array, coarse: Array, fine: Array
) -> tuple[Array, Array]:
    """The masses at some places of `count`, from two random words each."""
    coarse, fine = ((words >> 8).astype(total.dtype) * 2.0**-24 for words in (coarse, fine))
    if not stratified:
        high, low = _two_product(coarse, total)
        return high, low + fine * (total * 2.0**-24)
    share, index = total / count, places.astype(total.dtype)
    back, back_low = _two_product(share, jnp.asarray(count, total.dtype))
    lost = ((total - back) - back_low) / count  # the shares tile the total whichever way XLA rounds the division
    # No product is an operand of `two_sum`: XLA may then round both at once.
    place, rest = two_sum(index, coarse)
    high, low = _two_product(place, share)
    return high, low + (fine * 2.0**-24 + rest) * share + place * lost


def _two_product(a: Array, b: Array) -> tuple[Array, Array]:
    """a * b as a rounded product and its exact rounding error (Dekker 1971), for factors of at most 24 bits."""
    if np.dtype(a.dtype) == np.float64:  # 48 bits are exact enough in one double
        return a * b, jnp.zeros_like(a * b)
    product = a * b
    a_high, b_high = _upper_half(a), _upper_half(b)
    a_low, b_low = a - a_high, b - b_high
    return product, ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low


def _upper_half(x: Array) -> Array:
    """The float32 with the lower 12 bits of the significand cleared."""
    bits: UInt32[Array, "*shape"] = jax.lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFFFF000)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
