"""Files of dataset repositories on the Hugging Face hub."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from interop.data.arguments import required
from interop.datasets.compressed import Stream
from interop.datasets.errors import CorruptDatasetError, DatasetError, DownloadError
from interop.datasets.fetching import by_hand, checksum_of

_TIMEOUT = 30.0  # seconds to wait for an answer
_AT_ONCE = 4  # concurrent downloads: many small files mostly wait for answers


@dataclass(frozen=True)
class HubFile:
    """A file of a repository. Its SHA-256 is known if the hub stores it as a large file."""

    path: str
    size: int | None = None
    sha256: str | None = None


def hub_files(repo: str, prefix: str = "", revision: str | None = None) -> list[HubFile]:
    """The files of a dataset repository whose paths start with `prefix`, sorted by path.

    `revision` is a branch, tag or commit, by default the main branch.
    """
    hub = required("huggingface_hub", "datasets")
    with _as_download_error(repo, [prefix or "all files"]):
        info = hub.HfApi().dataset_info(repo, revision=revision, files_metadata=True, timeout=_TIMEOUT)
    files = [HubFile(each.rfilename, each.size, each.lfs and each.lfs.sha256) for each in info.siblings or ()]
    return sorted((file for file in files if file.path.startswith(prefix)), key=lambda file: file.path)


def hub_download(repo: str, files: Sequence[HubFile], folder: Path, revision: str | None = None) -> dict[str, str]:
    """Download files of a dataset repository to `folder / path`. Returns the SHA-256 of each by its path.

    Finished files are not downloaded again. `HF_ENDPOINT` and `HF_TOKEN` are honoured. `DownloadError` names the file, and
    explains how to download it by hand.
    """
    hub = required("huggingface_hub", "datasets")

    def download(file: HubFile) -> str:
        checksum = checksum_of(folder, file.path, file.size, file.sha256)
        if checksum is None:
            (folder / file.path).unlink(missing_ok=True)  # damaged; the library only checks its own record
            hub.hf_hub_download(repo, file.path, repo_type="dataset", local_dir=folder, revision=revision)
            checksum = checksum_of(folder, file.path, file.size, file.sha256)
        if checksum is None:
            (folder / file.path).unlink()
            raise OSError(f"{file.path} came with another size than {file.size}, or another SHA-256 than {file.sha256}")
        return checksum

    with (
        _as_download_error(repo, [file.path for file in files]),
        ThreadPoolExecutor(_AT_ONCE) as pool,
    ):
        return dict(zip((file.path for file in files), pool.map(download, files), strict=True))


@contextmanager
def hub_stream(repo: str, path: str) -> Iterator[Stream]:
    """Open a file of a dataset repository as a network stream. `DownloadError`, also during reads."""
    hub = required("huggingface_hub", "datasets")
    with _as_download_error(repo, [path]):
        files = hub.HfFileSystem(skip_instance_cache=True)
        with files.open(f"datasets/{repo}/{path}", "rb", block_size=0) as file:
            yield Stream(file, f"{repo}/{path}")


def local_files(folder: Path, prefix: str, *suffixes: str) -> list[Path]:
    """The local files of a repository, sorted by path.

    Returns files whose relative paths start with `prefix` or, if there are none, the files directly in the folder.
    CorruptDatasetError if there are no such files either.
    """
    every = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.suffix in suffixes}
    names = [name for name in every if name.startswith(prefix)] or [name for name in every if "/" not in name]
    if not names:
        raise CorruptDatasetError(f"{folder} has no files {prefix}*{' or '.join(suffixes)}")
    return [every[name] for name in sorted(names)]


@contextmanager
def _as_download_error(repo: str, paths: Sequence[str]) -> Iterator[None]:
    """Re-raise errors of the hub library as DownloadError."""
    hub = required("huggingface_hub", "datasets")
    try:
        yield
    except DatasetError:
        raise
    except (hub.errors.HTTPError, OSError, RuntimeError) as error:
        where = f"{hub.constants.ENDPOINT}/datasets/{repo}"
        causes = dict.fromkeys(str(each).strip() for each in (error, error.__cause__) if each)
        raise DownloadError("\n".join([f"{where}: {type(error).__name__}", *causes, by_hand(paths)])) from error
