"""What does not fit is refused while tracing, with words that name the leaf and the cure."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fbuf import Buffer, BufferState, Prioritized, Uniform

pytestmark = pytest.mark.usefixtures("device")

ITEM = {"reward": np.zeros((), np.float32), "observation": {"pixels": np.zeros((2, 3), np.uint8)}}
OBSERVATION = r"\['observation'\]\['pixels'\]"


def shapes(**leaves: Any) -> Any:
    """A batch like ITEM of shapes and dtypes, for tracing without running."""
    reward = leaves.get("reward", ((4,), np.float32))
    pixels = leaves.get("pixels", ((4, 2, 3), np.uint8))
    return {"reward": jax.ShapeDtypeStruct(*reward), "observation": {"pixels": jax.ShapeDtypeStruct(*pixels)}}


def state_of(buffer: Buffer, item: Any = ITEM) -> BufferState:
    return jax.eval_shape(lambda: buffer.init(item))


def refused(buffer: Buffer, batch: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        jax.eval_shape(buffer.extend, state_of(buffer), batch)


def test_a_batch_that_fits_is_taken() -> None:
    _, slots = jax.eval_shape(Buffer(5).extend, state_of(Buffer(5)), shapes())
    assert (slots.shape, slots.dtype) == ((4,), jnp.int32)
    with_lanes = shapes(reward=((4, 3), np.float32), pixels=((4, 3, 2, 3), np.uint8))
    _, slots = jax.eval_shape(Buffer(5, lanes=(3,)).extend, state_of(Buffer(5, lanes=(3,))), with_lanes)
    assert (slots.shape, slots.dtype) == ((4, 3), jnp.int32)


@pytest.mark.parametrize(
    "change",
    [
        lambda batch: {"reward": batch["reward"]},
        lambda batch: {**batch, "more": batch["reward"]},
        lambda batch: {**batch, "reward": (batch["reward"],)},
        lambda batch: {**batch, "reward": None},
        lambda batch: [batch],
    ],
)
def test_another_structure_is_refused(change: Any) -> None:
    refused(Buffer(5), change(shapes()), ValueError, "items have the structure .*reward.*, the batch has ")


@pytest.mark.parametrize(
    ("leaves", "match"),
    [
        ({"pixels": ((4, 2, 4), np.uint8)}, rf"{OBSERVATION}: .* needs shape \[n, 2, 3\] .*, got \[4, 2, 4\]"),
        ({"pixels": ((4, 1, 3), np.uint8)}, rf"{OBSERVATION}: .* needs shape \[n, 2, 3\] .*, got \[4, 1, 3\]"),
        ({"pixels": ((4, 2, 1), np.uint8)}, rf"{OBSERVATION}: .* needs shape \[n, 2, 3\] .*, got \[4, 2, 1\]"),
        ({"pixels": ((2, 3), np.uint8)}, rf"{OBSERVATION}: .* needs shape \[n, 2, 3\] .*, got \[2, 3\]"),
        ({"pixels": ((4, 2, 3, 1), np.uint8)}, rf"{OBSERVATION}: .* needs shape \[n, 2, 3\] .*, got \[4, 2, 3, 1\]"),
        ({"reward": ((), np.float32)}, r"\['reward'\]: .* needs shape \[n\] .*, got \[\]"),
        ({"reward": ((4, 1), np.float32)}, r"\['reward'\]: .* needs shape \[n\] .*, got \[4, 1\]"),
        ({"reward": ((3,), np.float32)}, r"\['reward'\]: this leaf has 3 rows, the leaves before it have 4"),
        ({"reward": ((1,), np.float32)}, r"\['reward'\]: this leaf has 1 rows, the leaves before it have 4"),
    ],
)
def test_another_shape_is_refused_also_one_that_would_broadcast(leaves: Any, match: str) -> None:
    refused(Buffer(5), shapes(**leaves), ValueError, match)


@pytest.mark.parametrize(
    ("reward", "pixels"), [((4,), (4, 2, 3)), ((4, 1), (4, 1, 2, 3)), ((4, 2), (4, 2, 2, 3)), ((3,), (3, 2, 3))]
)
def test_a_batch_with_other_lanes_is_refused(reward: Any, pixels: Any) -> None:
    batch = shapes(reward=(reward, np.float32), pixels=(pixels, np.uint8))
    match = rf"{OBSERVATION}: .* needs shape \[n, 3, 2, 3\] \(n rows, then lanes \(3,\), then one item\)"
    refused(Buffer(5, lanes=(3,)), batch, ValueError, match)


@pytest.mark.parametrize("dtype", [np.int32, np.float16, np.bool_, np.complex64])
def test_another_dtype_is_refused_and_never_cast(dtype: Any) -> None:
    match = rf"\['reward'\]: items are float32, the batch is {np.dtype(dtype)}: cast it first"
    refused(Buffer(5), shapes(reward=((4,), dtype)), TypeError, match)


def test_wide_numpy_batches_fit_what_jax_holds_of_them() -> None:
    buffer = Buffer(3)
    state = buffer.init({"count": np.int64(0), "value": np.float64(0)})
    state, _ = buffer.extend(state, {"count": np.arange(2), "value": np.asarray([0.5, 1.5])})
    np.testing.assert_array_equal(state.items["count"], [0, 1, 0])
    np.testing.assert_array_equal(state.items["value"], [0.5, 1.5, 0])
    with jax.enable_x64(True):
        wide = buffer.init({"count": np.int64(0), "value": np.float64(0)})
        assert (wide.items["count"].dtype, wide.items["value"].dtype) == (np.int64, np.float64)
        with pytest.raises(TypeError, match=r"\['value'\]: items are float64, the batch is float32"):
            buffer.extend(wide, {"count": np.arange(2), "value": np.zeros(2, np.float32)})


def test_an_item_of_64_bits_is_refused_where_64_bit_types_are_off() -> None:
    item = {"reward": jax.ShapeDtypeStruct((), np.float64)}
    with pytest.raises(TypeError, match=r"\['reward'\]: float64 needs 64-bit types on \(jax_enable_x64\)"):
        Buffer(3).init(item)


def test_an_array_of_64_bits_is_not_narrowed_where_64_bit_types_are_off() -> None:
    with jax.enable_x64(True):
        wide = jnp.arange(2.0)
    match = r"\['reward'\]: float64 needs 64-bit types on \(jax_enable_x64\)"
    with pytest.raises(TypeError, match=match):
        Buffer(3).init({"reward": wide})
    with pytest.raises(TypeError, match=match):
        Buffer(3).extend(Buffer(3).init({"reward": np.float32(0)}), {"reward": wide})


def test_random_keys_are_refused_with_what_to_store_instead() -> None:
    with pytest.raises(TypeError, match=r"\['key'\]: items cannot hold key<fry>; store jax.random.key_data\(key\)"):
        Buffer(3).init({"key": jax.random.key(0)})


@pytest.mark.parametrize("leaf", ["text", object()])
def test_an_item_of_other_than_arrays_is_refused(leaf: Any) -> None:
    with pytest.raises(TypeError, match=r"\['reward'\]: an item holds arrays or jax.ShapeDtypeStruct, got <class"):
        Buffer(3).init({"reward": leaf})


@pytest.mark.parametrize("item", [None, (), {}, {"reward": None}])
def test_an_item_without_arrays_is_refused(item: Any) -> None:
    with pytest.raises(ValueError, match="at least one array"):
        Buffer(3).init(item)


@pytest.mark.parametrize("batch_size", [0, -1, 2.0, "3", None, True, np.ones(())])
@pytest.mark.parametrize("buffer", [Buffer(3), Buffer(3, Prioritized())], ids=["uniform", "prioritized"])
def test_a_batch_size_that_is_no_positive_integer_is_refused(buffer: Buffer, batch_size: Any) -> None:
    with pytest.raises((ValueError, TypeError), match=r"batch_size must be .*, got"):
        buffer.sample(state_of(buffer), jax.random.key(0), batch_size)


def test_a_batch_size_that_is_traced_is_refused() -> None:
    buffer = Buffer(3)
    with pytest.raises(TypeError, match="batch_size must be an int that is known before the program runs"):
        jax.eval_shape(buffer.sample, state_of(buffer), jax.random.key(0), jax.ShapeDtypeStruct((), np.int32))


@pytest.mark.parametrize("dtype", [np.float32, np.bool_, np.complex64])
def test_slots_that_are_no_integers_are_refused(dtype: Any) -> None:
    buffer = Buffer(3, Prioritized())
    slots, priorities = jax.ShapeDtypeStruct((2,), dtype), jax.ShapeDtypeStruct((2,), np.float32)
    with pytest.raises(TypeError, match=f"slots must be integers, got {np.dtype(dtype)}"):
        jax.eval_shape(buffer.update, state_of(buffer), slots, priorities)


@pytest.mark.parametrize("shape", [(1,), (3,), (2, 1), (1, 2)])
def test_priorities_of_another_shape_are_refused_also_one_that_would_broadcast(shape: tuple[int, ...]) -> None:
    buffer = Buffer(3, Prioritized())
    slots, priorities = jax.ShapeDtypeStruct((2,), np.int32), jax.ShapeDtypeStruct(shape, np.float32)
    with pytest.raises(ValueError, match=r"priorities need the shape of slots, \(2,\), or \(\), got"):
        jax.eval_shape(buffer.update, state_of(buffer), slots, priorities)


def test_a_uniform_buffer_takes_no_priorities_and_says_which_does() -> None:
    with pytest.raises(TypeError, match=r"sampler=fbuf.Prioritized\(\.\.\.\)"):
        Buffer(3).update(state_of(Buffer(3)), np.zeros(2, np.int32), np.ones(2, np.float32))


@pytest.mark.parametrize("capacity", [0, -1])
def test_a_capacity_below_one_is_refused(capacity: int) -> None:
    with pytest.raises(ValueError, match=f"capacity must be at least 1, got {capacity}"):
        Buffer(capacity)


@pytest.mark.parametrize("capacity", [2.0, "3", None, True, np.float32(3)])
def test_a_capacity_that_is_no_integer_is_refused(capacity: Any) -> None:
    with pytest.raises(TypeError, match=r"capacity must be an int .*, got"):
        Buffer(capacity)


@pytest.mark.parametrize(
    ("lanes", "error"),
    [
        ((0,), ValueError),
        ((2, -1), ValueError),
        ((2.0,), TypeError),
        ((True,), TypeError),
        (3, TypeError),
        ([2], TypeError),
    ],
)
def test_lanes_that_are_no_tuple_of_positive_integers_are_refused(lanes: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        Buffer(3, lanes=lanes)


@pytest.mark.parametrize(("capacity", "lanes"), [(2**31 - 8, ()), (2**30, (2,)), (1, (2**16, 2**15))])
def test_more_items_than_slots_can_number_are_refused(capacity: int, lanes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=f"at most {2**31 - 9} items"):
        Buffer(capacity, lanes=lanes)


@pytest.mark.parametrize("sampler", [Uniform(), Prioritized()], ids=repr)
def test_as_many_items_as_slots_can_number_are_traced(sampler: Any) -> None:
    buffer = Buffer(2**31 - 9, sampler)
    state = jax.eval_shape(buffer.init, jax.ShapeDtypeStruct((), np.bool_))
    state, slots = jax.eval_shape(buffer.extend, state, jax.ShapeDtypeStruct((4,), np.bool_))
    state, _, draw = jax.eval_shape(lambda s, k: buffer.sample(s, k, 4), state, jax.random.key(0))
    assert draw.slots.dtype == slots.dtype == np.int32


@pytest.mark.parametrize("name", ["alpha", "eps"])
@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf"), -float("inf")])
def test_an_alpha_or_eps_that_is_negative_or_not_finite_is_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} must be from 0 to 1e.30, got {value}"):
        Prioritized(**{name: value})


@pytest.mark.parametrize("name", ["alpha", "eps"])
@pytest.mark.parametrize("value", ["0.6", None, 1j, np.ones(1)])
def test_an_alpha_or_eps_that_is_no_number_is_refused(name: str, value: Any) -> None:
    with pytest.raises(TypeError):
        Prioritized(**{name: value})


@pytest.mark.parametrize("name", ["alpha", "eps"])
def test_an_alpha_or_eps_that_cannot_be_hashed_is_refused(name: str) -> None:
    with pytest.raises(TypeError):
        Prioritized(**{name: jnp.float32(0.5)})


@pytest.mark.parametrize(("name", "value"), [("new_items", "highest"), ("dtype", "float16"), ("dtype", np.float32)])
def test_an_unknown_choice_is_refused_with_the_known_ones(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} must be '.*' or '.*', got"):
        Prioritized(**{name: value})


@pytest.mark.parametrize("sampler", [Prioritized, Uniform, None, "uniform", range(3)], ids=str)
def test_what_is_no_sampler_is_refused(sampler: Any) -> None:
    with pytest.raises(TypeError, match="sampler must be"):
        Buffer(4, sampler)


def test_what_is_no_writer_is_refused() -> None:
    with pytest.raises(TypeError, match="writer must be a Writer, got None"):
        Buffer(4, writer=None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="positional"):
        Buffer(4, Uniform(), (2,))  # type: ignore[misc]


def test_integers_of_numpy_are_integers() -> None:
    buffer = Buffer(np.int64(8), lanes=(np.int32(2),))  # type: ignore[arg-type]
    assert buffer == Buffer(8, lanes=(2,)) and type(buffer.capacity) is int and type(buffer.lanes[0]) is int
    assert Prioritized(alpha=np.float32(0.5)) == Prioritized(alpha=0.5)  # type: ignore[arg-type]
    drawn = buffer.sample(buffer.init(np.float32(0)), jax.random.key(0), np.int64(3))[2]  # type: ignore[arg-type]
    assert drawn.slots.shape == (3,)


@pytest.mark.parametrize("rule", [{"eps": 1e-50}, {"alpha": 1e39}, {"alpha": 10**400}, {"eps": 1e31}])
def test_numbers_that_single_precision_cannot_hold_are_refused(rule: Any) -> None:
    with pytest.raises(ValueError, match=next(iter(rule))):
        Prioritized(**rule)


def test_stratified_is_true_or_false() -> None:
    with pytest.raises(TypeError, match="stratified must be True or False, got 'no'"):
        Prioritized(stratified="no")  # type: ignore[arg-type]


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
    state = other.init(np.zeros(3, np.float32))
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


def test_slots_beyond_32_bits_are_out_of_range_and_do_not_wrap() -> None:
    buffer = Buffer(4, Prioritized(alpha=1, eps=0))
    state, _ = buffer.extend(buffer.init(np.float32(0)), np.zeros(4, np.float32))
    after = buffer.update(state, np.asarray([2**32 + 1, -(2**32) + 2, 3]), [7, 8, 9])
    np.testing.assert_array_equal(after.sampler.priorities[:4], [1, 1, 1, 9])
    assert buffer.update(state, [], []).sampler.highest == 1


def test_integers_that_do_not_survive_32_bits_are_refused() -> None:
    buffer = Buffer(4)
    state = buffer.init(np.zeros((), np.int64))
    with pytest.raises(ValueError, match=f"{2**40 + 5} does not fit in int32"):
        buffer.extend(state, np.asarray([1, 2**40 + 5]))
    state, _ = buffer.extend(state, np.asarray([1, 2**31 - 1]))
    np.testing.assert_array_equal(state.items[:2], [1, 2**31 - 1])


@pytest.mark.parametrize("alpha", [np.ones(4, np.float32), np.ones(1, np.float32)])
def test_an_alpha_of_several_numbers_is_refused(alpha: Any) -> None:
    rule = Prioritized()
    with pytest.raises(ValueError, match="alpha must be one number"):
        rule.reweight(rule.init(4), alpha)


@pytest.mark.parametrize("priorities", [np.ones(2, np.complex64), np.ones(2, np.bool_)])
def test_priorities_that_are_no_real_numbers_are_refused(priorities: Any) -> None:
    buffer = Buffer(4, Prioritized())
    with pytest.raises(TypeError, match="priorities must be real numbers"):
        buffer.update(buffer.init(np.float32(0)), np.zeros(2, np.int32), priorities)


def test_the_state_of_another_dtype_is_refused() -> None:
    with jax.enable_x64(True):
        state = Buffer(4, Prioritized(dtype="float64")).init(np.float32(0))
        buffer = Buffer(4, Prioritized())
        with pytest.raises(ValueError, match="was not made for"):
            buffer.extend(state, np.zeros(1, np.float32))


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint16, np.uint32, np.int64, np.uint64])
def test_slots_of_every_integer_type_are_read(dtype):
    buffer = Buffer(300)
    state, _ = buffer.extend(buffer.init({"x": np.float32(0)}), {"x": np.arange(300, dtype=np.float32)})
    assert buffer.read(state, np.array([100, 3], dtype))["x"].tolist() == [100, 3]
    narrow = dtype if np.dtype(dtype).itemsize < 8 else np.uint32
    assert buffer.read(state, jnp.asarray([100, 3], narrow))["x"].tolist() == [100, 3]


def test_a_priority_too_large_for_the_floats_is_refused_in_silence():
    buffer = Buffer(6, Prioritized())
    state, _ = buffer.extend(buffer.init({"x": np.float32(0)}), {"x": np.ones(3, np.float32)})
    state = buffer.update(state, [0], np.array([1e300]))
    assert int(state.sampler.refused) == 1 and float(state.sampler.priorities[0]) == 1
