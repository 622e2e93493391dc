"""The gymnasium spaces of the values of a dataset."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from interop.optional import required

if TYPE_CHECKING:
    from gymnasium import Space


Every = Callable[[], Iterator[Any]]
"""The values of each episode: arrays [T, ...], lists of text, or dicts of these. It is called for each pass."""


def space_of(every: Every) -> "Space[Any]":
    """The space of the values of episodes: a Box, without bounds but those of the dtype, a Text, or a Dict.

    For the longest text and its letters all episodes are read, for other values the first.
    """
    spaces, first = required("gymnasium", "datasets").spaces, next(every())
    if isinstance(first, dict):
        return spaces.Dict({key: space_of(below(every, key)) for key in first})
    if isinstance(first, list):
        longest, letters = 1, set("")
        for texts in every():
            longest = max(longest, *map(len, texts))
            letters.update(*texts)
        return spaces.Text(longest, min_length=0, charset=frozenset(letters))
    kind, shape = first.dtype, first.shape[1:]
    if kind.kind == "f":
        return spaces.Box(-np.inf, np.inf, shape, kind.type)
    low, high = (0, 1) if kind.kind == "b" else (np.iinfo(kind).min, np.iinfo(kind).max)
    return spaces.Box(low, high, shape, kind.type)


def below(every: Every, key: str) -> Every:
    """One entry of the values."""
    return lambda: (values[key] for values in every())


def fitted(space: "Space[Any]", values: Any, where: str) -> Any:
    """The values as members of a space, of which there are some: dicts are tuples where it is a Tuple.

    ValueError, with `where` they are, for other keys, shapes or dtypes.
    """
    spaces = required("gymnasium", "datasets").spaces
    if isinstance(values, dict) and isinstance(space, spaces.Dict):
        if values.keys() != space.spaces.keys():
            raise ValueError(f"{where}: the space has the entries {[*space.spaces]}, the rows have {[*values]}")
        return {key: fitted(member, values[key], f"{where}, {key}") for key, member in space.spaces.items()}
    if isinstance(values, dict) and isinstance(space, spaces.Tuple) and len(values) == len(space.spaces):
        return tuple(fitted(*each, where) for each in zip(space.spaces, values.values(), strict=True))
    if isinstance(space, spaces.Text):
        fits = isinstance(values, list)
    else:
        fits = isinstance(values, np.ndarray) and (space.dtype, space.shape) == (values.dtype, values.shape[1:])
    if not fits:
        kind = f"{values.dtype} {[*values.shape[1:]]}" if isinstance(values, np.ndarray) else type(values).__name__
        raise ValueError(
            f"{where}: the space is {space}, the rows are {kind}. Pass observation_space or action_space that they fit, or "
            "convert them"
        )
    return values
