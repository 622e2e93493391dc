"""A file of D4RL, written by h5py as D4RL's own scripts do."""

from pathlib import Path
from typing import Any

import h5py
import numpy as np

ROWS = 20
TERMINALS, TIMEOUTS = (4, 11), (8,)


def flags(rows: int, at: tuple[int, ...]) -> np.ndarray:
    return np.isin(np.arange(rows), at)


def arrays(rng: np.random.Generator, rows: int = ROWS) -> dict[str, np.ndarray]:
    return {
        "observations": rng.normal(size=(rows, 3)).astype(np.float32),
        "actions": rng.normal(size=(rows, 2)).astype(np.float32),
        "rewards": rng.normal(size=rows).astype(np.float32),
        "terminals": flags(rows, TERMINALS),
        "timeouts": flags(rows, TIMEOUTS),
        "infos/qpos": rng.normal(size=(rows, 4)),
        "infos/goal": rng.integers(9, size=rows),
    }


def write(path: Path, held: dict[str, Any]) -> None:
    with h5py.File(path, "w") as file:
        for name, values in held.items():
            file.create_dataset(name, data=values, **({"compression": "gzip"} if np.ndim(values) else {}))


def make(folder: Path, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Write `some.hdf5`. Returns its arrays; the rows are all of these but the last."""
    held = arrays(rng)
    metadata = {"metadata/algorithm": "SAC", "metadata/iteration": 7, "metadata/policy/fc0/weight": np.zeros((40, 40))}
    write(folder / "some.hdf5", {**held, **metadata})
    return held
