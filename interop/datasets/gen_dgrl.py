"""Gen-DGRL: Procgen episodes of expert and suboptimal agents, through dl.fbaipublicfiles.com."""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, Literal

import numpy as np
from tensordict import TensorDict

from interop.datasets.archives import tar_members
from interop.datasets.errors import CorruptDatasetError, unknown_id
from interop.datasets.experience_replay import BaseDatasetExperienceReplay
from interop.datasets.fetching import RemoteFile, fetch
from interop.datasets.object_arrays import load_object
from interop.datasets.rows import nested
from interop.datasets.source import Part, Source
from interop.writers import TensorDictRoundRobinWriter, Writer

BASE_URL = "https://dl.fbaipublicfiles.com/DGRL/Procgen/Datasets/Compressed"
GAMES = [
    *("bigfish", "bossfight", "caveflyer", "chaser", "climber", "coinrun", "dodgeball", "fruitbot"),
    *("heist", "jumper", "leaper", "maze", "miner", "ninja", "plunder", "starpilot"),
]
CATEGORIES = {  # folder of the archives, and rows at most
    "1M_E": ("1M/level_200/expert", 1_000_000),
    "1M_S": ("1M/level_200/suboptimal", 1_000_000),
    "10M": ("10M/level_200/expert", 10_000_000),
    "25M": ("25M/level_200/expert", 25_000_000),
    "level_1_E": ("100k/level_1/expert", 100_000),
    "level_1_S": ("100k/level_1/suboptimal", 100_000),
    "level_40_E": ("100k/level_40/expert", 100_000),
    "level_40_S": ("100k/level_40/suboptimal", 100_000),
}
IDS = [f"{game}-{category}" for category in CATEGORIES for game in GAMES]
_NAME = re.compile(r"(\w+)_(\d+)_(\d+)_-?\d+_-?[\d.]+\.npy")  # time, episode, its steps, level, return
_ROWS = 4096  # that a part of an unpacked archive has at least


@dataclass(frozen=True)
class GenDGRLSource(Source):
    """The archive of a game, `<game>.tar.xz`, or the files that were in it."""

    family = "gen_dgrl"

    def __post_init__(self) -> None:
        if self.dataset_id not in IDS:
            raise ValueError(unknown_id("Gen-DGRL", self.dataset_id, IDS))

    def download(self, folder: Path) -> Mapping[str, str]:
        game, category = self.dataset_id.split("-")
        name = f"{game}.tar.xz"
        return fetch([RemoteFile(f"{BASE_URL}/{CATEGORIES[category][0]}/{name}", name)], folder)

    def parts(self, folder: Path) -> list[Part]:
        """The archive as a whole, or some thousand rows of unpacked files each, ordered by time and episode."""
        game, category = self.dataset_id.split("-")
        left, archive = CATEGORIES[category][1], folder / f"{game}.tar.xz"
        if archive.exists():
            return [Part(left, archive, at_most=True, streamed=True)]
        place = folder / game if (folder / game).is_dir() else folder
        files = sorted(place.glob("*.npy"), key=lambda path: (_told(path.name, 1), int(_told(path.name, 2))))
        if not files:
            raise CorruptDatasetError(f"{folder} has neither {archive.name} nor the .npy files of episodes")
        parts, names, rows = list[Part](), list[str](), 0
        for path in files:
            names.append(path.name)
            rows += int(_told(path.name, 3))
            if rows >= min(_ROWS, left) or path is files[-1]:
                parts.append(Part(min(rows, left), place, tuple(names)))
                left, names, rows = left - parts[-1].rows, [], 0
        return [part for part in parts if part.rows]

    def read(self, part: Part) -> Iterator[TensorDict]:
        left = part.rows
        for name, file in _episodes(part):
            where = f"{part.path}, {name}" if part.path.is_file() else str(part.path / name)
            with file:
                episode = _episode(load_object(file, where), where)
            if len(episode) != int(_told(PurePosixPath(name).name, 3)):
                raise CorruptDatasetError(f"{where} has {len(episode)} steps, its name says otherwise")
            if left and len(episode):
                yield episode[:left]
            left -= min(left, len(episode))
            if not left:
                return


