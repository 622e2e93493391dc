"""The rate limiter inside jit, beside a model with the rule of Reverb in exact numbers."""

import dataclasses
import json
import math
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

import fbuf

LIMITERS = [
    fbuf.RateLimiter(min_size=7),
    fbuf.RateLimiter(4, 5, 10),
    fbuf.RateLimiter(0.1, 20, 3),
    fbuf.RateLimiter(2.5, 1, (0, 40)),
    fbuf.RateLimiter(1, 1, (0, 6)),  # a queue of 6
    fbuf.RateLimiter(2, 3, (-math.inf, 20)),
    fbuf.RateLimiter(2, 3, (0, math.inf)),
]


@dataclasses.dataclass
class Reverb:
    """`CanInsert` and `CanSample` of Reverb's C++ (reverb/cc/rate_limiter.cc), with fractions in the place of doubles."""

    limiter: fbuf.RateLimiter
    inserts: int = 0
    samples: int = 0
    deletes: int = 0

    @property
    def ratio(self) -> Fraction:
        return Fraction(str(self.limiter.samples_per_insert or 1))

    def can_insert(self, count: int = 1) -> bool:
        if self.inserts + 1 - self.deletes <= self.limiter.min_size:
            return True
        most = self.limiter.max_diff
        return most == math.inf or (self.inserts + count) * self.ratio - self.samples <= Fraction(most)

    def can_sample(self, count: int = 1) -> bool:
        if self.inserts - self.deletes < self.limiter.min_size:
            return False
        least = self.limiter.min_diff
        return least == -math.inf or self.inserts * self.ratio - self.samples - count >= Fraction(least)


@pytest.mark.parametrize("limiter", LIMITERS, ids=repr)
def test_it_is_the_rule_of_reverb(limiter: fbuf.RateLimiter) -> None:
    """Random histories of writes, draws and removals; what is not allowed is tried, too."""
    moves = jax.jit(lambda state, inserted, sampled: limiter.sampled(limiter.inserted(state, inserted), sampled))
    asked = jax.jit(
        lambda state, size, count: (
            limiter.can_insert(state, size),
            limiter.can_sample(state, size),
            limiter.can_insert(state, size, count),
            limiter.can_sample(state, size, count),
            limiter.inserts_allowed(state, size),
            limiter.samples_allowed(state, size),
        )
    )

    @settings(max_examples=25, deadline=None)
    @given(st.lists(st.tuples(st.sampled_from("isd"), st.integers(1, 9)), max_size=25))
    def histories(history: list[tuple[str, int]]) -> None:
        model, state = Reverb(limiter), limiter.init()
        for kind, count in history:
            size = model.inserts - model.deletes
            one_in, one_out, many_in, many_out, room, left = (each.item() for each in asked(state, size, count))
            assert (one_in, one_out) == (model.can_insert(), model.can_sample())
            assert (many_in, many_out) == (model.can_insert(count), model.can_sample(count))
            assert (room == 0 or model.can_insert(room)) and (room > 10**9 or not model.can_insert(room + 1))
            assert (left == 0 or model.can_sample(left)) and (left > 10**9 or not model.can_sample(left + 1))
            if kind == "i" and many_in:
                model.inserts += count
                state = moves(state, count, 0)
            elif kind == "s" and many_out:
                model.samples += count
                state = moves(state, 0, count)
            elif kind == "d":
                model.deletes += min(count, size)
            if limiter.samples_per_insert is not None:
                diff = model.inserts * model.ratio - model.samples
                assert state.credit.item() == diff * model.ratio.denominator
        assert state.inserted.tolist() == [model.inserts, 0] and state.sampled.tolist() == [model.samples, 0]

    histories()


ANSWERS = json.loads((Path(__file__).parent / "reverb_answers.json").read_text())["tables"]


