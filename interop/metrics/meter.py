"""The meter of a buffer: numbers for logs about its draws and writes."""

import weakref
from collections.abc import Iterable
from types import TracebackType
from typing import Self

import numpy as np

from interop.buffers import ReplayBuffer, ReplayBufferEnsemble
from interop.data.arguments import class_of
from interop.host.threads import Lock
from interop.metrics.log_writers import sender
from interop.metrics.tally import Counts, Tally
from interop.samplers import PromptGroupSampler
from interop.samplers.prompt_group import REASONS, PromptGroup
from interop.shared.storage_lock import locked

Numbers = dict[str, int | float]
_TOTALS = ("batches", "draws", "written", "replay_ratio", "overwritten", "never_drawn", "never_drawn_share")


class Meter:
    """Counts what a buffer returns and what is written into it; `read()` makes numbers of it, docs/do/logging.md lists them.

    It sees all from its construction on: batches of `sample`, of iteration and of ensembles with this buffer as a member,
    at the moment when they are returned, and writes through any buffer on the storage. With prefetch, batches that are
    drawn ahead count when they are returned, and not at all if they are dropped. Edits are no writes. After `empty`, a
    load, `resize` and another storage, draws of each item are counted anew.

    An ensemble is metered by its members: their rows, drawn through the ensemble or through the member. Each part of a
    batch is a batch.

    It neither keeps the buffer alive nor is kept by it: a meter that is dropped, or closed, costs nothing any more. It is
    also a context manager, which closes it.

    Cost: one entry in a list for each batch and each write. `read()` counts them, and a draw or a write does when some
    10^6 items have gathered; docs/do/logging.md has the times. Memory: 12 bytes a slot that was written, and the indices of
    the batches that are not counted yet.

    Args:
        buffer: a `ReplayBuffer` of any class, or a `ReplayBufferEnsemble`. TypeError for anything else.
    """

    def __init__(self, buffer: ReplayBuffer | ReplayBufferEnsemble) -> None:
        if not isinstance(buffer, ReplayBuffer | ReplayBufferEnsemble):
            raise TypeError(f"a Meter is of a ReplayBuffer or a ReplayBufferEnsemble, got {class_of(buffer)}")
        members: Iterable[ReplayBuffer] = buffer.members if isinstance(buffer, ReplayBufferEnsemble) else (buffer,)
        members = {id(member): member for member in members}.values()  # a buffer may be a member twice
        self._metered = [(weakref.ref(member), Tally()) for member in members]
        self._total = Counts()
        self._kept = Counts()  # of a time that was read, but that no writer took
        self._reading = Lock()
        self._closed = False
        for member, (_, tally) in zip(members, self._metered, strict=True):
            with locked(member):
                member.observers.add(tally)

    def read(self) -> Numbers:
        """The numbers since the last call, or since the construction; those of `total_` since the construction.

        A number that is not defined is left out, such as the age of drawn items where none was drawn. O(slots + draws since
        the last call). Threads that write and draw wait meanwhile.
        """
        with self._reading:
            return self._read()[0]

    def _read(self) -> tuple[Numbers, Counts]:
        """The numbers since the last call, and the counts that they are made from."""
        counts = Counts()
        draws = [np.zeros(0, np.int32)]
        groups: list[PromptGroup] | None = None
        for reference, tally in self._metered:
            if (buffer := reference()) is None:
                counts.add(tally.take())
                continue
            with locked(buffer):
                counts.add(tally.take())
                if self._closed:
                    continue
                draws.append(tally.draws_of_stored())
                if isinstance(buffer.sampler, PromptGroupSampler):
                    groups = (groups or []) + _groups_of(buffer.sampler)
        self._total.add(counts)
        counts.add(self._kept)
        self._kept = Counts()
        numbers = _numbers(counts) | _of_stored(np.concatenate(draws))
        if groups is not None:
            numbers |= _of_groups(groups)
        totals = _numbers(self._total)
        return numbers | {f"total_{name}": totals[name] for name in _TOTALS if name in totals}, counts

    def draws_of_stored(self) -> np.ndarray:
        """How often each stored item was drawn since it was written, or since the meter began: int32 [items], by flat slot.

        Of an ensemble those of its members, one after the other. A closed meter knows none. O(items).
        """
        with self._reading:
            draws = [np.zeros(0, np.int32)]
            for reference, tally in self._metered:
                if (buffer := reference()) is not None and not self._closed:
                    with locked(buffer):
                        draws.append(tally.draws_of_stored().copy())
            return np.concatenate(draws)

    def log(self, writer: object, step: int | None = None, *, prefix: str = "buffer/") -> None:
        """`read()`, and pass the numbers on. Where the writer raises, they are part of what is read or logged next.

        Args:
            writer: an object with `add_scalar`, such as a `SummaryWriter` of TensorBoard, which gets each number; or a
                function that takes a dict, such as `wandb.log`, `mlflow.log_metrics` or `run.track` of aim. TypeError for
                anything else, before anything is read.
            step: passed on with the numbers, as the third argument of `add_scalar`, or as `step` to a function that has
                such an argument.
            prefix: of the names.
        """
        send = sender(writer)
        with self._reading:
            numbers, counts = self._read()
        try:
            send({prefix + name: number for name, number in numbers.items()}, step)
        except BaseException:
            with self._reading:
                self._kept.add(counts)
            raise

    def close(self) -> None:
        """Stop counting. `read()` then gives what was counted before and not read yet."""
        with self._reading:
            self._closed = True
            for reference, tally in self._metered:
                if (buffer := reference()) is not None:
                    with locked(buffer):
                        buffer.observers.remove(tally)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"of {len(self._metered)} buffers" if len(self._metered) > 1 else ""
        return f"Meter({state})"


