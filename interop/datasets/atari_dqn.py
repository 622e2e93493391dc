"""DQN Replay: training data of DQN agents on Atari games, from Google Cloud Storage."""

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote, urlencode

import numpy as np
import torch
from tensordict import TensorDict
from tensordict.utils import NestedKey
from torch import Tensor

from interop.checkpoint.checkpointer import StorageCheckpointerBase
from interop.data.arguments import whole
from interop.datasets import allowance
from interop.datasets.compressed import Stream, decompressed
from interop.datasets.described import MOST_ROWS, Answered
from interop.datasets.dopamine_rings import DopamineRing
from interop.datasets.errors import CorruptDatasetError, DownloadError, unknown_id
from interop.datasets.experience_replay import BaseDatasetExperienceReplay
from interop.datasets.fetching import RemoteFile, fetch
from interop.datasets.frames_once import FramesOnceStorage
from interop.datasets.json_answers import fetch_json
from interop.datasets.object_arrays import array_header, load_object
from interop.datasets.rows import nested
from interop.datasets.source import Part, Source
from interop.sample_units import SampleUnit
from interop.samplers import Sampler, SamplerWithoutReplacement, SliceSampler, SliceSamplerWithoutReplacement
from interop.storages import Storage, TensorStorage, columns
from interop.transforms import Transform
from interop.writers import Writer

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
_ARRAYS = {"observation": ("uint8", 3), "action": ("int32", 1), "reward": ("float32", 1), "terminal": ("uint8", 1)}
_FILE = re.compile(r"\$store\$_\w+_ckpt\.(\d+)\.gz")
_ROWS = 4096  # per read
_ROW = 1 << 15  # the most bytes of a row
_NOTED = 1_000  # values of the metadata of a ring
_MOST_PAGES = 100  # of a list of 300 files
_DONE = ("next", "done")


@dataclass(frozen=True)
class AtariDQNSource(Source):
    """The replay buffer checkpoints of a run. Each is a ring of steps, in six files of gzipped `.npy` arrays."""

    max_checkpoints: int | None = None

    family = "atari"
    rows_version = 2

    def __post_init__(self) -> None:
        if self.dataset_id not in IDS:
            near = unknown_id("DQN Replay", self.dataset_id, IDS)
            raise ValueError(f"{near}. An id is <Game>/<run>, with runs 1 to 5")
        if self.max_checkpoints is not None:
            object.__setattr__(self, "max_checkpoints", whole("max_checkpoints", self.max_checkpoints))

    def download(self, folder: Path) -> Mapping[str, str]:
        place = f"dqn/{self.dataset_id}/replay_logs"
        query = {"prefix": f"{place}/", "fields": "items(name,size),nextPageToken"}
        sizes: dict[str, int] = {}
        try:
            for _ in range(_MOST_PAGES):
                url = f"{LIST_URL}?{urlencode(query)}"
                page = Answered(fetch_json(url), url)
                for described in page.items("items"):
                    item = Answered(described, f"{url}, an item")
                    sizes[Path(item.text("name")).name] = _bytes(item)
                if "nextPageToken" not in page:
                    break
                query["pageToken"] = page.text("nextPageToken")
            else:
                raise DownloadError(f"{LIST_URL} has more than {_MOST_PAGES} pages")
        except DownloadError as error:
            raise DownloadError(
                f"the files of {self.dataset_id} cannot be listed: {str(error).splitlines()[0]}. The bucket "
                "atari-replay-datasets is no longer open to everybody. If you have the .gz files of a run, pass their "
                "folder as from_local"
            ) from error
        ends = tuple(f"_ckpt.{number}.gz" for number in self._chosen(sizes))
        url = f"{BASE_URL}/{place}"
        files = [RemoteFile(f"{url}/{quote(name, safe='')}", name, size) for name, size in sizes.items()]
        return fetch([file for file in files if file.name.endswith(ends)], folder)

    def _chosen(self, names: Iterable[str]) -> list[int]:
        """The numbers of the selected checkpoints, in order."""
        numbers = {int(match[1]) for name in names if (match := _FILE.fullmatch(name))}
        return sorted(numbers)[: self.max_checkpoints]

    def parts(self, folder: Path) -> list[Part]:
        folder = folder / "replay_logs" if (folder / "replay_logs").is_dir() else folder
        parts = []
        for number in self._chosen(path.name for path in folder.iterdir()):
            paths = [folder / f"$store$_{name}_ckpt.{number}.gz" for name in _ARRAYS]
            parts.append(Part(_rows(paths), folder, (number, *paths), at_most=True, streamed=True))
        if not parts:
            raise CorruptDatasetError(f"{folder} has no files $store$_observation_ckpt.<number>.gz and the like")
        return parts

    def read(self, part: Part) -> Iterator[TensorDict]:
        """Yield up to `_ROWS` rows at a time. "truncated" is set at the end of a checkpoint, and at the ring's cursor."""
        number, *paths = part.which
        action, reward, terminal = (np.concatenate([*_blocks(path)]) for path in paths[1:])
        ring = DopamineRing(terminal, action, reward, _count(part.path, number))
        frames = ((block,) for block in _blocks(paths[0]))
        for at, observation in ring.steps(frames):
            terminated = (terminal[at] != 0).astype(np.uint8)
            truncated = ring.ends[at].astype(np.uint8) & ~terminated
            flags = {"terminated": terminated, "truncated": truncated, "done": terminated | truncated}
            rows = {"observation": observation, "action": action[at], "next": {"reward": reward[at], **flags}}
            yield nested(rows, len(at), f"{part.path}, checkpoint {number}")

    def metadata(self, folder: Path) -> dict[str, Any]:
        """Number, rows, "add_count" and "invalid_range" of each checkpoint."""
        parts = self.parts(folder)
        noted = [{"checkpoint": part.which[0], "rows": part.rows, **_notes(part.path, part.which[0])} for part in parts]
        return {"dataset_id": self.dataset_id, "checkpoints": noted}

    def presented(self, storage: TensorStorage, folder: Path) -> Storage:
        return FramesOnceStorage.open(folder, "r")


