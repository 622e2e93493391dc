"""Minari datasets (minari.farama.org)."""

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey

from interop.checkpoint.checkpointer import StorageCheckpointerBase
from interop.data.arguments import required
from interop.datasets.answers import NotFoundError
from interop.datasets.described import MOST_ROWS, Described, json_of
from interop.datasets.errors import CorruptDatasetError, DownloadError, unknown_id
from interop.datasets.experience_replay import BaseDatasetExperienceReplay
from interop.datasets.grouping import grouped
from interop.datasets.hub import hub_download, hub_files
from interop.datasets.hub_ids import AskedIds
from interop.datasets.minari_episodes import described_episodes, episodes, infos_of, steps_of
from interop.datasets.minari_infos import layout_of
from interop.datasets.minari_rows import rows
from interop.datasets.minari_spaces import arrays_of, spec_of
from interop.datasets.source import Part, Source
from interop.sample_units import SampleUnit
from interop.samplers import Sampler
from interop.shared.source_files import files_below
from interop.transforms import Transform
from interop.writers import Writer

_SPACES = {"observation_space": "observations", "action_space": "actions"}
_FORMATS = ("hdf5", "arrow", "parquet")
_NAME = re.compile(r"(?:(.+)/)?(.+?)(?:-v([0-9]{1,18}))?")  # of a dataset: namespace, name, version
_BYTES = 1 << 26  # per part
_ROWS = 4096  # per read


