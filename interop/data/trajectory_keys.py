"""Which entries of rows say where trajectories begin and end: the names that the whole library knows."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from tensordict.utils import NestedKey

from interop.data.keys import as_path, checked_key

KeyPath = tuple[Any, ...]

IDS: tuple[KeyPath, ...] = (("collector", "traj_ids"), ("traj_ids",), ("episode",))
ENDS: tuple[KeyPath, ...] = (("next", "done"), ("next", "terminated"), ("next", "truncated"))
FIRSTS: tuple[KeyPath, ...] = (("is_init",),)
MASKS: tuple[KeyPath, ...] = (("collector", "mask"),)


@dataclasses.dataclass(frozen=True)
class TrajectoryKeys:
    """The entries that mark trajectories, all of which count together.

    Attributes:
        ids: rows of one trajectory have the same value in each of these.
        ends: true in the last row of a trajectory.
        firsts: true in the first row of a trajectory.
        masks: false for padding, which is a trajectory of its own.
        named: those among them that the user named. The others count where they are stored with one value an item.
        required: those among them that must be stored.
    """

    ids: tuple[KeyPath, ...] = IDS
    ends: tuple[KeyPath, ...] = ENDS
    firsts: tuple[KeyPath, ...] = FIRSTS
    masks: tuple[KeyPath, ...] = MASKS
    named: frozenset[KeyPath] = frozenset()
    required: frozenset[KeyPath] = frozenset()

    @classmethod
    def chosen(
        cls, traj_key: NestedKey | None = None, end_keys: Sequence[Any] | None = None, only_named_keys: bool = False
    ) -> "TrajectoryKeys":
        """The default keys and those that a user names; with `only_named_keys` these alone.

        Args:
            traj_key: an entry of ids; None for the default ones.
            end_keys: entries that are true at ends; None for the default ones.
            only_named_keys: without the default keys. ValueError if no key is named.
        """
        ids = () if traj_key is None else (as_path(checked_key("traj_key", traj_key)),)
        ends = tuple(as_path(checked_key("end_keys", key)) for key in end_keys or ())
        named = frozenset((*ids, *ends))
        if only_named_keys:
            if not named:
                raise ValueError("only_named_keys=True needs a traj_key or end_keys: no other entry would count")
            return cls(ids, ends, (), (), named)
        return cls(tuple(dict.fromkeys((*ids, *IDS))), tuple(dict.fromkeys((*ends, *ENDS))), named=named)

    def paths(self) -> tuple[KeyPath, ...]:
        """All of them."""
        return (*self.ids, *self.ends, *self.firsts, *self.masks)

    def groups(self) -> tuple[tuple[KeyPath, ...], ...]:
        """Ids, ends, first rows and masks."""
        return self.ids, self.ends, self.firsts, self.masks

    def only(self, paths: Sequence[KeyPath]) -> "TrajectoryKeys":
        """Those among `paths`."""
        ids, ends, firsts, masks = (tuple(path for path in group if path in paths) for group in self.groups())
        return TrajectoryKeys(ids, ends, firsts, masks, self.named, self.required)

    def requiring(self, path: KeyPath) -> "TrajectoryKeys":
        """The same keys, of which this one must be stored."""
        return dataclasses.replace(self, required=self.required | {path})

    def without_ends(self) -> "TrajectoryKeys":
        """The ids alone."""
        return TrajectoryKeys(
            self.ids, (), (), (), self.named & frozenset(self.ids), self.required & frozenset(self.ids)
        )
