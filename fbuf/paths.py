"""Leaves of an item by path: a key, or a tuple of keys of dicts, field names and indices."""

import operator
from typing import Any

KeyPath = tuple[str | int, ...]


def path_of(name: str, given: Any, *, root: bool = False) -> KeyPath:
    """The path as a tuple. TypeError for anything else. With `root` the path () means the item itself."""
    path = given if isinstance(given, tuple) else (given,)
    if not ((path or root) and all(type(step) in (str, int) for step in path)):
        raise TypeError(f"{name} must be a key, or a tuple of keys, got {given!r}")
    return path


def required_leaf(name: str, item: Any, path: KeyPath) -> Any:
    """The leaf at a path of an item. ValueError if there is none, with the name of the option."""
    try:
        return leaf_at(item, path)
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"{name}={path!r}: an item has no such leaf") from error


def leaf_at(item: Any, path: KeyPath) -> Any:
    """The leaf, or the subtree, at a path of an item."""
    for step in path:
        item = item[step] if isinstance(item, dict) or isinstance(step, int) else operator.attrgetter(step)(item)
    return item
