"""The structure of a Python value apart from its tensors, numbers and texts, so that many that are alike share one.

A structure is a nested tuple: the kind of a value, and what that kind needs; equal ones are equal tuples.
"""

import collections
import dataclasses
import enum
import functools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from tensordict import (
    LazyStackedTensorDict,
    MemoryMappedTensor,
    NonTensorStack,
    TensorDict,
    is_tensor_collection,
    is_tensorclass,
)
from torch import Tensor

from interop.checkpoint import pickled
from interop.checkpoint.layouts import class_name, class_named
from interop.checkpoint.leaves import Leaf, array_name, is_written
from interop.checkpoint.torch_names import NAMES

MOST_DEEP = 64
Structure = tuple[Any, ...]
LEAVES = {"tensor", "array", "scalar", "int", "float", "bool", "complex", "text", "bytes", "pickled"}
_TENSORS = (Tensor, MemoryMappedTensor, torch.nn.Parameter, torch.nn.Buffer)
_NO_DATACLASS = (enum.Enum, BaseException, type, torch.nn.Module)


class UnsavedError(Exception):
    """A value cannot be saved. `path` leads to it from the outermost value."""

    def __init__(self, error: type[Exception], message: str) -> None:
        super().__init__(message)
        self.error, self.message, self.path = error, message, list[str]()

    def named(self, where: str) -> Exception:
        """The error for the caller."""
        return self.error(f"{', '.join([where, *self.path])}: {self.message}")


class Taker:
    """Takes values apart.

    Args:
        allow_pickle: what is of no other kind is pickled, and is an `UnsavedError` otherwise.

    `leaves` has the values without structure of what was taken apart so far, in order.
    """

    def __init__(self, allow_pickle: bool = False) -> None:
        self.leaves: list[Any] = []
        self._allow_pickle = allow_pickle
        self._open: set[int] = set()  # what is being taken apart
        self._takers: dict[type, Callable[[Taker, Any, int], Structure]] = dict(_TAKERS)

    def structure(self, value: Any, depth: int = 0) -> Structure:
        """The structure of a value, whose leaves are appended to `leaves`."""
        take = self._takers.get(type(value))
        if take is None:
            take = self._takers[type(value)] = _taker(type(value))
        if depth > MOST_DEEP:
            raise UnsavedError(ValueError, f"what is to be saved is nested more than {MOST_DEEP} deep")
        return take(self, value, depth)

    def below(self, owner: Any, named: Iterable[tuple[str, Any]], depth: int) -> tuple[Structure, ...]:
        """The structures of what is in a container, each with a name for messages."""
        if id(owner) in self._open:
            raise UnsavedError(ValueError, f"a {type(owner).__name__} that contains itself cannot be saved")
        self._open.add(id(owner))
        found: list[Structure] = []
        name = ""
        try:
            for each in named:
                name = each[0]
                found.append(self.structure(each[1], depth + 1))
        except UnsavedError as error:
            error.path.insert(0, name)
            raise
        finally:
            self._open.discard(id(owner))
        return tuple(found)

    def other(self, value: Any, why: str = "") -> Structure:
        """An object of a kind that is not known."""
        name = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
        if not self._allow_pickle:
            hint = "pass allow_pickle=True at save and at load to have it pickled, or save tensors and plain values instead"
            raise UnsavedError(TypeError, f"an object of type {name} cannot be saved{why}; {hint}")
        try:
            self.leaves.append(pickled.to_bytes(value))
        except TypeError as error:
            raise UnsavedError(TypeError, str(error)) from error
        return ("pickled",)


def described(structure: Structure, leaves: list[Leaf]) -> dict[str, Any]:
    """A structure as a saved tree; its leaves are appended in order."""
    kind = structure[0]
    if kind in LEAVES:
        leaf = leaf_of(structure)
        leaves.append(leaf)
        return leaf.described()
    tree: dict[str, Any] = {"kind": kind}
    for name, part in zip(FIELDS[kind], structure[1:], strict=True):
        if name == "items":
            part = [described(each, leaves) for each in part]
        elif name == "content":
            part = described(part, leaves)
        elif isinstance(part, tuple):
            part = list(part)
            if name == "keys" and not all(map(is_written, part)):
                raise TypeError(f"the keys {part} cannot be written: there is half of a pair of surrogates in one")
        tree[name] = str(part) if isinstance(part, torch.device) else part
    return tree


