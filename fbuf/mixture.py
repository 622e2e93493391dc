"""One batch from several buffers."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from fbuf import checks, row_masks
from fbuf.buffer import Buffer, BufferState
from fbuf.keywords import checked
from fbuf.priority_tree import LARGEST
from fbuf.samplers import Chances, Draw, Slices
from fbuf.shown import Shown


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MixtureDraw(Draw):
    """The draw of a mixture. Slots are those of the member of a row; probabilities are those in the mixture.

    Attributes:
        member: the number of the buffer of each row.
    """

    member: Int[Array, " batch"] = dataclasses.field(kw_only=True)


@checked
@dataclasses.dataclass(frozen=True)
class Mixture(Shown):
    """Several buffers that are written one by one and sampled together, such as demonstrations and new experience.

    Args:
        buffers: the members. Their items are alike; capacities, lanes, samplers and writers may differ.
        shares: the part of a batch from each member, up to a factor; equal parts by default.
        drawn: False: each member gives a fixed number of rows, in the order of members, rounded by largest remainders. The
            rows of a member without items are invalid. True: the member of each row is drawn, independently (to 2^-24 of
            the shares), among members with items. This reads a whole batch from every member. It refuses samplers
            without replacement, because it would discard most of their items.
        batch_size: of `sample` without one, as in `Buffer`.

    The state is a tuple with a state for each member: replace one of them to write to it. The probability of a row is the
    part of its member among the valid rows times the probability there, so `importance_weights` correct towards a uniform
    draw from the items of all members together.
    """

    buffers: tuple[Buffer, ...]
    shares: tuple[float, ...] | None = None
    drawn: bool = False
    batch_size: int | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.buffers, tuple) or not self.buffers:
            raise TypeError(f"buffers must be a tuple of at least one Buffer, got {self.buffers!r}")
        for buffer in self.buffers:
            checks.rule("buffers", buffer, Buffer)
        if not isinstance(self.drawn, bool):
            raise TypeError(f"drawn must be True or False, got {self.drawn!r}")
        if sum(buffer.capacity * buffer.items_per_row for buffer in self.buffers) > LARGEST:
            raise ValueError(f"at most {LARGEST} items in all members together")
        if len({_unit(buffer.sampler) for buffer in self.buffers}) > 1:
            raise ValueError("the samplers of all members must draw rows of the same length and burn_in")
        if self.batch_size is not None:
            object.__setattr__(self, "batch_size", checks.as_int("batch_size", self.batch_size))
            self._check_batch_size(self.batch_size)
        once = [buffer.sampler for buffer in self.buffers if buffer.sampler.without_replacement]
        if self.drawn and once:
            raise ValueError(f"drawn=True would lose most of what {once[0]!r} returns: use fixed shares")
        if self.shares is not None:
            self._check_shares(self.shares)
            object.__setattr__(self, "shares", tuple(map(float, self.shares)))

    def _check_shares(self, shares: Any) -> None:
        numbers = int | float | np.integer | np.floating
        if not isinstance(shares, tuple) or not all(isinstance(x, numbers) and not isinstance(x, bool) for x in shares):
            raise TypeError(f"shares must be a tuple of numbers, got {shares!r}")
        if len(shares) != len(self.buffers):
            raise ValueError(f"shares need one number for each of {len(self.buffers)} buffers, got {shares}")
        if not all(0 <= share < math.inf for share in shares) or not 0 < sum(map(float, shares)) < math.inf:
            raise ValueError(f"shares must be at least 0, finite, and not all zero, got {shares}")

    def _check_batch_size(self, batch_size: int) -> int:
        """The items of a row. ValueError if a batch of so many items is not a number of whole rows."""
        unit = _unit(self.buffers[0].sampler)[0]
        if batch_size % unit:
            raise ValueError(f"batch_size={batch_size} is not a multiple of the slice length, {unit}")
        return unit

    @property
    def _shares(self) -> tuple[float, ...]:
        return self.shares or (1.0,) * len(self.buffers)

    def parts(self, laws: Sequence[Chances]) -> np.ndarray:
        """The part of each member in the valid rows of a large batch, float64 [members], of the laws of their draws.

        With fixed shares small batches have other parts: whole numbers of rows. On the host: not inside jit.
        """
        some = [bool((~law.refused).any()) for law in laws]
        shares = np.where(some, self._shares, 0.0)
        return shares / (shares.sum() or 1)

    def init(self, example: Any) -> tuple[BufferState, ...]:
        """The states of empty members for items like `example`."""
        return tuple(buffer.init(example) for buffer in self.buffers)

    def size(self, states: tuple[BufferState, ...]) -> Int[Array, ""]:
        """Items stored, in all members together."""
        self.check(states)
        sizes: list[Any] = [buffer.size(state) for buffer, state in zip(self.buffers, states, strict=True)]
        return sum(sizes, jnp.zeros((), jnp.int32))

    def sample(
        self, states: tuple[BufferState, ...], key: Array, batch_size: int | None = None
    ) -> tuple[tuple[BufferState, ...], Any, MixtureDraw]:
        """A copy of `batch_size` items and their draw. See `Buffer.sample`. O(batch), times members if `drawn`."""
        self.check(states)
        checks.random_key(key)
        batch_size = checks.batch_size(batch_size, self.batch_size)
        unit = self._check_batch_size(batch_size)
        if self.drawn:
            counts = (batch_size,) * len(self.buffers)
        else:
            counts = tuple(unit * count for count in apportioned(self._shares, batch_size // unit))
        *keys, which = jax.random.split(key, len(self.buffers) + 1)
        after, parts, numbers = list(states), [], []
        for i, (buffer, count) in enumerate(zip(self.buffers, counts, strict=True)):
            if count:
                after[i], items, draw = buffer.sample(states[i], keys[i], count)
                parts.append((items, draw))
                numbers.append(i)
        _require_alike(parts, numbers)
        if self.drawn:
            items, drawn = _rows_of_drawn(parts, self._shares, which)
        else:
            items, drawn = _rows_of_all(parts, numbers)
        return tuple(after), items, drawn

    def update(
        self, states: tuple[BufferState, ...], draw: MixtureDraw, priorities: Float[Array, "*batch"] | float
    ) -> tuple[BufferState, ...]:
        """Give the items of a draw new priorities: one for each row, or one for all.

        Rows that are not valid are ignored, and so are rows of members without priorities. TypeError if no member has
        priorities. O(batch * log capacity) for each member.
        """
        self.check(states)
        keeping = [i for i, buffer in enumerate(self.buffers) if buffer.sampler.keeps_priorities]
        if not keeping:
            raise TypeError("no member keeps priorities: build one with sampler=fbuf.Prioritized(...)")
        slots = draw.slots if draw.starts is None else draw.starts
        priorities = checks.priorities(priorities, slots.shape)
        after = list(states)
        for i in keeping:
            own = draw.valid & (draw.member == i)
            # A bad priority of another member must not count as refused here.
            given = jnp.where(own, priorities, jnp.ones((), priorities.dtype))
            after[i] = self.buffers[i].update(states[i], jnp.where(own, slots, -1), given)
        return tuple(after)

    def check(self, states: tuple[BufferState, ...]) -> None:
        """ValueError for the states of another mixture, TypeError for no tuple. Members check their own states."""
        if not isinstance(states, tuple | list):
            raise TypeError(
                f"the state of a Mixture is a tuple with a state for each member, got {type(states).__name__}"
            )
        if len(states) != len(self.buffers):
            raise ValueError(f"one state for each of {len(self.buffers)} buffers is needed, got {len(states)}")


def _require_alike(parts: list[tuple[Any, Draw]], numbers: list[int]) -> None:
    """ValueError for members whose items differ in structure, shape or dtype."""

    def kind(items: Any) -> tuple[Any, list[str]]:
        return jax.tree.structure(items), [f"{leaf.dtype}{list(leaf.shape[1:])}" for leaf in jax.tree.leaves(items)]

    first = kind(parts[0][0])
    for i, (items, _) in zip(numbers, parts, strict=True):
        if kind(items) != first:
            raise ValueError(
                f"items must be alike: those of buffer {i} are {kind(items)}, those of buffer {numbers[0]} are {first}"
            )


def _unit(sampler: Any) -> tuple[int, ...]:
    """The items of a row of the batch: 1, or the length and burn_in of slices."""
    return (sampler.length, sampler.burn_in) if isinstance(sampler, Slices) else (1,)


def apportioned(shares: Sequence[float], total: int) -> list[int]:
    """Whole numbers in proportion to shares that add up to `total`, by largest remainders."""
    exact = np.asarray(shares, np.float64) / math.fsum(shares) * total
    counts = np.floor(exact).astype(np.int64)
    missing = total - int(counts.sum())
    counts[np.argsort(counts - exact, kind="stable")[:missing]] += 1
    return counts.tolist()


def _rows_of_all(parts: list[tuple[Any, Draw]], numbers: list[int]) -> tuple[Any, MixtureDraw]:
    """The rows of all parts, one part behind the other."""
    draws = [draw for _, draw in parts]
    valid = jnp.stack([jnp.sum(draw.valid, dtype=jnp.int32) for draw in draws])
    part = valid.astype(jnp.float32) / jnp.maximum(jnp.sum(valid), 1)
    draws = [_scaled(draw, part[i]) for i, draw in enumerate(draws)]
    member = np.repeat(np.asarray(numbers, np.int32), [draw.valid.shape[0] for draw in draws])
    rows = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *([_of_rows(draw) for draw in draws]))
    items = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *([items for items, _ in parts]))
    return items, _joined(rows, draws, valid > 0, jnp.asarray(member))


def _rows_of_drawn(parts: list[tuple[Any, Draw]], shares: Sequence[float], key: Array) -> tuple[Any, MixtureDraw]:
    """Each row from one part, drawn with these shares among the parts with items."""
    draws = [draw for _, draw in parts]
    some = jnp.stack([jnp.any(draw.valid) for draw in draws])
    weights = jnp.where(some, jnp.asarray(np.asarray(shares) / max(shares), jnp.float32), 0)
    bounds = jnp.cumsum(weights)
    mass = jax.random.uniform(key, draws[0].valid.shape, jnp.float32) * bounds[-1]
    member = jnp.sum(mass[:, None] >= bounds[None], axis=1, dtype=jnp.int32)
    last = len(shares) - 1 - jnp.argmax(weights[::-1] > 0).astype(jnp.int32)
    member = jnp.minimum(member, last)  # the product may round upwards
    part = weights / jnp.where(bounds[-1] > 0, bounds[-1], 1)
    draws = [_scaled(draw, part[i]) for i, draw in enumerate(draws)]

    def chosen(*leaves: Array) -> Array:
        rows = leaves[0]
        for i, leaf in enumerate(leaves[1:], start=1):
            rows = jnp.where(row_masks.over(member == i, leaf.ndim), leaf, rows)
        return rows

    rows = jax.tree.map(chosen, *([_of_rows(draw) for draw in draws]))
    items = jax.tree.map(chosen, *([items for items, _ in parts]))
    return items, _joined(rows, draws, weights > 0, member)


def _scaled(draw: Draw, part: Float[Array, ""]) -> Draw:
    part = part.astype(draw.probability.dtype)
    return dataclasses.replace(draw, probability=draw.probability * part, smallest=draw.smallest * part)


def _of_rows(draw: Draw) -> dict[str, Any]:
    """The leaves of a draw that have one entry a row."""
    fields = {field.name: getattr(draw, field.name) for field in dataclasses.fields(draw)}
    return {name: value for name, value in fields.items() if name not in ("smallest", "size")}


def _joined(rows: dict[str, Any], draws: list[Draw], taking_part: Array, member: Array) -> MixtureDraw:
    """One draw of these rows, with the smallest probability and the size of the members that take part."""
    smallest = jnp.stack([draw.smallest.astype(rows["probability"].dtype) for draw in draws])
    sizes = jnp.stack([draw.size for draw in draws])
    least = jnp.min(jnp.where(taking_part, smallest, jnp.inf))
    return MixtureDraw(
        **rows,
        smallest=jnp.where(jnp.any(taking_part), least, 1),
        size=jnp.sum(jnp.where(taking_part, sizes, 0), dtype=jnp.int32),
        member=member,
    )
