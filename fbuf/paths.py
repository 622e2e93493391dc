"""Leaves of an item by path: a key, or a tuple of keys of dicts, field names and indices."""

import operator
from typing import Any

import jax

from fbuf.keywords import nearest

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
        given = path[0] if len(path) == 1 else path
        raise ValueError(f"{name}={given!r}: an item has no such leaf{_those_of(item, path)}") from error


def leaf_at(item: Any, path: KeyPath) -> Any:
    """The leaf, or the subtree, at a path of an item."""
    for step in path:
        item = item[step] if isinstance(item, dict) or isinstance(step, int) else operator.attrgetter(step)(item)
    return item


def _those_of(item: object, path: KeyPath) -> str:
    """The leaves of an item, the nearest one first; for the error about one that it does not have."""
    found = []
    for steps, _ in jax.tree_util.tree_leaves_with_path(item):
        names = tuple(
            next(getattr(step, each) for each in ("key", "name", "idx") if hasattr(step, each)) for step in steps
        )
        found.append(names[0] if len(names) == 1 else names)
    texts = [repr(each) for each in found]
    near = nearest(repr(path[0] if len(path) == 1 else path), texts)
    question = f". Did you mean {near}?" if near else "."
    return f"{question} Its leaves are {', '.join(texts)}" if texts else ""
