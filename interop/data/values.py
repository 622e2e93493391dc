"""Python values taken apart into a structure and leaves, and built again, for lists of items and for checkpoints.

A structure is a `Branch` tree like that of a `Layout`, with a `Value` in the place of each leaf. Values come back equal, of
the same types, in memory of their own: tensors dense and without `requires_grad`, nested ones of strided layout by their
components, memory-mapped tensors as plain ones, views of tensordicts as tensordicts, an object that was there twice as two.
No `__init__` and no `__post_init__` runs.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterator
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

from fbuf.checkpoint.arrays import BY_NAME
from interop.data.layout import Branch
from interop.data.nested_tensors import Components, joined
from interop.data.tensordicts import entries_of, of_entries, unchecked
from interop.data.varied import Leaf

MOST_DEEP = 64
_NUMBERS_AND_TEXT = {type(None), bool, int, float, str}
_TENSORS = (Tensor, MemoryMappedTensor, torch.nn.Parameter, torch.nn.Buffer)
_STACKS = (LazyStackedTensorDict, NonTensorStack)
_SEQUENCES = (list, tuple, torch.Size)
_DICTS = (dict, collections.OrderedDict)
_INTEGER_BITS = 10_000  # Python refuses to read much longer ones from text


@dataclasses.dataclass(frozen=True)
class Value(Leaf):
    """One leaf of a value.

    Attributes:
        kind: "tensor", "array" or "scalar" of NumPy, "complex", "bytes", "plain" for what JSON can say, or "pickled".
        dtype: of a tensor, array or scalar, by name.
        dims: how many dims it has.
        device: of a tensor, None for the CPU.
    """

    kind: str
    dtype: str = ""
    dims: int = 0
    device: str | None = None


Node = Branch | Leaf
_Opened = tuple[Any, ...]
Other = Callable[[Any, str], tuple[Value, Any]]  # the leaf for an object of another kind, or a NotKept error

_PLAIN, _BYTES, _COMPLEX = map(Value, ("plain", "bytes", "complex"))
_value = functools.cache(Value)


class NotKept(Exception):  # noqa: N818  # becomes `error`, with the path to the value
    """A value that cannot be taken apart. `path` leads to it from the outermost value."""

    def __init__(self, error: type[Exception], message: str) -> None:
        super().__init__(message)
        self.error = error
        self.message = message
        self.path = list[Any]()

    def named(self, where: str) -> Exception:
        """The error for the caller."""
        path = "".join(f"[{key!r:.40}]" for key in self.path)
        return self.error(f"{where}{', at ' if path else ''}{path}: {self.message}")


# ------------------------------------------------------------------ taking apart


def flatten(value: Any, other: Other) -> tuple[Node, list[Any]]:
    """The structure of a value, and its leaves in order. They may share memory with it.

    Raises:
        NotKept: it contains itself, is nested too deeply, or holds what `other` refuses.
    """
    leaves: list[Any] = []
    return _node(value, leaves, other, []), leaves


def leaves_of(node: Node) -> list[Any]:
    """The leaves of a structure, in order."""
    return [node] if isinstance(node, Leaf) else [leaf for child in node.children for leaf in leaves_of(child)]


def _node(value: Any, leaves: list[Any], other: Other, around: list[int]) -> Node:
    kind = type(value)
    leaf: Value | None = None
    if kind in _TENSORS:
        value = value if kind is Tensor else value.detach().as_subclass(Tensor)
        why = not_dense(value)
        if value.is_nested and value.layout is torch.strided and value.size(0):
            return _branch(value, _components(value), leaves, other, around)
        if why:
            leaf, value = other(value, why)
        else:
            leaf = _of_tensor(value.dtype, value.ndim, None if value.is_cpu else value.device)
    elif kind in _NUMBERS_AND_TEXT or kind is list or kind is dict:
        leaf = _PLAIN if _is_plain(value, len(around)) else None
    elif kind is bytes:
        leaf = _BYTES
    elif kind is complex:
        leaf = _COMPLEX
    elif kind is np.ndarray or kind is np.memmap or isinstance(value, np.generic):
        array = np.asarray(value)
        array = array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
        if BY_NAME.get(array.dtype.name) == array.dtype:
            name = "array" if isinstance(value, np.ndarray) else "scalar"
            leaf = _value(name, array.dtype.name, array.ndim)
            value = array
        else:
            leaf, value = other(value, f" with dtype {array.dtype}")
    if leaf is None:
        opened = _opened(value, kind)
        if not isinstance(opened, str):
            return _branch(value, opened, leaves, other, around)
        leaf, value = other(value, opened)
    leaves.append(value)
    return leaf


def not_dense(value: Tensor) -> str:
    """Why a tensor cannot be kept; empty for one that is dense."""
    if value.layout is torch.strided and not (value.is_nested or value.is_meta or value.is_quantized):
        return ""
    kind = "without memory" if value.is_meta else f"of layout {value.layout} and dtype {value.dtype}"
    return f": it is {kind}, only dense tensors can be"


def _components(value: Tensor) -> _Opened:
    """A nested tensor as what it holds and the fields of its branch."""
    parts = value.unbind(0)
    return parts, Components, tuple(range(len(parts)))


@functools.cache
def _of_tensor(dtype: torch.dtype, dims: int, device: torch.device | None) -> Value:
    return Value("tensor", str(dtype).removeprefix("torch."), dims, None if device is None else str(device))


def _is_plain(value: Any, depth: int) -> bool:
    """Whether JSON can say a value: numbers, texts and None, and lists and dicts with text keys of these."""
    kind = type(value)
    if kind is int:
        return value.bit_length() < _INTEGER_BITS
    if kind is list and depth <= MOST_DEEP:
        return all(_is_plain(element, depth + 1) for element in value)
    if kind is dict and depth <= MOST_DEEP:
        return all(type(key) is str and _is_plain(element, depth + 1) for key, element in value.items())
    return kind in _NUMBERS_AND_TEXT


def _opened(value: Any, kind: type) -> _Opened | str:
    """A container as what it holds and the fields of its branch, in their order; why other objects are none."""
    entries = entries_of(value)
    if entries is not None:  # the most common one, in a fifth of the time
        return entries.values(), kind, tuple(entries), value.batch_size, (), value.device
    if kind in _SEQUENCES:
        return value, kind, tuple(range(len(value)))
    if kind in _DICTS:
        return (value.values(), kind, tuple(value)) if all(map(_is_key, value)) else _NO_KEYS
    if kind in _STACKS:
        if not value.tensordicts or value.hook_out is not None:
            return " where it is empty or inside of vmap"
        names = (getattr(value, "_td_dim_name", None),)
        return value.tensordicts, kind, tuple(range(len(value.tensordicts))), (value.stack_dim,), names
    if is_record(kind):
        return value, kind, tuple(range(len(value))), (), fields_of(kind)
    if is_tensorclass(kind):
        tensordict = vars(value)["_tensordict"]
        attributes = vars(value)["_non_tensordict"]
        if not {*attributes, *tensordict.keys()} <= {*fields_of(kind)}:
            return " with entries that are no fields of it"
        return (tensordict, *attributes.values()), kind, ("", *attributes)
    if is_tensor_collection(kind):
        names = tuple(value.names) if any(value.names) else ()
        return value.values(), TensorDict, tuple(value.keys()), tuple(value.batch_size), names, value.device
    return ""


_NO_KEYS = " with keys that are no texts"


def _is_key(key: object) -> bool:
    return (type(key) is int and -(2**63) <= key < 2**63) or (type(key) is str and is_written(key))


def is_written(text: str) -> bool:
    """Whether UTF-8 can say a text: half of a pair of surrogates it cannot."""
    return text.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in text)


def _branch(value: Any, opened: _Opened, leaves: list[Any], other: Other, around: list[int]) -> Node:
    if id(value) in around:
        raise NotKept(ValueError, f"a {type(value).__name__} that contains itself cannot be saved")
    if len(around) > MOST_DEEP:
        raise NotKept(ValueError, f"what is to be saved is nested more than {MOST_DEEP} deep")
    around.append(id(value))
    entries, kind, keys, *rest = opened
    children: list[Node] = []
    try:
        for entry in entries:
            children.append(_node(entry, leaves, other, around))  # noqa: PERF401  # so that an error knows how many
    except NotKept as error:
        error.path.insert(0, keys[len(children)])
        raise
    around.pop()
    return Branch(kind, keys, tuple(children), *rest)


# ------------------------------------------------------------------ classes of the user's


def is_record(kind: type) -> bool:
    """Whether a class is one of named tuples."""
    return issubclass(kind, tuple) and isinstance(getattr(kind, "_fields", None), tuple)


def is_container(kind: type) -> bool:
    """Whether objects of a class are taken apart; other classes are never built."""
    is_plain = kind in _SEQUENCES or kind in _DICTS or kind in _STACKS or kind in (TensorDict, Components)
    return is_plain or is_record(kind) or is_tensorclass(kind)


def fields_of(kind: Any) -> tuple[str, ...]:
    """The fields of a class of named tuples, or those of a tensorclass, sorted."""
    return tuple(kind._fields) if is_record(kind) else tuple(sorted(kind.__expected_keys__))


# ------------------------------------------------------------------ building


def build(node: Node, leaves: Iterator[Any], device: torch.device | None = None) -> Any:
    """The value of a structure, made of leaves in order. ValueError where leaves do not fit a container.

    Args:
        node: the structure.
        leaves: as many as it has, or more.
        device: of the tensordicts that have one; None for what they had.
    """
    if isinstance(node, Leaf):
        return next(leaves)
    parts = [next(leaves) if type(child) is Value else build(child, leaves, device) for child in node.children]
    kind = node.kind
    if kind is TensorDict:
        return _tensordict(node, parts, node.device and (device or node.device))
    if kind in _SEQUENCES:
        return kind(parts)
    if kind is Components:
        return joined(parts)
    if kind in _DICTS:
        return kind(zip(node.keys, parts, strict=True))
    if kind in _STACKS:
        (dim,) = node.batch
        (name,) = node.names
        if not 0 <= dim <= parts[0].ndim or any(part.ndim != parts[0].ndim for part in parts):
            raise ValueError(f"tensordicts that cannot be stacked along dim {dim}")
        return kind(*parts, stack_dim=dim, stack_dim_name=name)
    if is_record(kind):
        return tuple.__new__(kind, parts)
    if type(parts[0]) not in (TensorDict, LazyStackedTensorDict):
        raise ValueError("a tensorclass must be over a tensordict")
    instance: Any = kind.__new__(kind)  # not `from_tensordict`, which runs `__post_init__`
    instance.__dict__.update(_tensordict=parts[0], _non_tensordict=dict(zip(node.keys[1:], parts[1:], strict=True)))
    return instance


def _tensordict(node: Branch, parts: list[Any], device: torch.device | None) -> Any:
    dims = len(node.batch)
    for part in parts:
        shape = (part.size(0),) if getattr(part, "is_nested", False) else part.shape[:dims]  # it has no other size
        if shape[:dims] != node.batch:
            raise ValueError(f"an entry of shape {list(shape)}... in a batch of {list(node.batch)}")
    entries = zip(node.keys, parts, strict=True)
    batch = torch.Size(node.batch)
    return unchecked(dict(entries), batch, device, [*node.names]) if node.names else of_entries(entries, batch, device)