def _bytes(item: Answered) -> int:
    """The size of a file in the list, which is a number in text."""
    text = item.text("size")
    if not re.fullmatch("[0-9]{1,15}", text):
        raise item.wrong("size", "a number of bytes, as text", text)
    return int(text)


def _rows(paths: Iterable[Path]) -> int:
    """The number of rows of a checkpoint, from the headers of its arrays."""
    rows = dict[str, int]()
    for path, expected in zip(paths, _ARRAYS.values(), strict=True):
        if not path.exists():
            raise CorruptDatasetError(f"{path} is missing")
        with decompressed(path) as stream:
            shape, dtype = _header(path, stream)
        if (str(dtype), len(shape)) != expected:
            raise CorruptDatasetError(f"{path} must be {expected[0]} with {expected[1]} dims, it is {dtype} {[*shape]}")
        rows[str(path)] = shape[0]
    if len({*rows.values()}) > 1 or 0 in rows.values():
        raise CorruptDatasetError(f"the arrays of a checkpoint must have equally many rows, they have {rows}")
    return rows.popitem()[1]


def _header(path: Path, stream: Stream) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and dtype of an array. CorruptDatasetError for rows, or more of them, than a file of its size holds."""
    shape, _, dtype = array_header(stream, str(path))
    row = math.prod(shape[1:]) * dtype.itemsize
    allowance.check(row, _ROW, f"{path}, one row")
    if stream.most is not None:
        allowance.check(row * math.prod(shape[:1]), stream.most, str(path))
    return shape, dtype


def _blocks(path: Path) -> Iterator[np.ndarray]:
    """Yield the rows of an array, `_ROWS` at a time."""
    with decompressed(path) as stream:
        shape, dtype = _header(path, stream)
        for start in range(0, shape[0], _ROWS):
            block = (min(_ROWS, shape[0] - start), *shape[1:])
            data = stream.read(math.prod(block) * dtype.itemsize)
            if len(data) < math.prod(block) * dtype.itemsize:
                raise CorruptDatasetError(f"{path} is truncated: it has fewer rows than its header says")
            yield np.frombuffer(data, dtype).reshape(block)
        if rest := stream.finish():
            raise CorruptDatasetError(f"{path} has {rest} bytes more than its header says")


def _notes(folder: Path, number: int) -> dict[str, Any]:
    """The metadata of the ring of a checkpoint."""
    notes = {}
    for name in ("add_count", "invalid_range"):
        path = folder / f"{name}_ckpt.{number}.gz"
        if path.exists():
            with decompressed(path) as stream:
                noted = np.asarray(load_object(stream, str(path)))
            if noted.dtype.kind not in "iu" or noted.size > _NOTED:
                raise CorruptDatasetError(f"{path} must hold whole numbers, it holds {noted.dtype} {[*noted.shape]}")
            notes[name] = noted.tolist()
            if name == "add_count" and noted.ndim:
                raise CorruptDatasetError(f"{path} must hold one number, it holds {[*noted.shape]}")
    return notes


def _count(folder: Path, number: int) -> int | None:
    """How many rows were ever written to the ring of a checkpoint, if known."""
    count: int | None = _notes(folder, number).get("add_count")
    if count is not None and not 0 <= count <= MOST_ROWS:
        raise CorruptDatasetError(
            f"{folder}, checkpoint {number}: add_count must be a number from 0 to {MOST_ROWS}, it is {count}"
        )
    return count


class AtariDQNExperienceReplay(BaseDatasetExperienceReplay):
    """DQN Replay: the steps of five training runs of a DQN agent for each of 60 Atari games (arXiv:1907.04543).

    Rows are those of up to 50 checkpoints of a million rows each, in order, without the three rows of zeros that upstream
    writes before each episode, and without rows of a ring that were never written. Each frame is stored once, which takes 7
    GB per checkpoint. Upstream's metadata of each checkpoint is in `metadata`, not in batches.

    | key | shape | dtype |
    |---|---|---|
    | "observation", ("next", "observation") | [84, 84] | uint8 |
    | "action" | [] | int32 |
    | ("next", "reward") | [] | float32 |
    | ("next", "done"), ("next", "terminated"), ("next", "truncated") | [] | uint8 |
    | "done", "terminated", "truncated": zero | [] | uint8 |

    An episode ends with the game, at ("next", "terminated"). ("next", "truncated") is set if the next frame is unknown: in
    the last row of a checkpoint, and at the cursor of the replay buffer's ring. ("next", "observation") is zero in both
    cases. In slices, the sampler writes the flags of "next" as bool [1], and sets ("next", "truncated") in each last step.

    Args:
        dataset_id: `<Game>/<run>`, one of `available_datasets`.
        from_local: a folder with the `.gz` files of a run, or with a subfolder `replay_logs` that has them.
        writer: accepted, but the dataset is read-only.
        num_procs, mp_start_method: ignored: a checkpoint is a stream, read by one process.
        num_slices, slice_len: sample slices of episodes, by number per batch or by length.
        strict_len: False allows shorter slices from shorter episodes.
        replacement: False samples each row, or episode, once per epoch.
        max_checkpoints: use only the first checkpoints. By default all (class attribute `_max_runs`).

    The other arguments are those of `BaseDatasetExperienceReplay`, and so are errors. ValueError for an unknown id.
    """

    available_datasets = IDS
    _max_runs: int | None = None

    def __init__(
        self,
        dataset_id: str,
        batch_size: int | None = None,
        *,
        sampler: Sampler | Callable[[], Sampler] | None = None,
        num_procs: int = 0,
        num_slices: int | None = None,
        slice_len: int | None = None,
        strict_len: bool = True,
        replacement: bool = True,
        mp_start_method: str = "fork",
        max_checkpoints: int | None = None,
        root: str | os.PathLike[str] | None = None,
        download: bool | Literal["force"] = True,
        from_local: str | os.PathLike[str] | None = None,
        split_trajs: bool = False,
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
        slices = num_slices is not None or slice_len is not None
        if sampler is not None and (slices or not replacement):
            raise ValueError("num_slices, slice_len and replacement choose the sampler: give either these or sampler")
        if slices:
            kind = SliceSampler if replacement else SliceSamplerWithoutReplacement
            sampler = kind(num_slices=num_slices, slice_len=slice_len, end_key=_DONE, strict_length=strict_len)
        elif not replacement:
            sampler = SamplerWithoutReplacement()
        source = AtariDQNSource(dataset_id, self._max_runs if max_checkpoints is None else max_checkpoints)
        super().__init__(
            source,
            batch_size,
            num_workers=num_procs,
            sampler=sampler,
            root=root,
            download=download,
            from_local=from_local,
            split_trajs=split_trajs,
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
    def dataset_path(self) -> Path:
        """The folder of the rows."""
        return self.data_path_root

    @property
    def episodes(self) -> Tensor:  # type: ignore[override]  # the name is older here
        """The episode number of each row, int64 [N], from 0: not the view of episodes that other buffers have here."""
        if self.data_path != self.data_path_root:  # a row is a trajectory
            return torch.arange(len(self))
        done = columns.whole(self._storage, _DONE) != 0
        return done.cumsum(0) - done.to(torch.int64)

    def preprocess(
        self,
        fn: Callable[[Any], Any],
        dim: int = 0,
        num_workers: int | None = None,
        *,
        num_frames: int | None = None,
        dest: str | os.PathLike[str] | None = None,
        chunksize: int | None = None,
        num_chunks: int | None = None,
        pool: Pool | None = None,
        generator: torch.Generator | None = None,
        max_tasks_per_child: int | None = None,
        worker_threads: int = 1,
        index_with_generator: bool = False,
        pbar: bool = False,
        mp_start_method: str | None = None,
        resume: bool = False,
    ) -> Storage:
        """See `BaseDatasetExperienceReplay.preprocess`. RuntimeError for a dim other than 0."""
        if dim != 0:
            raise RuntimeError(f"the rows of frames that are stored once are divided along dim 0 alone, got dim={dim}")
        return super().preprocess(
            fn,
            dim,
            num_workers,
            num_frames=num_frames,
            dest=dest,
            chunksize=chunksize,
            num_chunks=num_chunks,
            pool=pool,
            generator=generator,
            max_tasks_per_child=max_tasks_per_child,
            worker_threads=worker_threads,
            index_with_generator=index_with_generator,
            pbar=pbar,
            mp_start_method=mp_start_method,
            resume=resume,
        )
