"""The base class of dataset sources: download of files, and conversion to rows."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from tensordict import TensorDictBase

from interop.shared.source_files import files_below
from interop.storages import Storage, TensorStorage


@dataclass(frozen=True)
class Part:
    """Consecutive rows of a dataset, read by one process. Pickled to workers.

    Args:
        rows: the number of rows.
        path: their file or folder.
        which: their location for the source, such as names of episodes or a range of rows.
        at_most: `rows` is an upper bound, for archives that are read as a stream.
        streamed: the rows may exceed the memory. Then workers read no part of the source.
    """

    rows: int
    path: Path
    which: tuple[Any, ...] = ()
    at_most: bool = False
    streamed: bool = False


@dataclass(frozen=True)
class Source(ABC):
    """An upstream dataset. Subclasses are frozen dataclasses, pickled to workers.

    `download` is called with its own folder, repeatedly until it returns, and resumes with existing files. Then `parts` is
    called once, and `read` for each part, in any process. Both must handle folders filled by a user (`from_local`), and
    raise `CorruptDatasetError` with the file name for invalid content.
    """

    dataset_id: str

    family: ClassVar[str]  # subfolder of `~/.cache/fbuf`
    rows_version: ClassVar[int] = 1
    """Grows when the same files become other rows. Folders of an earlier version are not read."""
    ends_parts: ClassVar[bool] = False
    """Whether `split_trajs` sets ("next", "done") in the last step of each trajectory and of its padding."""
    trajectory_ids: ClassVar[Sequence[tuple[str, ...]]] = ()  # entries of ids, besides those that the library knows

    @abstractmethod
    def download(self, folder: Path) -> Mapping[str, str]:
        """Download the upstream files into a folder. Returns the SHA-256 of each, in hexadecimal, by file name.

        `DownloadError` names the attempts, and the files to pass by hand (`from_local`).
        """

    @abstractmethod
    def parts(self, folder: Path) -> Sequence[Part]:
        """Divide all rows into parts, in order. Reads headers only. `CorruptDatasetError` if there are no rows."""

    @abstractmethod
    def read(self, part: Part) -> Iterator[TensorDictBase]:
        """Yield the rows of a part, [n] at a time, all with the same keys, shapes and dtypes."""

    def inputs(self, folder: Path) -> Sequence[Path]:
        """The files of a user's folder that the rows are made from: when one of them changes, they are converted anew.

        By default all files of the folder that are not hidden.
        """
        return files_below(folder)

    def metadata(self, folder: Path) -> dict[str, Any]:
        """The metadata of the dataset as JSON, stored beside the rows."""
        return {}

    def presented(self, storage: TensorStorage, folder: Path) -> Storage:
        """The storage to sample from, of the rows in this folder. It may derive more entries than `storage` has."""
        return storage
