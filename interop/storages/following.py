"""Priorities in this process for rows that other processes wrote."""

from typing import Any

import torch


def watched(storage: Any) -> bool:
    """Whether a buffer on the storage has priorities, which no other process can give to what it writes."""
    samplers = (getattr(buffer, "_sampler", None) for buffer in storage.attached())
    return any(sampler is not None and sampler.takes_priorities for sampler in samplers)


def standing(storage: Any) -> tuple[int, ...]:
    """What this process knows of the rows at the end of its turn."""
    return (*storage._counts(), len(storage))


def follow(storage: Any, before: tuple[int, ...]) -> None:
    """Have rows that were written since, around the ring, get the default priority; forget those of a storage that was
    emptied. Of rows that were written elsewhere only the writer knows."""
    if standing(storage) == before:  # of a first write that failed nothing says how many rows there are
        return
    written, _, _, length = before
    ledger, rows = storage._ledger, storage.row_capacity(None)
    count = min(ledger.written - written, rows)
    new = torch.arange(ledger.end - count, ledger.end, device="cpu") % max(rows, 1)
    new = new[new < storage._filled_rows]
    for buffer in storage.attached():
        sampler = getattr(buffer, "_sampler", None)
        if sampler is None or not sampler.takes_priorities:
            continue
        if len(storage) < length:
            sampler._empty()
            new = torch.arange(storage._filled_rows, device="cpu")
        if len(new):
            buffer.mark_update(buffer._writer._replicate_index(new))
