"""Files of dataset repositories on the Hugging Face hub."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote

from interop.data.arguments import required
from interop.datasets.answers import FailedError
from interop.datasets.compressed import Stream
from interop.datasets.described import Answered
from interop.datasets.errors import CorruptDatasetError, DownloadError
from interop.datasets.fetching import RemoteFile, RemoteStream, by_hand, fetch
from interop.datasets.json_answers import fetch_json

_TIMEOUT = 30.0  # seconds to wait for an answer
_AT_ONCE = 4  # concurrent downloads: many small files mostly wait for answers
_MOST_BYTES = 1 << 50  # of a file
_SHA256 = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class HubFile:
    """A file of a repository. Its SHA-256 is known if the hub stores it as a large file."""

    path: str
    size: int | None = None
    sha256: str | None = None


def hub_files(repo: str, prefix: str = "", revision: str | None = None) -> list[HubFile]:
    """The files of a dataset repository whose paths start with `prefix`, sorted by path.

    `revision` is a branch, tag or commit, by default the main branch. DownloadError if the hub cannot be reached or answers
    anything else than a list of files; its cause is a `NotFoundError` if there is no such repository or revision.
    """
    hub = _hub()
    url = f"{hub.endpoint}/api/datasets/{quote(repo)}" + (f"/revision/{quote(revision, safe='')}" if revision else "")
    with _naming(hub, repo, [prefix or "all files"]):
        answer = Answered(fetch_json(f"{url}?blobs=true", timeout=_TIMEOUT, headers=hub.headers), url)
        siblings = answer.any("siblings") if "siblings" in answer else None
        files = [_listed(sibling, url) for sibling in ([] if siblings is None else answer.items("siblings"))]
        if len({file.path for file in files}) < len(files):
            raise DownloadError(f"{url}: a file is listed twice")
    return sorted((file for file in files if file.path.startswith(prefix)), key=lambda file: file.path)


def _listed(described: Any, where: str) -> HubFile:
    """A file of the hub's list."""
    entry = Answered(described, f"{where}, a file")
    path = entry.text("rfilename")
    size = None
    sha256 = None
    place = PurePosixPath(path)
    if place.is_absolute() or ".." in place.parts or not place.parts or "\\" in path or not path.isprintable():
        raise entry.wrong("rfilename", "a path below the repository", path)
    if "size" in entry and entry.any("size") is not None:
        size = entry.whole("size", most=_MOST_BYTES)
    if "lfs" in entry and entry.any("lfs") is not None:
        sha256 = entry.fields("lfs").text("sha256")
        if not _SHA256.fullmatch(sha256):
            raise entry.wrong("lfs", "an object with a SHA-256", sha256)
    return HubFile(path, size, sha256)


def hub_download(repo: str, files: Sequence[HubFile], folder: Path, revision: str | None = None) -> dict[str, str]:
    """Download files of a dataset repository to `folder / path`. Returns the SHA-256 of each by its path.

    Downloads are those of `fetch`: resumed, checked, and not repeated for finished files. `HF_ENDPOINT`, `HF_TOKEN` and
    `HF_HUB_OFFLINE` are honoured. `DownloadError` names the file, and explains how to download it by hand.
    """
    hub = _hub()
    with _naming(hub, repo, [file.path for file in files]):
        remote = [
            RemoteFile(hub.address(repo, file.path, revision), file.path, file.size, file.sha256) for file in files
        ]
        return fetch(remote, folder, timeout=_TIMEOUT, headers=hub.headers, at_once=_AT_ONCE)


@contextmanager
def hub_stream(repo: str, path: str) -> Iterator[Stream]:
    """Open a file of a dataset repository as a network stream. `DownloadError`, also during reads."""
    hub = _hub()
    with (
        _naming(hub, repo, [path]),
        RemoteStream(hub.address(repo, path, None), timeout=_TIMEOUT, headers=hub.headers) as file,
    ):
        yield Stream(file, f"{repo}/{path}")


@dataclass(frozen=True)
class _Hub:
    """Where the hub is, and the headers of requests to it, with the user's token."""

    endpoint: str
    headers: Mapping[str, str]

    def address(self, repo: str, path: str, revision: str | None) -> str:
        return f"{self.endpoint}/datasets/{quote(repo)}/resolve/{quote(revision or 'main', safe='')}/{quote(path)}"


def _hub() -> _Hub:
    """The settings of huggingface_hub.

    Its modules are imported here, before a request: an import while an exception is handled would replace the exception.
    """
    constants = required("huggingface_hub.constants", "datasets")
    build_headers = required("huggingface_hub.utils", "datasets").build_hf_headers
    if constants.HF_HUB_OFFLINE:
        raise DownloadError(f"{constants.ENDPOINT} is not asked, as HF_HUB_OFFLINE is set")
    return _Hub(constants.ENDPOINT.rstrip("/"), build_headers(library_name="fbuf"))


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
def _naming(hub: _Hub, repo: str, paths: Sequence[str]) -> Iterator[None]:
    """Have DownloadErrors name the repository, the kind of failure, and the files."""
    try:
        yield
    except DownloadError as error:
        kind = type(error.__cause__ if isinstance(error.__cause__, FailedError) else error).__name__
        where = f"{hub.endpoint}/datasets/{repo}"
        manual = "" if "from_local=" in str(error) else f"\n{by_hand(paths)}"
        raise DownloadError(f"{where}: {kind}\n{error}{manual}") from error.__cause__
