"""Pytrees of arrays, such as the state of a buffer, as checkpoints."""

import os
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import jax
import numpy as np

from fbuf import checks
from fbuf.checkpoint.fields import CheckpointMismatch, Fields
from fbuf.checkpoint.reading import Reading, StoredArray, Verify, load
from fbuf.checkpoint.writing import Writing
from fbuf.keywords import checked

_Tree = TypeVar("_Tree")


@checked
def save_state(
    path: str | os.PathLike[str],
    state: Any,
    *,
    previous: Iterable[str | os.PathLike[str]] = (),
    extra: Mapping[str, np.ndarray] | None = None,
) -> None:
    """Save a pytree of arrays, such as a `BufferState`, in a folder.

    It is flushed to the disk when this returns. If the process is killed, the folder holds either the previous checkpoint
    or the new one, complete. Files with the same bytes as in the previous one are links to it. Do not call it inside `jit`.

    Args:
        path: a folder; made if it is missing, below one that exists. Other files in it stay.
        state: arrays of JAX or NumPy, PRNG keys, Python numbers, in any pytree. This process must be able to address all
            of it.
        previous: folders of other checkpoints; files with the same bytes are links to theirs.
        extra: named arrays beside the state. `load_state` ignores them, `load_with_extra` returns them.

    Raises:
        OSError: the disk is full, or fails; the previous checkpoint stays.
        TypeError: a leaf is no array.
    """
    leaves = [
        [jax.tree_util.keystr(where), *_saved(leaf)] for where, leaf in jax.tree_util.tree_leaves_with_path(state)
    ]
    if len({name for name, *_ in leaves}) < len(leaves):
        raise TypeError(f"two leaves of the state have the same path: {[name for name, *_ in leaves]}")
    with Writing(path, previous) as out:
        out.write({"kind": "pytree", "leaves": leaves, **({"extra": dict(extra)} if extra else {})})


@checked
def load_state(path: str | os.PathLike[str], like: _Tree, *, verify: Verify = "full") -> _Tree:
    """Load a pytree that `save_state` saved, bit for bit.

    Args:
        path: the folder.
        like: a pytree of the same structure, such as `buffer.init(item)`. Arrays are placed on the devices of its arrays.
        verify: "full" compares the checksum of every byte, "size" only the sizes of files.

    Raises:
        FileNotFoundError: there is no checkpoint.
        CheckpointCorrupt: it is damaged; the message names the file.
        CheckpointMismatch: structure, shapes or dtypes differ; the message lists all differences.
    """
    return load(path, lambda source: _like(source, like), verify)


@checked
def load_with_extra(path: str | os.PathLike[str], like: _Tree) -> tuple[_Tree, dict[str, np.ndarray]]:
    """Load a state as `load_state` does, and its `extra` arrays; {} if there are none."""

    def read(source: Reading) -> tuple[_Tree, dict[str, np.ndarray]]:
        state, described = _like(source, like), Fields(source.tree, str(source.path))
        extra = described.any("extra") if "extra" in described else {}
        fields = Fields(extra, f"{source.path}, extra")
        return state, {name: np.asarray(fields.array(name)) for name in extra}

    return load(path, read)


def _saved(leaf: Any) -> tuple[str, Any]:
    """The kind of a leaf, and the leaf as a NumPy array."""
    if isinstance(leaf, jax.Array):
        checks.in_memory(leaf)
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return f"key {jax.random.key_impl(leaf)}", np.asarray(jax.random.key_data(leaf))
        return "array", np.asarray(leaf)
    if isinstance(leaf, np.ndarray | np.generic | bool | int | float | complex):
        return "array", np.asarray(leaf)
    checks.refuse_tensor("the state", leaf)
    raise TypeError(f"a state is made of arrays and numbers, got {type(leaf).__name__}")


