"""Refusing data that would not come back as it was: TED data repeats itself, and what does not would be lost."""

from functools import partial

import torch
from torch import Tensor

from interop.ted.comparing import first_apart, first_set
from interop.ted.entries import Entries, Leaves, Names, Path, shown
from interop.ted.ring import Order
from interop.ted.threads import side_by_side

_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def refuse_lossy(leaves: Leaves, entries: Entries, names: Names, order: Order) -> None:
    """ValueError naming the key and the first row, by its place in the storage, that would come back otherwise.

    Compares bits, in pieces that fit into a cache: one pass over the observations, which are [time, *lanes, ...].
    """
    ring = order.ring
    by_row = {path: leaf.flatten(0, len(ring.shape) - 1) for path, leaf in leaves.items()}
    found: list[tuple[int, str]] = []
    for path in entries.outcomes:
        if path not in leaves:
            continue
        if path in names.reward and path not in names.done:
            found.append((0, f"{shown(path)} is in the root too and would be dropped: rewards are kept in 'next'"))
        elif not _alike(leaves[path], leaves["next", *path]):
            found.append((0, f"{shown(path)} and {shown(('next', *path))} differ in dtype or shape"))
        elif (row := first_set(by_row[path])) is not None:
            found.append((row, f"{shown(path)} is set in the root, where done flags are all False"))
    works = [partial(_first_lost, by_row["next", *path], by_row[path], order) for path in entries.followed]
    rows = side_by_side(works, sum(by_row[path].nbytes for path in entries.followed))
    for path, row in zip(entries.followed, rows, strict=True):
        if row is not None:
            found.append(
                (
                    row,
                    f"{shown(('next', *path))} is not the {shown(path)} of the row that follows, and no episode ends there",
                )
            )
    if found:
        row, why = min(found)
        places = tuple(int(each) for each in torch.unravel_index(torch.tensor(row, device="cpu"), ring.shape))
        raise ValueError(
            f"row {places[0] if len(places) == 1 else places} would come back otherwise: {why}. Only TED data can be "
            "flattened: use a TensorStorageCheckpointer for other data, name keys in done_keys or reward_keys, or pass "
            "verify=False to lose what differs"
        )


def _alike(one: Tensor, another: Tensor) -> bool:
    return one.dtype == another.dtype and one.shape == another.shape


def goes_on(leaves: Leaves, entries: Entries) -> bool:
    """Whether the last row of a lane has been somewhere else than where it began: it was written."""
    pairs = [(leaves["next", *path][-1].cpu(), leaves[path][-1].cpu()) for path in entries.followed]
    return any(not torch.equal(bits(after), bits(before)) for after, before in pairs)


def _first_lost(nexts: Tensor, roots: Tensor, order: Order) -> int | None:
    """The first row, and no end, that is followed by another one than its own `nexts`; the last by the first, or itself."""
    lanes, items = order.ring.lanes, order.ring.items
    row = first_apart(nexts[: items - lanes], roots[lanes:], order.stops)
    if row is not None:
        return row
    behind = items - lanes
    row = first_apart(nexts[behind:], roots[:lanes] if order.ring.is_full else roots[behind:], order.stops - behind)
    return None if row is None else row + behind


def bits(tensor: Tensor) -> Tensor:
    """The same memory as integers, which are equal only where every bit is."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.resolve_neg().view(_WHOLE[tensor.element_size()])


def missing_done(key: Path, leaves: Leaves) -> ValueError:
    """The error of data without the flags that say where episodes end."""
    known = ", ".join(shown(path) for path in leaves)
    return ValueError(f"{shown(key)} is missing from row 0 on, which tells where episodes end; there are {known}")
