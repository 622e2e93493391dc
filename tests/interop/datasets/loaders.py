"""Every loader, with upstream files of a few rows, for tests that hold for all of them."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from interop.datasets import atari_dqn, gen_dgrl
from interop.datasets.experience_replay import BaseDatasetExperienceReplay
from interop.datasets.rows import entries
from tests.interop.datasets import sources_atari_dqn, sources_gen_dgrl, sources_toy
from tests.interop.datasets.server import Server, serving


@dataclass(frozen=True)
class Loader:
    """A dataset, and what is known of it.

    Args:
        construct: the class, with the arguments that choose the dataset.
        make: writes the upstream files to a folder, as `from_local` takes them.
        upload: has the server send these files, and the library ask it for them.
        lengths: rows of the episodes.
        observation: its key.
        behind: the next observation of the last row of an episode: zeros, or another one than the next row has.
        root_flags: "done", "terminated" and "truncated" in the root.
        trailing: whether rewards and flags have a last dim of one.
        episode: the key of the number of the episode.
        splits: whether there is `split_trajs`.
        writes: whether rows can be written by default.
    """

    name: str
    construct: Callable[..., BaseDatasetExperienceReplay]
    make: Callable[[Path, np.random.Generator], Any]
    upload: Callable[[Server, Path, pytest.MonkeyPatch], None]
    lengths: tuple[int, ...]
    observation: str | None = "observation"
    behind: Literal["zero", "true"] = "zero"
    root_flags: Literal["none", "zeros", "done"] = "zeros"
    trailing: bool = True
    episode: str | None = None
    splits: bool = True
    writes: bool = False


@dataclass(frozen=True)
class Given:
    """A loader whose upstream files are in `files`, and at a server."""

    loader: Loader
    server: Server
    folder: Path

    @property
    def files(self) -> Path:
        return self.folder / "files"

    def construct(self, batch_size: int | None = None, **more: Any) -> BaseDatasetExperienceReplay:
        return self.loader.construct(batch_size=batch_size, **{"root": self.folder / "root", "download": True, **more})

    def upload(self, seed: int, patch: pytest.MonkeyPatch) -> None:
        """Make the upstream files, anew if they are there."""
        for each in (self.files, self.server.folder):
            shutil.rmtree(each, ignore_errors=True)
            each.mkdir(parents=True)
        self.loader.make(self.files, np.random.default_rng(seed))
        self.loader.upload(self.server, self.files, patch)


@contextmanager
def given(loader: Loader, folder: Path) -> Iterator[tuple[Given, pytest.MonkeyPatch]]:
    with serving(folder / "served") as server, pytest.MonkeyPatch.context() as patch:
        patch.setattr("time.sleep", lambda seconds: None)
        found = Given(loader, server, folder)
        found.upload(0, patch)
        yield found, patch


def _toy(server: Server, files: Path, patch: pytest.MonkeyPatch) -> None:
    place = shutil.copytree(files, server.folder / "toy")
    listing = [server.at(f"toy/{path.name}") for path in sorted(place.iterdir())]
    patch.setattr(sources_toy, "urls", listing)


def _atari_dqn(server: Server, files: Path, patch: pytest.MonkeyPatch) -> None:
    bucket, listing = "atari-replay-datasets", "storage/v1/b/atari-replay-datasets/o"
    logs = "dqn/Pong/5/replay_logs"
    patch.setattr(atari_dqn, "BASE_URL", server.at(bucket))
    patch.setattr(atari_dqn, "LIST_URL", server.at(listing))
    place = shutil.copytree(files, server.folder / bucket / logs)
    items = [{"name": f"{logs}/{path.name}", "size": str(path.stat().st_size)} for path in sorted(place.iterdir())]
    (server.folder / listing).parent.mkdir(parents=True)
    (server.folder / listing).write_text(json.dumps({"items": items}))


def _gen_dgrl(server: Server, files: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(gen_dgrl, "BASE_URL", server.at("DGRL"))
    patch.setitem(gen_dgrl.CATEGORIES, "level_1_E", ("100k/level_1/expert", 100))  # space is reserved for all of them
    shutil.copytree(files, server.folder / "DGRL/100k/level_1/expert")


LOADERS = [
    Loader(
        "toy",
        partial(sources_toy.ToyExperienceReplay, "toy", upstream="http"),
        sources_toy.make,
        _toy,
        lengths=tuple(length for lengths in sources_toy.LENGTHS for length in lengths),
        root_flags="none",
        episode="episode",
    ),
    Loader(
        "atari_dqn",
        partial(atari_dqn.AtariDQNExperienceReplay, "Pong/5"),
        sources_atari_dqn.make,
        _atari_dqn,
        lengths=(2, 3, 2, 2, 2, 2, 2),
        trailing=False,
    ),
    Loader(
        "gen_dgrl",
        partial(gen_dgrl.GenDGRLExperienceReplay, "bigfish-level_1_E"),
        sources_gen_dgrl.make,
        _gen_dgrl,
        lengths=sources_gen_dgrl.LENGTHS,
        behind="true",
        writes=True,
    ),
]


def equal(found: Any, expected: Any) -> bool:
    """Whether tensordicts are equal, text as well."""
    ours, theirs = dict(entries(found)), dict(entries(expected))
    return ours.keys() == theirs.keys() and all(_same(ours[key], theirs[key]) for key in ours)


def _same(found: Any, expected: Any) -> bool:
    if not isinstance(found, torch.Tensor):
        return found.tolist() == expected.tolist()
    return found.dtype == expected.dtype and torch.equal(found.nan_to_num(), expected.nan_to_num())
