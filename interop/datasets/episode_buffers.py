"""Conversion of stored trajectories to Minari episodes."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase, is_non_tensor

from interop.data.keys import as_path, entries_below, known_keys
from interop.datasets.rows import following
from interop.datasets.stored_episodes import StoredEpisodes, plain
from interop.ted.row_values import dense, words

Keys = str | tuple[str, ...] | Mapping[str, str | tuple[str, ...]]
_OUTCOMES = {("reward",), ("done",), ("terminated",), ("truncated",)}


def episode_buffers(stored: StoredEpisodes, observation: Keys, action: Keys) -> Iterator[dict[str, Any]]:
    """Yield episodes, one at a time, as keyword arguments of `minari.EpisodeBuffer`.

    A trajectory is split if an entry of "next" differs from the next row.

    Args:
        stored: the trajectories.
        observation, action: the key of the entry, or a dict of several.

    Raises: KeyError for a missing entry; TypeError for one that is neither text nor a tensor that NumPy supports;
    ValueError for several rewards per step, and for entries of "next" with another shape or dtype.
    """
    ids = set() if stored.id_path is None else {stored.id_path}
    for rows in stored:
        start = 0
        for stop in [*_breaks(rows), len(rows)]:
            yield _episode(rows[start:stop], observation, action, ids)
            start = stop


def _episode(rows: TensorDictBase, observation: Keys, action: Keys, ids: set[tuple[Any, ...]]) -> dict[str, Any]:
    steps, used = _steps(rows), _OUTCOMES | ids

    def taken(keys: Keys, count: int) -> Any:
        if isinstance(keys, Mapping):
            return {name: taken(key, count) for name, key in keys.items()}
        path = as_path(keys)
        found = {each[len(path) :]: value[:count] for each, value in steps.items() if each[: len(path)] == path}
        if not found:
            raise KeyError(f"{keys!r} is not stored; there are {known_keys(rows)}. Name the entry by its key")
        used.update((*path, *each) for each in found)
        return _nested(found)

    observations, actions = taken(observation, len(rows) + 1), taken(action, len(rows))
    infos = {}
    for path, value in steps.items():
        if path not in used:
            name = path[1:] if path[0] == "info" else path
            if name in infos:
                raise ValueError('an entry of "info" has the name of one beside it: both would be an info. Rename one')
            infos[name] = [*value] if np.ndim(value) == 1 else value  # Arrow needs lists
    return {"observations": observations, "actions": actions, **_outcomes(rows), "infos": _nested(infos)}


def _steps(rows: TensorDictBase) -> dict[Any, Any]:
    """Entries by path, T + 1 steps each: the root entries, then the last one of "next"."""
    above, below = (dict(entries_below(each)) for each in (rows.exclude("next"), rows.get("next", {})))
    steps = {
        path: torch.cat([each, below[path][-1:] if path in below else following(each[:1])])
        for path, each in above.items()
    }
    for path in below.keys() - above.keys() - _OUTCOMES:
        steps[path] = torch.cat([following(below[path][:1]), below[path]])
    return {path: plain(each, path) for path, each in steps.items()}


def _nested(values: Mapping[Any, Any]) -> Any:
    """Convert values by path to nested dicts."""
    out: dict[Any, Any] = {}
    for path, value in values.items():
        if not path:
            return value
        holder = out
        for each in path[:-1]:
            holder = holder.setdefault(each, {})
        holder[path[-1]] = value
    return out


def _outcomes(rows: TensorDictBase) -> dict[str, Any]:
    """Rewards and flags. The last step is truncated unless it is terminated."""
    count = len(rows)
    if (reward := rows.get(("next", "reward"), None)) is None:
        raise KeyError(f"('next', 'reward') is not stored; there are {known_keys(rows)}")
    if reward.numel() != count:
        raise ValueError(f"('next', 'reward') has the shape {[*reward.shape[1:]]}: Minari has one reward a step")
    flags = {
        name: value.reshape(count).numpy() != 0
        for name in ("done", "terminated", "truncated")
        if (value := rows.get(("next", name), None)) is not None
    }
    none = np.zeros(count, np.bool_)
    done = flags.get("done", none)
    terminated = flags.get("terminated", done & ~flags.get("truncated", none))
    truncated = flags.get("truncated", done & ~terminated).copy()
    truncated[-1] |= not terminated[-1]
    return {"rewards": reward.reshape(count).numpy(), "terminations": terminated, "truncations": truncated}


def _breaks(rows: TensorDictBase) -> list[int]:
    """The rows that do not continue the "next" of the previous row."""
    apart = np.zeros(len(rows) - 1, np.bool_)
    for path, below in entries_below(rows.get("next", {})):
        above = rows.get(path, None)
        if path in _OUTCOMES or above is None or not len(apart):
            continue
        if is_non_tensor(below):
            apart |= [one != other for one, other in zip(below.tolist()[:-1], above.tolist()[1:], strict=True)]
        elif (below.dtype, below.shape) != (above.dtype, above.shape):
            raise ValueError(
                f"{path} is {above.dtype} {[*above.shape[1:]]}, below 'next' it is {below.dtype} {[*below.shape[1:]]}: "
                "one of the two has to be converted"
            )
        elif below.numel():
            apart |= (words(dense(below[:-1]), 1) != words(dense(above[1:]), 1)).any(1)
    return (np.flatnonzero(apart) + 1).tolist()
