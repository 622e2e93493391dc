"""DQN Replay: what DQN agents saw in training on Atari games, through Google Cloud Storage."""

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote, urlencode

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from interop import columns
from interop.datasets.compressed import Stream, decompressed
from interop.datasets.errors import CorruptDatasetError, DownloadError, unknown_id
from interop.datasets.experience_replay import BaseDatasetExperienceReplay
from interop.datasets.fetching import RemoteFile, fetch
from interop.datasets.frames_once import FramesOnceStorage
from interop.datasets.object_arrays import array_header, load_object
from interop.datasets.rows import nested
from interop.datasets.source import Part, Source
from interop.numbers import whole
from interop.samplers import Sampler, SamplerWithoutReplacement, SliceSampler, SliceSamplerWithoutReplacement
from interop.storages import LazyMemmapStorage, Storage, TensorStorage
from interop.writers import ImmutableDatasetWriter, Writer

BASE_URL = "https://storage.googleapis.com/atari-replay-datasets"
LIST_URL = "https://storage.googleapis.com/storage/v1/b/atari-replay-datasets/o"
GAMES = [
    *("AirRaid", "Alien", "Amidar", "Assault", "Asterix", "Asteroids", "Atlantis", "BankHeist", "BattleZone"),
    *("BeamRider", "Berzerk", "Bowling", "Boxing", "Breakout", "Carnival", "Centipede", "ChopperCommand"),
    *("CrazyClimber", "DemonAttack", "DoubleDunk", "ElevatorAction", "Enduro", "FishingDerby", "Freeway", "Frostbite"),
    *("Gopher", "Gravitar", "Hero", "IceHockey", "Jamesbond", "JourneyEscape", "Kangaroo", "Krull", "KungFuMaster"),
    *("MontezumaRevenge", "MsPacman", "NameThisGame", "Phoenix", "Pitfall", "Pong", "Pooyan", "PrivateEye", "Qbert"),
    *("Riverraid", "RoadRunner", "Robotank", "Seaquest", "Skiing", "Solaris", "SpaceInvaders", "StarGunner", "Tennis"),
    *("TimePilot", "Tutankham", "UpNDown", "Venture", "VideoPinball", "WizardOfWor", "YarsRevenge", "Zaxxon"),
]
IDS = [f"{game}/{run}" for game in GAMES for run in range(1, 6)]
_ARRAYS = {  # of a checkpoint: dtype and dims
    "$store$_observation": ("uint8", 3),
    "$store$_action": ("int32", 1),
    "$store$_reward": ("float32", 1),
    "$store$_terminal": ("uint8", 1),
}
_NOTES = ("add_count", "invalid_range")
_FILE = re.compile(rf"({'|'.join(map(re.escape, (*_ARRAYS, *_NOTES)))})_ckpt\.(\d+)\.gz")
_ROWS = 4096  # that are read at once
_DONE = ("next", "done")