class GenDGRLExperienceReplay(BaseDatasetExperienceReplay):
    """Gen-DGRL: transitions of Procgen games, for generalization in offline reinforcement learning (arXiv:2312.05742).

    Rows are in the order of the archive, and at most as many as the category says: 1, 10 or 25 million, or 100,000. Of
    an archive with fewer they are fewer; of one with more the others are left out.

    | key | shape | dtype |
    |---|---|---|
    | "observation", ("next", "observation") | [3, 64, 64] | uint8 |
    | "action" | [1] | int64 |
    | ("next", "reward") | [1] | float32 |
    | ("next", "done"), ("next", "terminated"), ("next", "truncated") | [1] | bool |
    | "done", "terminated", "truncated": False | [1] | bool |

    An episode ends where upstream has it "done": ("next", "done") and ("next", "terminated"). The environments were reset
    in that step, so the last next observation of an episode is the first one of a new level. Where the last step of a file
    is not done, ("next", "truncated") and ("next", "done") are set.

    Args:
        dataset_id: `<game>-<category>`, one of `available_datasets`.
        batch_size, root, download, num_workers, **more: see `BaseDatasetExperienceReplay`. An archive is read by one
            process; workers read unpacked files.
        from_local: a folder with `<game>.tar.xz`, with the `.npy` files that were in it, or with a folder `<game>` of these.
        writer: by default a `TensorDictRoundRobinWriter`: new rows replace old ones in memory. The files stay as they are.

    Raises:
        ValueError: there is no such dataset. The message has the nearest ids.
        DatasetError: see `BaseDatasetExperienceReplay`.
    """

    available_datasets = IDS

    def __init__(
        self,
        dataset_id: str,
        batch_size: int | None = None,
        *,
        download: bool | Literal["force"] = True,
        root: str | os.PathLike[str] | None = None,
        from_local: str | os.PathLike[str] | None = None,
        num_workers: int = 0,
        writer: Writer | Callable[[], Writer] | None = None,
        **more: Any,
    ) -> None:
        writer = TensorDictRoundRobinWriter() if writer is None else writer
        super().__init__(
            GenDGRLSource(dataset_id), batch_size, root=root, download=download, from_local=from_local,
            num_workers=num_workers, writer=writer, **more,
        )  # fmt: skip


def _told(name: str, which: int) -> str:
    """What the name of an episode's file tells."""
    found = _NAME.fullmatch(name)
    if found is None:
        raise CorruptDatasetError(f"{name} is not named <time>_<episode>_<steps>_<level>_<return>.npy")
    return found[which]


def _episodes(part: Part) -> Iterator[tuple[str, IO[bytes]]]:
    if part.path.is_file():
        return ((name, file) for name, file in tar_members(part.path) if name.endswith(".npy"))
    return ((name, (part.path / name).open("rb")) for name in part.which)


def _episode(held: Any, where: str) -> TensorDict:
    """The steps of an episode, of which upstream has T + 1 observations."""
    if not isinstance(held, dict):
        raise CorruptDatasetError(f"{where} holds a {type(held).__name__}, not a dict of arrays")
    observation, action, reward, done = (
        _array(held, key, where) for key in ("observations", "actions", "rewards", "dones")
    )
    with np.errstate(invalid="ignore"):
        pixels = observation.astype(np.uint8)
    if len(pixels) == 0 or (observation.dtype != np.uint8 and (pixels != observation).any()):
        raise CorruptDatasetError(f"{where}: observations must be whole numbers from 0 to 255")
    steps, done = len(pixels) - 1, done.reshape(-1, 1) != 0
    truncated, flag = np.zeros_like(done), np.zeros((steps, 1), np.bool_)
    truncated[-1:] = ~done[-1:]
    flags = {"terminated": done, "truncated": truncated, "done": done | truncated}
    rewards = reward.astype(np.float32).reshape(-1, 1)
    rows = {
        "observation": pixels[:-1],
        "action": action.astype(np.int64).reshape(-1, 1),
        "next": {"observation": pixels[1:], "reward": rewards, **flags},
    }
    return nested({**rows, **dict.fromkeys(flags, flag)}, steps, where)


def _array(held: Mapping[str, Any], key: str, where: str) -> np.ndarray:
    found = held.get(key)
    if not isinstance(found, np.ndarray) or found.dtype.kind not in "biuf" or found.ndim == 0:
        came = f"{found.dtype} {list(found.shape)}" if isinstance(found, np.ndarray) else type(found).__name__
        raise CorruptDatasetError(f"{where}: {key} must be an array of numbers for each step, it is {came}")
    return found