@pytest.mark.parametrize("table", ANSWERS, ids=lambda table: str(table["limits"]))
def test_the_answers_of_reverb(table: dict[str, Any]) -> None:
    """As the package `dm-reverb` has given them, for one item and for several."""
    ratio, least, buffer = table["limits"]
    limiter = fbuf.RateLimiter(ratio, least, tuple(buffer) if isinstance(buffer, list) else buffer)
    state, inserted = limiter.init(), 0
    for step in table["steps"].split():
        size = min(inserted, 24)
        if step == "i":
            state, inserted = limiter.inserted(state, 1), inserted + 1
        elif step == "s":
            state = limiter.sampled(state, 1)
        else:
            count, answers = int(step[1:-4]), [each == "y" for each in step[-4:]]
            room, left = int(limiter.inserts_allowed(state, size)), int(limiter.samples_allowed(state, size))
            found = [room >= 1, left >= 1, room >= count, left >= count]
            begins_below = size < least < size + count  # see `RateLimiter`
            assert found == answers or (
                begins_below and found[2] and found[:2] + found[3:] == answers[:2] + answers[3:]
            )


def test_somebody_can_always_go_on() -> None:
    """Of every limiter that can be constructed: never are a write and a draw of one item both refused for ever."""
    for ratio in (0.1, 0.5, 1, 3, 7.5):
        for least in (-20, -3.5, 0, 2):
            width = 2 * max(1, ratio)
            for size in (1, 4, 30):
                if least > ratio * size:
                    continue
                limiter = fbuf.RateLimiter(ratio, size, (least, least + width))
                inserted = sampled = 0
                for turn in range(300):
                    stuck = True
                    model = Reverb(limiter, inserted, sampled)
                    if turn % 3 and model.can_sample():
                        sampled, stuck = sampled + 1, False
                    elif model.can_insert():
                        inserted, stuck = inserted + 1, False
                    elif model.can_sample():
                        sampled, stuck = sampled + 1, False
                    assert not stuck, (limiter, inserted, sampled)


def test_a_program_holds_the_ratio() -> None:
    """A scan that writes where it may and draws where it may; the carry is donated, and two of them are mapped."""
    buffer, limiter = fbuf.Buffer(64), fbuf.RateLimiter(4, 16, 24)
    example = jnp.zeros(())

    def turn(carry: Any, key: jax.Array) -> Any:
        state, rates = carry
        writes = limiter.can_insert(rates, state.ring.size, 2)

        def write(state: Any, rates: Any) -> Any:
            state, _ = buffer.extend(state, jnp.ones(2))
            return state, limiter.inserted(rates, 2)

        def draw(state: Any, rates: Any) -> Any:
            allowed = limiter.can_sample(rates, state.ring.size, 8)
            state, _, _ = buffer.sample(state, key, 8)
            return state, limiter.sampled(rates, jnp.where(allowed, 8, 0))

        carry = jax.lax.cond(writes, write, draw, state, rates)
        return carry, (carry[1].inserted[0], carry[1].sampled[0])

    def run(carry: Any, key: jax.Array) -> Any:
        return jax.lax.scan(turn, carry, jax.random.split(key, 400))

    carry = buffer.init(example), limiter.init()
    program = jax.jit(run, donate_argnums=0)
    (_, rates), (inserted, sampled) = program(carry, jax.random.key(0))
    assert carry[1].credit.is_deleted()
    diff = inserted * 4.0 - sampled
    later = np.asarray(inserted) > 18
    assert sampled[-1] > 500 and (diff[later] <= limiter.max_diff).all() and (diff[later] >= limiter.min_diff).all()
    both = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), (buffer.init(example), limiter.init()))
    (_, mapped), _ = jax.jit(jax.vmap(run))(both, jax.random.split(jax.random.key(0), 2))
    assert mapped.sampled[:, 0].tolist() == [rates.sampled[0]] * 2


def test_it_is_replicated_over_a_mesh() -> None:
    limiter = fbuf.RateLimiter(3, 4, 12)
    mesh = jax.make_mesh((1,), ("rows",))
    spec = jax.sharding.PartitionSpec()

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(spec, spec), out_specs=(spec, spec))
    def step(state: fbuf.RateLimiterState, count: jax.Array) -> Any:
        state = limiter.inserted(state, jax.lax.psum(count, "rows"))
        return state, limiter.samples_allowed(state, count)

    state, allowed = step(limiter.init(), jnp.int32(5))
    assert state.inserted.tolist() == [5, 0] and allowed == 15


