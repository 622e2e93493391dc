"""Python values as saved trees, and back: the kinds of values that can be saved without pickle.

These are None, bool, int, float, complex, str, bytes, list, tuple, named tuples, dict, NumPy arrays and scalars, tensors of
every dtype that is not quantized, tensordicts with what they may hold, tensorclasses, dataclasses, `torch.Size`,
`torch.dtype`, `torch.device`, and a dataclass itself. They come back equal, of the same types, in memory of their own:
contiguous, of the byte order of the machine, and without `requires_grad`. Memory-mapped tensors come back as plain ones,
views of tensordicts as tensordicts, and an object that was there twice as two.

A class is found by its name among the modules that were imported; reading a checkpoint imports none, and runs no
`__init__` or `__post_init__`.
"""

import collections
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, NonTensorStack, TensorDict, is_tensorclass

from fbuf.checkpoint import CheckpointCorrupt, CheckpointError, CheckpointMismatch, Fields
from interop.checkpoint import pickled
from interop.checkpoint.layouts import class_named
from interop.checkpoint.leaves import Leaf, Reading, put, take
from interop.checkpoint.rule import EXACT, Rule
from interop.checkpoint.structure import (
    LEAVES,
    MOST_DEEP,
    Taker,
    UnsavedError,
    described,
    field_names,
    is_described,
    is_plain_dataclass,
    is_record,
)
from interop.checkpoint.torch_names import device_named, dtype_named, optional_device
from interop.data.layout import unchecked

Columns = Iterator[list[Any]]  # the values of each leaf, in order
Build = Callable[[Columns, int], list[Any]]  # makes so many values of them
_FAULTS = (RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, StopIteration)


def encode(value: Any, where: str, allow_pickle: bool = False) -> dict[str, Any]:
    """A saved tree of a value; it may hold views of its memory. O(bytes).

    Args:
        value: of the kinds above.
        where: what it is, for messages.
        allow_pickle: have objects of other kinds pickled.

    Raises:
        TypeError: it holds an object of another kind; the message says where.
        ValueError: it contains itself, or is nested more than 64 deep.
    """
    taker = Taker(allow_pickle)
    try:
        structure = taker.structure(value)
        leaves: list[Leaf] = []
        form = described(structure, leaves)
        return {"form": form, "leaves": [put(leaf, [each]) for leaf, each in zip(leaves, taker.leaves, strict=True)]}
    except UnsavedError as error:
        raise error.named(where) from error.__cause__


def decode(tree: Any, rule: Rule = EXACT, where: str = "value", device: torch.device | None = None) -> Any:
    """The value of a saved tree.

    Args:
        tree: what `encode` gave, or what somebody else wrote.
        rule: whether pickled objects are read.
        where: what it is, for messages.
        device: where tensors go; None for where they were.

    Raises:
        CheckpointCorrupt: it is no such tree.
        CheckpointMismatch: a class it names is not imported, a device is not here, or pickles are not allowed.
    """
    with reading_errors(where):
        fields = Fields(tree, where)
        form = Form.read(fields.any("form"), where, device)
        reading = Reading(where, rule.allow_pickle, device)
        form.refuse_pickles(reading)
        columns = fields.items("leaves", len(form.leaves))
        taken = (take(leaf, column, 1, reading) for leaf, column in zip(form.leaves, columns, strict=True))
        return form.build(taken, 1)[0]


class reading_errors:  # noqa: N801  # used as a context
    """Whatever goes wrong with what is read is a CheckpointCorrupt."""

    def __init__(self, where: str) -> None:
        self._where = where

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if isinstance(error, _FAULTS) and not isinstance(error, CheckpointError):
            raise CheckpointCorrupt(f"{self._where}: not what was saved ({error})") from error


@dataclass(frozen=True)
class Form:
    """How values of one structure are put together.

    Args:
        leaves: what they are made of, in order.
        build: makes values of the columns of these leaves.
    """

    leaves: tuple[Leaf, ...]
    build: Build

    @classmethod
    def read(cls, tree: Any, where: str, device: torch.device | None = None) -> "Form":
        """The form of a described structure."""
        leaves: list[Leaf] = []
        build = _build(tree, leaves, where, device, 0)
        return cls(tuple(leaves), build)

    def refuse_pickles(self, reading: Reading) -> None:
        """CheckpointMismatch if there are pickles that may not be read."""
        if any(leaf.kind == "pickled" for leaf in self.leaves):
            pickled.refuse(reading.allow_pickle, reading.where)


def _build(tree: Any, leaves: list[Leaf], where: str, device: torch.device | None, depth: int) -> Build:
    if depth > MOST_DEEP:
        raise CheckpointCorrupt(f"{where}: nested more than {MOST_DEEP} deep")
    fields = Fields(tree, where)
    kind = fields.text("kind")
    if kind in LEAVES:
        leaves.append(Leaf.read(fields, where))
        return lambda columns, count: next(columns)
    if kind == "none":
        return _constant(None)
    if kind == "dtype":
        return _constant(dtype_named(fields.text("name"), where))
    if kind == "device":
        return _constant(device_named(fields.text("name"), where))
    if kind == "class":
        return _constant(class_named(fields.text("class"), is_described, where))
    content: Build | None = None
    if kind == "tensorclass":
        content = _build(fields.any("content"), leaves, where, device, depth + 1)
    children = [_build(each, leaves, where, device, depth + 1) for each in fields.items("items")]
    make = _maker(kind, fields, len(children), where, device, content)

    def build(columns: Columns, count: int) -> list[Any]:
        first = [content(columns, count)] if content is not None else []
        rows = [*first, *(child(columns, count) for child in children)]
        return list(map(make, zip(*rows, strict=True) if rows else repeat((), count)))

    return build