FIELDS: dict[str, tuple[str, ...]] = {  # what follows the kind in a structure
    "none": (),
    "dtype": ("name",),
    "device": ("name",),
    "class": ("class",),
    "list": ("items",),
    "tuple": ("items",),
    "size": ("items",),
    "record": ("class", "fields", "items"),
    "dict": ("keys", "items"),
    "ordered": ("keys", "items"),
    "dict of any": ("items",),  # keys and values in turn
    "ordered of any": ("items",),
    "tensordict": ("keys", "batch", "device", "names", "items"),
    "lazy": ("dim", "name", "items"),
    "nontensors": ("dim", "name", "items"),
    "tensorclass": ("class", "keys", "content", "items"),
    "dataclass": ("class", "fields", "items"),
}


@functools.lru_cache(1024)
def leaf_of(structure: Structure) -> Leaf:
    """The description of a structure that is a leaf."""
    if structure[0] == "tensor":
        return Leaf("tensor", NAMES[structure[1]], structure[2], structure[3])
    return Leaf(*structure)


# ------------------------------------------------------------------ classes of the user's, by name


def is_record(kind: type) -> bool:
    """Whether a class is one of named tuples."""
    return issubclass(kind, tuple) and isinstance(getattr(kind, "_fields", None), tuple)


def is_plain_dataclass(kind: type) -> bool:
    """Whether a class is a dataclass whose objects consist of its fields."""
    return (
        dataclasses.is_dataclass(kind)
        and not is_tensorclass(kind)
        and not issubclass(kind, _NO_DATACLASS)
        and kind.__new__ is object.__new__
    )


def field_names(kind: type) -> tuple[str, ...]:
    """The fields of a dataclass."""
    return tuple(field.name for field in dataclasses.fields(kind))


def is_described(kind: type) -> bool:
    """Whether a class may be named in a checkpoint."""
    return is_tensorclass(kind) or is_plain_dataclass(kind) or is_record(kind)


def _can_be_found(kind: type) -> bool:
    try:
        return class_named(class_name(kind), is_described, "") is kind
    except RuntimeError:
        return False


# ------------------------------------------------------------------ taking apart


def _leaf(kind: str) -> Callable[[Taker, Any, int], Structure]:
    structure = (kind,)

    def take(taker: Taker, value: Any, depth: int) -> Structure:
        taker.leaves.append(value)
        return structure

    return take


def _constant(kind: str, name: Callable[[Any], tuple[str, ...]]) -> Callable[[Taker, Any, int], Structure]:
    return lambda taker, value, depth: (kind, *name(value))


def _tensor(taker: Taker, value: Tensor, depth: int) -> Structure:
    if value.layout is not torch.strided or value.is_nested or value.is_meta or value.is_quantized:
        what = "without memory" if value.is_meta else f"of layout {value.layout} and dtype {value.dtype}"
        raise UnsavedError(TypeError, f"a tensor {what} cannot be saved, only dense ones")
    taker.leaves.append(value)
    return ("tensor", value.dtype, value.ndim, None if value.is_cpu else str(value.device))


def _plain_tensor(taker: Taker, value: Tensor, depth: int) -> Structure:
    return _tensor(taker, value.detach().as_subclass(Tensor), depth)


def _array(kind: str) -> Callable[[Taker, Any, int], Structure]:
    def take(taker: Taker, value: Any, depth: int) -> Structure:
        array = np.asarray(value)
        if not array.dtype.isnative:
            array = array.astype(array.dtype.newbyteorder("="))
        try:
            name = array_name(array.dtype)
        except TypeError:
            return taker.other(value, f" with dtype {array.dtype}")
        taker.leaves.append(array)
        return (kind, name, array.ndim)

    return take


def _sequence(kind: str) -> Callable[[Taker, Any, int], Structure]:
    def take(taker: Taker, value: Any, depth: int) -> Structure:
        return (kind, taker.below(value, ((f"element {n}", each) for n, each in enumerate(value)), depth))

    return take


def _dict(kind: str) -> Callable[[Taker, Any, int], Structure]:
    def take(taker: Taker, value: Any, depth: int) -> Structure:
        if all(type(key) is str and is_written(key) for key in value):
            return (kind, tuple(value), taker.below(value, ((f"key {k!r}", each) for k, each in value.items()), depth))
        both = ((f"{what} {str(key)[:40]!r}", each) for key, of in value.items() for what, each in _pair(key, of))
        return (f"{kind} of any", taker.below(value, both, depth))

    return take


def _pair(key: Any, value: Any) -> tuple[tuple[str, Any], tuple[str, Any]]:
    return ("the key", key), ("key", value)


