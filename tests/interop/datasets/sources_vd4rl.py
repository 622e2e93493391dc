"""Files of V-D4RL: episodes by `numpy.savez_compressed`, shards by h5py."""

from pathlib import Path

import h5py
import numpy as np


def episode(rng: np.random.Generator, steps: int, terminal: bool = False) -> dict[str, np.ndarray]:
    last = np.arange(steps) == steps - 1
    return {
        "image": rng.integers(256, size=(steps, 8, 8, 3), dtype=np.uint8),
        "action": rng.normal(size=(steps, 2)).astype(np.float32),
        "reward": rng.normal(size=steps).astype(np.float32),
        "discount": np.ones(steps, np.float32),
        "is_first": np.arange(steps) == 0,
        "is_last": last,
        "is_terminal": last & terminal,
        "height": rng.normal(size=steps),
        "velocity": rng.normal(size=(steps, 3)),
    }


def make(folder: Path, rng: np.random.Generator) -> list[dict[str, np.ndarray]]:
    """Write two episodes. Returns their arrays in order of the rows."""
    folder.mkdir(parents=True, exist_ok=True)
    episodes = [episode(rng, 6), episode(rng, 4, terminal=True)]
    for place, held in enumerate(episodes):
        np.savez_compressed(folder / f"2022060{place}T0-uuid-{len(held['reward'])}.npz", **held)
    return episodes


def make_shard(path: Path, rng: np.random.Generator, rows: int = 12) -> dict[str, np.ndarray]:
    """Write a shard of episodes of five steps. Returns its arrays."""
    held = {
        "observation": rng.integers(256, size=(rows, 3, 10, 10), dtype=np.uint8),
        "action": rng.normal(size=(rows, 2)).astype(np.float32),
        "reward": rng.normal(size=rows).astype(np.float32),
        "discount": np.ones(rows, np.float32),
        "step_type": np.array([0, 1, 1, 1, 2])[np.arange(rows) % 5],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        for name, values in held.items():
            file.create_dataset(name, data=values, compression="gzip")
    return held
