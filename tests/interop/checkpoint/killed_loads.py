"""Loads into storages in folders, in processes that are killed.

JAX is used in forked children only, so that each of them may. What they leave is looked at by whoever started this.
"""

import os
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from interop import LazyMemmapStorage, PrioritizedSampler, ReplayBuffer
from interop.host.rows import TorchRows
from interop.shared.journal import Journal
from interop.storages.priorities import KeptPriorities

CAPACITY = 8
Call = Callable[..., Any]
# Where to be killed: a method, and whether before or after it. The first call of it in the load counts.
MOMENTS: dict[str, tuple[Any, str, bool]] = {
    "rows are about to be written": (TorchRows, "write_run", False),
    "rows were written": (TorchRows, "write_run", True),
    "priorities are about to be kept": (KeptPriorities, "give", False),
    "priorities were kept": (KeptPriorities, "give", True),
    "the step is about to end": (Journal, "__exit__", False),
    "the step has ended": (Journal, "__exit__", True),
}
KILLS = ("rows were written", "the step is about to end")  # the rest is looked at without
WITHOUT_ROWS = ("priorities were kept", "the step is about to end", "the step has ended")


def sampler() -> PrioritizedSampler:
    return PrioritizedSampler(CAPACITY, 1.0, 1.0)


def old(folder: Path) -> ReplayBuffer:
    """What is there before the load."""
    buffer = ReplayBuffer(storage=LazyMemmapStorage(CAPACITY, scratch_dir=folder), sampler=sampler())
    buffer.extend(torch.arange(101, 106))
    buffer.update_priority(torch.arange(5), torch.arange(5) + 21.0)
    return buffer


def new() -> ReplayBuffer:
    """What is loaded."""
    buffer = ReplayBuffer(storage=LazyMemmapStorage(CAPACITY), sampler=sampler())
    buffer.extend(torch.arange(1, 11))
    buffer.update_priority(torch.arange(CAPACITY), torch.arange(CAPACITY) + 2.0)
    return buffer


def at(moment: str, then: Callable[[], Any]) -> Callable[[], None]:
    """Have something done at a moment; what is returned puts the method back."""
    kind, name, after = MOMENTS[moment]
    real: Call = getattr(kind, name)

    def wrapped(self: Any, *given: Any, **named: Any) -> Any:
        if not after:
            then()
        result = real(self, *given, **named)
        if after:
            then()
        return result

    setattr(kind, name, wrapped)
    return lambda: setattr(kind, name, real)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def in_child(call: Callable[[], Any]) -> int:
    """How a child ended that did this: its exit status, or less than 0 for a signal."""
    pid = os.fork()
    if not pid:
        try:
            call()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def load(folder: Path, saved: Path, moment: str | None, fresh: bool, end: Callable[[], Any]) -> None:
    """A load that is killed at that moment, or else right after it returned."""
    buffer = (
        old(folder)
        if not fresh
        else ReplayBuffer(storage=LazyMemmapStorage(CAPACITY, scratch_dir=folder), sampler=sampler())
    )
    if moment is not None:
        at(moment, kill)
    buffer.loads(saved)
    end()


def exits() -> None:
    os._exit(7)


# Whether nothing was written before, and how the process ends when the load has returned.
RETURNED: dict[str, tuple[bool, Callable[[], None], int]] = {
    "over rows, and exits": (False, exits, 7),
    "as the first write, and is killed": (True, kill, -signal.SIGKILL),
}


def main(root: Path) -> None:
    """Make one folder for each load of the checkpoint that is killed."""
    saved = root / "c"
    for name in KILLS:
        place = root / f"over {name}"
        assert in_child(lambda name=name, place=place: load(place, saved, name, False, exits)) == -signal.SIGKILL, name
    for name, (fresh, end, status) in RETURNED.items():
        place = root / name
        assert in_child(lambda place=place, fresh=fresh, end=end: load(place, saved, None, fresh, end)) == status, name
