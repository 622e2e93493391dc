"""Sources of datasets: their files, and the conversion of these into rows."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from tensordict import TensorDictBase


@dataclass(frozen=True)
class Part:
    """Consecutive rows of a dataset, which one process reads from the upstream files. It is pickled to workers.

    Args:
        rows: how many.
        path: the file or folder that they are in.
        which: what a source needs to find them there: names of episodes, a range of rows.
        at_most: `rows` is an upper bound, as an archive that is read as a stream tells no more.
        streamed: there may be no memory for all rows at once. No part of the source is read by workers then.
    """

    rows: int
    path: Path
    which: tuple[Any, ...] = ()
    at_most: bool = False
    streamed: bool = False


@dataclass(frozen=True)
class Source(ABC):
    """A dataset upstream. Subclasses are frozen dataclasses, which are pickled to workers.

    `download` is called with a folder of its own, again and again until it returns: files that are there already are
    gone on with. Then `parts` is called once, and `read` for each part, in any process. Both get folders that a user may
    have filled by hand (`from_local`), and raise `CorruptDatasetError`, which names the file, for what is not of the format.
    """

    dataset_id: str

    family: ClassVar[str]  # the folder of the family below `~/.cache/fbuf`

    @abstractmethod
    def download(self, folder: Path) -> Mapping[str, str]:
        """Download the upstream files into a folder. Returns the SHA-256 of each, in hexadecimal, by its name there.

        `DownloadError` says what was tried, and which files to pass by hand (`from_local`).
        """

    @abstractmethod
    def parts(self, folder: Path) -> Sequence[Part]:
        """All rows of the dataset in order. Reads headers only. `CorruptDatasetError` where there are none."""

    @abstractmethod
    def read(self, part: Part) -> Iterator[TensorDictBase]:
        """The rows of a part, [n] at a time, an episode or several. All with the same keys, shapes and dtypes."""

    def metadata(self, folder: Path) -> dict[str, Any]:
        """The metadata of the dataset as JSON. Kept beside the rows."""
        return {}
