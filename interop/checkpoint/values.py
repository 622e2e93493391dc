"""Python values as saved trees, and back, without pickle.

These are None, bool, int, float, complex, str, bytes, list, tuple, named tuples, `torch.Size`, dicts with keys of text or
integers, NumPy arrays and scalars, tensors of every dtype that is not quantized, tensordicts with what they may hold, and
tensorclasses. A class is found by its name among the modules that were imported; reading imports none.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from fbuf.checkpoint import CheckpointCorrupt, CheckpointError, Fields
from interop.checkpoint import pickled
from interop.checkpoint.layouts import check_values, node_of, refuse_hidden, saved_node
from interop.checkpoint.leaves import Reading, leaf_of, put, saved_leaf, take
from interop.data.values import Node, NotKept, Value, build, flatten, is_container, leaves_of, value_of
from interop.data.varied import Leaf

_FORMAT = 2
_FEW = 8  # items of a structure whose leaves share columns with those of other structures
_FAULTS = (RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, StopIteration)


def encode(value: Any, where: str, allow_pickle: bool = False) -> dict[str, Any]:
    """The saved tree of a value; it may hold views of its memory. O(bytes). The errors of `save_items`."""
    return save_items([value], allow_pickle, where)


def decode(tree: Any, allow_pickle: bool = False, where: str = "value", device: torch.device | None = None) -> Any:
    """The value of a saved tree. The arguments and errors of `load_items`."""
    found = load_items(tree, allow_pickle, where, device, 1)
    if not found:
        raise CheckpointCorrupt(f"{where}: a value was expected, found none")
    return found[0]


def save_items(
    items: Sequence[Any], allow_pickle: bool = False, where: str = "item {}", unnamed: int = 0
) -> dict[str, Any]:
    """The saved tree of a list of values.

    Each structure is described once. Leaves of one dtype and number of dims are one column: of one entry where many items
    have that structure, of all items where few have. An object that is there twice is saved as two. Four seconds per 10^6
    plain values, two per 10^5 tensordicts of three tensors.

    Args:
        items: any number, alike or not.
        allow_pickle: pickle objects of other kinds.
        where: what an item is, for messages; {} stands for its number.
        unnamed: how many containers around an item are not named in messages.

    Raises:
        TypeError: an item holds an object of another kind; the message says which and where.
        ValueError: an item contains itself, or is nested more than 64 deep.
    """
    other = _pickling if allow_pickle else _refusing
    numbers: dict[Node, int] = {}
    order = np.empty(len(items), np.int64)
    rows = []
    for place, item in enumerate(items):
        try:
            node, leaves = flatten(item, other)
            number = numbers.get(node)
            if number is None:
                refuse_hidden(node)
                number = numbers[node] = len(numbers)
        except NotKept as error:
            raise error.named(where.format(place), unnamed) from error.__cause__
        order[place] = number
        rows.append(leaves)
    columns = _Columns()
    counts = np.bincount(order, minlength=len(numbers)).tolist()
    forms, chosen = [], []
    for number, (node, count) in enumerate(zip(numbers, counts, strict=True)):
        chosen.append(columns.of(node, number if count > _FEW else None))
        forms.append(saved_node(node, iter(chosen[-1])))
    for number, leaves in zip(order.tolist(), rows, strict=True):
        for place, leaf in zip(chosen[number], leaves, strict=True):
            columns.values[place].append(leaf)
    return {
        "format": _FORMAT,
        "order": order.astype(np.min_scalar_type(len(numbers))),
        "forms": forms,
        "columns": [{**saved_leaf(leaf), **put(leaf, values)} for leaf, values in columns],
    }


class _Columns:
    """The columns of the leaves of items."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self.values: list[list[Any]] = []

    def of(self, node: Node, group: int | None) -> list[int]:
        """The column of each leaf of a structure: one of its own in a group, or one for all leaves of its kind."""
        found = []
        for place, leaf in enumerate(leaves_of(node)):
            key = leaf if group is None else (leaf, group, place)
            if key not in self._numbers:
                self._numbers[key] = len(self.values)
                self.values.append([])
            found.append(self._numbers[key])
        return found

    def __iter__(self) -> Any:
        leaves = (key[0] if isinstance(key, tuple) else key for key in self._numbers)
        return zip(leaves, self.values, strict=True)


