"""Conversion of Minari episodes to tensordict rows."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from tensordict import TensorDict

from interop.datasets.errors import CorruptDatasetError
from interop.datasets.images import stacked
from interop.datasets.minari_episodes import ONE_MORE, MinariEpisode, Steps
from interop.datasets.minari_infos import Layout, fitted
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

Arrays = Mapping[tuple[str, ...], np.dtype]
"""The entries of a step by their place, as dtypes with a shape, where they are known."""


def rows(episodes: Iterable[Steps], arrays: Arrays, infos: Layout, most: int) -> Iterator[TensorDict]:
    """Yield the steps of episodes; short episodes are joined, long ones split into pieces of `most` steps.

    All rows have all `infos`. The last step of an episode ends it: it is truncated unless it is terminated.

    CorruptDatasetError if an entry does not match the steps of its episode, or differs from other episodes.
    """
    waiting: list[Steps] = []
    count = 0
    for (number, steps), where, entries in episodes:
        columns = {path: column for path, column in entries.items() if path[0] != "infos" or path[1:] not in infos}
        columns = {path: _checked(column, path, steps, where) for path, column in columns.items()}
        for path, info in infos.items():
            if info.misfit is None:
                columns["infos", *path] = fitted(entries.get(("infos", *path)), info, steps)
            elif info.misfit[0] == where:
                raise CorruptDatasetError(info.misfit[1])
        entries = _ended(columns)
        for start in range(0, steps, most):
            stop = min(start + most, steps)
            cut = {path: values[start : stop + (path[0] in ONE_MORE)] for path, values in entries.items()}
            waiting.append(Steps(MinariEpisode(number, stop - start), where, cut))
            count += stop - start
            if count >= most:
                yield _joined(waiting, arrays)
                waiting = []
                count = 0
    if waiting:
        yield _joined(waiting, arrays)


def _checked(values: Any, path: tuple[str, ...], steps: int, where: str) -> Any:
    """Validate the number of rows."""
    needed = steps + (path[0] in ONE_MORE)
    count = len(values) if isinstance(values, list) or np.ndim(values) else 0
    if count != needed:
        raise CorruptDatasetError(f"{where}: {'/'.join(path)} has {count} rows, {needed} are needed for {steps} steps")
    return values


def _ended(entries: dict[tuple[str, ...], Any]) -> dict[tuple[str, ...], Any]:
    """Mark the last step of an episode as truncated unless a flag ends it, as Minari's collector does."""
    terminated, truncated = (entries.get((name,)) for name in ("terminations", "truncations"))
    if not isinstance(terminated, np.ndarray) or not isinstance(truncated, np.ndarray) or not len(truncated):
        return entries  # `_joined` reports what is missing
    if not terminated[-1].any() and not truncated[-1].any():
        ended = truncated.copy()
        ended[-1] = True
        return {**entries, ("truncations",): ended}
    return entries


def _joined(pieces: Sequence[Steps], arrays: Arrays) -> TensorDict:
    first = pieces[0]
    for name in ("observations", "actions", *_COLUMNS):
        if not any(path[0] == name for path in first.entries):
            raise CorruptDatasetError(f"{first.where} has no {name!r}")
    for other in pieces[1:]:
        if differ := first.entries.keys() ^ other.entries.keys():
            names = ", ".join(sorted(map("/".join, differ)))
            raise CorruptDatasetError(f"only one of {first.where} and {other.where} has {names}")
    numbers, steps = zip(*(piece.episode for piece in pieces), strict=True)
    out = TensorDict({"episode": leaf(np.repeat(numbers, steps))}, [sum(steps)])
    for path in first.entries:
        key = (_KEYS.get(path[0], path[0]), *path[1:])
        values = [_decoded(piece, path, arrays.get(path)) for piece in pieces]
        _check_alike(values, path, pieces)
        if path[0] in _COLUMNS:
            out["next", *key] = leaf(_column(_concatenated(values), _COLUMNS[path[0]]))
        elif path[0] in ONE_MORE:
            out[key] = leaf(_concatenated([array[:-1] for array in values]))
            out["next", *key] = leaf(_concatenated([array[1:] for array in values]))
        else:
            out[key] = leaf(_concatenated(values))
    out["next", "done"] = out["next", "terminated"] | out["next", "truncated"]
    return out


def _decoded(piece: Steps, path: tuple[str, ...], kind: np.dtype | None) -> Any:
    """Decode images, and reshape other values to the shape of `kind` if the number of elements matches."""
    values = piece.entries[path]
    is_list = isinstance(values, list)
    if (is_list and isinstance(values[0], str)) or (not is_list and (kind is None or values.shape[1:] == kind.shape)):
        return values
    if is_list or (values.dtype == np.uint8 and values.ndim == 2 and values[0, :3].tobytes() == _JPEG):
        return stacked(values, f"{piece.where}, {'/'.join(path)}")
    shape = (len(values), *kind.shape) if kind else values.shape
    return values.reshape(shape) if values.size == math.prod(shape) else values


def _check_alike(values: Sequence[Any], path: tuple[str, ...], pieces: Sequence[Steps]) -> None:
    kinds = [("text", "") if isinstance(array, list) else (array.dtype, [*array.shape[1:]]) for array in values]
    for piece, kind in zip(pieces, kinds, strict=True):
        if kind != kinds[0]:
            kind_text, first = (f"{dtype} {shape}" for dtype, shape in (kind, kinds[0]))
            raise CorruptDatasetError(
                f"{piece.where}: {'/'.join(path)} is {kind_text}, in {pieces[0].where} it is {first}"
            )


def _concatenated(values: Sequence[Any]) -> Any:
    if isinstance(values[0], list):
        return [row for array in values for row in array]
    return values[0] if len(values) == 1 else np.concatenate(values)


def _column(values: np.ndarray, dtype: type | None) -> np.ndarray:
    """Reshape [T] to [T, 1], and convert integers to float64."""
    dtype = dtype or (np.float64 if values.dtype.kind in "biu" else values.dtype.type)
    return (values if values.ndim > 1 else values[:, None]).astype(dtype, copy=False)
