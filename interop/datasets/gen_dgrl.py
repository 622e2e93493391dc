"""Gen-DGRL: Procgen episodes of expert and suboptimal agents, from dl.fbaipublicfiles.com."""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from tensordict import TensorDict
from tensordict.utils import NestedKey

from interop.checkpoint.checkpointer import StorageCheckpointerBase
from interop.datasets.archives import tar_members
from interop.datasets.errors import CorruptDatasetError, unknown_id
from interop.datasets.experience_replay import BaseDatasetExperienceReplay
from interop.datasets.fetching import RemoteFile, fetch
from interop.datasets.object_arrays import load_object
from interop.datasets.rows import nested
from interop.datasets.source import Part, Source
from interop.sample_units import SampleUnit
from interop.samplers import Sampler
from interop.transforms import Transform
from interop.writers import TensorDictRoundRobinWriter, Writer

BASE_URL = "https://dl.fbaipublicfiles.com/DGRL/Procgen/Datasets/Compressed"
GAMES = [
    *("bigfish", "bossfight", "caveflyer", "chaser", "climber", "coinrun", "dodgeball", "fruitbot"),
    *("heist", "jumper", "leaper", "maze", "miner", "ninja", "plunder", "starpilot"),
]
CATEGORIES = {  # category -> folder of the archives, maximum number of rows
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


@dataclass(frozen=True)
class GenDGRLSource(Source):
    """The archive of a game, `<game>.tar.xz`, with one file per episode."""

    family = "gen_dgrl"

    def __post_init__(self) -> None:
        if self.dataset_id not in IDS:
            raise ValueError(unknown_id("Gen-DGRL", self.dataset_id, IDS))

    def download(self, folder: Path) -> Mapping[str, str]:
        game, category = self.dataset_id.split("-")
        name = f"{game}.tar.xz"
        return fetch([RemoteFile(f"{BASE_URL}/{CATEGORIES[category][0]}/{name}", name)], folder)

    def parts(self, folder: Path) -> list[Part]:
        game, category = self.dataset_id.split("-")
        if not (archive := folder / f"{game}.tar.xz").exists():
            raise CorruptDatasetError(f"{folder} has no {archive.name}")
        return [Part(CATEGORIES[category][1], archive, at_most=True, streamed=True)]

    def read(self, part: Part) -> Iterator[TensorDict]:
        left = part.rows
        for name, file in tar_members(part.path):
            if name.endswith(".npy") and left:
                where = f"{part.path}, {name}"
                episode = _episode(load_object(file, where), where, left)
                yield episode
                left -= len(episode)


def _episode(columns: Any, where: str, most: int) -> TensorDict:
    """The first `most` steps of an episode, from T + 1 upstream observations. The last one ends it."""
    try:
        observation, action, reward, done = (columns[key] for key in ("observations", "actions", "rewards", "dones"))
        with np.errstate(invalid="ignore"):
            pixels = observation.astype(np.uint8)
        done = done.reshape(-1, 1) != 0
        action = action.astype(np.int64).reshape(-1, 1)
        reward = reward.astype(np.float32).reshape(-1, 1)
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise CorruptDatasetError(f"{where} is no dict of observations, actions, rewards and dones: {error}") from error
    if pixels.ndim != 4 or not len(pixels) or (observation.dtype != np.uint8 and (pixels != observation).any()):
        raise CorruptDatasetError(f"{where}: observations must be images, of whole numbers from 0 to 255")
    truncated = np.zeros_like(done)
    none = np.zeros_like(done)
    last = max(min(most, len(done)) - 1, 0)
    truncated[last : last + 1] = ~done[last : last + 1]
    flags = {"terminated": done, "truncated": truncated, "done": done | truncated}
    rows = {
        "observation": pixels[:-1],
        "action": action,
        "next": {"observation": pixels[1:], "reward": reward, **flags},
        **dict.fromkeys(flags, none),
    }
    return nested(rows, len(pixels) - 1, where)[:most]


class GenDGRLExperienceReplay(BaseDatasetExperienceReplay):
    """Gen-DGRL: transitions of Procgen games, for generalization in offline reinforcement learning (arXiv:2312.05742).

    Rows are in archive order. Only the first 1, 10 or 25 million, or 100,000 rows are used, depending on the category; an
    archive may have fewer.

    | key | shape | dtype |
    |---|---|---|
    | "observation", ("next", "observation") | [3, 64, 64] | uint8 |
    | "action" | [1] | int64 |
    | ("next", "reward") | [1] | float32 |
    | ("next", "done"), ("next", "terminated"), ("next", "truncated") | [1] | bool |
    | "done", "terminated", "truncated": False | [1] | bool |

    An episode ends at upstream's "done": ("next", "done") and ("next", "terminated"). The environment was reset in that
    step, so the last next observation is the first one of a new level, which upstream's own reader replaces by zeros. If the
    last step of a file is not done, or the last row that is used cuts an episode, it has ("next", "truncated") and ("next",
    "done").

    Args:
        dataset_id: `<game>-<category>`, one of `available_datasets`.
        from_local: a folder with `<game>.tar.xz`.
        writer: by default a `TensorDictRoundRobinWriter`: new rows replace old ones in memory, not on disk.

    The other arguments are those of `BaseDatasetExperienceReplay`, and so are errors. ValueError for an unknown id.
    """

    available_datasets = IDS

    def __init__(
        self,
        dataset_id: str,
        batch_size: int | None = None,
        *,
        writer: Writer | Callable[[], Writer] | None = None,
        root: str | os.PathLike[str] | None = None,
        download: bool | Literal["force"] = True,
        from_local: str | os.PathLike[str] | None = None,
        split_trajs: bool = False,
        num_workers: int = 0,
        sampler: Sampler | Callable[[], Sampler] | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        prefetch: int | None = None,
        transform: Transform | Callable[[Any], Any] | None = None,
        transform_factory: Callable[[], Transform | Callable[[Any], Any]] | None = None,
        dim_extend: int | None = None,
        checkpointer: StorageCheckpointerBase | type[StorageCheckpointerBase] | None = None,
        generator: torch.Generator | None = None,
        shared: bool = False,
        compilable: bool | None = None,
        delayed_init: bool | None = None,
        sample_unit: SampleUnit | None = None,
        consume_after_n_samples: int | None = None,
        priority_key: NestedKey | None = "td_error",
    ) -> None:
        writer = TensorDictRoundRobinWriter() if writer is None else writer
        super().__init__(
            GenDGRLSource(dataset_id),
            batch_size,
            writer=writer,
            root=root,
            download=download,
            from_local=from_local,
            split_trajs=split_trajs,
            num_workers=num_workers,
            sampler=sampler,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            prefetch=prefetch,
            transform=transform,
            transform_factory=transform_factory,
            dim_extend=dim_extend,
            checkpointer=checkpointer,
            generator=generator,
            shared=shared,
            compilable=compilable,
            delayed_init=delayed_init,
            sample_unit=sample_unit,
            consume_after_n_samples=consume_after_n_samples,
            priority_key=priority_key,
        )
