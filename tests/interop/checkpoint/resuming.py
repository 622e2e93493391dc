"""Buffers that go on after they were saved, and others that go on from there in a process of their own.

`differences` loads what `save_all` left in a folder and tells what differs.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from interop import TensorDictReplayBuffer
from tests.interop.pair_history import BATCH, CELLS, LANES, PRIORITIZED, Cell, as_given, ids_of, parts

DRAWS = 50
_KIND = "TensorDictReplayBuffer"


def joined(cell: Cell, seed: int) -> Any:
    """A buffer of these parts; None where they cannot be joined."""
    try:
        storage, sampler, writer = parts(cell)
        generator = torch.Generator("cpu").manual_seed(seed)
        return TensorDictReplayBuffer(
            storage=storage, sampler=sampler, writer=writer, batch_size=BATCH, generator=generator
        )
    except (TypeError, ValueError, RuntimeError):
        return None


def go_on(buffer: Any, cell: Cell, time: int, draws: int) -> list[Any]:
    """Draws, and between them priorities and rows, by `time`; all that was seen."""
    seen: list[Any] = []
    lanes = LANES if cell.ndim == 2 else 1
    for turn in range(time, time + draws):
        if cell.writer != "ImmutableDatasetWriter" and _writes(turn):
            rows = ids_of(4 * sum(map(_writes, range(turn))), 4, lanes)
            seen.append(torch.as_tensor(buffer.extend(as_given(rows, cell))).clone())
        if len(buffer) < 6:
            continue
        try:
            batch, info = buffer.sample(return_info=True)
        except RuntimeError as error:  # nothing may be left to draw
            seen.append(str(error))
            continue
        seen += [batch.clone() if isinstance(batch, TensorDictBase) else batch]
        seen += [_plain(info[key]) for key in sorted(info, key=str)]
        if cell.sampler in PRIORITIZED:
            batch["td_error"] = (batch["x"] % 11 + turn % 3).float()
            buffer.update_tensordict_priority(batch)
    return [*seen, len(buffer), buffer.write_count if cell.writer != "ImmutableDatasetWriter" else 0, buffer[:].clone()]


def _writes(turn: int) -> bool:
    return turn % 7 == 0 or turn < 4


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return value.clone() if isinstance(value, torch.Tensor | TensorDictBase) else value


def same(one: Any, other: Any) -> bool:
    """Whether two things that were seen are the same, bit for bit."""
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor):
        bits = [each.contiguous().reshape(-1).view(torch.uint8).numpy() for each in (one, other)]
        return one.dtype == other.dtype and one.shape == other.shape and np.array_equal(*bits)
    if isinstance(one, TensorDictBase):
        keys = sorted(map(str, one.keys(True, True)))
        return keys == sorted(map(str, other.keys(True, True))) and all(
            same(leaf, other.get(key)) for key, leaf in one.items(True, True) if isinstance(leaf, torch.Tensor)
        )
    return type(one) is type(other) and one == other


def cells(writers: tuple[str, ...]) -> Iterator[Cell]:
    """All that may be joined."""
    return (cell for cell in CELLS if cell.buffer == _KIND and cell.writer in writers)


def name_of(cell: Cell) -> str:
    return "-".join(map(str, cell))


def save_all(folder: Path, chosen: Iterator[Cell], draws: int = DRAWS) -> int:
    """Save each buffer, after it has gone on for a while, and what it saw afterwards; how many there were."""
    count = 0
    for cell in chosen:
        buffer = joined(cell, 0)
        if buffer is None:
            continue
        go_on(buffer, cell, 0, 9)
        buffer.dumps(folder / name_of(cell))
        seen = go_on(buffer, cell, 9, draws)
        torch.save((tuple(cell), draws, seen), folder / f"{name_of(cell)}.pt")
        count += 1
    return count


def differences(folder: Path) -> list[str]:
    """What goes on otherwise when it is loaded here."""
    found = []
    torch.manual_seed(12345)
    for path in sorted(folder.glob("*.pt")):
        told, draws, expected = torch.load(path, weights_only=False)
        cell = Cell(*told)
        for written in {False, cell.writer != "ImmutableDatasetWriter"}:
            buffer = joined(cell, 777)
            if written:
                buffer.extend(as_given(ids_of(504, 5, LANES if cell.ndim == 2 else 1), cell))  # to be forgotten
            buffer.loads(folder / name_of(cell))
            seen = go_on(buffer, cell, 9, draws)
            if not same(expected, seen):
                first = next((k for k, (a, b) in enumerate(zip(expected, seen, strict=False)) if not same(a, b)), None)
                found.append(f"{name_of(cell)}: from {first} of {len(expected)} on, {written=}")
    return found
