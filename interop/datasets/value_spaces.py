"""Gymnasium spaces inferred from the values of a dataset."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from interop.data.arguments import required
from interop.data.bridge import FROM_NUMPY
from interop.specs import Unbounded, to_gymnasium

if TYPE_CHECKING:
    from gymnasium import Space


def space_of(every: Callable[[], Iterator[Any]]) -> "Space[Any]":
    """Infer the space of episode values: a Box with the bounds of its dtype, a Text, or a Dict.

    Args:
        every: returns an iterator over the values of each episode: arrays [T, ...], lists of text, or dicts of these. For
            text it is called again, and reads all episodes for the length and charset; other values need the first only.
    """
    spaces = required("gymnasium", "datasets").spaces
    first = next(every())
    if isinstance(first, dict):
        return spaces.Dict({key: space_of(partial(_entries, every, key)) for key in first})
    if isinstance(first, list):
        longest = 1
        letters = set[str]()
        for texts in every():
            longest = max(longest, *map(len, texts))
            letters.update(*texts)
        return spaces.Text(longest, min_length=0, charset=frozenset(letters))
    return to_gymnasium(Unbounded(first.shape[1:], dtype=FROM_NUMPY[first.dtype]))


def _entries(every: Callable[[], Iterator[Any]], key: str) -> Iterator[Any]:
    return (value[key] for value in every())


def fitted(space: "Space[Any]", values: Any, where: str) -> Any:
    """Convert values to members of a space; a dict becomes a tuple for a Tuple space.

    ValueError, prefixed by `where`, for other keys, shapes or dtypes.
    """
    spaces = required("gymnasium", "datasets").spaces
    if isinstance(values, dict) and isinstance(space, spaces.Dict):
        if values.keys() != space.spaces.keys():
            raise ValueError(f"{where}: the space has the entries {[*space.spaces]}, the rows have {[*values]}")
        return {key: fitted(member, values[key], f"{where}, {key}") for key, member in space.spaces.items()}
    if isinstance(values, dict) and isinstance(space, spaces.Tuple) and len(values) == len(space.spaces):
        return tuple(fitted(*pair, where) for pair in zip(space.spaces, values.values(), strict=True))
    if isinstance(values, np.ndarray):
        kind = f"{values.dtype} {[*values.shape[1:]]}"
        fits = (space.dtype, space.shape) == (values.dtype, values.shape[1:])
    else:
        kind = type(values).__name__
        fits = isinstance(values, list) and isinstance(space, spaces.Text)
    if not fits:
        raise ValueError(
            f"{where}: the space is {space}, the rows are {kind}. Pass observation_space or action_space that they fit, or "
            "convert them"
        )
    return values