def _refusing(value: Any, why: str) -> tuple[Value, Any]:
    name = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    raise NotKept(
        TypeError,
        f"an object of type {name} cannot be saved{why}; pass allow_pickle=True at save and at load to have it pickled, or "
        "save tensors and plain values instead",
    )


def _pickling(value: Any, why: str) -> tuple[Value, Any]:
    try:
        return value_of("pickled"), pickled.to_bytes(value)
    except TypeError as error:
        raise NotKept(TypeError, str(error)) from error


# ------------------------------------------------------------------ reading


def load_items(
    tree: Any,
    allow_pickle: bool = False,
    where: str = "items",
    device: torch.device | None = None,
    most: int | None = None,
) -> list[Any]:
    """The values of a saved tree, in memory of their own.

    Args:
        tree: what `save_items` gave, or what somebody else wrote.
        allow_pickle: read pickled objects.
        where: what they are, for messages.
        device: where tensors go; None for where they were.
        most: how many there may be.

    Raises:
        CheckpointCorrupt: it is no such tree, or there are too many items.
        CheckpointMismatch: a class it names is not imported, a device is not here, or pickles are not allowed.
    """
    with reading_errors(where):
        fields = Fields(tree, where)
        reading = Reading(where, allow_pickle, device)
        if fields.whole("format") != _FORMAT:
            raise fields.wrong("format", f"{_FORMAT}, the one that is known here", fields.any("format"))
        columns = [Fields(each, where) for each in fields.items("columns")]
        leaves = [leaf_of(each, reading) for each in columns]
        forms: list[tuple[Node, list[int]]] = []
        for each in fields.items("forms"):
            chosen: list[int] = []

            def leaf(saved: Any, where: str, chosen: list[int] = chosen) -> Leaf | None:
                if type(saved) is not int:
                    return None
                chosen.append(saved)
                return leaves[saved] if saved >= 0 else None

            node = node_of(each, leaf, where, is_container)
            check_values(node, where)
            forms.append((node, chosen))
        order = _order(fields, len(forms), most, where)
        uses: Counter[int] = Counter()
        for (_, chosen), count in zip(forms, np.bincount(order, minlength=len(forms)).tolist(), strict=True):
            if not count:
                raise CheckpointCorrupt(f"{where}: a structure that no item has")
            uses.update({column: count * times for column, times in Counter(chosen).items()})
        if sorted(uses) != list(range(len(leaves))):
            raise CheckpointCorrupt(f"{where}: a column that no item has")
        taken = [iter(take(leaf, columns[n], uses[n], reading)) for n, leaf in enumerate(leaves)]
        made = [(node, [taken[column] for column in chosen]) for node, chosen in forms]
        return [build(node, map(next, chosen), device) for node, chosen in map(made.__getitem__, order.tolist())]


def _order(fields: Fields, forms: int, most: int | None, where: str) -> np.ndarray:
    """The number of the structure of each item."""
    saved = fields.array("order", None, (None,))
    if saved.dtype.kind != "u":
        raise fields.wrong("order", "an array of numbers", saved)
    if most is not None and saved.shape[0] > most:
        raise CheckpointCorrupt(f"{where}: {saved.shape[0]} items where there is room for {most}")
    order = np.asarray(saved).astype(np.int64)
    if order.size and order.max() >= forms:
        raise fields.wrong("order", f"numbers of {forms} structures", saved)
    return order


@contextlib.contextmanager
def reading_errors(where: str) -> Iterator[None]:
    """Turns what goes wrong with what is read into CheckpointCorrupt."""
    try:
        yield
    except CheckpointError:
        raise
    except _FAULTS as error:
        raise CheckpointCorrupt(f"{where}: not what was saved ({error})") from error
