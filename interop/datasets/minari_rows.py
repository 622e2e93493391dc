"""Rows of tensordicts from episodes as Minari stores them."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from tensordict import TensorDict

from interop.datasets.errors import CorruptDatasetError
from interop.datasets.images import stacked
from interop.datasets.minari_episodes import ONE_MORE, Episode
from interop.datasets.minari_spaces import Space, at, shape_of
from interop.datasets.rows import leaf

_KEYS = {
    "observations": "observation",
    "actions": "action",
    "rewards": "reward",
    "terminations": "terminated",
    "truncations": "truncated",
    "infos": "info",
}
_COLUMNS = {"rewards": None, "terminations": np.bool_, "truncations": np.bool_}  # below "next", [T, 1]
_JPEG = b"\xff\xd8\xff"


def rows(found: Iterable[Episode], spaces: Mapping[str, Space], most: int) -> Iterator[TensorDict]:
    """The steps of episodes, short ones together, long ones in pieces of `most`: at least so many at a time, if there are.

    CorruptDatasetError where an entry has not as many rows as the episode has steps, or is unlike that of other episodes.
    """
    full: list[Episode] = []
    waiting: list[Episode] = []
    count = 0
    for episode in found:
        entries = {path: _with_reset(values, path, episode) for path, values in episode.entries.items()}
        for start in range(0, episode.steps, most):
            stop = min(start + most, episode.steps)
            cut = {path: values[start : stop + (path[0] in ONE_MORE)] for path, values in entries.items()}
            waiting.append(episode._replace(steps=stop - start, entries=cut))
            count += stop - start
            if count >= most:
                if full:
                    yield _joined(full, spaces)
                full, waiting, count = waiting, [], 0
    if full or waiting:
        yield _joined([*full, *waiting], spaces)


def _with_reset(values: Any, path: tuple[str, ...], episode: Episode) -> Any:
    """Values with as many rows as they need. Infos may lack that of the reset: it is zero, or empty text."""
    has_rows = isinstance(values, list) or getattr(values, "ndim", 0) > 0
    count, needed = len(values) if has_rows else 0, episode.steps + (path[0] in ONE_MORE)
    if path[0] == "infos" and count == episode.steps:
        is_array = isinstance(values, np.ndarray)
        return np.concatenate([np.zeros_like(values[:1]), values]) if is_array else ["", *values]
    if count != needed:
        raise CorruptDatasetError(
            f"{episode.where}: {'/'.join(path)} has {count} rows, {needed} are needed for {episode.steps} steps"
        )
    return values


def _joined(pieces: Sequence[Episode], spaces: Mapping[str, Space]) -> TensorDict:
    first, *others = pieces
    for name in ("observations", "actions", *_COLUMNS):
        if not any(path[0] == name for path in first.entries):
            raise CorruptDatasetError(f"{first.where} has no {name!r}")
    for other in others:
        if differ := first.entries.keys() ^ other.entries.keys():
            names = ", ".join(sorted("/".join(path) for path in differ))
            raise CorruptDatasetError(f"only one of {first.where} and {other.where} has {names}")
    steps = [each.steps for each in pieces]
    out = TensorDict({"episode": leaf(np.repeat([each.number for each in pieces], steps))}, [sum(steps)])
    for path in first.entries:
        space, key = at(spaces.get(path[0]), path[1:]), (_KEYS.get(path[0], path[0]), *path[1:])
        values = [_decoded(each, path, space) for each in pieces]
        _check_alike(values, path, pieces)
        if path[0] in _COLUMNS:
            out["next", *key] = leaf(_column(_one(values), _COLUMNS[path[0]]))
        elif path[0] in ONE_MORE:
            out[key] = leaf(_one([each[:-1] for each in values]))
            out["next", *key] = leaf(_one([each[1:] for each in values]))
        else:
            out[key] = leaf(_one(values))
    out["next", "done"] = out["next", "terminated"] | out["next", "truncated"]
    return out


def _decoded(episode: Episode, path: tuple[str, ...], space: Space) -> Any:
    """Values in the shape that the space says, where it is one of as many numbers. Images are decoded."""
    values, shape = episode.entries[path], shape_of(space)
    where = f"{episode.where}, {'/'.join(path)}"
    if isinstance(values, list):
        return values if isinstance(values[0], str) else stacked(values, where)
    if shape is None or values.shape[1:] == shape:
        return values
    if len(shape) > 1 and values.dtype == np.uint8 and values.ndim == 2 and values[0, :3].tobytes() == _JPEG:
        return stacked(values, where)
    return values.reshape(len(values), *shape) if math.prod(values.shape[1:]) == math.prod(shape) else values


def _check_alike(values: Sequence[Any], path: tuple[str, ...], pieces: Sequence[Episode]) -> None:
    kinds = [("text", []) if isinstance(each, list) else (each.dtype, [*each.shape[1:]]) for each in values]
    for piece, kind in zip(pieces, kinds, strict=True):
        if kind != kinds[0]:
            found, first = (f"{dtype} {shape}" for dtype, shape in (kind, kinds[0]))
            raise CorruptDatasetError(f"{piece.where}: {'/'.join(path)} is {found}, in {pieces[0].where} it is {first}")


def _one(values: Sequence[Any]) -> Any:
    if isinstance(values[0], list):
        return [row for each in values for row in each]
    return values[0] if len(values) == 1 else np.concatenate(values)


def _column(values: np.ndarray, dtype: type | None) -> np.ndarray:
    """[T] as [T, 1], integers as float64."""
    dtype = dtype or (np.float64 if values.dtype.kind in "biu" else values.dtype.type)
    return (values if values.ndim > 1 else values[:, None]).astype(dtype, copy=False)
