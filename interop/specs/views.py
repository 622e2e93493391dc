"""Live views of the keys, entries and items of a Composite."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any


class View:
    """A view of a Composite, computed at each iteration. Keys are names, or tuples for nested entries.

    Args:
        walk: returns an iterator of (path, entry) pairs.
        pick: (key, entry) -> element of the view.
    """

    def __init__(self, walk: Callable[[], Iterator[Any]], pick: Callable[[Any, Any], Any]) -> None:
        self._walk, self._pick = walk, pick

    def __iter__(self) -> Iterator[Any]:
        return (self._pick(_key(path), entry) for path, entry in self._walk())

    def __len__(self) -> int:
        return sum(1 for _ in self._walk())

    def __contains__(self, item: Any) -> bool:
        with contextlib.suppress(TypeError):  # not a key
            item = _key(path_of(item))
        return any(item == each for each in self)

    def __repr__(self) -> str:
        return f"View({list(self)})"


def path_of(key: Any) -> tuple[str, ...]:
    """The names in a key: a string, or nested tuples of strings. TypeError for anything else."""
    if isinstance(key, str):
        return (key,)
    if not isinstance(key, tuple) or not key:
        raise TypeError(f"keys are texts, or tuples of texts for nested entries, got {key!r}")
    return tuple(name for part in key for name in path_of(part))


def _key(path: tuple[str, ...]) -> Any:
    return path[0] if len(path) == 1 else path
