"""The keys, entries and items of a Composite, as views that follow it."""

from collections.abc import Callable, Iterator
from typing import Any


class View:
    """What a walk through the entries of a Composite gives, each time anew.

    Args:
        walk: makes an iterator of (path, entry) pairs.
        pick: what of a path and an entry is in the view.
    """

    def __init__(self, walk: Callable[[], Iterator[Any]], pick: Callable[[tuple[str, ...], Any], Any]) -> None:
        self._walk, self._pick = walk, pick

    def __iter__(self) -> Iterator[Any]:
        return (self._pick(path, entry) for path, entry in self._walk())

    def __len__(self) -> int:
        return sum(1 for _ in self._walk())

    def __contains__(self, item: Any) -> bool:
        return item in list(self)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self)})"


class KeysView(View):
    """The keys: names, and tuples of names for nested entries."""

    def __init__(self, walk: Callable[[], Iterator[Any]]) -> None:
        super().__init__(walk, lambda path, entry: path[0] if len(path) == 1 else path)

    def __contains__(self, item: Any) -> bool:
        return super().__contains__(_key(item))


class ValuesView(View):
    """The entries."""

    def __init__(self, walk: Callable[[], Iterator[Any]]) -> None:
        super().__init__(walk, lambda path, entry: entry)


class ItemsView(View):
    """Pairs of key and entry."""

    def __init__(self, walk: Callable[[], Iterator[Any]]) -> None:
        super().__init__(walk, lambda path, entry: (path[0] if len(path) == 1 else path, entry))


def path_of(key: Any) -> tuple[str, ...]:
    """The names in a key: a text, or tuples of texts in any nesting. TypeError for anything else."""
    if isinstance(key, str):
        return (key,)
    if not isinstance(key, tuple) or not key:
        raise TypeError(f"keys are texts, or tuples of texts for nested entries, got {key!r}")
    return tuple(name for part in key for name in path_of(part))


def _key(item: Any) -> Any:
    try:
        path = path_of(item)
    except TypeError:
        return item
    return path[0] if len(path) == 1 else path