def _like(source: Reading, like: Any) -> Any:
    described = Fields(source.tree, str(path := source.path))
    if described.text("kind") != "pytree":
        raise CheckpointMismatch(f"{path} holds a {described.text('kind')}, not a pytree of arrays")
    saved: dict[Any, tuple[str, Any]] = {}
    for entry in described.items("leaves"):
        name, kind, value = entry if isinstance(entry, list) and len(entry) == 3 else (None, None, None)
        fields = Fields({"name": name, "kind": kind, "value": value}, f"{path}, a leaf")
        if fields.text("name") in saved:
            raise fields.wrong("name", "the path of one leaf", name)
        saved[name] = (fields.text("kind"), fields.array("value"))
    _join_parts(saved)
    wanted = [(jax.tree_util.keystr(where), leaf) for where, leaf in jax.tree_util.tree_leaves_with_path(like)]
    differences = [f"{name}: only in the checkpoint" for name in saved.keys() - {name for name, _ in wanted}]
    for name, leaf in wanted:
        if name not in saved:
            differences.append(f"{name}: not in the checkpoint")
            continue
        (kind, value), (expected, shape, dtype) = saved[name], _form(leaf)
        if kind != expected:
            differences.append(f"{name}: {kind} instead of {expected}")
        elif (tuple(value.shape), value.dtype) != (shape, dtype):
            differences.append(f"{name}: {value.dtype}{list(value.shape)} instead of {dtype}{list(shape)}")
    if differences:
        raise CheckpointMismatch(f"{path} is a state of another buffer: " + "; ".join(sorted(differences)))
    leaves = [_placed(leaf, *saved[name]) for name, leaf in wanted]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


# Arrays of uint32 that earlier versions saved in parts, by the names of the parts: their last dims, and their dtypes.
_SAVED_IN_PARTS: dict[str, dict[str, tuple[tuple[int, ...], str]]] = {
    "counters": {"cursor": ((), "int32"), "size": ((), "int32"), "written": ((2,), "uint32")},  # of a ring
    "spans": {"first": ((), "uint32"), "last": ((), "uint32"), "kind": ((), "uint8")},  # of trajectories
}


def _join_parts(saved: dict[Any, tuple[str, Any]]) -> None:
    """Put the parts of arrays that earlier versions saved one by one into one array."""
    for joined, parts in _SAVED_IN_PARTS.items():
        one = next(iter(parts))
        for name in [name for name in saved if name.endswith(f".{one}")]:
            owner, lead = name.removesuffix(one), tuple(saved[name][1].shape)  # the parts agree in their first dims
            found = {part: saved.get(owner + part) for part in parts}
            forms = {part: each and (each[0], tuple(each[1].shape), str(each[1].dtype)) for part, each in found.items()}
            if forms == {part: ("array", (*lead, *rest), dtype) for part, (rest, dtype) in parts.items()}:
                arrays = [np.asarray(saved.pop(owner + part)[1]).astype(np.uint32) for part in parts]
                columns = [each if each.ndim > len(lead) else each[..., None] for each in arrays]
                saved[owner + joined] = ("array", np.concatenate(columns, -1))


def _form(leaf: Any) -> tuple[str, tuple[int, ...], Any]:
    """The kind, shape and dtype of a saved leaf."""
    kind = "array"

    def data(key: jax.Array) -> jax.Array:
        nonlocal kind
        kind = f"key {jax.random.key_impl(key)}"
        return jax.random.key_data(key)

    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        kind, leaf = _saved(leaf)
    elif jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.eval_shape(data, leaf)
    return kind, tuple(leaf.shape), leaf.dtype


def _placed(leaf: Any, kind: str, value: np.ndarray | StoredArray) -> Any:
    """The value as a leaf of the same type as `leaf`, on the same devices."""
    array = np.asarray(value)
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        where = getattr(leaf, "sharding", None)
        if kind.startswith("key "):
            array = jax.random.wrap_key_data(array, impl=kind.removeprefix("key "))  # type: ignore[arg-type]
        return jax.device_put(array, where)
    return array if isinstance(leaf, np.ndarray) else array[()] if isinstance(leaf, np.generic) else array.item()
