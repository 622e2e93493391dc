"""Datasets of Minari, made by the minari package."""

import gc
import json
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gymnasium
import h5py
import minari
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete, Space, Text, Tuple
from minari.data_collector import EpisodeBuffer

DATASET = "toy/all-v0"
LENGTHS = (3, 1, 2, 5, 1, 1, 2, 1, 1, 4, 2, 3)  # of episodes: the names of the files sort 10 before 2
OBSERVATIONS = Dict(
    {
        "position": Box(-np.inf, np.inf, (2,), np.float64),
        "image": Box(0, 255, (32, 40, 3), np.uint8),
        "depth": Box(0, 255, (33, 32), np.uint8),
        "grid": Box(0, 9, (2, 2), np.uint8),
        "pair": Tuple([Discrete(3), Box(-1, 1, (), np.float32)]),
        "mission": Text(20),
    }
)
ACTIONS = MultiDiscrete([3, 4])


@contextmanager
def root(folder: Path) -> Iterator[None]:
    """Has minari keep its datasets in a folder, and not warn of metadata that is not given."""
    with patch.dict(os.environ, MINARI_DATASETS_PATH=str(folder)), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def make(
    folder: Path, rng: np.random.Generator, data_format: str = "hdf5", jpeg_encoding: bool = True
) -> list[EpisodeBuffer]:
    """A dataset of all kinds of spaces, in a Minari root. Returns its episodes."""
    buffers = [_episode(number, steps, rng) for number, steps in enumerate(LENGTHS)]
    write(folder, DATASET, buffers, OBSERVATIONS, ACTIONS, data_format=data_format, jpeg_encoding=jpeg_encoding)
    return buffers


def write(
    folder: Path, dataset_id: str, buffers: list[EpisodeBuffer], observations: Space, actions: Space, **options: Any
) -> Path:
    """A dataset of these episodes, in a Minari root. Returns the folder of its files."""
    spaces = {"observation_space": observations, "action_space": actions}
    with root(folder):
        minari.create_dataset_from_buffers(dataset_id, buffers, **spaces, **options)
    return folder / dataset_id / "data"


def collect(folder: Path, dataset_id: str, episodes: int = 2, data_format: str = "hdf5") -> Path:
    """Random play of CartPole, collected by minari, in a Minari root. Returns the folder of its files."""
    with root(folder):
        _play(dataset_id, episodes, data_format)
        gc.collect()  # minari's temporary folder, of which Python warns
    return folder / dataset_id / "data"


def _play(dataset_id: str, episodes: int, data_format: str) -> None:
    with minari.DataCollector(gymnasium.make("CartPole-v1"), data_format=data_format) as env:
        env.action_space.seed(0)
        for seed in range(episodes):
            env.reset(seed=seed)
            while not any(env.step(env.action_space.sample())[2:4]):
                pass
        env.create_dataset(dataset_id)


def line(folder: Path, dataset_id: str = "toy/line-v0", edit: Callable[[h5py.File], None] = lambda file: None) -> Path:
    """Two episodes of 3 and 2 steps, of which the HDF5 file is then edited. Returns the folder of its files."""
    ends = {"terminations": [[False, False, True], [False] * 2], "truncations": [[False] * 3, [False, True]]}
    buffers = [
        EpisodeBuffer(
            number,
            seed=7,
            options={"a": {"b": 1}},
            observations=np.arange(10 * number, 10 * number + steps + 1, dtype=np.float64)[:, None] + [0, 0.5],
            actions=np.arange(steps) + number,
            rewards=[1.0, 2.0, 3.0] if number == 0 else [4.0, 5.0],
            terminations=ends["terminations"][number],
            truncations=ends["truncations"][number],
            infos={"x": np.arange(1.0, steps + 1) + 10 * number},  # without that of the reset
        )
        for number, steps in enumerate((3, 2))
    ]
    data = write(folder, dataset_id, buffers, Box(-np.inf, np.inf, (2,), np.float64), Discrete(4))
    with h5py.File(data / "main_data.hdf5", "a") as file:
        edit(file)
    return data


def described(data: Path, **changes: Any) -> None:
    """Change the metadata of a dataset. None takes an entry away."""
    path = data / "metadata.json"
    said = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in said.items() if value is not None}))


def _episode(number: int, steps: int, rng: np.random.Generator) -> EpisodeBuffer:
    def image(*shape: int) -> np.ndarray:
        coarse = rng.integers(0, 256, (steps + 1, 4, *shape[1:]), np.uint8)
        return np.repeat(coarse, -(-shape[0] // 4), axis=1)[:, : shape[0]]

    observations = {
        "position": rng.normal(size=(steps + 1, 2)),
        "image": image(32, 40, 3),
        "depth": image(33, 32),
        "grid": rng.integers(0, 10, (steps + 1, 2, 2), np.uint8),
        "pair": (rng.integers(0, 3, steps + 1), rng.normal(size=steps + 1).astype(np.float32)),
        "mission": [f"step {step} of {number}" for step in range(steps + 1)],
    }
    return EpisodeBuffer(
        number,
        seed=number,
        observations=observations,
        actions=rng.integers(0, 3, (steps, 2)),
        rewards=rng.normal(size=steps).tolist(),
        terminations=[False] * (steps - 1) + [number % 2 == 0],
        truncations=[False] * (steps - 1) + [number % 2 == 1],
        infos={"success": rng.random(steps + 1) < 0.5, "inner": {"force": rng.normal(size=(steps + 1, 2, 3))}},
    )