def test_equal_rules_make_one_trace() -> None:
    traces = 0

    def ask(limiter: fbuf.RateLimiter, state: fbuf.RateLimiterState) -> Any:
        nonlocal traces
        traces += 1
        return limiter.can_sample(state, 9)

    program = jax.jit(ask, static_argnums=0)
    for _ in range(3):
        program(fbuf.RateLimiter(2, 3, 8), fbuf.RateLimiter(2, 3, 8).init())
    assert traces == 1


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 2**31 - 1)), max_size=8), st.sampled_from([1, 3, 0.1, 0.5]))
def test_counters_do_not_overflow(moves: list[tuple[bool, int]], ratio: float) -> None:
    """They have 64 bits; the credit stays at its end, on the right side."""
    limiter = fbuf.RateLimiter(ratio, 1, 10)
    state, inserted, sampled, credit = limiter.init(), 0, 0, 0
    exact = Fraction(str(ratio))
    for write, count in moves:
        if write:
            state, inserted = limiter.inserted(state, count), inserted + count
            credit = min(credit + count * exact.numerator, 2**30)
        else:
            state, sampled = limiter.sampled(state, count), sampled + count
            credit = max(credit - count * exact.denominator, -(2**30))
        assert state.credit.item() == credit
    low, high = np.asarray(state.inserted, np.uint64), np.asarray(state.sampled, np.uint64)
    assert (int(low[0]) + (int(low[1]) << 32), int(high[0]) + (int(high[1]) << 32)) == (inserted, sampled)


@pytest.mark.parametrize(
    ("given_", "error", "text"),
    [
        ({"samples_per_insert": 4}, ValueError, "needs error_buffer"),
        ({"error_buffer": 4}, ValueError, "give samples_per_insert"),
        ({"samples_per_insert": 0, "error_buffer": 4}, ValueError, "above 0"),
        ({"samples_per_insert": math.inf, "error_buffer": 4}, ValueError, "above 0 and finite"),
        ({"samples_per_insert": math.nan, "error_buffer": 4}, ValueError, "NaN"),
        ({"samples_per_insert": "4", "error_buffer": 4}, TypeError, "must be a number"),
        ({"samples_per_insert": 4, "error_buffer": 3.9}, ValueError, "narrower than 2 * max"),
        ({"samples_per_insert": 0.5, "error_buffer": 0.9}, ValueError, "narrower than 2 * max"),
        ({"samples_per_insert": 4, "error_buffer": (0, 7)}, ValueError, "narrower than 2 * max"),
        ({"samples_per_insert": 4, "error_buffer": (9, 2)}, ValueError, "narrower than 2 * max"),
        ({"samples_per_insert": 4, "error_buffer": (1, 2, 3)}, ValueError, "a pair"),
        ({"samples_per_insert": 1, "min_size": 5, "error_buffer": (6, 20)}, ValueError, "is above"),
        ({"min_size": 0}, ValueError, "min_size must be at least 1"),
        ({"samples_per_inserts": 1}, TypeError, "samples_per_insert"),
    ],
)
def test_what_can_never_be_satisfied_is_refused(given_: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        fbuf.RateLimiter(**given_)


def test_what_32_bits_cannot_count_is_refused_by_init() -> None:
    with pytest.raises(ValueError, match="denominator up to 100000"):
        fbuf.RateLimiter(math.pi, 1, 10).init()
    with pytest.raises(ValueError, match="32 bits hold"):
        fbuf.RateLimiter(0.001, 1, 2_000_000).init()
    assert fbuf.RateLimiter(math.pi, 1, 10).max_diff == math.pi + 10  # as a rule of numbers it is one


@pytest.mark.parametrize(
    ("ratio", "inserts", "samples"), [(0.1, 2, 8), (0.1, 4, 64), (0.7, 5, 8), (1 / 3, 2, 4), (2.4, 16, 1)]
)
def test_no_credit_refuses_both_sides_with_a_band_that_is_just_wide_enough(
    ratio: float, inserts: int, samples: int
) -> None:
    limiter = fbuf.RateLimiter(ratio, 1, (inserts * ratio + samples) / 2)
    credits = jnp.arange(-1000, 1000, dtype=jnp.int32)
    states = dataclasses.replace(limiter.init(), credit=credits)
    may_write, may_draw = limiter.can_insert(states, 1, inserts), limiter.can_sample(states, 1, samples)
    assert np.all(may_write | may_draw)
    assert not np.all(may_write) and not np.all(may_draw)
    assert limiter.units.band == inserts * Fraction(ratio).limit_denominator(100) + samples
