"""Discounted returns from each step of a trajectory on: of n steps, or of all."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Int

from fbuf import checks, storage, trajectories
from fbuf.keywords import checked
from fbuf.trajectories import TERMINATED, TrajectoryState
from fbuf.writers import RingState


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NStep:
    """The return of a step: `returns + discount * value` of the observation after the step `last`.

    Attributes:
        returns: float: r[t] + gamma * r[t + 1] + ..., over `steps` rewards.
        steps: int32: how many rewards, from 1 to n; 0 if the step is not valid.
        discount: float: gamma ** steps; 0 if the last step terminated, or the step is not valid.
        last: int32: the last step, along time; in a ring its slot.

    Attributes:
        returns: TODO.
        steps: TODO.
        discount: TODO.
        last: TODO.
    """

    returns: Array
    steps: Array
    discount: Array
    last: Array


@checked
def n_step(
    rewards: Any,
    ends: Any,
    gamma: Any,
    n: int,
    *,
    terminated: Any = None,
    valid: Any = None,
    axis: int = -1,
) -> NStep:
    """Returns of up to n steps from every step on; never across an end. The end of the array is one, too.

    Leaves have the shape of the rewards; `axis` is time. 16-bit floats are summed as float32, and `returns` rounded once;
    integers become floats. O(steps * log n), and one trace for all gammas.

    Args:
        rewards: [..., time], earned in the step.
        ends: bool, of this shape: the trajectory ends with this step, terminated or cut short.
        gamma: discount, [] or of this shape; it may be traced.
        n: steps, an int.
        terminated: bool, of this shape: the trajectory ends in a terminal state, so `discount` is 0.
        valid: bool, of this shape: False for padding, which no return includes.

    For windows of a buffer (`Slices(length=n, least=1)`) `valid` is their mask; the first column has their returns.
    """
    n = checks.as_int("n", n)
    _refuse_tensors(rewards, ends, gamma)
    axis, held, gamma, ends, over, there = _along_time(rewards, ends, gamma, terminated, valid, axis)
    window = (
        jnp.where(there, held, 0),
        jnp.where(there, jnp.where(over, 0, jnp.broadcast_to(gamma, held.shape)), 1),
        there.astype(jnp.int32),
        there & ~ends,
    )
    returns, discount, steps, _ = _windows(window, min(n, max(held.shape[-1], 1)))
    time = jnp.broadcast_to(jnp.arange(held.shape[-1], dtype=jnp.int32), held.shape)
    found = NStep(
        returns=returns.astype(_kept(rewards)),
        steps=steps,
        discount=jnp.where(there, discount, 0),
        last=time + jnp.maximum(steps - 1, 0),
    )
    return jax.tree.map(lambda leaf: jnp.moveaxis(leaf, -1, axis), found)


@checked
def n_step_of_slots(
    slots: Int[Array, "*shape"], rewards: Array, index: TrajectoryState, ring: RingState, gamma: Any, n: int
) -> NStep:
    """Returns of up to n steps from stored items on, in the shape of the slots; `last` are slots.

    They never cross the end of a trajectory or the cursor of the ring. O(slots * n), whatever the number of items. With
    `Frames`, `buffer.intact(state, found.last)` is True for each `last` whose frames are all stored.

    Args:
        slots: of stored items.
        rewards: one for each item of the buffer, `state.items[...]`: [capacity, *lanes], with dims of 1 behind them or not.
        index, ring: `state.trajectories` and `state.ring` of the buffer.
        gamma: discount, [], or one for each item.
        n: steps, an int.
    """
    checks.refuse_tensor("slots", slots)
    _refuse_tensors(rewards, None, gamma)
    capacity, lanes = index.number.shape
    n = min(checks.as_int("n", n), capacity)
    gamma = jnp.asarray(gamma)
    for name, leaf in (("rewards", rewards), ("gamma", gamma)):
        if (leaf.ndim or leaf is rewards) and (leaf.shape[:1] != (capacity,) or leaf.size != capacity * lanes):
            raise ValueError(
                f"{name}: one for each item is needed, {capacity} rows of {lanes}, got shape {list(leaf.shape)}; for more "
                "than one reward use jax.vmap"
            )
    at = trajectories.place(index, ring, slots)
    row, lane = slots.astype(jnp.int32)[..., None] // lanes, slots.astype(jnp.int32)[..., None] % lanes
    offset = jnp.arange(n, dtype=jnp.int32).reshape((1,) * slots.ndim + (n,))
    there = offset <= at.after[..., None]
    ahead = jnp.minimum(offset, at.after[..., None])
    row = jnp.where(ahead >= capacity - row, ahead - (capacity - row), row + ahead)  # no sum passes 2^31
    window = row * lanes + lane

    held = storage.read(rewards, window, rewards.shape[1:])
    step = storage.read(gamma, window, gamma.shape[1:]) if gamma.ndim else jnp.broadcast_to(gamma, held.shape)
    kind = _summed(held)
    step = jnp.cumprod(jnp.where(there, step.astype(kind), 1), -1)
    before = jnp.concatenate([jnp.ones_like(step[..., :1]), step[..., :-1]], -1)
    steps = jnp.minimum(at.after, n - 1) + 1
    return NStep(
        returns=jnp.sum(jnp.where(there, before * held.astype(kind), 0), -1).astype(_kept(held)),
        steps=steps,
        discount=jnp.where((at.kind == TERMINATED) & (at.after < n), 0, step[..., -1]),
        last=jnp.take_along_axis(window, steps[..., None] - 1, -1)[..., 0],
    )


@checked
def returns_to_go(
    rewards: Any,
    ends: Any,
    gamma: Any,
    *,
    values: Any = None,
    terminated: Any = None,
    valid: Any = None,
    axis: int = -1,
) -> Array:
    """Discounted returns to go from every step on: G[t] = r[t] + gamma * G[t + 1], and r[t] where the trajectory ends.

    Arguments are as for `n_step`. `values`, in the shape of the rewards, are those of the observations after the steps.
    With them G[t] = r[t] + gamma * values[t] where a trajectory is cut short: at an end that did not terminate, before
    padding, and at the end of the array. 0 for a step that is not valid. O(steps): step by step on the CPU, elsewhere in
    O(log steps) rounds, with other rounding.
    """
    _refuse_tensors(rewards, ends, gamma)
    return _returns_to_go(rewards, ends, gamma, values=values, terminated=terminated, valid=valid, axis=axis)


@functools.partial(jax.jit, static_argnames="axis")
def _returns_to_go(
    rewards: Array,
    ends: Array,
    gamma: Array,
    *,
    values: Array | None,
    terminated: Array | None,
    valid: Array | None,
    axis: int,
) -> Array:
    axis, held, gamma, ends, over, there = _along_time(rewards, ends, gamma, terminated, valid, axis)
    stops = ends | ~there | ~_shifted(there, 1, False)
    earned = jnp.where(there, held, 0)
    if values is not None:
        beyond = jnp.moveaxis(_like(rewards, "values", values), axis, -1).astype(held.dtype)
        earned += jnp.where(there & stops & ~over, jnp.broadcast_to(gamma, held.shape) * beyond, 0)
    found = jax.lax.platform_dependent(earned, gamma, stops, cpu=_one_by_one, default=_by_halves)
    return jnp.moveaxis(found, -1, axis).astype(_kept(rewards))


def _one_by_one(earned: Array, gamma: Array, stops: Array) -> Array:
    """G[t] = earned[t] + gamma[t] * G[t + 1]; G[t] = earned[t] at stops."""

    def body(ahead: Array, step: tuple[Array, Array | None, Array]) -> tuple[Array, Array]:
        now, discount, stop = step
        found = now + jnp.where(stop, 0, (gamma if discount is None else discount) * ahead)
        return found, found

    # A single discount is not an array of the loop, which would read it for every step.
    steps = (earned, None if gamma.ndim == 0 else gamma, stops)
    by_time = jax.tree.map(lambda leaf: jnp.moveaxis(leaf, -1, 0), steps)
    found = jax.lax.scan(body, jnp.zeros(earned.shape[:-1], earned.dtype), by_time, reverse=True)[1]
    return jnp.moveaxis(found, 0, -1)


def _by_halves(earned: Array, gamma: Array, stops: Array) -> Array:
    """`_one_by_one` in O(log steps) rounds, for devices on which a step takes as long as an array."""

    def join(later: tuple[Array, ...], earlier: tuple[Array, ...]) -> tuple[Array, ...]:
        found, discount, stop = earlier
        return (
            found + jnp.where(stop, 0, discount * later[0]),  # not a product with 0: rewards behind an end may be NaN
            jnp.where(stop, 0, discount * later[1]),
            stop | later[2],
        )

    every = jnp.broadcast_to(gamma, earned.shape)
    return jax.lax.associative_scan(join, (earned, every, stops), reverse=True, axis=earned.ndim - 1)[0]


def _windows(one: tuple[Array, Array, Array, Array], n: int) -> tuple[Array, Array, Array, Array]:
    """Windows of n steps from windows of one: return, discount, steps, and whether the trajectory goes on."""

    def join(first: tuple[Array, ...], second: tuple[Array, ...], by: int) -> tuple[Array, Array, Array, Array]:
        returns, discount, steps, goes_on = first
        more, further, count = (_shifted(leaf, by, fill) for leaf, fill in zip(second[:3], (0, 1, 0), strict=True))
        return (
            returns + jnp.where(goes_on, discount * more, 0),
            discount * jnp.where(goes_on, further, 1),
            steps + jnp.where(goes_on, count, 0),
            goes_on & _shifted(second[3], by, False),
        )

    made, size, power = None, 0, 1
    while True:  # n by its binary digits
        if n & power:
            made, size = (one, power) if made is None else (join(made, one, size), size + power)
        if size == n:
            assert made is not None
            return made
        one, power = join(one, one, power), 2 * power


def _shifted(leaf: Array, by: int, fill: Any) -> Array:
    """The entries `by` steps later; `fill` behind the end."""
    by = min(by, leaf.shape[-1])
    return jnp.concatenate([leaf[..., by:], jnp.full((*leaf.shape[:-1], by), fill, leaf.dtype)], -1)


def _along_time(
    rewards: Any, ends: Any, gamma: Any, terminated: Any, valid: Any, axis: int
) -> tuple[int, Array, Array, Array, Array, Array]:
    """The axis, and the arguments with time as last axis: rewards, gamma, ends, terminated, valid."""
    shape = jnp.shape(rewards)
    if not -len(shape) <= axis < len(shape):
        raise ValueError(f"axis={axis} is to be that of time in rewards of shape {list(shape)}")
    kind = _summed(rewards)
    held = jnp.moveaxis(jnp.asarray(rewards).astype(kind), axis, -1)

    def flags(name: str, given: Any, default: bool) -> Array:
        if given is None:
            return jnp.full(held.shape, default)
        if jnp.result_type(given) != jnp.bool_:
            raise TypeError(f"{name} must be bool, got {jnp.result_type(given)}")
        return jnp.moveaxis(_like(rewards, name, given), axis, -1)

    over, there = flags("terminated", terminated, False), flags("valid", valid, True)
    if jnp.issubdtype(jnp.result_type(gamma), jnp.complexfloating):
        raise TypeError(f"gamma must be real, got {jnp.result_type(gamma)}")
    discount = jnp.asarray(gamma).astype(kind)
    if discount.ndim:
        discount = jnp.moveaxis(_like(rewards, "gamma", discount), axis, -1)
    return axis, held, discount, flags("ends", ends, False) | over, over, there


def _refuse_tensors(rewards: object, ends: object, gamma: object) -> None:
    """TypeError for tensors of torch."""
    for name, given in (("rewards", rewards), ("ends", ends), ("gamma", gamma)):
        checks.refuse_tensor(name, given)


def _like(rewards: Array, name: str, given: Any) -> Array:
    given = jnp.asarray(given)
    if given.shape != jnp.shape(rewards):
        raise ValueError(f"{name} has the shape {list(given.shape)}, rewards have {list(jnp.shape(rewards))}")
    return given


def _kept(rewards: Any) -> Any:
    """The dtype of returns."""
    dtype = jnp.result_type(rewards)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        raise TypeError(f"rewards must be real numbers, got {dtype}")
    return dtype if jnp.issubdtype(dtype, jnp.floating) else jnp.result_type(float)


def _summed(rewards: Any) -> Any:
    """The dtype of sums."""
    return jnp.promote_types(_kept(rewards), jnp.float32)
