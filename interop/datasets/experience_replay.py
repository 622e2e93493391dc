"""The base class of dataset replay buffers."""

import json
import os
import secrets
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from itertools import chain, repeat
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any, Literal

import torch
from tensordict.utils import NestedKey

from interop.buffers import TensorDictReplayBuffer
from interop.checkpoint.checkpointer import StorageCheckpointerBase
from interop.data.arguments import whole
from interop.datasets.checkpointer import DatasetCheckpointer
from interop.datasets.committed import (
    check_preprocessed,
    check_rows_version,
    damage_of,
    local_state,
    made_again,
    make_dataset,
    opened,
    record_of,
)
from interop.datasets.described import noted
from interop.datasets.errors import MissingDatasetError
from interop.datasets.preprocessing import transformed
from interop.datasets.source import Source
from interop.datasets.splitting import split
from interop.sample_units import SampleUnit
from interop.samplers import Sampler
from interop.shared.published_folder import is_there, publish, read_whole, remove
from interop.specs import Composite, make_composite_from_td
from interop.storages import LazyMemmapStorage, Storage, TensorStorage
from interop.transforms import Transform
from interop.writers import ImmutableDatasetWriter, Writer

_KIND = "a dataset"
_SCHEMA = 1  # version of the dataset folders


class BaseDatasetExperienceReplay(TensorDictReplayBuffer):
    """A dataset, downloaded and converted at the first construction, and memory-mapped by all later ones.

    The rows are in `<root>/<dataset_id>`. The folder appears atomically: after a kill, the next construction resumes the
    download and converts again. Of several processes, one converts and the others wait. Samples are tensordicts with an
    "index".

    The rows on disk are never modified. With a writable `writer`, written rows are copied to the memory of this process.

    An iteration, `for batch in dataset`, ends after ceil(rows / batch_size) batches. The sampler draws them: by default
    independently, so that some rows come several times and others not. A sampler with epochs ends an iteration with its
    epoch: `sampler=SamplerWithoutReplacement()` draws each row once. `sample()` has no end.

    Args:
        source: the source of files and rows.
        batch_size: rows per batch.
        root: the folder of the family, by default `~/.cache/fbuf/<family>`.
        download: True downloads missing files, "force" downloads and converts again, False raises `MissingDatasetError` if
            the dataset does not exist.
        from_local: a folder with upstream files to convert instead of downloading. Where names, sizes or times of these
            files have changed since, the next construction converts them anew.
        split_trajs: store one row per trajectory, padded to the longest, with "mask" and "traj_ids", in
            `<root>/<dataset_id>_split`.
        num_workers: processes that read upstream files; 0 reads in this one.
        writer: by default an `ImmutableDatasetWriter`, which rejects writes.

    The other arguments are those of `TensorDictReplayBuffer`.

    Raises:
        MissingDatasetError: the dataset does not exist, and `download=False`.
        DownloadError: a download failed, or a file differs from its first download.
        CorruptDatasetError: upstream files are damaged. The message names the file.
        DatasetError: files of `from_local` changed while they were converted.
        ValueError: the folder has the dataset with other arguments, or of a newer version; or files of `from_local` have
            changed since the dataset was converted and preprocessed.
        FileExistsError: the folder has other content.
        OSError: the disk is full.
    """

    METADATA_NAME = "metadata.json"  # the file of upstream's metadata, beside the rows
    _kinds: tuple[type[Storage], ...] = (TensorStorage,)  # storages that `preprocess` reads

    def __init__(
        self,
        source: Source,
        batch_size: int | None = None,
        *,
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
        if download not in (True, False, "force"):
            raise ValueError(f"download must be True, False or 'force', got {download!r}")
        num_workers = whole("num_workers", num_workers, 0)
        batch_size = None if batch_size is None else whole("batch_size", batch_size)
        parts = Path(source.dataset_id).parts
        if not parts or ".." in parts or Path(source.dataset_id).is_absolute():
            raise ValueError(f"a dataset id names a folder below the root, got {source.dataset_id!r}")
        cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "fbuf" / source.family
        self._root = Path(cache if root is None else root).expanduser().absolute()
        self._source = source
        self._split_trajs = split_trajs
        files = None if from_local is None else Path(from_local).expanduser().absolute()
        folder = self.data_path_root
        force = download == "force"
        if files is not None and not files.is_dir() and (force or not is_there(folder)):
            raise FileNotFoundError(f"from_local must be a folder of upstream files, there is none at {files}")
        made_from = {"kind": f"{_KIND} of {source.family}", "schema": _SCHEMA, **json.loads(json.dumps(asdict(source)))}
        if source.rows_version > 1:
            made_from["rows_version"] = source.rows_version
        if files is not None:
            made_from["from_local"] = os.fspath(files)
        make = partial(make_dataset, source, files, self.METADATA_NAME, force, num_workers)
        whens: Iterator[Any] = chain(["always"] if force else [], repeat("missing"))

        def make_sure() -> None:
            if files is None and not download:
                self._check_there()
            state = {} if files is None else local_state(source, files)
            when = next(whens)
            if when == "missing":
                check_rows_version(folder, source.rows_version)
            with damage_of(folder):
                if when == "missing":
                    check_preprocessed(folder, state)
                publish(folder, {**made_from, **state}, make, when=when, states=state.keys())

        chosen = writer() if writer is not None and not isinstance(writer, Writer) else writer
        chosen = chosen or ImmutableDatasetWriter()
        self._own_collate_fn = collate_fn
        storage = self._opened(chosen, make_sure)
        super().__init__(
            storage=storage,
            writer=chosen,
            collate_fn=collate_fn,
            batch_size=batch_size,
            sampler=sampler,
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

    def _check_there(self) -> None:
        if not is_there(self.data_path_root):
            raise MissingDatasetError(
                f"The dataset could not be found in {self.data_path_root}. Pass download=True, or the folder of files "
                "that you have as from_local="
            )

    def _opened(self, writer: Writer, make_sure: Callable[[], object]) -> Storage:
        """Open the storage of the rows, or trajectories, on disk."""
        if self._split_trajs:
            make_sure = partial(read_whole, self.data_path_root, make_sure, self._split)
        storage = read_whole(self.data_path, make_sure, partial(self._open, self.data_path, writer))
        self._kinds = (TensorStorage, type(storage))
        return storage

    def _open(self, folder: Path, writer: Writer) -> Storage:
        storage, record = opened(folder)
        writes = not isinstance(writer, ImmutableDatasetWriter)
        if writes:
            storage = TensorStorage(storage.get(slice(None)))  # a private map: writes stay in this process
        shown = (
            storage if record.keys() & {"of", "preprocessed"} else self._source.presented(storage, self.data_path_root)
        )
        if not writes:
            shown.checkpointer = DatasetCheckpointer(record)
        return shown

    def _split(self) -> dict[str, Any]:
        """Split the current rows into trajectories."""
        kind = f"the trajectories of {_KIND}"
        base = self.data_path_root
        of = {"kind": kind, "schema": _SCHEMA, "of": record_of(base).get("made")}

        def make(scratch: Path) -> dict[str, Any]:
            storage = self._open(base, ImmutableDatasetWriter())
            rows = split(storage, scratch / "data", self._source.trajectory_ids, self._source.ends_parts)
            return {"rows": rows, "made": secrets.token_hex(8)}

        with damage_of(self.data_path):
            return publish(self.data_path, of, make, when="differs")

    def _epoch_items(self) -> float:
        """The number of rows."""
        return len(self)

    @property
    def root(self) -> Path:
        """The folder of the family of datasets."""
        return self._root

    @property
    def data_path_root(self) -> Path:
        """The folder of the rows."""
        return self._root / self._source.dataset_id

    @property
    def data_path(self) -> Path:
        """The folder of the rows; with `split_trajs`, of the trajectories."""
        return (
            self.data_path_root.with_name(self.data_path_root.name + "_split")
            if self._split_trajs
            else self.data_path_root
        )

    @property
    def metadata_path(self) -> Path:
        """The file of `metadata`."""
        return self.data_path_root / self.METADATA_NAME

    @property
    def metadata(self) -> dict[str, Any]:
        """The metadata of the dataset. CorruptDatasetError if its file is missing or damaged."""
        return noted(self.metadata_path)

    @property
    def specs(self) -> Composite:
        """The spec of a row: entries, shapes and dtypes, without bounds."""
        return make_composite_from_td(self._storage.get(0), unsqueeze_null_shapes=False)

    def delete(self) -> None:
        """Remove the rows from disk, with leftovers of interrupted calls. This buffer stays readable."""
        remove(self.data_path)

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
        """Apply `fn` to all rows once, and store the result.

        Args:
            fn: tensordict -> tensordict, called with several rows, [n]; with `chunksize=0`, with one row, []. The result
                has as many rows, all with the same keys, shapes and dtypes.
            dim: the dim along which rows are split.
            num_workers: processes that run `fn`, by default one per core; 0 runs it in this process.
            num_frames: transform only the first rows.
            dest: the folder of the result, which is returned as a writable storage. An earlier result there is replaced.
                None replaces the dataset itself, also for later constructions, until `download="force"`.
            chunksize, num_chunks, pool, generator, max_tasks_per_child, worker_threads, index_with_generator, pbar,
                mp_start_method, resume: as for `transformed`.

        After an error the dataset, or the content of `dest`, is unchanged. `resume` continues with the finished rows.

        Raises:
            ValueError: `fn` returns a wrong number of rows, or rows that differ.
            RuntimeError: the storage was replaced by one that is not a `TensorStorage`.
            FileExistsError: `dest` has other content.
        """
        if not isinstance(self._storage, self._kinds):
            raise RuntimeError(
                "preprocess is only implemented for storages that subclass TensorStorage, got "
                f"{type(self._storage).__name__}"
            )
        run = partial(
            transformed,
            self._storage,
            fn,
            dim,
            num_workers,
            num_frames=num_frames,
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
        if dest is not None:
            dest = Path(dest).absolute()
            publish(dest, {"kind": "a preprocessed dataset", "schema": _SCHEMA}, run, when="always")
            return LazyMemmapStorage.open(dest)
        record = record_of(self.data_path)
        publish(self.data_path, record, partial(made_again, self.data_path, run), when="always")
        storage = self._opened(self._writer, self._check_there)
        self.set_storage(storage, self._own_collate_fn)
        return storage
