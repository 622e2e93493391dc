"""Python values as saved trees, and back. Without `allow_pickle=True` at both ends nothing is pickled.

These are None, bool, int, float, complex, str, bytes, list, tuple, named tuples, `torch.Size`, dicts with keys of text or
integers, NumPy arrays and scalars, dense and nested tensors of every dtype that is not quantized, tensordicts with what
they may hold, and tensorclasses. A class is found by its name among the modules that were imported; reading imports none.

Each structure is described once. Leaves of one kind, dtype and number of dims are one column: the bytes of tensors and
arrays one behind the other, with their shapes; plain values are JSON.
"""

import contextlib
import json
import pickle
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate, chain, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fbuf.checkpoint import CheckpointCorrupt, CheckpointError, CheckpointMismatch, Fields
from fbuf.checkpoint.arrays import BY_NAME
from interop.checkpoint.layouts import check_values, device_named, dtype_named, node_of, refuse_hidden, saved_node
from interop.data.values import Node, NotKept, Value, build, flatten, is_container, leaves_of
from interop.data.varied import Leaf

_FORMAT = 3
NO_PICKLE = "save tensors and plain values instead"  # the remedy where the caller cannot have objects pickled
_PICKLE = f"pass allow_pickle=True at save and at load to have it pickled, or {NO_PICKLE}"
_SHORT = 1 << 12  # characters of a text that is written into the manifest
_MOST_DIMS = 64
_FAULTS = (RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError)


def encode(value: Any, where: str, allow_pickle: bool = False, remedy: str = _PICKLE) -> dict[str, Any]:
    """The saved tree of a value; it may hold views of its memory. O(bytes). The arguments and errors of `save_items`."""
    return save_items([value], allow_pickle, where, remedy)


def is_encoded(tree: object) -> bool:
    """Whether it is a result of `encode`, damaged or not, and not a value that would be encoded."""
    return isinstance(tree, dict) and len(tree.keys() & {"format", "order", "forms", "columns"}) > 2


def decode(tree: Any, allow_pickle: bool = False, where: str = "value", device: torch.device | None = None) -> Any:
    """The value of a saved tree. The arguments and errors of `load_items`."""
    found = load_items(tree, allow_pickle, where, device)
    if len(found) != 1:
        raise CheckpointCorrupt(f"{where}: one value was expected, found {len(found)}")
    return found[0]


def save_items(
    items: Sequence[Any], allow_pickle: bool = False, where: str = "item {}", remedy: str = _PICKLE
) -> dict[str, Any]:
    """The saved tree of a list of values. An object that is there twice is saved as two.

    Args:
        items: any number, alike or not.
        allow_pickle: pickle objects of other kinds.
        where: what an item is, for messages; {} stands for its number.
        remedy: what to do about an object of another kind, for messages.

    Raises:
        TypeError: an item holds an object of another kind; the message says which and where.
        ValueError: an item contains itself, or is nested more than 64 deep.
    """
    other = _pickling if allow_pickle else partial(_refusing, remedy)
    numbers: dict[Node, int] = {}
    columns: dict[Value, list[Any]] = {}
    targets: list[list[list[Any]]] = []  # the columns of the leaves of each structure
    order = np.empty(len(items), np.int64)
    for place, item in enumerate(items):
        try:
            node, leaves = flatten(item, other)
            number = numbers.get(node)
            if number is None:
                refuse_hidden(node)
                number = numbers[node] = len(numbers)
                targets.append([columns.setdefault(leaf, []) for leaf in leaves_of(node)])
        except NotKept as error:
            raise error.named(where.format(place)) from error.__cause__
        order[place] = number
        for column, leaf in zip(targets[number], leaves, strict=True):
            column.append(leaf)
    places = {leaf: place for place, leaf in enumerate(columns)}
    return {
        "format": _FORMAT,
        "order": order.astype(np.min_scalar_type(len(numbers))),
        "forms": [saved_node(node, map(places.__getitem__, leaves_of(node))) for node in numbers],
        "columns": [{**saved_leaf(leaf), **_column(leaf, values)} for leaf, values in columns.items()],
    }


def saved_leaf(leaf: Value) -> dict[str, Any]:
    """A leaf as a saved tree."""
    described: dict[str, Any] = {"kind": leaf.kind}
    if leaf.dtype:
        described |= {"dtype": leaf.dtype, "dims": leaf.dims}
    return described if leaf.device is None else {**described, "device": leaf.device}


