"""Conversion of stored trajectories to Minari episodes."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase, is_non_tensor

from interop.data.keys import as_path, entries_below
from interop.datasets.export_formats import FileFormat, refuse_names
from interop.datasets.stored_episodes import KeyPath, Kind, StoredEpisodes, shown_kind
from interop.ted.row_values import dense, words

Keys = str | tuple[str, ...] | Mapping[str, str | tuple[str, ...]]
_FLAGS = ("done", "terminated", "truncated")
_OUTCOMES = {("reward",), *((name,) for name in _FLAGS)}
_TUPLE_PART = re.compile(r"_index_\d+")  # how Minari names the parts of a Tuple
_EXACT = 2**53  # the loader reads rewards as float64


@dataclass(frozen=True)
class EpisodeBuffers:
    """The stored trajectories as episodes of Minari. Made by `of`, which checks all rows.

    Args:
        stored: the trajectories.
        files: the format.
        places: the entries, without "next", by their place in an episode: ("observations", "camera"), ("infos", "speed").
        kinds: the kind of the entry at each place.
    """

    stored: StoredEpisodes
    files: FileFormat
    places: Mapping[KeyPath, KeyPath]
    kinds: Mapping[KeyPath, Kind]

    @classmethod
    def of(cls, stored: StoredEpisodes, files: FileFormat, observation: Keys, action: Keys) -> "EpisodeBuffers":
        """Check every entry and all rows.

        Args:
            stored: the trajectories.
            files: the format.
            observation, action: the key of the entry, or a dict of several.

        Raises:
            KeyError: an entry is missing.
            TypeError: the files have no such entries, see `FileFormat.kinds`; or rewards or flags are no numbers.
            ValueError: several rewards or flags a step, an entry of "next" of another shape or dtype, or a key that cannot
                be read back.
        """
        kinds = files.kinds(stored)
        _check_outcomes(kinds, stored)
        entries = {path: kind for path, kind in kinds.items() if path[0] != "next"}
        for path, kind in kinds.items():
            below = path[1:]
            if path[0] != "next" or not below or below in _OUTCOMES:
                continue
            if entries.setdefault(below, kind) != kind:
                raise ValueError(
                    f"{below} is {shown_kind(entries[below])}, below 'next' it is {shown_kind(kind)}: one of the two has to "
                    "be converted"
                )
        # Outcomes of the root, zero in data of collectors, are infos where they say something.
        entries = {
            path: kind
            for path, kind in entries.items()
            if path not in _OUTCOMES or isinstance(kind[0], str) or stored.is_ever_set(path)
        }
        if stored.id_path is not None:  # Minari numbers episodes
            entries.pop(stored.id_path, None)
        places = dict(_entries_under(entries, observation, "observations")) | dict(
            _entries_under(entries, action, "actions")
        )
        used = set(places.values())
        for path in (path for path in entries if path not in used):
            place = ("infos", *(path[1:] if path[0] == "info" and len(path) > 1 else path))
            if place in places:
                raise ValueError(
                    f'{path} and {places[place]}: an entry of "info" has the name of one beside it: both would be an info. '
                    "Rename one"
                )
            places[place] = path
        refuse_names(places, "place in the episodes of Minari")
        for place, path in places.items():
            if part := next(filter(_TUPLE_PART.fullmatch, place), None):
                raise ValueError(f"{path}: {part!r} is how Minari names a part of a Tuple: rename the entry")
        return cls(stored, files, places, {place: entries[path] for place, path in places.items()})

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield episodes, one at a time, as keyword arguments of `minari.EpisodeBuffer`.

        A trajectory is split if an entry of "next" differs from the next row.
        """
        for rows in self.stored:
            start = 0
            for stop in [*_breaks(rows), len(rows)]:
                yield self._episode(rows[start:stop])
                start = stop

    def _episode(self, rows: TensorDictBase) -> dict[str, Any]:
        above, below = (dict(entries_below(part)) for part in (rows.exclude("next"), rows.get("next", {})))
        entries: dict[KeyPath, Any] = {}
        for place, path in self.places.items():
            now = above.get(path)
            then = None if path in _OUTCOMES else below.get(path)
            values = _one_more(*(None if column is None else self.files.values(column, path) for column in (now, then)))
            if place[0] == "actions":
                values = values[: len(rows)]
            elif place[0] == "infos" and np.ndim(values) == 1:
                values = [*values]  # Arrow needs lists
            entries[place] = values
        return {"infos": {}, **_nested(entries), **_outcomes(rows)}