@dataclass(frozen=True)
class AtariDQNSource(Source):
    """The checkpoints of the replay buffer of a run. Each is a ring of steps, in six files of gzipped `.npy` arrays."""

    max_checkpoints: int | None = None

    family = "atari"

    def __post_init__(self) -> None:
        if self.dataset_id not in IDS:
            raise ValueError(
                f"{unknown_id('DQN Replay', self.dataset_id, IDS)}. An id is <Game>/<run>, with runs 1 to 5"
            )
        if self.max_checkpoints is not None:
            whole("max_checkpoints", self.max_checkpoints)

    def download(self, folder: Path) -> Mapping[str, str]:
        listed = self._listed(folder)
        place = f"{BASE_URL}/dqn/{self.dataset_id}/replay_logs"
        files = [name for number in self._chosen(listed) for name in listed if _told(name) == number]
        return fetch([RemoteFile(f"{place}/{quote(name, safe='')}", name, listed[name]) for name in files], folder)

    def _listed(self, folder: Path) -> dict[str, int]:
        """Names and sizes of the files upstream."""
        found, page = dict[str, int](), 0
        query = {"prefix": f"dqn/{self.dataset_id}/replay_logs/", "fields": "items(name,size),nextPageToken"}
        try:
            while not page or "pageToken" in query:
                fetch([RemoteFile(f"{LIST_URL}?{urlencode(query)}", f"listing/{page}.json")], folder)
                listing = json.loads((folder / f"listing/{page}.json").read_bytes())
                found |= {item["name"].rpartition("/")[2]: int(item["size"]) for item in listing.get("items", ())}
                query.pop("pageToken", None)
                query |= {"pageToken": listing["nextPageToken"]} if "nextPageToken" in listing else {}
                page += 1
        except (DownloadError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise DownloadError(
                f"the files of {self.dataset_id} cannot be listed: {str(error).splitlines()[0]}. The bucket "
                "atari-replay-datasets is no longer open to everybody. If you have the .gz files of a run, pass their "
                "folder as from_local"
            ) from error
        found = {name: size for name, size in found.items() if _FILE.fullmatch(name)}
        if not found:
            raise DownloadError(f"there are no files of {self.dataset_id} in the bucket atari-replay-datasets")
        return found

    def _chosen(self, names: Iterable[str]) -> list[int]:
        """The numbers of checkpoints, in order."""
        return sorted({_told(name) for name in names if _FILE.fullmatch(name)})[: self.max_checkpoints]

    def parts(self, folder: Path) -> list[Part]:
        folder = folder / "replay_logs" if (folder / "replay_logs").is_dir() else folder
        parts = []
        for number in self._chosen(path.name for path in folder.iterdir()):
            rows = {path: shape[0] for path, shape in _shapes(folder, number).items()}
            first, count = next(iter(rows.items()))
            if wrong := [path for path in rows if rows[path] != count]:
                raise CorruptDatasetError(f"{first} has {count} rows, {wrong[0]} has {rows[wrong[0]]}")
            parts += [Part(count, folder, (number,), streamed=True)] if count else []
        if not parts:
            raise CorruptDatasetError(f"{folder} has no files $store$_observation_ckpt.<number>.gz and the like")
        return parts

    def read(self, part: Part) -> Iterator[TensorDict]:
        """Some thousand rows at a time. A checkpoint ends, and breaks where new rows would be written, as "truncated"."""
        number, ends = part.which[0], np.zeros(part.rows, np.uint8)
        ends[[-1, int(_notes(part.path, number).get("add_count", 0)) % part.rows - 1]] = 1
        shapes = _shapes(part.path, number)
        with ExitStack() as stack:
            arrays = [_Array(stack.enter_context(decompressed(path)), path) for path in shapes]
            for start in range(0, part.rows, _ROWS):
                count = min(_ROWS, part.rows - start)
                frames, action, reward, terminal = (array.rows(count) for array in arrays)
                terminated = (terminal != 0).astype(np.uint8)
                truncated = ends[start : start + count] & ~terminated
                flags = {"terminated": terminated, "truncated": truncated, "done": terminated | truncated}
                rows = {"observation": frames, "action": action, "next": {"reward": reward, **flags}}
                yield nested(rows, count, f"{part.path}, checkpoint {number}")
            for array in arrays:
                array.finish()

    def metadata(self, folder: Path) -> dict[str, Any]:
        """Of each checkpoint: its number, rows, and "add_count" and "invalid_range" of the replay buffer."""
        parts = self.parts(folder)
        noted = [{"checkpoint": part.which[0], "rows": part.rows, **_notes(part.path, part.which[0])} for part in parts]
        return {"dataset_id": self.dataset_id, "checkpoints": noted}


class AtariDQNExperienceReplay(BaseDatasetExperienceReplay):
    """DQN Replay: the steps of five training runs of a DQN agent for each of 60 Atari games (arXiv:1907.04543).

    Rows are those of up to 50 checkpoints of a million each, in the order of their numbers. Each frame is on the disk
    once, which takes 7 GB a checkpoint. What upstream notes of each checkpoint is in `metadata`, not in batches.

    | key | shape | dtype |
    |---|---|---|
    | "observation", ("next", "observation") | [84, 84] | uint8 |
    | "action" | [] | int32 |
    | ("next", "reward") | [] | float32 |
    | ("next", "done"), ("next", "terminated"), ("next", "truncated") | [] | uint8 |
    | "done", "terminated", "truncated": zero | [] | uint8 |

    An episode ends where the game is over: ("next", "terminated"). The frame behind some steps is not known: behind the
    last row of a checkpoint, and where the ring of the replay buffer was written next. There ("next", "truncated") is set.
    ("next", "observation") is zero in both cases. In slices the sampler writes the flags of "next", bool [1], and sets
    ("next", "truncated") in the last step of each.

    Args:
        dataset_id: `<Game>/<run>`, one of `available_datasets`.
        batch_size, root, download, sampler, transform, **more: see `BaseDatasetExperienceReplay`.
        from_local: a folder with the `.gz` files of a run, or with a folder `replay_logs` of these.
        writer: None, or an `ImmutableDatasetWriter`.
        num_procs: accepted. A checkpoint is a stream, which one process reads.
        num_slices, slice_len: draw slices of episodes: so many a batch, or of this length.
        strict_len: False lets episodes that are shorter come out whole.
        replacement: False to draw each row, or episode, once before any comes again.
        mp_start_method: accepted.
        max_checkpoints: how many of the first checkpoints are used, all by default. A class attribute `_max_runs` sets the
            default.

    Raises:
        ValueError: there is no such dataset. The message has the nearest ids.
        DatasetError: see `BaseDatasetExperienceReplay`. The bucket of the dataset is no longer open to everybody.
    """

    available_datasets = IDS
    _max_runs: int | None = None

    def __init__(
        self, dataset_id: str, batch_size: int | None = None, *, root: str | os.PathLike[str] | None = None,
        download: bool | Literal["force"] = True, from_local: str | os.PathLike[str] | None = None,
        sampler: Sampler | Callable[[], Sampler] | None = None, writer: Writer | Callable[[], Writer] | None = None,
        transform: Any = None, num_procs: int = 0, num_slices: int | None = None, slice_len: int | None = None,
        strict_len: bool = True, replacement: bool = True, mp_start_method: str = "fork",
        max_checkpoints: int | None = None, **more: Any,
    ) -> None:  # fmt: skip
        writer = writer() if callable(writer) else writer or ImmutableDatasetWriter()
        if not isinstance(writer, ImmutableDatasetWriter):
            raise ValueError(f"frames that are stored once cannot be written: got a {type(writer).__name__}")
        slices = num_slices is not None or slice_len is not None
        if sampler is not None and (slices or not replacement):
            raise ValueError("num_slices, slice_len and replacement choose the sampler: give either these or sampler")
        if slices:
            kind = SliceSampler if replacement else SliceSamplerWithoutReplacement
            sampler = kind(num_slices=num_slices, slice_len=slice_len, end_key=_DONE, strict_length=strict_len)
        elif not replacement:
            sampler = SamplerWithoutReplacement()
        super().__init__(
            AtariDQNSource(dataset_id, self._max_runs if max_checkpoints is None else max_checkpoints), batch_size,
            root=root, download=download, from_local=from_local, num_workers=num_procs, sampler=sampler, writer=writer,
            transform=transform, **more,
        )  # fmt: skip

    @property
    def dataset_path(self) -> Path:
        """The folder of the rows."""
        return self.data_path_root

    @property
    def episodes(self) -> Tensor:
        """The number of the episode of each row, int64 [N], counted from 0."""
        if self.data_path != self.data_path_root:  # rows are trajectories
            return torch.arange(len(self))
        done = columns.whole(self._storage, _DONE) != 0
        return done.cumsum(0) - done.to(torch.int64)

    def presented(self, storage: TensorStorage) -> Storage:
        assert isinstance(storage, LazyMemmapStorage) and storage.scratch_dir is not None
        return FramesOnceStorage.open(storage.scratch_dir, "r")

    def preprocess(self, fn: Callable[[Any], Any], dim: int = 0, *args: Any, **options: Any) -> Storage:
        """See `BaseDatasetExperienceReplay.preprocess`. RuntimeError for a dim other than 0."""
        if dim != 0:
            raise RuntimeError(f"the rows of frames that are stored once are divided along dim 0 alone, got dim={dim}")
        return super().preprocess(fn, dim, *args, **options)


class _Array:
    """The rows of a compressed `.npy` array, from the first to the last."""

    def __init__(self, stream: Stream, path: Path) -> None:
        self._stream, self._path = stream, path
        shape, self._dtype = array_header(stream, str(path))
        self._shape = shape[1:]

    def rows(self, count: int) -> np.ndarray:
        size = count * math.prod(self._shape) * self._dtype.itemsize
        data = self._stream.read(size)
        if len(data) < size:
            raise CorruptDatasetError(f"{self._path} is truncated: it has fewer rows than its header says")
        return np.frombuffer(data, self._dtype).reshape(count, *self._shape)

    def finish(self) -> None:
        if rest := self._stream.finish():
            raise CorruptDatasetError(f"{self._path} has {rest} bytes more than its header says")


def _told(name: str) -> int:
    """The number of the checkpoint that a file is of."""
    found = _FILE.fullmatch(name)
    return int(found[2]) if found else -1


def _shapes(folder: Path, number: int) -> dict[Path, tuple[int, ...]]:
    """The shapes of the arrays of a checkpoint, in the order of `_ARRAYS`."""
    shapes = {}
    for name, (expected, dims) in _ARRAYS.items():
        path = folder / f"{name}_ckpt.{number}.gz"
        if not path.exists():
            raise CorruptDatasetError(f"{path} is missing")
        with decompressed(path) as stream:
            shape, dtype = array_header(stream, str(path))
        if dtype != expected or len(shape) != dims:
            raise CorruptDatasetError(f"{path} must be {expected} with {dims} dims, it is {dtype} {list(shape)}")
        shapes[path] = shape
    return shapes


def _notes(folder: Path, number: int) -> dict[str, Any]:
    """What is known of the ring of a checkpoint."""
    found = {}
    for name in _NOTES:
        path = folder / f"{name}_ckpt.{number}.gz"
        if path.exists():
            with decompressed(path) as stream:
                noted = np.asarray(load_object(stream, str(path)))
            if noted.dtype.kind not in "iu" or (name == "add_count" and noted.size != 1):
                raise CorruptDatasetError(f"{path} must hold whole numbers, it holds {noted.dtype} {list(noted.shape)}")
            found[name] = noted.item() if name == "add_count" else noted.tolist()
    return found
