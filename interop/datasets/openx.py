"""Open X-Embodiment: robot trajectories in archives of pickled episodes on the Hugging Face hub."""

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from tensordict import TensorDict
from tensordict.utils import NestedKey

from interop.buffers import TensorDictReplayBuffer, collate
from interop.checkpoint.checkpointer import StorageCheckpointerBase
from interop.datasets.errors import unknown_id
from interop.datasets.experience_replay import BaseDatasetExperienceReplay
from interop.datasets.hub import HubFile, hub_download, hub_files, local_files
from interop.datasets.openx_episodes import REPO, episodes, trajectory
from interop.datasets.openx_ids import IDS
from interop.datasets.openx_stream import StreamSampler, TrajectoryStream
from interop.datasets.source import Part, Source
from interop.sample_units import SampleUnit
from interop.samplers import Sampler, SamplerWithoutReplacement, SliceSampler, SliceSamplerWithoutReplacement
from interop.transforms import Transform
from interop.writers import ImmutableDatasetWriter, Writer

_PARTS = 16  # per archive; each skips the episodes before it
_LONGEST = 1 << 20  # maximum rows of a trajectory


@dataclass(frozen=True)
class OpenXSource(Source):
    """Webdataset archives `<id>/<id>_00000.tar`, with one member `<key>.data.pickle` per episode."""

    family = "openx"
    rows_version = 2

    def shards(self) -> list[HubFile]:
        """The archives on the hub. ValueError for an unknown id."""
        archives = [file for file in hub_files(REPO, f"{self.dataset_id}/") if file.path.endswith(".tar")]
        if not archives:
            raise ValueError(unknown_id("Open X-Embodiment", self.dataset_id, IDS))
        return archives

    def download(self, folder: Path) -> Mapping[str, str]:
        return hub_download(REPO, self.shards(), folder)

    def parts(self, folder: Path) -> list[Part]:
        """Read all archives once, to count the steps."""
        out = []
        before = 0
        for path in local_files(folder, f"{self.dataset_id}/", ".tar"):
            lengths = [len(steps) for _, steps in episodes(path)]
            step = -(-len(lengths) // _PARTS) or 1
            starts = range(0, len(lengths), step)
            out += [Part(sum(lengths[first : first + step]), path, (first, first + step, before)) for first in starts]
            before += len(lengths)
        return out

    def inputs(self, folder: Path) -> list[Path]:
        return local_files(folder, f"{self.dataset_id}/", ".tar")

    def read(self, part: Part) -> Iterator[TensorDict]:
        first, stop, before = part.which
        for number, encoded in enumerate(episodes(part.path, first, stop), before + first):
            if encoded[1]:
                yield trajectory(encoded, number)


def _of_downloaded(name: str) -> Any:
    """A property of `BaseDatasetExperienceReplay` that is None for a stream."""
    of = getattr(BaseDatasetExperienceReplay, name)
    return property(lambda self: None if self.streaming else of.fget(self), doc=f"{of.__doc__} None for a stream.")


class OpenXExperienceReplay(BaseDatasetExperienceReplay):
    """Robot trajectories of Open X-Embodiment, downloaded or as a stream (https://robotics-transformer-x.github.io).

    Each dataset has its own licence. An episode is a demonstration. Rows:

    - "observation": as upstream, images as uint8 [3, H, W]. ("next", "observation") is that of the next step; in the last
      step, zeros or empty text.
    - "action", "discount" and others: as upstream. Python floats become float32.
    - ("next", "reward") [1]; ("next", "done"), ("next", "terminated") and ("next", "truncated") bool [1] from `is_last` and
      `is_terminal`; "done", "terminated" and "truncated" bool [1], False; "is_init" bool [] from `is_first`. The last step
      of an episode is truncated if it has none of these flags.
    - "episode" int32 []: the episode number.

    Iteration without a batch size yields whole trajectories, cropped to `slice_len`; for a downloaded dataset,
    `num_slices` at a time.

    A stream is read over the network, or from `from_local`, and is not stored on disk. A batch has random windows of the
    next trajectories, truncated at their ends: `num_slices` equal ones, windows of `slice_len`, or a single one. After the
    last trajectory the stream restarts, so that iteration with a batch size does not end. With `prefetch` above 1, batches
    may be reordered. A stream has no length, index, folder or checkpoint.

    Args:
        dataset_id: one of `available_datasets`.
        batch_size: rows per batch.
        shuffle: shuffle trajectories. A stream reads the archives in random order, through a shuffle buffer of 16
            trajectories.
        num_slices: slices per batch.
        slice_len: steps per slice, instead of `num_slices`.
        pad: for streams, the padding value of slices from trajectories that are too short; True for 0. Padded text is None.
            By default such slices are a RuntimeError.
        replacement: for downloaded datasets, whether to sample with replacement; True by default.
        streaming: use a stream; the opposite of `download`. True by default.
        root: the folder of the family, by default `~/.cache/fbuf/openx`.
        download: True, "force" or False.
        from_local: a folder with archives `<dataset_id>/*.tar` or `*.tar`, instead of those on the hub.
        sampler: for downloaded datasets without slices; by default a `RandomSampler`.
        strict_length: for downloaded datasets, whether to drop slices that are too short.
        num_workers: for downloaded datasets, processes that read upstream files; 0 reads in this one.

    The other arguments are those of `BaseDatasetExperienceReplay`.

    Raises:
        ValueError: conflicting arguments, a batch that slices do not fill, or an unknown id.
        RuntimeError: an argument that needs a downloaded dataset, or a stream. NotImplementedError: `split_trajs`.
    """

    available_datasets = IDS
    root = _of_downloaded("root")
    data_path = _of_downloaded("data_path")
    data_path_root = _of_downloaded("data_path_root")
    metadata = _of_downloaded("metadata")
    metadata_path = _of_downloaded("metadata_path")

    def __init__(
        self,
        dataset_id: str,
        batch_size: int | None = None,
        *,
        shuffle: bool = True,
        num_slices: int | None = None,
        slice_len: int | None = None,
        pad: float | None = None,
        replacement: bool | None = None,
        streaming: bool | None = None,
        root: str | os.PathLike[str] | None = None,
        download: bool | Literal["force"] | None = None,
        from_local: str | os.PathLike[str] | None = None,
        sampler: Sampler | Callable[[], Sampler] | None = None,
        split_trajs: bool = False,
        strict_length: bool = True,
        writer: Writer | Callable[[], Writer] | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        num_workers: int = 0,
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
        if num_slices is not None and slice_len is not None:
            raise ValueError("num_slices or slice_len can be given, but not both")
        if split_trajs:
            raise NotImplementedError("split_trajs is not supported: iterate without a batch size for trajectories")
        self.streaming = not download if streaming is None else streaming
        self.shuffle = shuffle
        self.num_slices = num_slices
        self.slice_len = slice_len
        source = OpenXSource(dataset_id)
        padding = {True: 0, False: None}[pad] if isinstance(pad, bool) else pad
        if not self.streaming:
            if padding is not None:
                raise RuntimeError("pad is for streams: pass streaming=True")
            sampler = self._sampler_of(sampler, replacement, strict_length)
            download = streaming is not None if download is None else download
            super().__init__(
                source,
                batch_size,
                root=root,
                download=download,
                from_local=from_local,
                sampler=sampler,
                writer=writer,
                collate_fn=collate_fn,
                num_workers=num_workers,
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
            return
        if replacement:
            raise RuntimeError("replacement=True is not available with a stream: pass download=True")
        if download:
            raise ValueError("download and streaming exclude each other")
        if sampler is not None:
            raise ValueError("a stream is sampled in the order in which it comes: pass download=True to use a sampler")
        shards: Sequence[Path | str] = (
            [file.path for file in source.shards()]
            if from_local is None
            else local_files(Path(from_local).expanduser(), f"{dataset_id}/", ".tar")
        )
        stream = TrajectoryStream(shards, shuffle, num_slices, slice_len, padding)
        if batch_size is not None:
            stream.slice_length(batch_size)
        TensorDictReplayBuffer.__init__(
            self,
            storage=stream,
            sampler=StreamSampler(),
            writer=writer or ImmutableDatasetWriter(),
            collate_fn=collate_fn or collate.identity,
            batch_size=batch_size,
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

    def _sampler_of(self, sampler: Any, replacement: bool | None, strict_length: bool) -> Any:
        """The sampler of a downloaded dataset."""
        if self.num_slices is None and self.slice_len is None:
            return (
                SamplerWithoutReplacement(shuffle=self.shuffle) if sampler is None and replacement is False else sampler
            )
        if sampler is not None:
            raise ValueError("num_slices and slice_len make a sampler: pass either them or sampler")
        slices: dict[str, Any] = {"num_slices": self.num_slices, "slice_len": self.slice_len, "traj_key": "episode"}
        if replacement is False:
            return SliceSamplerWithoutReplacement(**slices, strict_length=strict_length, shuffle=self.shuffle)
        if not self.shuffle:
            raise RuntimeError("shuffle=False with slices needs replacement=False")
        return SliceSampler(**slices, strict_length=strict_length)

    def __iter__(self) -> Iterator[Any]:
        if self.batch_size is not None:
            return super().__iter__()
        length = self.slice_len
        storage = self.storage
        if isinstance(storage, TrajectoryStream):
            rows = storage.trajectories()
            return map(
                self.transform, rows if length is None else (storage.window(trajectory, length) for trajectory in rows)
            )
        count = self.num_slices or 1
        sampler = SliceSamplerWithoutReplacement(
            num_slices=count,
            traj_key="episode",
            strict_length=False,
            shuffle=self.shuffle,
            truncated_key=length and ("next", "truncated"),
        )
        trajectories = TensorDictReplayBuffer(
            storage=storage, sampler=sampler, batch_size=count * (length or _LONGEST), generator=self._rng
        )
        return map(self.transform, trajectories)

    def _epoch_items(self) -> float:
        """The number of rows; infinity for a stream, which restarts."""
        return math.inf if self.streaming else super()._epoch_items()

    def delete(self) -> None:
        """Remove the rows from disk. RuntimeError for a stream."""
        if self.streaming:
            raise RuntimeError("a stream has nothing on the disk")
        super().delete()
