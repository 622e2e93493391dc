"""What does not fit is refused while tracing, with words that name the leaf and the cure."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fbuf import Buffer, BufferState, Prioritized, Uniform

pytestmark = pytest.mark.usefixtures("device")

ITEM = {"reward": np.zeros((), np.float32), "observation": {"pixels": np.zeros((2, 3), np.uint8)}}
PIXELS = r"\['observation'\]\['pixels'\]"
THREE, RANKED = Buffer(3), Buffer(3, Prioritized())


def shapes(reward: Any = (4,), pixels: Any = (4, 2, 3), kind: Any = np.float32) -> Any:
    """A batch like ITEM, for tracing without running."""
    made = jax.ShapeDtypeStruct
    return {"reward": made(reward, kind), "observation": {"pixels": made(pixels, np.uint8)}}


def state_of(buffer: Buffer, item: Any = ITEM) -> BufferState:
    return jax.eval_shape(lambda: buffer.init(item))


def extended(batch: Any, lanes: tuple[int, ...] = ()) -> tuple[BufferState, Any]:
    buffer = Buffer(5, lanes=lanes)
    return jax.eval_shape(buffer.extend, state_of(buffer), batch)


def sampled(batch_size: Any, buffer: Buffer = THREE) -> Any:
    return buffer.sample(state_of(buffer), jax.random.key(0), batch_size)


def updated(buffer: Buffer, slots: Any = ((2,), np.int32), priorities: Any = ((2,), np.float32)) -> Any:
    given = (jax.ShapeDtypeStruct(*each) for each in (slots, priorities))
    return jax.eval_shape(buffer.update, state_of(buffer), *given)


def wide() -> Any:
    with jax.enable_x64(True):
        return jnp.arange(2.0)


SMALL = jax.eval_shape(lambda: Buffer(3).init({"reward": np.float32(0)}))
WIDE_TYPES = r"\['reward'\]: float64 needs 64-bit types on \(jax_enable_x64\)"
Case = tuple[Callable[[], Any], Any, str]


def each(make: Callable[[Any], Any], values: Any, error: Any, says: str) -> list[Case]:
    """One case for each value."""
    return [(lambda value=value: make(value), error, says) for value in values]


def with_reward(leaf: Any) -> Any:
    return THREE.init({"reward": leaf})


def in_lanes(lead: tuple[int, ...]) -> Any:
    return extended(shapes(lead, (*lead, 2, 3)), (3,))


ONE = shapes()
STRUCTURES = [{"reward": ONE["reward"]}, {**ONE, "more": ONE["reward"]}, {**ONE, "reward": None}, [ONE]]
NOT_FROM_0 = (-0.1, float("nan"), float("inf"), 1e39, 10**400)
NO_NUMBERS = ("0.6", None, 1j, np.ones(1), jnp.float32(0.5))
REFUSED: list[Case] = [
    # batches: structure, shape, lanes, dtype
    *each(extended, STRUCTURES, ValueError, "items have the structure .*reward.*, the batch has "),
    *each(
        lambda shape: extended(shapes(pixels=shape)),
        [(4, 2, 4), (4, 1, 3), (2, 3), (4, 2, 3, 1)],
        ValueError,
        rf"{PIXELS}: .* needs shape \[n, 2, 3\] .*, got ",
    ),
    *each(lambda n: extended(shapes(n)), [(), (4, 1)], ValueError, r"\['reward'\]: .* needs shape \[n\] .*, got \["),
    *each(
        lambda n: extended(shapes((n,))),
        [1, 3],
        ValueError,
        r"\['reward'\]: this leaf has . rows, the leaves before .* 4",
    ),
    *each(
        in_lanes,
        [(4,), (4, 1), (4, 2)],
        ValueError,
        rf"{PIXELS}: .* needs shape \[n, 3, 2, 3\] \(n rows, then lanes \(3,\), then one item\)",
    ),
    *each(
        lambda kind: extended(shapes(kind=kind)),
        [np.int32, np.float16, np.bool_, np.complex64],
        TypeError,
        r"\['reward'\]: items are float32, the batch is .*: cast it first",
    ),
    # items
    *each(with_reward, [jax.ShapeDtypeStruct((), np.float64), wide()], TypeError, WIDE_TYPES),
    (lambda: THREE.extend(SMALL, {"reward": wide()}), TypeError, WIDE_TYPES),
    *each(with_reward, [jax.random.key(0)], TypeError, r"hold key<fry>; store jax.random.key_data\(key\)"),
    *each(with_reward, ["text", object()], TypeError, r"\['reward'\]: an item holds arrays or jax.Shape"),
    *each(THREE.init, [None, (), {}, {"reward": None}], ValueError, "at least one array"),
    # draws and priorities
    *each(sampled, [0, -1, 2.0, "3", None, True, np.ones(())], (ValueError, TypeError), "batch_size must be .*, got"),
    (lambda: jax.eval_shape(sampled, jax.ShapeDtypeStruct((), np.int32)), TypeError, "known before the program runs"),
    *each(
        lambda kind: updated(RANKED, ((2,), kind)),
        [np.float32, np.bool_, np.complex64],
        TypeError,
        "slots must be integers, got",
    ),
    *each(
        lambda shape: updated(RANKED, priorities=(shape, np.float32)),
        [(1,), (3,), (2, 1), (1, 2)],
        ValueError,
        r"the shape of slots, \(2,\), or",
    ),
    *each(
        lambda kind: updated(RANKED, priorities=((2,), kind)),
        [np.complex64, np.bool_],
        TypeError,
        "priorities must be real numbers",
    ),
    (lambda: updated(THREE), TypeError, r"sampler=fbuf.Prioritized\(\.\.\.\)"),
    (lambda: Prioritized().reweight(Prioritized().init(4), np.ones(1)), ValueError, "alpha must be one number"),
    # rules
    *each(Buffer, [0, -1], ValueError, "capacity must be at least 1, got"),
    *each(Buffer, [2.0, "3", None, True, np.float32(3)], TypeError, r"capacity must be an int .*, got"),
    *each(lambda lanes: Buffer(3, lanes=lanes), [(0,), (2, -1)], ValueError, "lanes"),
    *each(lambda lanes: Buffer(3, lanes=lanes), [(2.0,), (True,), 3, [2]], TypeError, "lanes"),
    *each(
        lambda size: Buffer(size[0], lanes=size[1]),
        [(2**31 - 8, ()), (2**30, (2,)), (1, (2**16, 2**15))],
        ValueError,
        f"at most {2**31 - 9} items",
    ),
    *each(lambda alpha: Prioritized(alpha=alpha), NOT_FROM_0, ValueError, "alpha must be from 0 to 1e.30, got"),
    *each(lambda eps: Prioritized(eps=eps), NOT_FROM_0, ValueError, "eps must be from 0 to 1e.30, got"),
    *each(lambda alpha: Prioritized(alpha=alpha), NO_NUMBERS, TypeError, "alpha must be a number, got"),
    (lambda: Prioritized(eps=1e-50), ValueError, "eps"),
    (lambda: Prioritized(new_items="highest"), ValueError, "new_items must be '.*' or '.*', got"),  # type: ignore[arg-type]
    *each(lambda kind: Prioritized(dtype=kind), ["float16", np.float32], ValueError, "dtype must be '.*' or '.*', got"),
    (lambda: Prioritized(stratified="no"), TypeError, "stratified must be True or False, got 'no'"),  # type: ignore[arg-type]
    *each(
        lambda rule: Buffer(4, rule), [Prioritized, Uniform, None, "uniform", range(3)], TypeError, "sampler must be"
    ),
    (lambda: Buffer(4, writer=None), TypeError, "writer must be a Writer, got None"),  # type: ignore[arg-type]
    (lambda: Buffer(4, Uniform(), (2,)), TypeError, "positional"),  # type: ignore[misc]
    (lambda: Buffer(3, Prioritized(dtype="float64")).init(np.float32(0)), ValueError, "jax_enable_x64"),
]


@pytest.mark.parametrize(("make", "error", "says"), REFUSED)
def test_what_does_not_fit_is_refused(make: Callable[[], Any], error: Any, says: str) -> None:
    with pytest.raises(error, match=says):
        make()


def test_what_fits_is_taken() -> None:
    for lanes in ((), (3,)):
        _, slots = extended(shapes((4, *lanes), (4, *lanes, 2, 3)), lanes)
        assert (slots.shape, slots.dtype) == ((4, *lanes), jnp.int32)
    buffer = Buffer(np.int64(8), lanes=(np.int32(2),))  # type: ignore[arg-type]
    assert buffer == Buffer(8, lanes=(2,)) and type(buffer.capacity) is int and type(buffer.lanes[0]) is int
    assert Prioritized(alpha=np.float32(0.5)) == Prioritized(alpha=0.5)  # type: ignore[arg-type]
    drawn = jax.eval_shape(lambda state, key: THREE.sample(state, key, np.int64(3)), state_of(THREE), jax.random.key(0))  # type: ignore[arg-type]
    assert drawn[2].slots.shape == (3,)


def test_wide_numpy_batches_fit_what_jax_holds_of_them() -> None:
    item, batch = (
        {"count": np.int64(0), "value": np.float64(0)},
        {"count": np.arange(2), "value": np.asarray([0.5, 1.5])},
    )
    state, _ = THREE.extend(THREE.init(item), batch)
    np.testing.assert_array_equal(state.items["count"], [0, 1, 0])
    np.testing.assert_array_equal(state.items["value"], [0.5, 1.5, 0])
    with jax.enable_x64(True):
        held = THREE.init(item)
        assert (held.items["count"].dtype, held.items["value"].dtype) == (np.int64, np.float64)
        with pytest.raises(TypeError, match=r"\['value'\]: items are float64, the batch is float32"):
            THREE.extend(held, {"count": np.arange(2), "value": np.zeros(2, np.float32)})
        with pytest.raises(ValueError, match="was not made for"):
            RANKED.extend(Buffer(3, Prioritized(dtype="float64")).init(np.float32(0)), np.zeros(1, np.float32))


def test_integers_that_do_not_survive_32_bits_are_refused() -> None:
    state = THREE.init(np.zeros((), np.int64))
    with pytest.raises(ValueError, match=f"{2**40 + 5} does not fit in int32"):
        THREE.extend(state, np.asarray([1, 2**40 + 5]))
    assert THREE.extend(state, np.asarray([1, 2**31 - 1]))[0].items.tolist() == [1, 2**31 - 1, 0]


@pytest.mark.parametrize("sampler", [Uniform(), Prioritized()], ids=repr)
def test_as_many_items_as_slots_can_number_are_traced(sampler: Any) -> None:
    buffer = Buffer(2**31 - 9, sampler)
    state = jax.eval_shape(buffer.init, jax.ShapeDtypeStruct((), np.bool_))
    state, slots = jax.eval_shape(buffer.extend, state, jax.ShapeDtypeStruct((4,), np.bool_))
    state, _, draw = jax.eval_shape(lambda s, k: buffer.sample(s, k, 4), state, jax.random.key(0))
    assert draw.slots.dtype == slots.dtype == np.int32


@pytest.mark.parametrize(
    ("buffer", "other"),
    [
        (Buffer(8), Buffer(4)),
        (Buffer(4), Buffer(8)),
        (Buffer(4, lanes=(2,)), Buffer(4)),
        (Buffer(4), Buffer(4, Prioritized())),
        (Buffer(4, Prioritized()), Buffer(4)),
        (Buffer(4, Prioritized()), Buffer(4, Prioritized(new_items="highest_stored"))),
        (Buffer(8, Prioritized()), Buffer(9, Prioritized())),
    ],
)
def test_the_state_of_another_buffer_is_refused_by_every_method(buffer: Buffer, other: Buffer) -> None:
    state = state_of(other, np.zeros(3, np.float32))
    methods = [
        lambda: buffer.extend(state, np.zeros((1, *buffer.lanes, 3), np.float32)),
        lambda: buffer.sample(state, jax.random.key(0), 2),
        lambda: buffer.update(state, np.zeros(1, np.int32), np.ones(1)),
        lambda: buffer.read(state, np.zeros(1, np.int32)),
        lambda: buffer.clear(state),
    ]
    for method in methods:
        with pytest.raises(ValueError, match=r"another buffer made it|was not made for"):
            method()


def test_slots_of_every_integer_type_are_read_and_none_wraps() -> None:
    buffer = Buffer(300, Prioritized(alpha=1, eps=0))
    state, _ = buffer.extend(buffer.init(np.float32(0)), np.arange(300, dtype=np.float32))
    for kind in (np.int8, np.uint8, np.int16, np.uint16, np.uint32, np.int64, np.uint64):
        assert buffer.read(state, np.array([100, 3], kind)).tolist() == [100, 3]
        narrow = kind if np.dtype(kind).itemsize < 8 else np.uint32
        assert buffer.read(state, jnp.asarray([100, 3], narrow)).tolist() == [100, 3]
    after = buffer.update(state, np.asarray([2**32 + 1, -(2**32) + 2, 3]), [7, 8, 9])
    np.testing.assert_array_equal(after.sampler.priorities[:4], [1, 1, 1, 9])
    assert buffer.update(state, [], []).sampler.highest == 1
    after = buffer.update(state, [0], np.array([1e300]))  # infinite in JAX's floats: refused in silence
    assert int(after.sampler.refused) == 1 and float(after.sampler.priorities[0]) == 1
