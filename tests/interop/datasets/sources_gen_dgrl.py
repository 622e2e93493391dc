"""Archives of Gen-DGRL as upstream has them: a pickled dict of arrays an episode."""

import tarfile
from pathlib import Path

import numpy as np

LENGTHS = (4, 1, 6)


def episode(steps: int, rng: np.random.Generator, dtype: type = np.float32) -> dict[str, np.ndarray]:
    done = np.zeros(steps, np.bool_)
    done[-1:] = True
    return {
        "observations": rng.integers(0, 256, (steps + 1, 3, 64, 64)).astype(dtype),
        "actions": rng.integers(0, 15, (steps, 1)),
        "rewards": rng.random((steps, 1), dtype=np.float32),
        "dones": done.astype(dtype) if dtype is np.float32 else done,
    }


def save(folder: Path, episodes: list[dict[str, np.ndarray]]) -> list[str]:
    """The files of episodes; their names, in order."""
    folder.mkdir(parents=True, exist_ok=True)
    names = []
    for place, held in enumerate(episodes):
        name = f"20230102T030405_{place}_{len(held['rewards'])}_{place - 1}_{held['rewards'].sum():.2f}.npy"
        np.save(folder / name, np.array(held, object), allow_pickle=True)
        names.append(name)
    return names


def make(folder: Path, rng: np.random.Generator, game: str = "bigfish") -> list[dict[str, np.ndarray]]:
    """`<game>.tar.xz` in the folder; its episodes."""
    episodes = [episode(steps, rng, np.uint8 if steps == 1 else np.float32) for steps in LENGTHS]
    pack(folder, episodes, game)
    return episodes


def pack(folder: Path, episodes: list[dict[str, np.ndarray]], game: str = "bigfish") -> Path:
    aside = folder / "unpacked"
    names = save(aside / game, episodes)
    with tarfile.open(folder / f"{game}.tar.xz", "w:xz", preset=0) as archive:
        archive.add(aside / game, game, recursive=False)
        for name in names:
            archive.add(aside / game / name, f"{game}/{name}")
            (aside / game / name).unlink()
    (aside / game).rmdir()
    aside.rmdir()
    return folder / f"{game}.tar.xz"
