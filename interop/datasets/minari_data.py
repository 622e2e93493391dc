"""Datasets of Minari (minari.farama.org)."""

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any, ClassVar, Literal

from tensordict import TensorDictBase

from interop.datasets.errors import CorruptDatasetError, DownloadError, unknown_id
from interop.datasets.experience_replay import BaseDatasetExperienceReplay
from interop.datasets.hub import hub_download, hub_files
from interop.datasets.minari_episodes import episodes, steps_of
from interop.datasets.minari_rows import rows
from interop.datasets.minari_spaces import row_bytes, spec_of
from interop.datasets.source import Part, Source
from interop.optional import required
from interop.samplers import Sampler
from interop.transforms import Transform
from interop.writers import Writer

_SPACES = ("observation_space", "action_space")
_FORMATS = ("hdf5", "arrow", "parquet")
_BYTES = 1 << 26  # of the rows of a part, and of those that are read at once
_ROWS = 4096  # at once


@dataclass(frozen=True)
class MinariSource(Source):
    """A dataset on the Hugging Face hub, or a folder that Minari wrote."""

    family: ClassVar[str] = "minari"

    dataset_id: str

    def download(self, folder: Path) -> dict[str, str]:
        remote = os.environ.get("MINARI_REMOTE", "hf://farama-minari")
        kind, _, author = remote.partition("://")
        if kind != "hf":
            raise DownloadError(
                f"MINARI_REMOTE is {remote!r}, only datasets of the Hugging Face hub, 'hf://<author>', are downloaded. For "
                f"others call minari.download_dataset({self.dataset_id!r}), and pass load_from_local_minari=True"
            )
        name, _, inner = self.dataset_id.partition("/")
        errors = required("huggingface_hub.errors", "datasets")
        try:
            files = hub_files(f"{author}/{name}", f"{inner}/data/" if inner else "data/")
        except DownloadError as error:
            if not isinstance(error.__cause__, errors.RepositoryNotFoundError):
                raise
            files = []
        if not files:
            known: list[str] = []
            with contextlib.suppress(errors.HTTPError, OSError):
                known = MinariExperienceReplay.available_datasets
            raise ValueError(unknown_id("Minari", self.dataset_id, known))
        return hub_download(f"{author}/{name}", files, folder)

    def parts(self, folder: Path) -> list[Part]:
        data = self._data(folder)
        said = _described(data)
        steps = steps_of(data, said["data_format"])
        for key, found in {"total_episodes": len(steps), "total_steps": sum(steps.values())}.items():
            if said.get(key, found) != found:
                raise CorruptDatasetError(f"{data} has {key} of {found}, its metadata.json says {said[key]}")
        most = max(256, _BYTES // _bytes_of(said))
        before = accumulate(steps.values(), initial=0)
        runs = groupby(zip(steps.items(), before, strict=False), key=lambda each: each[1] // most)
        kept = [{number: count for (number, count), _ in run if count} for _, run in runs]
        return [Part(sum(run.values()), data, (f"from episode {min(run)} on", run)) for run in kept if run]

    def read(self, part: Part) -> Iterator[TensorDictBase]:
        said = _described(part.path)
        spaces = {"observations": said["observation_space"], "actions": said["action_space"]}
        at_once = min(_ROWS, max(16, _BYTES // _bytes_of(said)))
        yield from rows(episodes(part.path, said["data_format"], part.which[1]), spaces, at_once)

    def metadata(self, folder: Path) -> dict[str, Any]:
        said = {"env_spec": None, "combined_datasets": [], **_described(self._data(folder))}
        said.setdefault("dataset_id", self.dataset_id)
        [(namespace, name, version)] = re.findall(r"^(?:(.+)/)?(.+?)(?:-v(\d+))?$", said["dataset_id"])
        about = {"namespace": namespace or None, "dataset_name": name, "version": int(version) if version else None}
        return {**said, **about}

    def _data(self, folder: Path) -> Path:
        """The folder with the files of the dataset."""
        inner = self.dataset_id.partition("/")[2]
        some = [folder, folder / "data", folder / inner / "data", folder / self.dataset_id / "data"]
        for each in some:
            if (each / "metadata.json").is_file():
                return each
        raise CorruptDatasetError(f"no metadata.json of Minari in any of {', '.join(map(str, dict.fromkeys(some)))}")


def _described(data: Path) -> Mapping[str, Any]:
    """What the metadata of a dataset says, with spaces and `env_spec` as JSON. Spaces that are missing are None."""
    path = data / "metadata.json"
    return _parsed(path, path.read_bytes())


@lru_cache(maxsize=1)
def _parsed(path: Path, text: bytes) -> Mapping[str, Any]:
    """The text is parsed once for all parts: the bounds of an image are lists of as many numbers as it has."""
    try:
        said = {"observation_space": "null", "action_space": "null", **json.loads(text)}
        said |= {key: json.loads(said[key]) for key in ("env_spec", *_SPACES) if key in said}
        said.setdefault("data_format", "hdf5")  # files of 2023 do not say it
        _bytes_of(said)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CorruptDatasetError(f"{path} is no metadata of Minari ({error!r})") from error
    if said["data_format"] not in _FORMATS:
        raise CorruptDatasetError(
            f"{path} has the data_format {said['data_format']!r}, known are {_FORMATS}: upgrade this library"
        )
    return said


def _bytes_of(said: Mapping[str, Any]) -> int:
    """The size of a row, about."""
    return 2 * row_bytes(said["observation_space"]) + row_bytes(said["action_space"]) + 64


class _Available:
    def __get__(self, instance: object, owner: type) -> list[str]:
        return [*required("minari", "datasets").list_remote_datasets()]


class MinariExperienceReplay(BaseDatasetExperienceReplay):
    """A Minari dataset as a replay buffer: downloaded from the Hugging Face hub, or read from a local Minari folder.

    A row is a step. A trajectory ends where ("next", "done") is True; its last ("next", "observation") is the true one.
    Dtypes are those of the files.

    | key | of an episode of T steps |
    |---|---|
    | "observation", ("next", "observation") | observations 0 to T - 1, and 1 to T; nested for Dict and Tuple spaces |
    | "action" | actions |
    | ("next", "reward") | rewards, [1]; integers become float64 |
    | ("next", "terminated"), ("next", "truncated") | bool [1] |
    | ("next", "done") | terminated or truncated |
    | "episode" | the number of the episode, int64 |
    | "info", ("next", "info") | infos, as observations. Where that of the reset was not stored, it is zero |
    | "state", ("next", "state") | as observations, where they were stored |
    | others | entries of T rows under their own names |

    The entries of a Tuple are "0", "1", .... Images that Minari stored as JPEG are decoded. Text stays text. Which class
    a space had does not matter: the arrays of unknown spaces are read as they are stored.

    Args:
        dataset_id: such as "D4RL/door/human-v2"; one of `available_datasets`, which asks the hub.
        load_from_local_minari: read `<MINARI_DATASETS_PATH or ~/.minari/datasets>/<dataset_id>/data`, not the network. It
            is converted anew each time.
        from_local: a folder that Minari wrote: that with the metadata.json, the one above it, or a Minari root.
        others: see `BaseDatasetExperienceReplay` and `TensorDictReplayBuffer`.

    Raises:
        ValueError: there is no such dataset. The message has the nearest names.
        FileNotFoundError: there is no such local dataset.
        CorruptDatasetError: entries have not as many rows as the episode has steps, or differ between episodes, or
            metadata.json says other totals. The message names file, episode, entry and both numbers.
        Others as for `BaseDatasetExperienceReplay`.
    """

    METADATA_NAME = "env_metadata.json"

    available_datasets = _Available()

    def __init__(
        self, dataset_id: str, batch_size: int | None = None, *, root: str | os.PathLike[str] | None = None,
        download: bool | Literal["force"] = True, from_local: str | os.PathLike[str] | None = None,
        sampler: Sampler | Callable[[], Sampler] | None = None, writer: Writer | Callable[[], Writer] | None = None,
        collate_fn: Callable[[Any], Any] | None = None, pin_memory: bool = False, prefetch: int | None = None,
        transform: Transform | Callable[[Any], Any] | None = None, split_trajs: bool = False,
        load_from_local_minari: bool = False, num_workers: int = 0, **more: Any,
    ) -> None:  # fmt: skip
        if load_from_local_minari:
            if from_local is not None:
                raise ValueError("pass from_local or load_from_local_minari, not both")
            home = Path(os.environ.get("MINARI_DATASETS_PATH") or "~/.minari/datasets").expanduser()
            from_local, download = home / dataset_id / "data", "force"
        super().__init__(
            MinariSource(dataset_id), batch_size, root=root, download=download, from_local=from_local, sampler=sampler,
            writer=writer, collate_fn=collate_fn, pin_memory=pin_memory, prefetch=prefetch, transform=transform,
            split_trajs=split_trajs, num_workers=num_workers, **more,
        )  # fmt: skip

    @property
    def metadata(self) -> dict[str, Any]:
        """What Minari says of the dataset, with its spaces as specs: see `minari_spaces.spec_of`."""
        said = super().metadata
        return {**said, **{key: spec_of(said[key]) for key in _SPACES}}
