"""What is known about one slot: when it was written, its trajectory, and how often it is drawn, or why it is not."""

import dataclasses

from fbuf.keywords import checked
from fbuf.page_tables import Section, html_page
from fbuf.samplers import Reason


@checked
@dataclasses.dataclass(frozen=True)
class StoredTrajectory:
    """The trajectory of an item, as far as it is stored.

    Attributes:
        id: the value of the leaf that tells trajectories apart, of several a tuple; None if items have none.
        lane: its lane.
        number: its number in the lane, or of an `interop` buffer in `rb.episodes`; None if trajectories are not numbered.
        step: how many of its rows came before the item, stored or not; None if not known.
        first: the slot of its first stored item.
        last: the slot of its last stored item.
        length: how many of its items are stored.
    """

    id: int | float | str | tuple[int | float | str, ...] | None
    lane: int
    number: int | None
    step: int | None
    first: int
    last: int
    length: int


@checked
@dataclasses.dataclass(frozen=True)
class Why:
    """All that is known about one slot. `print` it for sentences.

    Attributes:
        slot: the slot.
        code: the `Reason` that it is not in the next draw; `Reason.NONE` if it can be, `Reason.UNKNOWN` if nobody knows.
        written: the number of the write that made its row, from 0 on; None if the order is not known, or it holds no item.
        age: how many rows were written after it; None as for `written`.
        trajectory: that of the item; None if the buffer knows no trajectories.
        begins: by what the trajectory begins, in words.
        ends: by what it ends, in words.
        priority: as the user passed it; None without priorities.
        weight: the importance weight for beta 1, relative to the largest of any item; for another beta it is weight ** beta.
            None if it is not drawn, or if its probability is not known; of slices that of the start.
        probability: that one draw contains the slot: a draw of one item, of one slice, or of one group. 0 if it is not in
            the next one, None if it is not known.
        starts: slots of the starts of which slices contain it, the oldest first; None for single items.
        member: the member of a mixture or ensemble; None for one buffer.
        unit: what one draw is: "item", "slice" or "group".
        index: the coordinates of the slot in a storage of several item dims; None for one dim.
        slice_len: rows of a whole slice, without burn-in; None for single items, and where the length is not known.
        needs: how many rows of its trajectory must be stored for a slice; None as for `slice_len`.
    """

    slot: int
    code: Reason
    written: int | None = None
    age: int | None = None
    trajectory: StoredTrajectory | None = None
    begins: str | None = None
    ends: str | None = None
    priority: float | None = None
    weight: float | None = None
    probability: float | None = None
    starts: tuple[int, ...] | None = None
    member: int | None = None
    unit: str = "item"
    index: tuple[int, ...] | None = None
    slice_len: int | None = None
    needs: int | None = None

    @property
    def reason(self) -> str | None:
        """Why it is not in the next draw, in words; None if it can be, or if nobody knows."""
        if self.code in (Reason.NONE, Reason.UNKNOWN):
            return None
        if self.code == Reason.TOO_SHORT and self.needs is not None:
            return f"{self.code.words}, which needs {self.needs} of them"
        return self.code.words

    def to_dict(self) -> dict[str, object]:
        """The fields as plain values; `code` as the label of the reason."""
        return {**dataclasses.asdict(self), "code": self.code.label, "reason": self.reason}

    def sentences(self) -> list[str]:
        """All of it in sentences."""
        name = f"Slot {self.slot}"
        if self.index is not None:
            name += f", at {', '.join(map(str, self.index))},"
        if self.member is not None:
            name += f" of member {self.member}"
        if self.code == Reason.NOT_WRITTEN:
            return [f"{name} holds no item, so it cannot be drawn."]
        found = [f"{name} holds an item."]
        if self.written is not None:
            found = [f"{name} was written by write {self.written}, counted from 0; {self.age} rows came after it."]
        if self.trajectory is not None:
            found += self._of_trajectory(self.trajectory)
        if self.priority is not None:
            found.append(f"Its priority is {self.priority:.6g}.")
        return found + self._of_draws()

    def _of_trajectory(self, held: StoredTrajectory) -> list[str]:
        what = f"trajectory {held.number}" if held.number is not None else "a trajectory"
        known = "" if held.id is None else f" with id {held.id}"
        step = "an item" if held.step is None else f"step {held.step}"
        stored = f"of which {held.length} {'row is' if held.length == 1 else 'rows are'} stored"
        return [
            f"It is {step} of {what}{known} in lane {held.lane}, {stored}: slots {held.first} to {held.last}.",
            *([] if self.begins is None else [f"The trajectory begins: {self.begins}."]),
            *([] if self.ends is None else [f"The trajectory ends: {self.ends}."]),
        ]

    def _of_draws(self) -> list[str]:
        if self.reason is not None:
            reached = f" It would be reached from {_some(self.starts)}." if self.starts else ""
            never = "It is not the next one" if self.code == Reason.WAITING else "It cannot be drawn"
            return [f"{never}: {self.reason}.{reached}"]
        if self.probability is None:
            return ["How often it is drawn is not known: the sampler does not say."]
        if self.starts is None:
            found = [f"A draw of one {self.unit} has it with probability {self.probability:.6g}."]
        else:
            found = [
                f"A draw of one slice{'' if self.slice_len is None else f' of {self.slice_len} rows'} has it with "
                f"probability {self.probability:.6g}. It is reached from {_some(self.starts)}."
            ]
        if self.weight is not None:
            what = "Its importance weight" if self.starts is None else "As a start, its importance weight"
            found.append(f"{what} for beta 1 is {self.weight:.6g}.")
        return found

    def __str__(self) -> str:
        return "\n".join(self.sentences())

    def _repr_html_(self) -> str:
        title, *others = self.sentences()
        return html_page(title, [Section("", note=sentence) for sentence in others])


def _some(starts: tuple[int, ...]) -> str:
    """Starts in words; of many the first and the last."""
    if len(starts) > 12:
        return f"{len(starts)} starts, from slot {starts[0]} to slot {starts[-1]}"
    return f"the start{'s' if len(starts) > 1 else ''} at {', '.join(map(str, starts))}"
