"""The states of the members of an ensemble."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from fbuf.checkpoint import CheckpointMismatch, Fields
from interop.checkpoint.state import LoadOptions, described, state_for, together


def saved_members(members: Sequence[Any]) -> list[Any]:
    """The saved state of each, with its class."""
    return [described(member, member.saved()) for member in members]


def loading_members(fields: Fields, members: Sequence[Any], options: LoadOptions) -> Callable[[], None]:
    """Check what `saved_members` gave, under "members"; what is returned puts it in."""
    saved = fields.items("members")
    _check_count(len(saved), len(members))
    return together(
        partial(member.restoring, state_for(member, each, f"member {place}"), options)
        for place, (member, each) in enumerate(zip(members, saved, strict=True))
    )


def loading_dicts(ensemble: Any, given: Any, members: Sequence[Any]) -> tuple[dict[str, Any], Callable[[], None]]:
    """Check the state dicts under "0", "1" and so on; what else there is, and what puts them in."""
    if not isinstance(given, Mapping):
        raise CheckpointMismatch(f"the state of a {type(ensemble).__name__} is a dict, got {type(given).__name__}")
    places = {key for key in given if isinstance(key, str) and key.isdecimal()}
    if places != {str(place) for place in range(len(members))}:
        _check_count(len(places), len(members))
        raise CheckpointMismatch(f"members have the numbers 0 to {len(members) - 1}, found {sorted(places)}")
    apply = together(partial(member.restoring_dict, given[str(place)]) for place, member in enumerate(members))
    return {key: value for key, value in given.items() if key not in places}, apply


def _check_count(saved: int, here: int) -> None:
    if saved != here:
        raise CheckpointMismatch(f"the checkpoint is of {saved} members, there are {here}")
