"""Files of RoboSet, written by h5py as RoboHive does."""

from pathlib import Path

import h5py
import numpy as np

STEPS = {"Trial0": 3, "Trial2": 5, "Trial10": 4}  # of two files each: Trial10 is before Trial2 in the files


def trial(rng: np.random.Generator, steps: int) -> dict[str, np.ndarray]:
    return {
        "observations": rng.normal(size=(steps, 5)),
        "actions": rng.normal(size=(steps, 2)).astype(np.float32),
        "rewards": rng.normal(size=steps).astype(np.float32),
        "done": np.arange(steps) == steps - 1,
        "time": np.arange(steps) / 10,
        "env_infos/solved": rng.random(steps) < 0.5,
        "env_infos/obs_dict/qpos": rng.normal(size=(steps, 4)),
    }


def write(path: Path, trials: dict[str, dict[str, np.ndarray]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        for name, held in trials.items():
            for key, values in held.items():
                file[f"{name}/{key}"] = values


def make(folder: Path, rng: np.random.Generator) -> list[tuple[int, int, dict[str, np.ndarray]]]:
    """Write `a.h5` and `b.h5`. Returns (episode, seed, arrays) of their trials, in order of the rows."""
    expected = []
    for seed, name in enumerate(("a.h5", "b.h5")):
        trials = {key: trial(rng, steps + seed) for key, steps in STEPS.items()}
        write(folder / name, trials)
        expected += [(int(key.removeprefix("Trial")), seed, held) for key, held in trials.items()]
    return sorted(expected, key=lambda each: each[:2])
