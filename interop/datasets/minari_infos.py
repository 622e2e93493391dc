"""The common layout of infos, which Minari lets differ from episode to episode."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from interop.datasets.errors import CorruptDatasetError

KeyPath = tuple[str, ...]


class Kind(NamedTuple):
    """The dtype of a stored info, None for text, and its shape. A single value has no dims."""

    dtype: np.dtype | None
    shape: tuple[int, ...]


class EpisodeInfos(NamedTuple):
    """The kinds of the infos of an episode by their path, with its number of steps, and its name for errors."""

    where: str
    steps: int
    kinds: Mapping[KeyPath, Kind]


class StepInfo(NamedTuple):
    """An info in the rows of all episodes.

    Args:
        dtype: None for text.
        shape: of a row; that of the largest row where episodes differ.
        of_steps: whether there is a value for each step; otherwise a value is of a whole episode.
        misfit: the name of an episode whose values fit no layout, and the error text, which is raised when that episode is
            read: errors of its steps come first.
    """

    dtype: np.dtype | None
    shape: tuple[int, ...]
    of_steps: bool = True
    misfit: tuple[str, str] | None = None

    @property
    def row_bytes(self) -> int:
        """The bytes of a row; of text, those of a reference."""
        return math.prod(self.shape) * np.dtype(self.dtype or "O").itemsize


Layout = Mapping[KeyPath, StepInfo]


def layout_of(episodes: Iterable[EpisodeInfos]) -> dict[KeyPath, StepInfo]:
    """The infos of all episodes, in the order in which they appear.

    An info has a value for each step, with the reset or without it; or it is one value for the episode, of the same shape in
    all episodes. Rows that differ in shape are padded with zeros behind their values, and numbers get their common dtype.

    Numbers of rows that are none of these are a `misfit`. CorruptDatasetError for an entry that is text, or a group, in some
    episodes only.
    """
    seen: dict[KeyPath, dict[tuple[int, Kind], str]] = {}  # an episode of each kind
    for where, steps, kinds in episodes:
        for path, kind in kinds.items():
            seen.setdefault(path, {}).setdefault((steps, kind), where)
    ways = {path: [(where, *info_kind) for info_kind, where in kinds.items()] for path, kinds in seen.items()}
    for path, places_of_path in ways.items():
        if inner := next((path[:depth] for depth in range(1, len(path)) if path[:depth] in ways), None):
            raise CorruptDatasetError(
                f"{places_of_path[0][0]}: infos/{'/'.join(inner)} is a group, in {ways[inner][0][0]} it has values"
            )
    return {path: _info(path, places_of_path) for path, places_of_path in ways.items()}


def _info(path: KeyPath, ways: list[tuple[str, int, Kind]]) -> StepInfo:
    where, _, first = ways[0]
    dtypes = {kind.dtype for *_, kind in ways}
    if None in dtypes and len(dtypes) > 1:
        other = next(place for place, _, kind in ways if (kind.dtype is None) != (first.dtype is None))
        raise CorruptDatasetError(
            f"infos/{'/'.join(path)} is text in one of {where} and {other}, and numbers in the other"
        )
    dtype = None if None in dtypes else np.result_type(*dtypes)
    if all(not kind.shape or kind.shape[0] in (steps, steps + 1) for _, steps, kind in ways):
        return StepInfo(dtype, _largest([kind.shape[1:] for *_, kind in ways]))
    if dtype is not None and all(kind.shape == first.shape for *_, kind in ways):
        return StepInfo(dtype, first.shape, of_steps=False)
    place, steps, kind = next(way for way in ways if way[2].shape and way[2].shape[0] - way[1] not in (0, 1))
    rows = f"{place}: infos/{'/'.join(path)} has {kind.shape[0]} rows, {steps + 1} are needed for {steps} steps"
    return StepInfo(dtype, (), misfit=(place, rows))


def _largest(shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    """The smallest shape that each shape fits into; shorter ones get dims of one in front."""
    dims = max(map(len, shapes))
    return tuple(map(max, *((1,) * (dims - len(shape)) + shape for shape in (*shapes, shapes[0])))) if dims else ()


def fitted(values: Any, info: StepInfo, steps: int) -> Any:
    """The values of T + 1 times: an array [T + 1, *info.shape], or a list of text. None is an info that is missing.

    What is not known, at the reset or in a whole episode, is zero or empty text.
    """
    if info.dtype is None:
        if values is None or isinstance(values, str):
            return [values or ""] * (steps + 1)
        return ["", *values] if len(values) == steps else values
    out = np.zeros((steps + 1, *info.shape), info.dtype)
    if values is None or not (values := np.asarray(values)).size:
        return out
    if values.ndim == 0 or not info.of_steps:
        values = np.broadcast_to(values, (steps + 1, *values.shape))
    row = (1,) * (len(info.shape) - values.ndim + 1) + values.shape[1:]
    out[(slice(steps + 1 - len(values), None), *map(slice, row))] = values.reshape(len(values), *row)
    return out
