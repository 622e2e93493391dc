"""A dataset of JSON files, for tests of what all datasets share."""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from tensordict import TensorDict

from interop.datasets.errors import CorruptDatasetError, DownloadError
from interop.datasets.experience_replay import BaseDatasetExperienceReplay
from interop.datasets.fetching import RemoteFile, fetch
from interop.datasets.rows import column, following, nested
from interop.datasets.source import Part, Source

LENGTHS = ((4, 2), (3,), (5, 1))  # of the episodes of each file
ROWS = sum(map(sum, LENGTHS))
calls: list[str] = []  # of the source in this process
urls: list[str] = []  # of the files, at a server


def make(folder: Path, rng: np.random.Generator) -> TensorDict:
    """Three files. Returns the rows."""
    folder.mkdir(parents=True, exist_ok=True)
    source, number, rows = ToySource("toy"), 0, []
    for place, lengths in enumerate(LENGTHS):
        episodes = []
        for length in lengths:
            text = [f"step {step} of {number}" for step in range(length)]
            obs, reward = rng.random((length, 2)).tolist(), rng.random(length).tolist()
            episodes.append({"episode": number, "observation": obs, "reward": reward, "text": text})
            number += 1
        (folder / f"{place}.json").write_text(json.dumps({"rows": sum(lengths), "episodes": episodes}))
        rows += source.read(Part(sum(lengths), folder / f"{place}.json"))
    return torch.cat(rows)


@dataclass(frozen=True)
class ToySource(Source):
    """`upstream`: a folder that stands for the server, or "http" for `urls`. `at_most`: counts of rows are upper bounds."""

    family = "toy"

    upstream: str = ""
    at_most: bool = False

    def download(self, folder: Path) -> Mapping[str, str]:
        calls.append("download")
        if self.upstream == "http":
            return fetch([RemoteFile(url, url.rpartition("/")[2]) for url in urls], folder)
        found = sorted(Path(self.upstream).glob("[0-9].json"))
        if not found:
            raise DownloadError(f"{self.upstream} has no files")
        for path in found:
            if not (folder / path.name).exists():
                shutil.copy(path, folder / f"{path.name}.part")
                (folder / f"{path.name}.part").rename(folder / path.name)
        return {each.name: hashlib.sha256((folder / each.name).read_bytes()).hexdigest() for each in found}

    def parts(self, folder: Path) -> list[Part]:
        calls.append("parts")
        return [Part(_content(path)["rows"], path, at_most=self.at_most) for path in sorted(folder.glob("[0-9].json"))]

    def read(self, part: Part) -> Iterator[TensorDict]:
        calls.append("read")
        for episode in _content(part.path)["episodes"]:
            yield _rows(episode, f"{part.path}, episode {episode['episode']}")

    def metadata(self, folder: Path) -> dict[str, Any]:
        return {"files": sorted(path.name for path in folder.glob("[0-9].json"))}


def _content(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise CorruptDatasetError(f"{path} is damaged: {error}") from error


def _rows(episode: Mapping[str, Any], where: str) -> TensorDict:
    arrays = {key: value if key == "text" else np.asarray(value) for key, value in episode.items() if key != "episode"}
    reward, count = column(arrays.pop("reward"), torch.float32), len(episode["observation"])
    rows = nested(arrays, count, where)
    rows["episode"] = torch.full((count,), episode["episode"])
    done = torch.arange(1, count + 1)[:, None] == count
    next_ = {"observation": following(rows["observation"]), "reward": reward, "done": done, "terminated": done}
    rows["next"] = TensorDict({**next_, "truncated": torch.zeros_like(done)}, [count])
    return rows


class ToyExperienceReplay(BaseDatasetExperienceReplay):
    SOURCE: ClassVar[type[ToySource]] = ToySource

    def __init__(
        self, dataset_id: str, batch_size: int | None = None, *, upstream: Path | str = "", at_most: bool = False,
        **more: Any,
    ) -> None:  # fmt: skip
        super().__init__(self.SOURCE(dataset_id, str(upstream), at_most), batch_size, **more)


def same(found: Any, expected: TensorDict) -> bool:
    """Whether all entries are equal, text as well."""
    kinds = set(found.keys(True, True)) == set(expected.keys(True, True))
    return kinds and bool((found == expected).all()) and [*found["text"]] == [*expected["text"]]


def content(folder: Path) -> dict[str, bytes]:
    """The bytes of all files below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def edit(path: Path, change: Callable[[Any], Any]) -> None:
    """Change an upstream file, or a record."""
    held = json.loads(path.read_text())
    change(held)
    path.write_text(json.dumps(held))
