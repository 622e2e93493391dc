"""Refusing data that would not come back as it was: TED data repeats itself, and what does not would be lost."""

from collections.abc import Iterator

import torch
from torch import Tensor

from interop.ted.entries import Entries, Leaves, Names, Path, shown
from interop.ted.ring import Order, Ring

_CHUNK = 1 << 22  # bytes
_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def refuse_lossy(leaves: Leaves, entries: Entries, names: Names, order: Order) -> None:
    """ValueError naming the key and the first row, by its place in the storage, that would come back otherwise.

    Compares bits, in pieces that fit into a cache: one pass over the observations, which are [time, *lanes, ...].
    """
    ring = order.ring
    found: list[tuple[int, str]] = []
    for path in entries.outcomes:
        if path not in leaves:
            continue
        if path in names.reward and path not in names.done:
            found.append((0, f"{shown(path)} is in the root too and would be dropped: rewards are kept in 'next'"))
        elif not _alike(leaves[path], leaves["next", *path]):
            found.append((0, f"{shown(path)} and {shown(('next', *path))} differ in dtype or shape"))
        elif (row := _first_set(leaves[path], ring)) is not None:
            found.append((row, f"{shown(path)} is set in the root, where done flags are all False"))
    followed = ~ring.taken_back(order.ends)
    for path in entries.followed:
        row = _first_apart(leaves["next", *path], leaves[path], followed, ring.is_full)
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


def _first_set(flags: Tensor, ring: Ring) -> int | None:
    any_row = torch.ones((), dtype=torch.bool, device="cpu").expand(ring.shape)
    for start, stop in _chunks(flags):
        row = _first(bits(flags[start:stop].cpu()) != 0, any_row[start:stop])
        if row is not None:
            return row + start * any_row[0].numel()
    return None


def _first_apart(nexts: Tensor, roots: Tensor, followed: Tensor, around: bool) -> int | None:
    """The first row that is followed by another one than its own `nexts`; the last is followed by the first, or itself."""
    last = nexts.shape[0] - 1
    pairs = [(start, stop, roots[start + 1 : stop + 1]) for start, stop in _chunks(nexts[:last])]
    pairs.append((last, last + 1, roots[:1] if around else roots[last:]))
    for start, stop, following in pairs:
        row = _first(bits(nexts[start:stop].cpu()) != bits(following.cpu()), followed[start:stop])
        if row is not None:
            return row + start * followed[0].numel()
    return None


def _first(differs: Tensor, rows: Tensor) -> int | None:
    found = (differs.reshape(*rows.shape, -1).any(-1) & rows).reshape(-1).nonzero()
    return int(found[0]) if len(found) else None


def _chunks(tensor: Tensor) -> Iterator[tuple[int, int]]:
    """Rows in pieces."""
    rows = tensor.shape[0]
    step = max(1, _CHUNK * rows // max(1, tensor.numel() * tensor.element_size()))
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


def bits(tensor: Tensor) -> Tensor:
    """The same memory as integers, which are equal only where every bit is."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.resolve_neg().view(_WHOLE[tensor.element_size()])


def missing_done(key: Path, leaves: Leaves) -> ValueError:
    """The error of data without the flags that say where episodes end."""
    known = ", ".join(shown(path) for path in leaves)
    return ValueError(f"{shown(key)} is missing from row 0 on, which tells where episodes end; there are {known}")
