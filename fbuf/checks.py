"""Errors about structure, shape and dtype, raised while tracing: before anything runs, at no cost later."""

import functools
import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import PyTree

from fbuf.keywords import nearest


def as_int(name: str, value: Any, least: int = 1) -> int:
    """A Python int of at least `least` for a whole number: an int of any library, a float such as 1e5, a 0-d array.

    TypeError for anything else: other floats, infinite ones and NaN, bools, and values that are traced. ValueError below
    `least`.
    """
    number = value if type(value) is int else _whole_number(value)
    if number is None:
        raise TypeError(
            f"{name} must be an int or a whole number such as 1e5 that is known before the program runs, got {value!r}"
        )
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {value!r}")
    return number


def batch_size(given: object, default: int | None) -> int:
    """The batch size of a call, or of the buffer. TypeError if neither has one."""
    if given is None and default is None:
        raise TypeError(
            "sample() needs a batch size: sample(state, key, 32), or Buffer(..., batch_size=32) for all its draws"
        )
    return default if given is None else as_int("batch_size", given)  # type: ignore[return-value]  # one of them is there


def _whole_number(value: Any) -> int | None:
    """The whole number that a value is, or None."""
    if isinstance(value, bool | np.bool_ | jax.core.Tracer):
        return None
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):  # arrays, and tensors of other libraries
        try:
            value = value.item()
        except (RuntimeError, TypeError):  # it has no value, such as a tensor on the device "meta"
            return None
        if isinstance(value, bool):
            return None
    if isinstance(value, float | np.floating):
        return int(value) if float(value).is_integer() else None
    try:
        return operator.index(value)
    except TypeError:
        return None


def rule(name: str, given: Any, kind: type) -> None:
    """TypeError for a class instead of an instance, or an object without the methods and attributes of `kind`."""
    if isinstance(given, type):
        raise TypeError(f"{name} must be an instance, got the class: write {given.__name__}()")
    needed = [each for each in {**vars(kind), **kind.__annotations__} if not each.startswith("_")]
    lacks = sorted(each for each in needed if not hasattr(given, each))
    if lacks or not isinstance(given, kind):
        raise TypeError(f"{name} must be a {kind.__name__}, got {given!r}: it does not define {', '.join(lacks)}")


def refuse_tensor(name: str, value: object) -> None:
    """TypeError for a tensor or a TensorDict of torch."""
    kind = type(value)
    if kind.__module__.partition(".")[0] in ("torch", "tensordict"):
        package = kind.__module__.partition(".")[0]
        raise TypeError(
            f"{name}: fbuf takes arrays of JAX and NumPy, got a {package} {kind.__name__}: convert it by "
            "interop.to_jax(data), which also takes a TensorDict, or by tensor.numpy()"
        )


def random_key(given: object) -> None:
    """TypeError for what cannot be a random key: a seed, a generator, None."""
    if not hasattr(given, "dtype") or type(given).__module__ == "torch":
        raise TypeError(f"key must be a random key, such as jax.random.key(0), got {given!r}")


def number(name: str, value: object) -> None:
    """TypeError for what is no real number: an array of one value or a plain number, traced or not."""
    refuse_tensor(name, value)
    if type(value) is float or (isinstance(value, int | float | np.number) and not isinstance(value, bool)):
        return
    if isinstance(value, jax.Array | np.ndarray) and jnp.issubdtype(value.dtype, jnp.number):
        return
    raise TypeError(f"{name} must be a number, or an array of one, got {value!r}")


def on_host(name: str, state: object) -> None:
    """TypeError for a state that is traced, RuntimeError for one that was donated, before a function that reads values."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if isinstance(leaf, jax.core.Tracer):
            raise TypeError(
                f"{name}() reads values, which are not known inside jax.jit: state{jax.tree_util.keystr(path)} is traced. "
                "Call it outside of the jitted function, with the state that this returns"
            )
        in_memory(leaf)
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            raise TypeError(
                f"{name}() reads values, but state{jax.tree_util.keystr(path)} is on devices of other processes too: call "
                "it for the part of each process"
            )


def in_memory(leaf: object) -> None:
    """RuntimeError for an array that was donated. 100 ns."""
    if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer) and leaf.is_deleted():
        raise RuntimeError(
            "this state was donated: a function that was jitted with donate_argnums wrote into its memory, so its arrays "
            "are deleted. Use the state that the function returned (state, ... = step(state, ...)), or, if you need the "
            "earlier state, pass a copy: jax.tree.map(jnp.copy, state)"
        )


def belongs(items: Any, sampler_state: Any, rows: tuple[int, ...], sampler: Any, *made_for: int) -> None:
    """ValueError for a state whose shapes are not those of a buffer of `rows` (capacity and lanes) and this sampler.

    `made_for` are the arguments of the sampler's `init`.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(items):
        if leaf.shape[: len(rows)] != rows:
            raise ValueError(
                f"{_name(path)}: this buffer stores {_shape((*rows, '...'))}, the state has {_shape(leaf.shape)}: "
                "another buffer made it"
            )
    structure, kinds = _expected(sampler, made_for, jax.dtypes.canonicalize_dtype("float64"))
    found = [(jnp.shape(leaf), jnp.result_type(leaf)) for leaf in jax.tree.leaves(sampler_state)]
    if jax.tree.structure(sampler_state) != structure or found != kinds:
        raise ValueError(f"the state was not made for sampler={sampler!r} and {math.prod(rows)} items")