def _tensordict(taker: Taker, value: Any, depth: int) -> Structure:
    entries = value._tensordict if type(value) is TensorDict else dict(value.items())
    if set(map(type, entries.values())) == {Tensor}:
        items = tuple([_tensor(taker, each, depth) for each in entries.values()])
    else:
        items = taker.below(value, ((f"key {key!r}", each) for key, each in entries.items()), depth)
    names = tuple(value.names)
    named = names if any(names) else None
    return ("tensordict", tuple(entries), tuple(value.batch_size), value.device, named, items)


def _lazy(kind: str) -> Callable[[Taker, Any, int], Structure]:
    def take(taker: Taker, value: Any, depth: int) -> Structure:
        if not value.tensordicts or value.hook_out is not None:
            return taker.other(value, " where it is empty or inside of vmap")
        items = taker.below(value, ((f"element {n}", each) for n, each in enumerate(value.tensordicts)), depth)
        return (kind, value.stack_dim, getattr(value, "_td_dim_name", None), items)

    return take


def _tensorclass(taker: Taker, value: Any, depth: int) -> Structure:
    attributes = value._non_tensordict
    if not set(attributes) | set(value._tensordict.keys()) <= set(type(value).__expected_keys__):
        return taker.other(value, " with entries that are no fields of it")
    content = taker.below(value, [("entries", value._tensordict)], depth)[0]
    items = taker.below(value, ((f"field {key!r}", each) for key, each in attributes.items()), depth)
    return ("tensorclass", class_name(type(value)), tuple(attributes), content, items)


def _dataclass(taker: Taker, value: Any, depth: int) -> Structure:
    kind, names = type(value), field_names(type(value))
    more = set(getattr(value, "__dict__", ())) - set(names)
    more = {name for name in more if not isinstance(getattr(kind, name, None), functools.cached_property)}
    missing = [name for name in names if not hasattr(value, name)]
    if more or missing:
        return taker.other(
            value, f" with attributes that are no fields ({sorted(more)}), or without fields ({missing})"
        )
    items = taker.below(value, ((f"field {name!r}", getattr(value, name)) for name in names), depth)
    return ("dataclass", class_name(kind), names, items)


def _record(taker: Taker, value: Any, depth: int) -> Structure:
    fields = tuple(type(value)._fields)
    if getattr(value, "__dict__", None):
        return taker.other(value, " with attributes that are no fields")
    items = taker.below(value, zip((f"field {name!r}" for name in fields), value, strict=True), depth)
    return ("record", class_name(type(value)), fields, items)


def _class(taker: Taker, value: type, depth: int) -> Structure:
    if is_described(value) and _can_be_found(value):
        return ("class", class_name(value))
    return taker.other(value, f" ({value.__qualname__})")


def _taker(kind: type) -> Callable[[Taker, Any, int], Structure]:
    """How objects of a class are taken apart that is not named below."""
    if issubclass(kind, Tensor):
        return _plain_tensor if kind in _TENSORS else _unknown
    if issubclass(kind, np.generic):
        return _array("scalar")
    if kind is np.memmap:
        return _array("array")
    if issubclass(kind, type):
        return _class
    if is_tensorclass(kind) or is_plain_dataclass(kind) or is_record(kind):
        if not _can_be_found(kind):
            return lambda taker, value, depth: taker.other(value, ", whose class is not found by its name")
        return _tensorclass if is_tensorclass(kind) else _dataclass if is_plain_dataclass(kind) else _record
    return _tensordict if is_tensor_collection(kind) else _unknown


def _unknown(taker: Taker, value: Any, depth: int) -> Structure:
    return taker.other(value)


_TAKERS: dict[type, Callable[[Taker, Any, int], Structure]] = {
    type(None): lambda taker, value, depth: ("none",),
    bool: _leaf("bool"),
    int: _leaf("int"),
    float: _leaf("float"),
    complex: _leaf("complex"),
    str: _leaf("text"),
    bytes: _leaf("bytes"),
    list: _sequence("list"),
    tuple: _sequence("tuple"),
    torch.Size: _sequence("size"),
    dict: _dict("dict"),
    collections.OrderedDict: _dict("ordered"),
    np.ndarray: _array("array"),
    Tensor: _tensor,
    TensorDict: _tensordict,
    LazyStackedTensorDict: _lazy("lazy"),
    NonTensorStack: _lazy("nontensors"),
    torch.dtype: _constant("dtype", lambda value: (NAMES[value],)),
    torch.device: _constant("device", lambda value: (str(value),)),
}
