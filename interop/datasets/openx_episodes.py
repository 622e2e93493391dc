"""Conversion of pickled Open X-Embodiment episodes to rows."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from interop.datasets.archives import members_of, tar_members
from interop.datasets.errors import CorruptDatasetError
from interop.datasets.hub import hub_stream
from interop.datasets.images import stacked
from interop.datasets.object_arrays import load_object
from interop.datasets.rows import channels_first, column, following, nested

REPO = "jxu124/OpenX-Embodiment"
_REQUIRED = ("observation", "reward", "is_first", "is_last", "is_terminal")

Episode = tuple[str, Sequence[Mapping[str, Any]]]  # name for errors, steps with encoded images


def episodes(archive: Path | str, first: int = 0, stop: int | None = None) -> Iterator[Episode]:
    """Yield the episodes of an archive. Some may have no steps. A text path is an archive on the hub, read as a stream.

    CorruptDatasetError for other content, and for an archive whose episodes all have no steps.
    """
    empty: str | None = ""  # the last episode without steps, while there is no other one
    with ExitStack() as opened:
        members = (
            tar_members(archive)
            if isinstance(archive, Path)
            else members_of(opened.enter_context(hub_stream(REPO, archive)), archive)
        )
        pickled = (member_data for member_data in members if member_data[0].endswith(".data.pickle"))
        for name, member in islice(pickled, first, stop):
            where = f"{archive}, {name}"
            content = load_object(member, where)
            steps = content.get("steps") if isinstance(content, Mapping) else None
            if not isinstance(steps, list) or not all(isinstance(step, Mapping) for step in steps):
                raise CorruptDatasetError(f'{where}: is no dict with a list of dicts under "steps"')
            empty = where if not steps and empty is not None else None
            yield where, steps
    if empty and not first and stop is None:
        raise CorruptDatasetError(f'{empty}: no episode of this archive is a dict with a list of dicts under "steps"')


def trajectory(episode: Episode, number: int) -> TensorDict:
    """Convert an episode of at least one step to a tensordict [T], see `OpenXExperienceReplay`."""
    where, steps = episode
    entries = _entries(steps, where)
    count = len(steps)
    if missing := [key for key in _REQUIRED if key not in entries]:
        raise CorruptDatasetError(f"{where}: the steps have no {', '.join(missing)}")
    reward, first, last, terminal = (entries.pop(key) for key in _REQUIRED[1:])
    rows = nested(entries, count, where)
    terminated = column(terminal, torch.bool)
    done = column(last, torch.bool) | terminated
    done[-1] = True  # an episode ends with its last step, whether it is flagged or not
    then = {
        "observation": following(rows.get("observation")),
        "reward": column(reward, torch.float32),
        "done": done,
        "terminated": terminated,
        "truncated": done & ~terminated,
    }
    rows["next"] = TensorDict(then, [count])
    rows["is_init"] = column(first, torch.bool)[:, 0]
    rows["episode"] = torch.full((count,), number, dtype=torch.int32)
    return rows.update({flag: torch.zeros_like(done) for flag in ("done", "terminated", "truncated")})


def _entries(steps: Sequence[Mapping[str, Any]], where: str) -> dict[str, Any]:
    """The values of the steps by key: an array, a list of text, or a dict of these."""
    keys = steps[0].keys()
    for place, step in enumerate(steps):
        if step.keys() != keys:
            other = ", ".join(sorted(map(str, step.keys() ^ keys)))
            raise CorruptDatasetError(f"{where}, step {place}: has other keys than the first step: {other}")
    return {key: _entry([step[key] for step in steps], f"{where}, {key}") for key in keys}


def _entry(values: list[Any], where: str) -> Any:
    """Combine the steps' values of one key."""
    if all(isinstance(value, Mapping) for value in values):
        if not all(isinstance(value.get("bytes"), bytes) for value in values):
            return _entries(values, where)
        return channels_first(stacked([value["bytes"] for value in values], where))
    try:
        if all(isinstance(value, str | bytes) for value in values):
            return [value.decode() if isinstance(value, bytes) else value for value in values]
        array = np.asarray(values)
        if array.dtype.kind not in "biuf":
            raise TypeError(f"there is {values[0]!r:.80}")
        return array.astype(np.float32) if type(values[0]) is float else array
    except (ValueError, TypeError) as error:
        raise CorruptDatasetError(f"{where}: these are neither numbers of one shape nor text: {error}") from error
