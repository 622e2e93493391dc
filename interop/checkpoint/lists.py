"""Lists of many items as saved trees, and back: items of one structure are a column a leaf, not a description an item."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from fbuf.checkpoint import CheckpointCorrupt, Fields
from interop.checkpoint.leaves import Leaf, Reading, put, take
from interop.checkpoint.rule import EXACT, Rule
from interop.checkpoint.structure import Structure, Taker, UnsavedError, described
from interop.checkpoint.values import Form, reading_errors

_FEW = 8  # items of a structure whose leaves share columns with those of other structures


def save_items(
    items: Sequence[Any], allow_pickle: bool = False, where: str = "item {}", unnamed: int = 0
) -> dict[str, Any]:
    """A saved tree of a list of values of the kinds of `values`.

    Items with the same keys, types, dtypes and numbers of dims are a group, of which each tensor is one array, or two where
    shapes differ. Items that are the same object are saved as several. A second per 10^5 tensordicts of three tensors.

    Args:
        items: any number, alike or not.
        allow_pickle: have objects of other kinds pickled.
        where: what an item is, for messages; {} stands for its number.
        unnamed: how many containers around an item are not named in messages.

    Raises:
        TypeError: an item holds an object of another kind; the message says which and where.
        ValueError: an item contains itself, or is nested more than 64 deep.
    """
    taker = Taker(allow_pickle)
    numbers: dict[Structure, int] = {}
    rows: list[list[list[Any]]] = []  # of each group, the leaves of each item
    group = np.empty(len(items), np.int64)
    for place, item in enumerate(items):
        leaves: list[Any] = []
        taker.leaves = leaves
        try:
            structure = taker.structure(item)
        except UnsavedError as error:
            del error.path[:unnamed]
            raise error.named(where.format(place)) from error.__cause__
        number = numbers.get(structure)
        if number is None:
            number = numbers[structure] = len(rows)
            rows.append([])
        rows[number].append(leaves)
        group[place] = number
    pools: dict[Leaf, list[Any]] = {}
    groups = []
    for structure, of in zip(numbers, rows, strict=True):
        kinds: list[Leaf] = []
        tree: dict[str, Any] = {"form": described(structure, kinds)}
        if len(of) > _FEW or len(rows) == 1:
            columns = zip(kinds, zip(*of, strict=True), strict=True)
            tree["columns"] = [put(leaf, list(column)) for leaf, column in columns]
        else:
            for leaf, value in ((leaf, value) for leaves in of for leaf, value in zip(kinds, leaves, strict=True)):
                pools.setdefault(leaf, []).append(value)
        groups.append(tree)
    kept = [{"leaf": leaf.described(), "count": len(of), "values": put(leaf, of)} for leaf, of in pools.items()]
    return {"group": group.astype(np.min_scalar_type(len(rows))), "groups": groups, "pools": kept}


def load_items(
    tree: Any, rule: Rule = EXACT, where: str = "items", device: torch.device | None = None, most: int | None = None
) -> list[Any]:
    """The list of a saved tree, whose items are in memory of their own.

    Args:
        tree: what `save_items` gave, or what somebody else wrote.
        rule: whether pickled objects are read.
        where: what they are, for messages.
        device: where tensors go; None for where they were.
        most: how many items there may be.

    Raises:
        CheckpointCorrupt: it is no such tree, or there are too many items.
        CheckpointMismatch: a class it names is not imported, a device is not here, or pickles are not allowed.
    """
    with reading_errors(where):
        fields = Fields(tree, where)
        group = _groups(fields, most, where)
        described = [Fields(each, where) for each in fields.items("groups")]
        if group.size and group.max() >= len(described):
            raise fields.wrong("group", f"numbers of {len(described)} groups", group)
        counts = np.bincount(group, minlength=len(described)).tolist()
        forms = [Form.read(each.any("form"), where, device) for each in described]
        pools = [Fields(each, where) for each in fields.items("pools")]
        leaves = [Leaf.read(each.fields("leaf"), where) for each in pools]
        reading = Reading(where, rule.allow_pickle, device)
        for form in (*forms, Form(tuple(leaves), _nothing)):
            form.refuse_pickles(reading)
        if 0 in counts or len(set(leaves)) < len(leaves):
            raise CheckpointCorrupt(f"{where}: a group without items, or the same values twice")
        pooled = {
            leaf: iter(take(leaf, each.any("values"), each.whole("count"), reading))
            for leaf, each in zip(leaves, pools, strict=True)
        }
        made: list[Iterator[Any]] = []
        for each, form, count in zip(described, forms, counts, strict=True):
            if "columns" in each:
                columns = each.items("columns", len(form.leaves))
                taken = (take(leaf, column, count, reading) for leaf, column in zip(form.leaves, columns, strict=True))
                made.append(iter(form.build(taken, count)))
            else:
                made.append(_odd(form, pooled, count))
        return [next(made[number]) for number in group.tolist()]


def _odd(form: Form, pooled: dict[Leaf, Iterator[Any]], count: int) -> Iterator[Any]:
    """Items made of values of the pools."""
    rows = [[next(pooled[leaf]) for leaf in form.leaves] for _ in range(count)]
    return iter([form.build(([value] for value in row), 1)[0] for row in rows])


def _groups(fields: Fields, most: int | None, where: str) -> np.ndarray:
    """The number of the group of each item."""
    saved = fields.array("group", None, (None,))
    if saved.dtype.kind != "u":
        raise fields.wrong("group", "an array of numbers", saved)
    if most is not None and saved.shape[0] > most:
        raise CheckpointCorrupt(f"{where}: {saved.shape[0]} items where there is room for {most}")
    return np.asarray(saved).astype(np.int64)


def _nothing(columns: Any, count: int) -> list[Any]:
    return []