def _constant(value: Any) -> Build:
    return lambda columns, count: [value] * count


Make = Callable[[tuple[Any, ...]], Any]


def _maker(
    kind: str, fields: Fields, size: int, where: str, device: torch.device | None, content: Build | None
) -> Make:
    """What puts one value together of its parts."""
    if kind in ("list", "tuple", "size"):
        return {"list": list, "tuple": tuple, "size": torch.Size}[kind]
    if kind in ("dict", "ordered"):
        keys = _texts(fields, "keys", size, where)
        make = _DICTS[kind]
        return lambda parts: make(zip(keys, parts, strict=True))
    if kind in ("dict of any", "ordered of any"):
        return lambda parts: _of_any(_DICTS[kind[:-7]], parts, where)
    if kind == "tensordict":
        return _tensordict_maker(fields, size, where, device)
    if kind in ("lazy", "nontensors"):
        return _lazy_maker(kind, fields, where)
    if kind == "record":
        found: Any = class_named(fields.text("class"), is_record, where)
        _same_fields(found, found._fields, _texts(fields, "fields", size, where), where)
        return lambda parts: tuple.__new__(found, parts)
    if kind == "dataclass":
        return _dataclass_maker(fields, size, where)
    if kind == "tensorclass" and content is not None:
        return _tensorclass_maker(fields, size, where)
    raise fields.wrong("kind", "a kind of value", kind)


def _texts(fields: Fields, name: str, size: int, where: str) -> tuple[str, ...]:
    found = fields.items(name, size)
    if not all(isinstance(each, str) for each in found) or len(set(found)) < size:
        raise CheckpointCorrupt(f"{where}: {name!r} should be {size} different texts")
    return tuple(found)


_DICTS: dict[str, Any] = {"dict": dict, "ordered": collections.OrderedDict}


def _of_any(kind: Any, parts: tuple[Any, ...], where: str) -> dict[Any, Any]:
    found: dict[Any, Any] = kind(zip(parts[::2], parts[1::2], strict=True))
    if 2 * len(found) != len(parts):
        raise CheckpointCorrupt(f"{where}: a key comes twice")
    return found


def _same_fields(kind: type, now: Sequence[str], then: Sequence[str], where: str) -> None:
    if tuple(now) != tuple(then):
        raise CheckpointMismatch(
            f"{where}: the fields of {kind.__qualname__} were {list(then)} when it was saved, they are {list(now)} now"
        )


def _tensordict_maker(fields: Fields, size: int, where: str, device: torch.device | None) -> Make:
    keys = _texts(fields, "keys", size, where)
    batch = torch.Size(fields.wholes("batch"))
    named = fields.any("device")
    place = None if named is None else device or optional_device(named, where)
    names: list[Any] | None = None
    if fields.any("names") is not None:
        names = fields.items("names", len(batch))
        if not all(each is None or isinstance(each, str) for each in names):
            raise CheckpointCorrupt(f"{where}: the names of dims are none")
    dims = len(batch)

    def make(parts: tuple[Any, ...]) -> Any:
        for part in parts:
            if part.shape[:dims] != batch:
                raise CheckpointCorrupt(f"{where}: an entry of shape {list(part.shape)} in a batch of {list(batch)}")
        return unchecked(dict(zip(keys, parts, strict=True)), batch, place, names and [*names])

    return make


def _lazy_maker(kind: str, fields: Fields, where: str) -> Make:
    dim, name = fields.whole("dim", most=MOST_DEEP), fields.any("name")
    if name is not None and not isinstance(name, str):
        raise fields.wrong("name", "a text", name)
    stack: Any = {"lazy": LazyStackedTensorDict, "nontensors": NonTensorStack}[kind]

    def make(parts: tuple[Any, ...]) -> Any:
        if not parts or dim > parts[0].ndim or any(part.shape != parts[0].shape for part in parts):
            raise CheckpointCorrupt(f"{where}: tensordicts that cannot be stacked along dim {dim}")
        return stack(*parts, stack_dim=dim, stack_dim_name=name)

    return make


def _tensorclass_maker(fields: Fields, size: int, where: str) -> Make:
    found: Any = class_named(fields.text("class"), is_tensorclass, where)
    keys = _texts(fields, "keys", size, where)
    expected = set(found.__expected_keys__)

    def make(parts: tuple[Any, ...]) -> Any:
        held = parts[0]
        if type(held) not in (TensorDict, LazyStackedTensorDict):
            raise CheckpointCorrupt(f"{where}: a tensorclass must be over a tensordict")
        if not set(keys) | set(held.keys()) <= expected:
            _same_fields(found, sorted(expected), sorted({*keys, *held.keys()}), where)
        made = found.__new__(found)  # not `from_tensordict`, which runs `__post_init__`
        made.__dict__.update(_tensordict=held, _non_tensordict=dict(zip(keys, parts[1:], strict=True)))
        return made

    return make


def _dataclass_maker(fields: Fields, size: int, where: str) -> Make:
    found = class_named(fields.text("class"), is_plain_dataclass, where)
    names = _texts(fields, "fields", size, where)
    _same_fields(found, field_names(found), names, where)

    def make(parts: tuple[Any, ...]) -> Any:
        made: Any = object.__new__(found)
        for name, part in zip(names, parts, strict=True):
            object.__setattr__(made, name, part)
        return made

    return make
