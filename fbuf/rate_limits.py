"""How many items may be drawn for each one that is written, and the reverse: a rule, and two counters."""

import dataclasses
import functools
import math
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Int

from fbuf import checks
from fbuf.keywords import checked
from fbuf.short_text import ShortText
from fbuf.shown import Shown

_MOST = 2**30  # credit beyond this is cut off, so that no sum of two overflows
_UNBOUNDED = 2**31 - 1
_DENOMINATORS = (1, 10, 100, 1_000, 10_000, 100_000)
_INFINITE = (-math.inf, math.inf)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class RateLimiterState(ShortText):
    """What was written and drawn under a `RateLimiter`.

    Attributes:
        credit: [] int32: `inserted * samples_per_insert - sampled`, in units of 1 / denominator of that ratio. Exact within
            2^30 units of zero; it stays there beyond.
        inserted: [2] uint32: how many items were written, low and high word.
        sampled: [2] uint32: how many items were drawn.
    """

    credit: Int[Array, ""]
    inserted: Array
    sampled: Array


@checked
@dataclasses.dataclass(frozen=True)
class RateLimiter(Shown):
    """Bounds how far draws and writes run ahead of each other, as the rate limiters of Reverb do (arXiv:2102.04736).

    With `diff = inserted * samples_per_insert - sampled`, in items:

    - a draw of n items is allowed if at least `min_size` items are stored, and diff stays at least `min_diff`;
    - a write of n items is allowed if diff stays at most `max_diff`, and always while fewer than `min_size` are stored.

    A write that begins below `min_size` may so pass `max_diff`, by less than itself: if it waited, it would wait for draws
    that are not allowed. Reverb, which writes one item after the other, never asks this for several.

    `error_buffer`, a number, makes `min_diff` and `max_diff` of `min_size * samples_per_insert` minus and plus it: the ratio
    then holds for what comes after the first `min_size` items. A pair is (min_diff, max_diff) itself. Reverb's
    `MinSize(n)` is `RateLimiter(min_size=n)`, `SampleToInsertRatio(r, n, e)` is `RateLimiter(r, n, e)`, and the limiter of
    `Queue(n)` and `Stack(n)` is `RateLimiter(1, 1, (0, n))`.

    Inside jit the counters are a state of their own, beside that of the buffer: it may be donated, mapped by `vmap`, carried
    by a `scan`, or replicated over a mesh. Methods are pure, and take O(1). Nothing is enforced: the program asks, and
    decides.

        >>> rates = limiter.init()
        >>> rates = limiter.inserted(rates, 64)
        >>> limiter.can_sample(rates, buffer.size(state), 32)

    Args:
        samples_per_insert: how many items are drawn for each that is written; None for no bound but `min_size`.
        min_size: stored items from which on draws are allowed.
        error_buffer: see above; needed with `samples_per_insert`.

    ValueError for a limiter under which draws and writes could wait for each other without end: with a band narrower than
    `2 * max(1, samples_per_insert)`, as in Reverb, or above what `min_size` items give.
    """

    samples_per_insert: float | None = None
    min_size: int = 1
    error_buffer: float | tuple[float, float] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "min_size", checks.as_int("min_size", self.min_size))
        if self.samples_per_insert is None:
            if self.error_buffer is not None:
                raise ValueError("error_buffer bounds a ratio: give samples_per_insert too, or leave it out")
            return
        ratio = _number("samples_per_insert", self.samples_per_insert)
        if not 0 < ratio < math.inf:
            raise ValueError(f"samples_per_insert must be above 0 and finite, got {self.samples_per_insert!r}")
        object.__setattr__(self, "samples_per_insert", ratio)
        given: Any = self.error_buffer
        if given is None:
            raise ValueError(
                "samples_per_insert needs error_buffer: how many items draws may run ahead or behind, such as several "
                "batches"
            )
        if isinstance(given, tuple | list):
            if len(given) != 2:
                raise ValueError(f"error_buffer must be a number or a pair (min_diff, max_diff), got {given!r}")
            given = (_number("min_diff", given[0]), _number("max_diff", given[1]))
        else:
            given = _number("error_buffer", given)
        object.__setattr__(self, "error_buffer", given)
        units = self.units
        if not units.band >= 2 * max(Fraction(1), units.ratio):
            raise ValueError(
                f"error_buffer={self.error_buffer} leaves diff a band from {self.min_diff:g} to {self.max_diff:g}, which is "
                f"narrower than 2 * max(1, samples_per_insert) = {2 * max(1.0, ratio):g}: draws and writes could wait for "
                "each other without end"
            )
        if units.min_diff > units.ratio * self.min_size:
            raise ValueError(
                f"min_diff={self.min_diff:g} is above samples_per_insert * min_size = {ratio * self.min_size:g}: nothing "
                "could be drawn once min_size items are stored, and writes could wait without end"
            )

    @property
    def min_diff(self) -> float:
        """The least diff after a draw; -inf without a ratio."""
        return float(self.units.min_diff)

    @property
    def max_diff(self) -> float:
        """The largest diff after a write; inf without a ratio."""
        return float(self.units.max_diff)

    @property
    def units(self) -> "Units":
        """The ratio and the band without rounding."""
        return _units(self)

    # ------------------------------------------------------------------ inside jit

    def init(self) -> RateLimiterState:
        """Counters at zero.

        ValueError if the ratio is no fraction of whole numbers with a denominator up to 100,000, or if the band is too wide
        for 32 bits: |diff| times that denominator reaches 2^30.
        """
        self._small_units  # noqa: B018
        return RateLimiterState(
            credit=jnp.zeros((), jnp.int32), inserted=jnp.zeros(2, jnp.uint32), sampled=jnp.zeros(2, jnp.uint32)
        )

    def inserted(self, state: RateLimiterState, count: Int[Array, ""] | int) -> RateLimiterState:
        """`count` items were written: at most 2^31 - 1 of them, and counted once for all lanes."""
        count = jnp.asarray(count, jnp.int32)
        return dataclasses.replace(
            state, credit=_moved(state.credit, count, self._small_units[0]), inserted=_plus(state.inserted, count)
        )

    def sampled(self, state: RateLimiterState, count: Int[Array, ""] | int) -> RateLimiterState:
        """`count` items were drawn."""
        count = jnp.asarray(count, jnp.int32)
        return dataclasses.replace(
            state, credit=_moved(state.credit, count, -self._small_units[1]), sampled=_plus(state.sampled, count)
        )

    def can_insert(
        self, state: RateLimiterState, size: Int[Array, ""] | int, count: Int[Array, ""] | int = 1
    ) -> Bool[Array, ""]:
        """Whether `count` items may be written now, where `size` are stored."""
        return (jnp.asarray(size) < self.min_size) | (jnp.asarray(count) <= self._room(state))

    def can_sample(
        self, state: RateLimiterState, size: Int[Array, ""] | int, count: Int[Array, ""] | int = 1
    ) -> Bool[Array, ""]:
        """Whether `count` items may be drawn now, where `size` are stored."""
        return jnp.asarray(count) <= self.samples_allowed(state, size)

    def inserts_allowed(self, state: RateLimiterState, size: Int[Array, ""] | int) -> Int[Array, ""]:
        """How many items may be written now, where `size` are stored; 2^31 - 1 where nothing bounds them."""
        return jnp.where(jnp.asarray(size) < self.min_size, _UNBOUNDED, self._room(state))

    def samples_allowed(self, state: RateLimiterState, size: Int[Array, ""] | int) -> Int[Array, ""]:
        """How many items may be drawn now, where `size` are stored; 2^31 - 1 where nothing bounds them."""
        over = jnp.full_like(state.credit, _UNBOUNDED)
        if self.min_diff > -math.inf:
            _, denominator, least, _ = self._small_units
            over = jnp.maximum((state.credit - least) // denominator, 0)
        return jnp.where(jnp.asarray(size) < self.min_size, 0, over)

    def _room(self, state: RateLimiterState) -> Array:
        """How many items may be written, by the ratio."""
        if self.max_diff == math.inf:
            return jnp.full_like(state.credit, _UNBOUNDED)
        numerator, _, _, most = self._small_units
        return jnp.maximum((most - state.credit) // numerator, 0)

    @property
    def _small_units(self) -> tuple[int, int, int, int]:
        """Numerator and denominator of the ratio, and the least and the largest credit, in 32 bits; 0 for none."""
        if self.samples_per_insert is None:
            return 0, 0, 0, 0
        units = self.units
        if units.denominator > _DENOMINATORS[-1]:
            raise ValueError(
                f"samples_per_insert={self.samples_per_insert!r} is no fraction with a denominator up to "
                f"{_DENOMINATORS[-1]}, which 32 bits can count exactly: round it, for example to 3 digits"
            )
        least = 0 if units.least == -math.inf else int(units.least)
        most = 0 if units.most == math.inf else int(units.most)
        largest = max(abs(least), abs(most), units.numerator * self.min_size)
        if largest >= _MOST:
            raise ValueError(
                f"{self!r} counts in units of 1/{units.denominator}, and needs {largest} of them; 32 bits hold "
                f"{_MOST - 1}. Use a smaller error_buffer and min_size, or a ratio of smaller whole numbers"
            )
        return units.numerator, units.denominator, least, most


@dataclasses.dataclass(frozen=True)
class Units:
    """A `RateLimiter` in whole numbers: a gate that rounded could refuse writes and draws at once, without end.

    A number of the rule is the simplest fraction that is the same float, with a denominator up to 100,000: 0.1 is 1/10.
    Other numbers are what the float is. `credit` is diff in units of 1 / denominator of the ratio.

    Attributes:
        ratio: `samples_per_insert`; 0 for none.
        min_diff, max_diff: the band; -inf and inf for no bound.
        least, most: the least and the largest credit, whole numbers; -inf and inf for no bound.
    """

    ratio: Fraction
    min_diff: Fraction | float
    max_diff: Fraction | float
    least: int | float
    most: int | float

    @property
    def numerator(self) -> int:
        """What one written item adds to the credit."""
        return self.ratio.numerator

    @property
    def denominator(self) -> int:
        """What one drawn item takes from the credit."""
        return self.ratio.denominator

    @property
    def band(self) -> Fraction | float:
        """`max_diff - min_diff`, in items."""
        return self.max_diff - self.min_diff

    def credit(self, inserted: int, sampled: int) -> int:
        """diff in units, of so many items ever written and drawn."""
        return inserted * self.ratio.numerator - sampled * self.ratio.denominator


@functools.lru_cache(maxsize=64)
def _units(rule: RateLimiter) -> Units:
    if rule.samples_per_insert is None or rule.error_buffer is None:
        return Units(Fraction(0), *_INFINITE, *_INFINITE)
    ratio = _fraction(rule.samples_per_insert)
    assert isinstance(ratio, Fraction)  # finite
    if isinstance(rule.error_buffer, tuple):
        low, high = map(_fraction, rule.error_buffer)
    else:
        middle, width = ratio * rule.min_size, _fraction(rule.error_buffer)
        low, high = middle - width, middle + width
    least = low if isinstance(low, float) else math.ceil(low * ratio.denominator)
    most = high if isinstance(high, float) else math.floor(high * ratio.denominator)
    return Units(ratio, low, high, least, most)


def _fraction(value: float) -> Fraction | float:
    """The simplest fraction that is this float; the float if it is infinite."""
    if math.isinf(value):
        return value
    exact = Fraction(value)
    return next((near for most in _DENOMINATORS if float(near := exact.limit_denominator(most)) == value), exact)


def _number(name: str, value: object) -> float:
    if isinstance(value, bool | str | bytes) or not isinstance(value, int | float | np.integer | np.floating):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if math.isnan(value):
        raise ValueError(f"{name} must be a number, got NaN")
    return float(value)


def _moved(credit: Array, count: Array, unit: int) -> Array:
    """The credit after `count` units, cut off beyond `_MOST`."""
    if not unit:
        return credit
    many = count > _UNBOUNDED // abs(unit)  # so many pass the whole range
    moved = credit + jnp.where(many, 0, count) * unit
    # The product is below 2^31 in size; where the sum has moved the wrong way, it has wrapped around.
    wrapped = (moved < credit) if unit > 0 else (moved > credit)
    beyond = many | wrapped
    limit = _MOST if unit > 0 else -_MOST
    return jnp.where(beyond, limit, jnp.clip(moved, -_MOST, _MOST)).astype(jnp.int32)


def _plus(words: Array, count: Array) -> Array:
    """A counter of two words, low and high, plus a count."""
    low = words[0] + count.astype(jnp.uint32)
    return jnp.stack([low, words[1] + (low < words[0]).astype(jnp.uint32)])