def _column(leaf: Value, values: list[Any]) -> dict[str, Any]:
    """These values as a saved tree. It may hold a view of a tensor that is the only one."""
    if leaf.kind == "plain":
        text = json.dumps(values, ensure_ascii=False, separators=(",", ":"))
        short = len(text) <= _SHORT and text.isascii()
        return {"json": text if short else np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8)}
    if leaf.kind == "tensor":
        raw = _bytes_of(values)
    else:
        as_bytes = leaf.kind in ("bytes", "pickled")
        values = [np.frombuffer(each, np.uint8) if as_bytes else np.asarray(each) for each in values]
        raw = np.concatenate([each.reshape(-1) for each in values]).view(np.uint8)
    lengths = np.fromiter(chain.from_iterable(each.shape for each in values), np.int64)  # NumPy is slow with torch.Size
    return {"shapes": lengths.reshape(len(values), values[0].ndim), "raw": raw}


def _bytes_of(values: list[Tensor]) -> np.ndarray:
    """The bytes of tensors of one dtype, one behind the other; a view of a dense one that is alone."""
    with torch.no_grad():
        flat = [each.reshape(-1) for each in values]
        try:
            joined = flat[0] if len(flat) == 1 else torch.cat(flat)
        except RuntimeError:  # torch does not join some dtypes, such as float8
            joined = torch.cat([each.contiguous().view(torch.uint8) for each in flat])
        dense = joined.detach().resolve_conj().resolve_neg().cpu().contiguous()
        found: np.ndarray = dense.view(torch.uint8).numpy()
    return found


def _refusing(remedy: str, value: Any, why: str) -> tuple[Value, Any]:
    name = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    raise NotKept(TypeError, f"an object of type {name} cannot be saved{why}; {remedy}")


def _pickling(value: Any, why: str) -> tuple[Value, Any]:
    try:
        return Value("pickled"), pickle.dumps(value, protocol=5)
    except Exception as error:
        message = f"an object of type {type(value).__name__} cannot be pickled: {error}"
        raise NotKept(TypeError, message) from error


# ------------------------------------------------------------------ reading


def load_items(
    tree: Any, allow_pickle: bool = False, where: str = "items", device: torch.device | None = None
) -> list[Any]:
    """The values of a saved tree, in memory of their own.

    Args:
        tree: what `save_items` gave, or what somebody else wrote.
        allow_pickle: read pickled objects.
        where: what they are, for messages.
        device: where tensors go; None for where they were.

    Raises:
        CheckpointCorrupt: it is no such tree.
        CheckpointMismatch: a class it names is not imported, a device is not here, or pickles are not allowed.
    """
    with reading_errors(where):
        fields = Fields(tree, where)
        if fields.any("format") != _FORMAT:
            raise fields.wrong("format", f"{_FORMAT}, the one that is known here", fields.any("format"))
        columns = [Fields(each, where) for each in fields.items("columns")]
        leaves = [leaf_of(each) for each in columns]
        if allow_pickle is not True and any(leaf.kind == "pickled" for leaf in leaves):
            raise CheckpointMismatch(
                f"{where}: holds objects that were saved by pickle, which runs code when it is read: pass "
                "allow_pickle=True at load if you trust the writer of the file"
            )
        values = [_values(leaf, column, device) for leaf, column in zip(leaves, columns, strict=True)]
        forms: list[tuple[Node, list[int]]] = []
        for each in fields.items("forms"):
            chosen: list[int] = []

            def leaf(saved: Any, where: str, chosen: list[int] = chosen) -> Leaf | None:
                if type(saved) is not int or saved < 0:
                    return None
                chosen.append(saved)
                return leaves[saved]

            node = node_of(each, leaf, where, is_container)
            check_values(node, where)
            forms.append((node, chosen))
        order = np.asarray(fields.array("order", None, (None,)))
        if order.dtype.kind != "u" or (order.size and order.max() >= len(forms)):
            raise fields.wrong("order", f"numbers of {len(forms)} structures", order)
        uses = [0] * len(values)
        for (_, chosen), count in zip(forms, np.bincount(order, minlength=len(forms)).tolist(), strict=True):
            for place in chosen:
                uses[place] += count
        if uses != list(map(len, values)):
            raise CheckpointCorrupt(f"{where}: the items have {uses} values, the columns {list(map(len, values))}")
        taken = list(map(iter, values))
        made = [(node, [taken[place] for place in chosen]) for node, chosen in forms]
        return [build(node, map(next, chosen), device) for node, chosen in map(made.__getitem__, order.tolist())]