@functools.lru_cache(maxsize=64)
def _expected(sampler: Any, made_for: tuple[int, ...], widest: Any) -> tuple[Any, list[tuple[tuple[int, ...], Any]]]:
    """Structure, shapes and dtypes of the state of a sampler, which depend on the 64-bit setting."""
    state = jax.eval_shape(lambda: sampler.init(*made_for))
    return jax.tree.structure(state), [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(state)]


def slots(given: Any) -> Array:
    """Slots as int32; larger values become -1, the slot of no item."""
    refuse_tensor("slots", given)
    if not isinstance(given, jax.Array):
        given = np.asarray(given)
        given = given.astype(np.int32) if given.size == 0 else given
    if not jnp.issubdtype(given.dtype, jnp.integer):
        raise TypeError(f"slots must be integers, got {given.dtype}")
    if given.dtype == np.int32:
        return jnp.asarray(given)
    where = jnp.where if isinstance(given, jax.Array) else np.where
    fits = given <= np.iinfo(np.int32).max if np.iinfo(given.dtype).max > np.iinfo(np.int32).max else True
    fits = fits & (given >= np.iinfo(np.int32).min) if given.dtype == np.int64 else fits
    return jnp.asarray(given.astype(np.int32) if fits is True else where(fits, given.astype(np.int32), -1))


def priorities(given: Any, shape: tuple[int, ...]) -> Array:
    """Priorities as an array of real numbers of this shape, or of one for all. TypeError or ValueError otherwise."""
    refuse_tensor("priorities", given)
    if not isinstance(given, jax.Array):
        with np.errstate(over="ignore"):  # too large for JAX's floats: infinite, and refused later
            try:
                given = jnp.asarray(given)
            except (TypeError, ValueError) as error:
                raise TypeError(f"priorities must be real numbers, got {given!r}") from error
    if not jnp.issubdtype(given.dtype, jnp.floating) and not jnp.issubdtype(given.dtype, jnp.integer):
        raise TypeError(f"priorities must be real numbers, got {given.dtype}")
    if given.shape not in ((), shape):
        raise ValueError(f"priorities need the shape of slots, {shape}, or (), got {given.shape}")
    return given


def mask(given: object) -> Array:
    """A mask of rows as an array. TypeError for other than bool, ValueError for more than two dims or none."""
    refuse_tensor("mask", given)
    found: Array | np.ndarray = given if isinstance(given, jax.Array) else np.asarray(given)
    if found.dtype != np.bool_:
        raise TypeError(f"mask must be bool, True for the rows to write, got {found.dtype}: for example weights > 0")
    if not found.ndim:
        raise ValueError("mask needs shape [n], one value for each row of the batch, got a single value")
    return jnp.asarray(found)


def mask_fits(shape: tuple[int, ...], rows: int, lanes: tuple[int, ...]) -> None:
    """ValueError for a mask that has not one value for each row."""
    if len(shape) > 1 and lanes:
        raise ValueError(
            f"mask needs shape [{rows}] with lanes={lanes}, one value for each row: a row holds an item of each lane. It "
            f"has {_shape(shape)}. For lanes that end at different times use a buffer without lanes: it takes leaves "
            "[lanes, time, ...] and a mask [lanes, time]"
        )
    if shape != (rows,) and not (len(shape) == 2 and not lanes):
        raise ValueError(f"mask needs shape [{rows}], one value for each row of the batch, got {_shape(shape)}")


def runs_as_rows(batch: PyTree, shape: tuple[int, ...]) -> PyTree:
    """Leaves [runs, time, ...] as [runs * time, ...]. ValueError, naming the leaf, for leaves of another shape."""

    def rows(path: tuple[object, ...], leaf: Array | np.ndarray) -> Array | np.ndarray:
        refuse_tensor(_name(path), leaf)
        if jnp.shape(leaf)[:2] != shape:
            raise ValueError(
                f"{_name(path)}: with a mask {_shape(shape)} the batch needs leaves {_shape((*shape, '...'))}, got "
                f"{_shape(jnp.shape(leaf))}"
            )
        return leaf.reshape(shape[0] * shape[1], *leaf.shape[2:])

    return jax.tree_util.tree_map_with_path(rows, batch)


