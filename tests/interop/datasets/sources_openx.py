"""Archives of pickled episodes, as the Open X-Embodiment repository on the Hugging Face hub has them."""

import io
import pickle
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

DATASET = "cmu_stretch"
LENGTHS = ((5, 3), (6,))  # of the episodes in each archive


def make(folder: Path, rng: np.random.Generator) -> list[list[dict[str, Any]]]:
    """Two archives of a dataset below `folder`. Returns the steps of each episode, with images as arrays [H, W, 3]."""
    every = []
    for number, lengths in enumerate(LENGTHS):
        found = [episode(length, rng) for length in lengths]
        members = [(f"{DATASET}_{number}_{place:03d}", encoded(steps)) for place, steps in enumerate(found)]
        archive(folder / DATASET / f"{DATASET}_{number:05d}.tar", members)
        every += found
    return every


def episode(length: int, rng: np.random.Generator, terminal: bool = True) -> list[dict[str, Any]]:
    """Steps as the dataset has them, but for images, which are arrays."""
    text = f"pick up {rng.integers(1000)}"
    return [
        {
            "action": {"motion": rng.normal(size=7), "gripper": np.float32(rng.normal())},
            "observation": {
                "image": rng.integers(0, 256, (4, 6, 3), np.uint8),
                "state": rng.normal(size=3).astype(np.float32),
                "natural_language_instruction": text,
            },
            "language_instruction": text,
            "reward": float(step == length - 1),
            "discount": 1.0,
            "is_first": step == 0,
            "is_last": step == length - 1,
            "is_terminal": terminal and step == length - 1,
        }
        for step in range(length)
    ]


def encoded(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The steps with their images as PNG."""
    out = []
    for step in steps:
        file = io.BytesIO()
        Image.fromarray(step["observation"]["image"]).save(file, "PNG")
        image = {"bytes": file.getvalue(), "path": None}
        out.append({**step, "observation": {**step["observation"], "image": image}})
    return out


def archive(path: Path, members: list[tuple[str, list[dict[str, Any]]]]) -> None:
    """A tar file of pickled episodes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as out:
        for name, steps in members:
            data = pickle.dumps({"steps": steps})
            info = tarfile.TarInfo(f"{name}.data.pickle")
            info.size = len(data)
            out.addfile(info, io.BytesIO(data))