def leaf_of(fields: Fields) -> Value:
    """The leaf that a saved tree describes. CheckpointCorrupt where it describes none."""
    kind, where = fields.text("kind"), fields.where
    if kind in ("complex", "bytes", "plain", "pickled"):
        return Value(kind)
    if kind not in ("tensor", "array", "scalar"):
        raise CheckpointCorrupt(f"{where}: {kind[:40]!r} is no kind of value")
    dtype, dims = fields.text("dtype"), fields.whole("dims", most=0 if kind == "scalar" else _MOST_DIMS)
    if kind == "tensor":
        dtype_named(dtype, where)
    elif dtype not in BY_NAME:
        raise CheckpointCorrupt(f"{where}: {dtype[:40]!r} is no dtype")
    device = device_named(fields.any("device"), where) if "device" in fields else None
    return Value(kind, dtype, dims, None if device is None else str(device))


def _values(leaf: Value, column: Fields, device: torch.device | None) -> list[Any]:
    """The values of a column, in memory of their own. CheckpointCorrupt for others."""
    if leaf.kind == "plain":
        text = column.any("json")
        if not isinstance(text, str):
            text = np.asarray(column.array("json", np.uint8, (None,))).tobytes().decode("utf-8", "surrogatepass")
        return list(json.loads(text))
    if leaf.kind == "tensor":
        return _tensors(leaf, column, device or device_named(leaf.device, column.where))
    dtype = BY_NAME[leaf.dtype or ("complex128" if leaf.kind == "complex" else "uint8")]
    dims = 1 if leaf.kind in ("bytes", "pickled") else leaf.dims
    raw, shapes, sizes = _parts(column, dims, dtype.itemsize, dtype == np.bool_)
    ends = pairwise(accumulate(sizes, initial=0))
    arrays = [raw.view(dtype)[slice(*each)].reshape(shape).copy() for each, shape in zip(ends, shapes, strict=True)]
    if leaf.kind == "array":
        return arrays
    if leaf.kind == "scalar":
        return [each[()] for each in arrays]
    if leaf.kind == "complex":
        return list(map(complex, arrays))
    found = [each.tobytes() for each in arrays]
    return found if leaf.kind == "bytes" else [_unpickled(each, column.where) for each in found]


def _parts(column: Fields, dims: int, size: int, flags: bool) -> tuple[np.ndarray, list[list[int]], list[int]]:
    """The bytes of a column, and shape and number of entries of each value, with `dims` dims and entries of `size` bytes."""
    shapes = np.asarray(column.array("shapes", np.int64, (None, dims)))
    raw = np.asarray(column.array("raw", np.uint8, (None,)))
    fits = not shapes.size or (shapes.min() >= 0 and shapes.max() < 2**40)
    total = np.prod(shapes.astype(np.float64), 1).sum() if fits and dims else float(len(shapes))
    if not fits or total * size != raw.size:
        raise column.wrong("shapes", f"shapes of {raw.size} bytes", shapes)
    if flags and raw.size and raw.max() > 1:
        raise column.wrong("raw", "flags of one byte", raw)
    return raw, shapes.tolist(), np.prod(shapes, 1).tolist()


def _tensors(leaf: Value, column: Fields, device: torch.device | None) -> list[Tensor]:
    dtype, where = dtype_named(leaf.dtype, column.where), column.where
    raw, shapes, sizes = _parts(column, leaf.dims, dtype.itemsize, dtype == torch.bool)
    kept = torch.uint8 if dtype.itemsize == 1 else dtype  # torch copies no int1 to int7
    joined = torch.empty(raw.size // dtype.itemsize, dtype=kept, device="cpu")
    joined.view(torch.uint8).numpy()[:] = raw
    parts = joined.split(sizes) if leaf.dims else joined.unbind()
    if leaf.dims > 1:
        parts = [each.view(shape) for each, shape in zip(parts, shapes, strict=True)]
    found = [each.clone() for each in parts] if kept == dtype else [each.clone().view(dtype) for each in parts]
    if device is None or device.type == "cpu":
        return found
    try:
        return [each.to(device) for each in found]
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise CheckpointMismatch(
            f"{where}: tensors were saved from the device {device}, which is not here: load into a storage with "
            "device='cpu'"
        ) from error


def _unpickled(content: bytes, where: str) -> Any:
    """The object of a pickle, which runs what it says: `load_items` has checked that the caller allows it."""
    try:
        return pickle.loads(content)
    except Exception as error:
        raise CheckpointMismatch(f"{where}: an object that was saved by pickle cannot be read: {error!r}") from error


@contextlib.contextmanager
def reading_errors(where: str) -> Iterator[None]:
    """Turns what goes wrong with what is read into CheckpointCorrupt."""
    try:
        yield
    except CheckpointError:
        raise
    except StopIteration:  # not the cause of the error: contextlib would then raise the StopIteration itself
        raise CheckpointCorrupt(f"{where}: not what was saved (a column ends too soon)") from None
    except _FAULTS as error:
        raise CheckpointCorrupt(f"{where}: not what was saved ({error})") from error