def item_spec(example: Any) -> Any:
    """Shape and dtype of each leaf of one item, as JAX stores them under the current 64-bit setting."""

    def spec(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
        if isinstance(leaf, jax.ShapeDtypeStruct | jax.Array):
            _refuse_narrowing(_name(path), leaf.dtype)
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        refuse_tensor(_name(path), leaf)
        try:
            return jax.eval_shape(jnp.asarray, leaf)
        except TypeError as error:
            raise TypeError(f"{_name(path)}: an item holds arrays or jax.ShapeDtypeStruct, got {type(leaf)}") from error

    specs = jax.tree_util.tree_map_with_path(spec, example)
    if not jax.tree.leaves(specs):
        raise ValueError("an item needs at least one array, got an empty structure")
    return specs


def batch_length(items: Any, batch: Any, lanes: tuple[int, ...], at: int) -> int:
    """The rows of a batch, in dim `at`. TypeError or ValueError, naming the leaf, if it does not fit the `items`."""
    stored: Any = jax.tree.structure(items)
    given: Any = jax.tree.structure(batch)
    if stored != given:
        refuse_tensor("the batch", batch)
        raise ValueError(_other_structure(items, batch))
    length = None
    for (path, kept), new in zip(jax.tree_util.tree_leaves_with_path(items), jax.tree.leaves(batch), strict=True):
        name = _name(path)
        if not isinstance(new, jax.Array | np.ndarray):
            refuse_tensor(name, new)
        shape = jnp.shape(new)
        wanted = (*kept.shape[1 : at + 1], "n", *kept.shape[at + 1 :])
        if len(shape) != kept.ndim or shape[:at] + shape[at + 1 :] != kept.shape[1:]:
            order = f"lanes {lanes}, then n rows" if at else f"n rows, then lanes {lanes}" if lanes else "n rows"
            raise ValueError(
                f"{name}: the batch needs shape {_shape(wanted)} ({order}, then one item), got {_shape(shape)}"
            )
        if length is not None and shape[at] != length:
            raise ValueError(f"{name}: this leaf has {shape[at]} rows, the leaves before it have {length}")
        length = shape[at]
        if isinstance(new, jax.Array):
            _refuse_narrowing(name, new.dtype)
        elif isinstance(new, np.ndarray):
            _refuse_overflow(name, new)
        dtype = jax.dtypes.canonicalize_dtype(jnp.result_type(new))
        if dtype != kept.dtype:
            raise TypeError(f"{name}: items are {kept.dtype}, the batch is {dtype}: cast it first")
    assert length is not None
    return length


def _other_structure(items: object, batch: object) -> str:
    """How the leaves of a batch differ from those of the items: which are missing, and which nobody knows."""
    if isinstance(batch, list) and not isinstance(items, list | tuple):
        return (
            f"the batch is a list of {len(batch)} items: stack them, so that each leaf has a row for each of them: "
            "jax.tree.map(lambda *leaves: np.stack(leaves), *batch)"
        )
    stored, given = ([_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)] for tree in (items, batch))
    missing, unknown = [name for name in stored if name not in given], [name for name in given if name not in stored]
    if not missing and not unknown:
        return f"items have the structure {jax.tree.structure(items)}, the batch has {jax.tree.structure(batch)}"
    parts = []
    if unknown:
        near = {name: nearest(name, missing) for name in unknown}
        named = [f"{name} (did you mean {like}?)" if like else name for name, like in near.items()]
        parts.append(f"the batch has {', '.join(named)}, which items do not have")
    if missing:
        parts.append(f"{'it' if unknown else 'the batch'} lacks {', '.join(missing)}")
    return f"{', and '.join(parts)}. A batch has the leaves of an item: {', '.join(stored)}"


def fits(batch: Any) -> Any:
    """The unchanged batch. ValueError for NumPy's 64-bit integers that do not fit into 32 bits, TypeError for tensors."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        if isinstance(leaf, np.ndarray):
            _refuse_overflow(_name(path), leaf)
        elif not isinstance(leaf, jax.Array):
            refuse_tensor(_name(path), leaf)
    return batch


def _refuse_narrowing(name: str, dtype: Any) -> None:
    """TypeError for a 64-bit type if JAX would convert it to 32 bits. (NumPy arrays are converted, as JAX does.)"""
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        raise TypeError(f"{name}: items cannot hold {dtype}; store jax.random.key_data(key)")
    held = jax.dtypes.canonicalize_dtype(dtype)
    if held != dtype:
        raise TypeError(f"{name}: {dtype} needs 64-bit types on (jax_enable_x64), or cast to {held}")


def _refuse_overflow(name: str, values: np.ndarray) -> None:
    """ValueError for NumPy's 64-bit integers that do not fit into the 32 bits that JAX converts them to."""
    held = jax.dtypes.canonicalize_dtype(values.dtype)
    if values.dtype.kind in "iu" and held != values.dtype and values.size:
        low, high, limit = int(values.min()), int(values.max()), np.iinfo(held)
        if low < limit.min or high > limit.max:
            wrong = high if high > limit.max else low
            raise ValueError(f"{name}: {wrong} does not fit in {held}: turn on 64-bit types (jax_enable_x64)")


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path) or "item"


def _shape(shape: tuple[Any, ...]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"
