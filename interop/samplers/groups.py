"""Which stored rows make whole groups, and how often each group was used."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np

from fbuf.checkpoint import Fields
from interop.checkpoint.state import integers

Id = int | str
# A number of a row: that of its group plus 1, a state, and the uses of the group. The first row of a group has the state
# of the group; the state of the other rows says that they have their place in the group instead of the uses. Older folders
# have no places: all rows of a group have its state and uses.
_NUMBER = 24  # bits to the right of the number
_STATE = 22  # bits to the right of the state
_OPEN, _WHOLE, _BROKEN, _LATER = range(4)
_STATES = 3  # the bits of a state
MOST_USES = (1 << _STATE) - 1


@dataclasses.dataclass(slots=True, eq=False)
class Group:
    """Rows of one id."""

    number: int  # of all groups ever begun
    id: Id
    size: int  # rows of the complete group
    slots: list[int]  # in the order of writing
    uses: int = 0
    place: int = -1  # in `Groups.ready`; -1 for none

    @property
    def is_whole(self) -> bool:
        """Whether all of its rows are stored."""
        return len(self.slots) == self.size


class Groups:
    """Groups of `size` rows of one id, in the order of writing. Without a size, each row says that of its group.

    A row that is overwritten leaves its group. The group is then broken: its other rows join no other group. A group that
    was used `most` times is no longer ready. O(1) a row.
    """

    def __init__(self, size: int | None, most: int | None) -> None:
        self.size = size
        self.most = most
        self.ready: list[Group] = []  # complete, and not used up
        self._open: dict[Id, Group] = {}  # incomplete, not broken
        self._of: dict[int, Group] = {}  # by slot
        self._begun = 0
        self._top = 0  # above all slots of rows
        self._changed: set[Group] | None = None  # since the last `changes`; None if nobody asks
        self._log: list[Callable[[], None]] = []  # each undoes a change since `begin`, the last first

    # ------------------------------------------------------------------ undo

    def begin(self) -> None:
        """Forget how to undo what was done."""
        self._log = []

    @property
    def undoable(self) -> int:
        """How many changes can be undone."""
        return len(self._log)

    def undo(self, changes: int = 0) -> None:
        """Undo all changes but the first ones since `begin`, also one that was interrupted. It may be called again."""
        log = self._log
        while len(log) > changes:
            log[-1]()
            log.pop()

    def _keep(self, *groups: Group) -> None:
        """Be able to undo changes of the counters, and of these groups."""
        self._log.append(partial(self._put_counters, self._begun, self._top, dict(self._open)))
        self._log += [partial(self._put_group, group, [*group.slots], group.uses, group.place) for group in groups]

    def _put_group(self, group: Group, slots: list[int], uses: int, place: int) -> None:
        group.slots[:] = slots
        group.uses = uses
        group.place = place
        self._note(group)

    def _put_counters(self, begun: int, top: int, opened: "dict[Id, Group]") -> None:
        self._begun = begun
        self._top = top
        self._open = opened

    def _keep_slot(self, slot: int) -> None:
        self._log.append(partial(self._put_slot, slot, self._of.get(slot)))

    def _put_slot(self, slot: int, group: Group | None) -> None:
        if group is None:
            self._of.pop(slot, None)
        else:
            self._of[slot] = group

    def _keep_ready(self, *places: int) -> None:
        """Be able to undo changes of the list of ready groups at its end and at these places."""
        groups = {place: self.ready[place] for place in (*places, len(self.ready) - 1) if place >= 0}
        self._log.append(partial(self._put_ready, len(self.ready), groups))

    def _put_ready(self, length: int, groups: dict[int, Group]) -> None:
        ready = self.ready
        ready += [groups[place] for place in range(len(ready), length)]
        del ready[length:]
        for place, group in groups.items():
            ready[place] = group

    # ------------------------------------------------------------------ changes

    def write(self, slots: Sequence[int], ids: Sequence[Id], sizes: Sequence[int] | None = None) -> None:
        """Enter rows with these ids, written to different slots in this order.

        `sizes`, where the groups have no common one, are those of their groups. ValueError if rows of a group disagree.
        """
        of_rows = [self.size] * len(slots) if sizes is None else sizes
        for slot, id_, size in zip(slots, ids, of_rows, strict=True):
            self.remove(slot)
            assert size is not None
            group = self._open.get(id_) or Group(self._begun, id_, size, [])
            if group.size != size:
                raise ValueError(
                    f"the completions of {id_!r} disagree on the size of their group: {group.size} and {size}. Write "
                    "the same number with each, and give each visit of a prompt an id of its own"
                )
            self._keep(group)
            self._keep_slot(slot)
            if not group.slots:
                self._open[id_] = group
                self._begun += 1
            group.slots.append(slot)
            self._of[slot] = group
            self._note(group)
            self._top = max(self._top, slot + 1)
            if group.is_whole:
                del self._open[id_]
                self._keep_ready()
                group.place = len(self.ready)
                self.ready.append(group)

    def remove(self, slot: int) -> None:
        """Remove the row in a slot, which was overwritten or deleted."""
        group = self._of.get(slot)
        if group is not None:
            self._keep(group)
            self._keep_slot(slot)
            del self._of[slot]
            group.slots.remove(slot)
            self._note(group)
            self._retire(group)
            if self._open.get(group.id) is group:
                del self._open[group.id]

    def truncate(self, length: int) -> None:
        """Remove the rows in slots from `length` on. O(rows) where there are any."""
        if length < self._top:
            for slot in [slot for slot in self._of if slot >= length]:
                self.remove(slot)
            self._keep()
            self._top = length

    def use(self, groups: Iterable[Group]) -> None:
        """Count a use of each of these groups, which are ready."""
        for group in groups:
            self._keep(group)
            group.uses += 1
            self._note(group)
            if self.most is not None and group.uses >= self.most:
                self._retire(group)

    def used_up(self) -> list[int]:
        """The slots of complete groups that can be used no more. O(rows)."""
        return [slot for slot, group in self._of.items() if group.is_whole and not self._usable(group)]

    def differing(self, slots: Sequence[int], ids: Sequence[Id]) -> list[int]:
        """The places in `slots` of rows that are in no group, or in one of another id."""
        groups = zip(map(self._of.get, slots), ids, strict=True)
        return [place for place, (group, id_) in enumerate(groups) if group is None or group.id != id_]

    def _retire(self, group: Group) -> None:
        """Take a group off the ready ones; the last of these takes its place."""
        if group.place >= 0:
            last = self.ready[-1]
            self._keep_ready(group.place)
            self._keep(group, last)
            self.ready.pop()
            if last is not group:
                last.place = group.place
                self.ready[group.place] = last
            group.place = -1

    # ------------------------------------------------------------------ what there is

    def every(self) -> list[Group]:
        """All groups with a stored row, in the order in which they were begun. O(rows)."""
        return sorted(set(self._of.values()), key=attrgetter("number"))

    def is_open(self, group: Group) -> bool:
        """Whether further rows may join the group."""
        return self._open.get(group.id) is group

    # ------------------------------------------------------------------ a number of each row

    def _note(self, group: Group) -> None:
        if self._changed is not None:
            self._changed.add(group)

    def changes(self, every: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """The slots of rows in groups that changed since the last call, or of all rows, and a number of each.

        The number says to which group a row belongs, and how often this was used.
        """
        changed = set(self._of.values()) if every or self._changed is None else self._changed
        self._changed = set()
        slots = _array(slot for group in changed for slot in group.slots)
        return slots, _array(word for group in changed for word in self._words(group))

    def _words(self, group: Group) -> Iterator[int]:
        """The numbers of the rows of a group, in their order."""
        if group.is_whole:
            state = _WHOLE
        else:
            state = _OPEN if self.is_open(group) else _BROKEN
        number = (group.number + 1) << _NUMBER
        for place in range(len(group.slots)):
            if place == 0:
                yield number | state << _STATE | min(group.uses, MOST_USES)
            else:
                yield number | _LATER << _STATE | min(place, MOST_USES)

    @classmethod
    def of_words(cls, rows: Iterable[tuple[int, int, Id, int]], size: int | None, most: int | None) -> "Groups":
        """The groups of rows, given from the oldest to the newest by slot, number, id, and size of the group.

        Rows of the number 0 are in no group. A group is broken where the number of one of its rows was lost, as that of a
        row which was overwritten when no sampler kept groups.
        """
        new = cls(size, most)
        members_of = dict[int, list[tuple[int, int, Id, int]]]()
        for slot, word, id_, of_group in rows:
            if word:
                members_of.setdefault((word >> _NUMBER) - 1, []).append((slot, word, id_, of_group))
        for number in sorted(members_of):
            members = sorted(
                members_of[number], key=lambda member: _place(member[1])
            )  # of equal places the oldest first
            places = [_place(word) for _, word, _, _ in members]
            _, word, _, of_group = members[0]
            state, uses = word >> _STATE & _STATES, word & MOST_USES
            if state == _LATER:  # the first row is lost
                state, uses = _BROKEN, 0
            # The ids differ where one was edited since. The rows of the others join groups as rows that are new.
            id_ = Counter(id_ for _, _, id_, _ in members).most_common(1)[0][0]
            slots = [slot for slot, _, other, _ in members if other == id_]
            group = Group(number, id_, of_group, slots, uses)
            new._of |= dict.fromkeys(slots, group)
            is_all = len(slots) == len(members) and (
                not any(places) or places == [min(place, MOST_USES) for place in range(len(places))]
            )
            if state == _WHOLE and new._usable(group):
                group.place = len(new.ready)
                new.ready.append(group)
            elif state == _OPEN and is_all and len(slots) < group.size:
                new._open[id_] = group
        new._begun = max(members_of, default=-1) + 1
        new._top = max(new._of, default=-1) + 1
        return new

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_log": []}

    # ------------------------------------------------------------------ checkpoints

    def state(self) -> dict[str, Any]:
        """The tree of a checkpoint."""
        every = self.every()
        place = {group: at for at, group in enumerate(every)}
        ids = [group.id for group in every]
        numbers = [id_ for id_ in ids if isinstance(id_, int) and -(2**63) <= id_ < 2**63]
        return {
            "begun": self._begun,
            "numbers": _array(group.number for group in every),
            "ids": ids if len(numbers) < len(ids) else _array(numbers),
            "rows": _array(len(group.slots) for group in every),
            "slots": _array(slot for group in every for slot in group.slots),
            "uses": _array(group.uses for group in every),
            **({} if self.size is not None else {"sizes": _array(group.size for group in every)}),
            "open": _array(map(place.__getitem__, self._open.values())),
            "ready": _array(map(place.__getitem__, self.ready)),
        }

    @classmethod
    def of_state(cls, fields: Fields, size: int | None, most: int | None) -> "Groups":
        """The groups of a saved tree; CheckpointCorrupt where it has none."""
        new = cls(size, most)
        new._begun = fields.whole("begun", most=2**62)
        numbers = integers(fields, "numbers", None, 0, max(new._begun, 1))
        sizes = np.full(numbers.size, size) if size is not None else integers(fields, "sizes", numbers.size, 1, 2**48)
        rows = integers(fields, "rows", numbers.size, 1, int(sizes.max(initial=0)) + 1)
        uses = integers(fields, "uses", numbers.size, 0, 2**62)
        if (rows > sizes).any():
            raise fields.wrong("rows", "at most the size of each group", rows)
        slots = integers(fields, "slots", int(rows.sum()), 0, 2**48)
        for name, values in (("numbers", numbers), ("slots", slots)):
            if np.unique(values).size < values.size:
                raise fields.wrong(name, "different numbers", values)
        parts = np.split(slots, np.cumsum(rows)[:-1]) if rows.size else []
        every = [
            Group(int(number), id_, int(of_group), part.tolist(), int(used))
            for number, id_, of_group, part, used in zip(
                numbers, _ids(fields, rows.size), sizes, parts, uses, strict=True
            )
        ]
        new._of = {slot: group for group in every for slot in group.slots}
        new._top = max(new._of, default=-1) + 1
        opened, ready = (integers(fields, name, None, 0, numbers.size).tolist() for name in ("open", "ready"))
        new._open = {every[at].id: every[at] for at in opened}
        if len(new._open) < len(opened) or any(group.is_whole for group in new._open.values()):
            raise fields.wrong("open", "incomplete groups, one of each id", opened)
        if sorted(ready) != [at for at, group in enumerate(every) if new._usable(group)]:
            raise fields.wrong("ready", "all groups that are complete and not used up", ready)
        new.ready = [every[at] for at in ready]
        for at, group in enumerate(new.ready):
            group.place = at
        return new

    def _usable(self, group: Group) -> bool:
        return group.is_whole and (self.most is None or group.uses < self.most)


def _place(word: int) -> int:
    """The place of a row in its group; 0 where its number has none."""
    return word & MOST_USES if word >> _STATE & _STATES == _LATER else 0


def _array(values: Iterable[int]) -> np.ndarray:
    return np.fromiter(values, np.int64)


def _ids(fields: Fields, count: int) -> list[Id]:
    saved = fields.any("ids")
    if isinstance(saved, np.ndarray):
        return integers(fields, "ids", count, -(2**63), 2**63).tolist()
    ids = fields.items("ids", count)
    if not all(type(id_) in (int, str) for id_ in ids):
        raise fields.wrong("ids", "integers or texts", saved)
    return ids