@dataclass(frozen=True)
class MinariSource(Source):
    """A Minari dataset on the Hugging Face hub or in a local folder."""

    family: ClassVar[str] = "minari"
    rows_version: ClassVar[int] = 2

    dataset_id: str

    def download(self, folder: Path) -> dict[str, str]:
        remote = os.environ.get("MINARI_REMOTE", "hf://farama-minari")
        if not remote.startswith("hf://"):
            raise DownloadError(
                f"MINARI_REMOTE is {remote!r}, only 'hf://<author>' is downloaded from. For others call "
                f"minari.download_dataset({self.dataset_id!r}), and pass load_from_local_minari=True"
            )
        name, _, inner = self.dataset_id.partition("/")
        repo = f"{remote[5:]}/{name}"
        try:
            files = hub_files(repo, f"{inner}/data/".lstrip("/"))
        except DownloadError as error:
            if not isinstance(error.__cause__, NotFoundError):
                raise
            files = []
        if not files:
            ids: list[str] = []
            with contextlib.suppress(Exception):  # the names only improve the message
                ids = _remote_ids()
            raise ValueError(unknown_id("Minari", self.dataset_id, ids))
        return hub_download(repo, files, folder)

    def parts(self, folder: Path) -> list[Part]:
        data = self._data(folder)
        description = _described(data)
        all_episodes = episodes(data, description["data_format"])
        counts = {"total_episodes": len(all_episodes), "total_steps": sum(episode.steps for episode in all_episodes)}
        for key, count in counts.items():
            if description.get(key, count) != count:
                raise CorruptDatasetError(f"{data} has {key} of {count}, its metadata.json says {description[key]}")
        size = _row_bytes(_arrays(description, str(data)))
        infos = layout_of(infos_of(data, description["data_format"], all_episodes))
        size += 2 * sum(info.row_bytes for info in infos.values())
        parts = grouped(data, ((episode, episode.steps, episode.steps * size) for episode in all_episodes), _BYTES)
        return [replace(part, which=(*part.which, infos)) for part in parts]

    def inputs(self, folder: Path) -> list[Path]:
        return files_below(self._data(folder))

    def read(self, part: Part) -> Iterator[TensorDictBase]:
        description = _described(part.path)
        arrays = _arrays(description, str(part.path))
        *some_episodes, infos = part.which
        size = _row_bytes(arrays) + 2 * sum(info.row_bytes for info in infos.values())
        at_once = min(_ROWS, max(16, _BYTES // size))
        return rows(steps_of(part.path, description["data_format"], some_episodes), arrays, infos, at_once)

    def metadata(self, folder: Path) -> dict[str, Any]:
        description = {
            "dataset_id": self.dataset_id,
            "env_spec": None,
            "combined_datasets": [],
            **_described(self._data(folder)),
        }
        description["episodes"] = described_episodes(self._data(folder), description["data_format"])
        if not (match := _NAME.fullmatch(description["dataset_id"])):
            raise CorruptDatasetError(
                f"{self._data(folder)}/metadata.json: {description['dataset_id']!r:.80} is no dataset_id"
            )
        namespace, name, version = match.groups()
        about = {"namespace": namespace or None, "dataset_name": name, "version": int(version) if version else None}
        return {**description, **about}

    def _data(self, folder: Path) -> Path:
        """The folder with the files of the dataset."""
        inner = self.dataset_id.partition("/")[2]
        some = [folder, folder / "data", folder / inner / "data", folder / self.dataset_id / "data"]
        for folder_of_data in some:
            if (folder_of_data / "metadata.json").is_file():
                return folder_of_data
        raise CorruptDatasetError(f"no metadata.json of Minari in any of {', '.join(map(str, dict.fromkeys(some)))}")


def _described(data: Path) -> Mapping[str, Any]:
    """The metadata of a dataset, with spaces and `env_spec` as JSON; None for missing spaces."""
    path = data / "metadata.json"
    return _parsed(path, path.read_bytes())


@lru_cache(maxsize=1)
def _parsed(path: Path, text: bytes) -> Mapping[str, Any]:
    """Parse metadata, cached for all parts: the bounds of an image space have one number per pixel."""
    content = json_of(text, str(path))
    given_fields = Described(content, str(path))
    description = {**dict.fromkeys(_SPACES, "null"), "data_format": "hdf5", **content}
    fields = Described(description, str(path))
    for name in ("total_episodes", "total_steps"):
        if name in given_fields:
            fields.whole(name, most=MOST_ROWS)
    if "dataset_id" in given_fields:
        fields.text("dataset_id")
    for name in ("env_spec", *_SPACES):
        if name in description and (description[name] is not None or name in _SPACES):
            description[name] = json_of(fields.text(name).encode(errors="replace"), f"{path}, {name}")
    if fields.text("data_format") not in _FORMATS:
        raise CorruptDatasetError(
            f"{path} has the data_format {description['data_format']!r:.80}, known are {_FORMATS}: upgrade this library"
        )
    _arrays(description, str(path))
    return description


def _arrays(description: Mapping[str, Any], where: str) -> dict[tuple[str, ...], np.dtype]:
    """The arrays of a step by path, from the spaces."""
    return {
        path: kind
        for key, name in _SPACES.items()
        for path, kind in arrays_of(description[key], f"{where}, {key}", name)
    }


def _row_bytes(arrays: Mapping[tuple[str, ...], np.dtype]) -> int:
    return 64 + 2 * sum(kind.itemsize for kind in arrays.values())


def _remote_ids() -> list[str]:
    return [*required("minari", "datasets").list_remote_datasets()]


class MinariExperienceReplay(BaseDatasetExperienceReplay):
    """A dataset of Minari (minari.farama.org), downloaded from the Hugging Face hub or read from a local Minari folder.

    A row is a step. A trajectory ends at ("next", "done"); its last ("next", "observation") is the true one. Dtypes are
    those of the files.

    | key | content, for an episode of T steps |
    |---|---|
    | "observation", ("next", "observation") | observations 0 to T - 1, and 1 to T; nested for Dict and Tuple spaces |
    | "action" | actions |
    | ("next", "reward") | rewards, [1]; integers become float64 |
    | ("next", "terminated"), ("next", "truncated"), ("next", "done") | bool [1]; done is either |
    | "episode" | the episode number, int64 |
    | "info", ("next", "info"), "state", ("next", "state") | as observations |
    | other entries of T rows | as stored |

    The entries of a Tuple are "0", "1", .... JPEG images are decoded. Text stays text. Arrays of unknown spaces are read as
    stored. An episode whose last step has no flag, which Minari allows, is truncated there.

    All rows have the infos of all episodes. An info that is missing, at the reset, in single steps, or in a whole episode,
    is zero or empty text. An info that is one value for an episode is in all of its rows. Where infos differ in shape, rows
    have the largest one, with zeros behind the values; numbers have the common dtype.

    `metadata` has Minari's metadata, and under "episodes" a dict for each episode, with "id", "total_steps", "seed",
    "options" and other entries, as far as Minari recorded them.

    Args:
        dataset_id: such as "D4RL/door/human-v2"; one of `available_datasets`, which queries the hub when its ids are used.
        load_from_local_minari: read `<MINARI_DATASETS_PATH or ~/.minari/datasets>/<dataset_id>/data` at each construction.
        from_local: a folder written by Minari: the folder with metadata.json, its parent, or a Minari root.

    The other arguments are those of `BaseDatasetExperienceReplay`.

    Raises:
        ValueError: an unknown dataset. The message has the nearest names.
        FileNotFoundError: the local dataset does not exist.
        CorruptDatasetError: the rows of an entry do not match the steps of its episode, episodes differ in entries other
            than infos, an info is text in some episodes only, or metadata.json has other totals. The message names file,
            episode, entry and both numbers.
    """

    METADATA_NAME = "env_metadata.json"

    available_datasets = AskedIds(_remote_ids, "Minari on the hub")

    def __init__(
        self,
        dataset_id: str,
        batch_size: int | None = None,
        *,
        load_from_local_minari: bool = False,
        root: str | os.PathLike[str] | None = None,
        download: bool | Literal["force"] = True,
        from_local: str | os.PathLike[str] | None = None,
        split_trajs: bool = False,
        num_workers: int = 0,
        sampler: Sampler | Callable[[], Sampler] | None = None,
        writer: Writer | Callable[[], Writer] | None = None,
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
        if load_from_local_minari:
            if from_local is not None:
                raise ValueError("pass from_local or load_from_local_minari, not both")
            home = Path(os.environ.get("MINARI_DATASETS_PATH") or "~/.minari/datasets").expanduser()
            if not (home / dataset_id / "data").is_dir():
                raise FileNotFoundError(
                    f"there is no local Minari dataset {dataset_id!r} in {home}: see MINARI_DATASETS_PATH"
                )
            from_local = home / dataset_id / "data"
            download = "force"
        super().__init__(
            MinariSource(dataset_id),
            batch_size,
            root=root,
            download=download,
            from_local=from_local,
            split_trajs=split_trajs,
            num_workers=num_workers,
            sampler=sampler,
            writer=writer,
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

    @property
    def metadata(self) -> dict[str, Any]:
        """Minari's metadata, with spaces as specs (needs minari); None for text and unknown spaces."""
        content = super().metadata
        return {**content, **{key: spec_of(content[key], f"{self.metadata_path}, {key}") for key in _SPACES}}
