"""Every loader, with upstream files of a few rows, for tests that hold for all of them."""

import hashlib
import importlib
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from interop import datasets
from interop.datasets import atari_dqn, d4rl_urls, gen_dgrl, openx
from interop.datasets.experience_replay import BaseDatasetExperienceReplay
from interop.datasets.rows import entries
from tests.interop.datasets import (
    sources_atari_dqn,
    sources_d4rl,
    sources_gen_dgrl,
    sources_hub_folder,
    sources_lerobot,
    sources_minari,
    sources_openml,
    sources_openx,
    sources_roboset,
    sources_toy,
    sources_vd4rl,
)
from tests.interop.datasets.server import Server, as_hub, publish_minari, serving


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
        root_flags: "done", "terminated" and "truncated" in the root: none; zeros; "done" as in "next" and zeros; all of the
            row before.
        trailing: whether rewards and flags have a last dim of one.
        episode: the key of the number of the episode.
        splits: whether there is `split_trajs`.
        ends_parts: whether `split_trajs` ends a trajectory that goes on.
        writes: whether rows can be written by default.
    """

    name: str
    construct: Callable[..., BaseDatasetExperienceReplay]
    make: Callable[[Path, np.random.Generator], Any]
    upload: Callable[[Server, Path, pytest.MonkeyPatch], None]
    lengths: tuple[int, ...]
    observation: str | None = "observation"
    behind: Literal["zero", "true"] = "zero"
    root_flags: Literal["none", "zeros", "done", "shifted"] = "zeros"
    trailing: bool = True
    episode: str | None = None
    splits: bool = True
    ends_parts: bool = False
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


def _on_the_hub(*place: str) -> Callable[[Server, Path, pytest.MonkeyPatch], None]:
    """Upload to a folder below a repository."""

    def upload(server: Server, files: Path, patch: pytest.MonkeyPatch) -> None:
        as_hub(server, server.folder.parent / "hub", patch)
        shutil.copytree(files, server.folder.joinpath("datasets", *place))

    return upload


def _minari(server: Server, files: Path, patch: pytest.MonkeyPatch) -> None:
    as_hub(server, server.folder.parent / "hub", patch)
    publish_minari(server, files / "toy")


def _d4rl(server: Server, files: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setitem(d4rl_urls.D4RL_URLS, "hopper-medium-v2", server.at("some.hdf5"))
    shutil.copy(files / "some.hdf5", server.folder)


def _openml(server: Server, files: Path, patch: pytest.MonkeyPatch) -> None:
    """As scikit-learn asks for it."""
    client = importlib.import_module("sklearn.datasets._openml")
    api, data = "api/v1/json/data", (files / "covertype.arff").read_bytes()
    names = {"_SEARCH_NAME": "list/data_name/{}/limit/2", "_DATA_INFO": "{}"}
    names |= {"_DATA_FEATURES": "features/{}", "_DATA_QUALITIES": "qualities/{}"}
    for name, path in names.items():
        patch.setattr(client, name, server.at(f"{api}/{path}"))
    columns = [line.split("'")[1:] for line in data.decode().splitlines() if line.startswith("@ATTRIBUTE")]
    features = [
        {"index": str(place), "name": name, "data_type": "numeric" if kind == " REAL" else "nominal"}
        | {"is_target": str(name == "class").lower(), "is_ignore": "false", "is_row_identifier": "false"}
        | {"number_of_missing_values": "0"}
        for place, (name, kind, *_) in enumerate(columns)
    ]
    about = {"id": "1", "name": "covertype", "version": "3", "format": "ARFF", "status": "active", "file_id": "1"}
    about |= {"url": server.at("data/covertype.arff"), "md5_checksum": hashlib.md5(data).hexdigest()}
    rows = str(len(data.partition(b"@DATA\n")[2].splitlines()))
    answers = {
        "list/data_name/covertype/limit/2/data_version/3": {"data": {"dataset": [{"did": 1, "status": "active"}]}},
        "1": {"data_set_description": about},
        "features/1": {"data_features": {"feature": features}},
        "qualities/1": {"data_qualities": {"quality": [{"name": "NumberOfInstances", "value": rows}]}},
    }
    for path, answer in answers.items():
        place = server.folder / api / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(json.dumps(answer))
    (server.folder / "data").mkdir()
    (server.folder / "data/covertype.arff").write_bytes(data)


LOADERS = [
    Loader(
        "toy",
        partial(sources_toy.ToyExperienceReplay, "toy", upstream="http"),
        sources_toy.make,
        _toy,
        lengths=tuple(chain.from_iterable(sources_toy.LENGTHS)),
        root_flags="none",
        episode="episode",
    ),
    Loader(
        "minari",
        partial(datasets.MinariExperienceReplay, sources_minari.DATASET),
        sources_minari.make,
        _minari,
        lengths=sources_minari.LENGTHS,
        behind="true",
        root_flags="none",
        episode="episode",
    ),
    Loader(
        "d4rl",
        partial(datasets.D4RLExperienceReplay, "hopper-medium-v2"),
        sources_d4rl.make,
        _d4rl,
        lengths=(5, 4, 3, 7),
        root_flags="shifted",
        ends_parts=True,
    ),
    Loader(
        "atari_dqn",
        partial(datasets.AtariDQNExperienceReplay, "Pong/5"),
        sources_atari_dqn.make,
        _atari_dqn,
        lengths=(2, 3, 2, 2, 2, 2, 2),
        trailing=False,
    ),
    Loader(
        "gen_dgrl",
        partial(datasets.GenDGRLExperienceReplay, "bigfish-level_1_E"),
        sources_gen_dgrl.make,
        _gen_dgrl,
        lengths=sources_gen_dgrl.LENGTHS,
        behind="true",
        writes=True,
    ),
    Loader(
        "openml",
        partial(datasets.OpenMLExperienceReplay, "covertype"),
        partial(sources_openml.make, name="covertype"),
        _openml,
        lengths=(1,) * 30,
        observation=None,
        splits=False,
    ),
    Loader(
        "openx",
        partial(datasets.OpenXExperienceReplay, sources_openx.DATASET, streaming=False),
        sources_openx.make,
        _on_the_hub(*openx.REPO.split("/")),
        lengths=tuple(chain.from_iterable(sources_openx.LENGTHS)),
        episode="episode",
        splits=False,
    ),
    Loader(
        "roboset",
        partial(datasets.RobosetExperienceReplay, "DAPG(expert)/door_v2d-v1"),
        sources_roboset.make,
        _on_the_hub("jdvakil", "RoboSet_Sim", "DAPG(expert)", "door_v2d-v1"),
        lengths=tuple(steps + seed for steps in sources_roboset.STEPS.values() for seed in range(2)),
        root_flags="done",
    ),
    Loader(
        "vd4rl",
        partial(datasets.VD4RLExperienceReplay, "main/walker_walk/random/64px", totensor=False),
        sources_vd4rl.make,
        _on_the_hub("conglu", "vd4rl", "vd4rl", "main", "walker_walk", "random", "64px"),
        lengths=(5, 3),
        observation="pixels",
        behind="true",
    ),
    Loader(
        "lerobot",
        partial(datasets.LeRobotExperienceReplay, sources_lerobot.DATASET),
        sources_lerobot.make,
        _on_the_hub(*sources_lerobot.DATASET.split("/")),
        lengths=sources_lerobot.LENGTHS,
        episode="episode",
    ),
    Loader(
        "hub_folder",
        partial(datasets.HubFolderExperienceReplay, "me/moves"),
        sources_hub_folder.make,
        _on_the_hub("me", "moves"),
        lengths=(5, 1, 4),
        behind="true",
        root_flags="none",
        episode="episode",
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