def _entries_under(entries: Mapping[KeyPath, Kind], keys: Keys, place: str) -> Iterator[tuple[KeyPath, KeyPath]]:
    """The entries under the keys, by their place. KeyError for a key under which there is none."""
    named: Mapping[Any, Any] = {(name,): key for name, key in keys.items()} if isinstance(keys, Mapping) else {(): keys}
    for name, key in named.items():
        path = as_path(key)
        below = [path_below for path_below in entries if path_below[: len(path)] == path]
        if not below:
            names = sorted(repr(path[0] if len(path) == 1 else path) for path in entries)
            raise KeyError(f"{key!r} is not stored; there are {', '.join(names) or 'none'}. Name the entry by its key")
        for path_below in below:
            yield (place, *name, *path_below[len(path) :]), path_below


def _one_more(above: Any, below: Any) -> Any:
    """The values of T + 1 steps: those of the root, then the last one of "next"; zero or empty text where one is missing."""
    present = below if above is None else above
    nothing = [""] if isinstance(present, list) else np.zeros_like(present[:1])
    if above is None:
        parts = [nothing, below]
    else:
        parts = [above, nothing if below is None else below[-1:]]
    return [*parts[0], *parts[1]] if isinstance(present, list) else np.concatenate(parts)


def _nested(values: Mapping[KeyPath, Any]) -> dict[str, Any]:
    """Convert values by path to nested dicts."""
    out: dict[Any, Any] = {}
    for path, value in values.items():
        holder = out
        for step in path[:-1]:
            holder = holder.setdefault(step, {})
        holder[path[-1]] = value
    return out


def _check_outcomes(kinds: Mapping[KeyPath, Kind], stored: StoredEpisodes) -> None:
    """KeyError, TypeError or ValueError for rewards and flags that are not one number a step."""
    if ("next", "reward") not in kinds:
        names_text = ", ".join(sorted(map(repr, kinds))) or "none"
        raise KeyError(f"('next', 'reward') is not stored; there are {names_text}")
    for name in ("reward", *_FLAGS):
        dtype, shape = kinds.get(("next", name), (torch.bool, ()))
        if isinstance(dtype, str) or (dtype.is_complex and name != "reward"):
            raise TypeError(f"('next', {name!r}) is {shown_kind((dtype, shape))}: Minari has a number a step there")
        if torch.Size(shape).numel() != 1:
            raise ValueError(f"('next', {name!r}) has the shape {[*shape]}: Minari has one {name} a step")
    if kinds["next", "reward"][0] == torch.int64 and stored.reaches(("next", "reward"), _EXACT):
        raise ValueError(
            "('next', 'reward') has integers beyond 2**53, which are read as float64 and would not come back: convert them"
        )


def _outcomes(rows: TensorDictBase) -> dict[str, Any]:
    """Rewards and flags. The last step is truncated unless it is terminated."""
    count = len(rows)
    flags = {
        name: value.reshape(count).numpy() != 0
        for name in _FLAGS
        if (value := rows.get(("next", name), None)) is not None
    }
    none = np.zeros(count, np.bool_)
    done = flags.get("done", none)
    terminated = flags.get("terminated", done & ~flags.get("truncated", none))
    truncated = flags.get("truncated", done & ~terminated).copy()
    truncated[-1] |= not terminated[-1]
    rewards = rows["next", "reward"].reshape(count).resolve_conj().resolve_neg().numpy()
    return {"rewards": rewards, "terminations": terminated, "truncations": truncated}


def _breaks(rows: TensorDictBase) -> list[int]:
    """The rows that do not continue the "next" of the previous row."""
    apart = np.zeros(len(rows) - 1, np.bool_)
    for path, below in entries_below(rows.get("next", {})):
        above = rows.get(path, None)
        if path in _OUTCOMES or above is None or not len(apart):
            continue
        if is_non_tensor(below):
            apart |= [one != other for one, other in zip(below.tolist()[:-1], above.tolist()[1:], strict=True)]
        elif below.numel():
            apart |= (words(dense(below[:-1]), 1) != words(dense(above[1:]), 1)).any(1)
    return (np.flatnonzero(apart) + 1).tolist()