def _numbers(counts: Counts) -> Numbers:
    """The numbers of a time."""
    ages = counts.ages
    numbers: Numbers = {
        "batches": counts.batches,
        "draws": counts.draws,
        "written": counts.written,
        "late_draws": ages.late,
        "unknown_draws": counts.unknown,
        "overwritten": ages.overwritten,
        "never_drawn": ages.never_drawn,
    }
    if counts.written:
        numbers["replay_ratio"] = counts.draws / counts.written
    if ages.overwritten:
        numbers["never_drawn_share"] = ages.never_drawn / ages.overwritten
        numbers["draws_per_overwritten"] = ages.draws_of_overwritten / ages.overwritten
    if ages.counted:
        numbers |= {"age_mean": ages.age_sum / ages.counted, "age_max": ages.age_max}
    if counts.weighted:
        numbers |= {"ess": counts.ess / counts.weighted, "ess_share": counts.ess_share / counts.weighted}
    if counts.stale:
        numbers |= {"staleness_mean": counts.staleness / counts.stale, "staleness_max": counts.staleness_max}
    if counts.used:
        numbers["group_uses_mean"] = counts.uses / counts.used
    return numbers


def _of_stored(draws: np.ndarray) -> Numbers:
    """Of the stored items, which were drawn so often."""
    numbers: Numbers = {"stored": draws.size}
    if draws.size:
        numbers |= {
            "draws_per_stored": float(draws.mean(dtype=np.float64)),
            "draws_per_stored_max": int(draws.max()),
            "undrawn_share": 1 - int(np.count_nonzero(draws)) / draws.size,
        }
    return numbers


def _groups_of(sampler: PromptGroupSampler) -> list[PromptGroup]:
    """The groups of a sampler; none where it cannot read their ids, which its next draw says."""
    try:
        return sampler.groups()
    except (KeyError, TypeError, ValueError):
        return []


def _of_groups(groups: list[PromptGroup]) -> Numbers:
    numbers: Numbers = {"groups": len(groups), "groups_ready": sum(group.reason is None for group in groups)}
    for reason in REASONS:
        numbers["groups_" + reason.replace(" ", "_")] = sum(group.reason == reason for group in groups)
    return numbers
