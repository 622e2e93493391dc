"""Checkpoints of DQN Replay as dopamine writes them: gzipped `.npy` arrays of a ring of steps."""

import gzip
import io
from pathlib import Path
from typing import Any

import numpy as np

NUMBERS = (2, 10)  # of checkpoints; in text 10 comes first
ROWS = (9, 6)
CURSOR = 5  # in the first one, where the ring would be written next


def path_of(folder: Path, name: str, number: int) -> Path:
    kept = name in ("observation", "action", "reward", "terminal")
    return folder / f"{'$store$_' if kept else ''}{name}_ckpt.{number}.gz"


def write(folder: Path, name: str, number: int, array: Any) -> Path:
    file, path = io.BytesIO(), path_of(folder, name, number)
    np.save(file, array, allow_pickle=False)
    path.write_bytes(gzip.compress(file.getvalue(), 1))
    return path


def checkpoint(rows: int, rng: np.random.Generator, cursor: int = 0) -> dict[str, np.ndarray]:
    terminal = np.zeros(rows, np.uint8)
    terminal[[1, rows - 3]] = 1
    return {
        "observation": rng.integers(0, 256, (rows, 84, 84), dtype=np.uint8),
        "action": rng.integers(0, 18, rows, dtype=np.int32),
        "reward": rng.random(rows, dtype=np.float32),
        "terminal": terminal,
        "add_count": np.array(3 * rows + cursor),
        "invalid_range": np.arange(5) + cursor,
    }


def make(folder: Path, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """The files of a run; the arrays of all its rows, and the flags "truncated" of them."""
    folder.mkdir(parents=True, exist_ok=True)
    made = [checkpoint(ROWS[0], rng, CURSOR), checkpoint(ROWS[1], rng)]
    for number, arrays in zip(NUMBERS, made, strict=True):
        for name, array in arrays.items():
            write(folder, name, number, array)
    rows = {name: np.concatenate([arrays[name] for arrays in made]) for name in list(made[0])[:4]}
    rows["truncated"] = np.zeros(sum(ROWS), np.uint8)
    rows["truncated"][[CURSOR - 1, ROWS[0] - 1, sum(ROWS) - 1]] = 1
    return rows
