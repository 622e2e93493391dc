"""HTTPS downloads with resume, retries and verification."""

import hashlib
import os
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urljoin, urlsplit
from urllib.request import url2pathname

from interop.data.arguments import required
from interop.datasets.errors import DownloadError
from interop.datasets.progress import progress

_BLOCK = 1 << 16  # bytes
_TRANSIENT = (408, 429, 500, 502, 503, 504)  # HTTP statuses
_LOOPBACK = ("127.0.0.1", "localhost")


@dataclass(frozen=True)
class RemoteFile:
    """A file to download.

    Args:
        url: an `https` URL. `http` is allowed for 127.0.0.1 and localhost. A `file` URL is copied.
        name: the path below the folder.
        size: the size in bytes, if known.
        sha256: in lower-case hexadecimal, if known.
        plain_http: allow `http` for this host, after `https` fails.
    """

    url: str
    name: str
    size: int | None = None
    sha256: str | None = None
    plain_http: bool = False


def fetch(
    files: Sequence[RemoteFile], folder: Path, *, timeout: float = 30.0, retries: int = 4, pause: float = 0.5
) -> dict[str, str]:
    """Download files into a folder. Returns the SHA-256 of each by its name.

    A file is written to `<name>.part`, verified and renamed. Partial files are resumed, also by later calls, if the server
    identifies the version of the file (`ETag`, `Last-Modified`). Finished files are not downloaded again.

    Args:
        files: the files, with distinct names.
        folder: created if missing.
        timeout: seconds to wait for an answer or data.
        retries: the maximum number of successive retries without new data.
        pause: seconds before the first retry; doubled for each further one.

    Raises:
        DownloadError: names the attempts, and the files to download by hand. Partial files are kept.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        done = {file.name: checksum_of(folder, file.name, file.size, file.sha256) for file in files}
        missing = [file for file in files if done[file.name] is None]
        _check_space(folder, sum(file.size - _size(folder / f"{file.name}.part") for file in missing if file.size))
        total = sum(file.size or 0 for file in missing) if all(file.size for file in missing) else None
        with _session(retries, pause) as session, progress("Downloading", total, "B") as advance:
            for file in missing:
                part = folder / f"{file.name}.part"
                download = _Download(file, part, part.with_suffix(".version"), session, timeout, advance)
                done[file.name] = download.run(retries, pause)
                os.replace(part, folder / file.name)
                download.version.unlink(missing_ok=True)
    except (_FailedError, OSError) as error:  # includes errors of requests
        raise DownloadError(
            f"{folder}: {error}\n{by_hand([f'{file.name}  ({file.url})' for file in files])}"
        ) from error
    return {name: checksum for name, checksum in done.items() if checksum}


def by_hand(files: Sequence[str]) -> str:
    """Instructions for files that cannot be downloaded."""
    some = [*files[:6], *([f"and {len(files) - 6} more"] if len(files) > 6 else [])]
    return "\n  ".join(["To go on by hand, put these files into a folder and pass it as from_local=...", *some])


def checksum_of(folder: Path, name: str, size: int | None, sha256: str | None) -> str | None:
    """The SHA-256 of a file. None if it is missing, or its size or checksum is not the known one.

    DownloadError if the name points outside of the folder.
    """
    path = folder / name
    if folder.resolve() not in path.resolve().parents:
        raise DownloadError(f"{name!r} is not the name of a file below {folder}")
    if not path.is_file() or size not in (None, _size(path)):
        return None
    found = _sha256(path)
    return found if sha256 in (None, found) else None


class _FailedError(Exception):
    """A download failed."""


class _TransientError(_FailedError):
    """A download failed for a transient reason."""


@dataclass
class _Download:
    """The download of a file to its `.part` file. `version` is the file with the server's version of the partial data."""

    file: RemoteFile
    part: Path
    version: Path
    session: Any
    timeout: float
    advance: Callable[[int], object]

    def run(self, retries: int, pause: float) -> str:
        """Download the file. Returns its checksum."""
        requests, urllib3 = required("requests", "datasets"), required("urllib3", "datasets")
        url, failures = urlsplit(self.file.url), []
        self.part.parent.mkdir(parents=True, exist_ok=True)
        if url.scheme == "file":
            shutil.copyfile(url2pathname(url.path), self.part)
            return self._checked()
        self.advance(_size(self.part))
        addresses = [url.geturl()]
        if self.file.plain_http:
            addresses.insert(0, url._replace(scheme="https").geturl())
            self.session.mount(addresses[0], requests.adapters.HTTPAdapter())  # without retries
        for address in addresses:
            try:
                return self._receive_with_retries(address, retries, pause)
            except (_FailedError, requests.RequestException, urllib3.exceptions.HTTPError) as error:
                failures.append(f"{address}: {error}")
        raise _FailedError("\n".join(failures))

    def _receive_with_retries(self, url: str, retries: int, pause: float) -> str:
        """Download the missing data, and resume after interruptions."""
        failures, furthest = 0, _size(self.part)
        while True:
            try:
                return self._receive(url)
            except (_TransientError, required("urllib3", "datasets").exceptions.HTTPError):
                failures = 1 if _size(self.part) > furthest else failures + 1
                furthest = max(furthest, _size(self.part))
                if failures > retries:
                    raise
                time.sleep(pause * 2 ** (failures - 1))

    def _receive(self, url: str) -> str:
        """Append the missing data to the partial file. Returns the checksum of the file."""
        size, version = _size(self.part), self.version.read_text() if self.version.exists() else ""
        headers = {"Range": f"bytes={size}-", "If-Range": version} if size and version else {}
        headers["Accept-Encoding"] = "identity"
        self._check_address(url)
        follow = {"response": self._check_redirect}
        with closing(
            self.session.get(url, headers=headers, stream=True, timeout=self.timeout, hooks=follow)
        ) as response:
            status, found = response.status_code, response.headers
            tag = found.get("ETag", "W/")
            new = found.get("Last-Modified", "") if tag.startswith("W/") else tag
            resumed = status == 206 and new == version and found.get("Content-Range", "").startswith(f"bytes {size}-")
            if status == 416 or (status == 206 and not resumed):
                self.part.unlink(missing_ok=True)
                raise _TransientError("is another file than the one that was begun")
            response.raise_for_status()
            start = size if resumed else 0
            total = start + int(found["Content-Length"]) if "Content-Length" in found else self.file.size
            if self.file.size not in (None, total):
                raise _FailedError(f"has {total} bytes, not {self.file.size}")
            _check_space(self.part.parent, (total or 0) - size)
            self.advance(start - size)
            with self.part.open("ab" if resumed else "wb") as out:
                self.version.write_text(new)
                for block in response.raw.stream(_BLOCK, decode_content=False):
                    out.write(block)
                    self.advance(len(block))
                out.flush()
                os.fsync(out.fileno())
        if _size(self.part) < (total or 0):
            raise _TransientError(f"{_size(self.part)} of {total} bytes came")
        return self._checked(_TransientError if resumed else _FailedError)

    def _checked(self, failure: type[_FailedError] = _FailedError) -> str:
        """Verify the complete partial file and return its checksum. A wrong file is deleted."""
        size, checksum, fault = _size(self.part), _sha256(self.part), ""
        with self.part.open("rb") as content:
            if content.read(256).lstrip().lower().startswith((b"<!doctype html", b"<html")):
                fault = "is a page of HTML, not the file"
        if size == 0 and self.file.size != 0:
            fault = "is empty"
        if self.file.size not in (None, size):
            fault = f"has {size} bytes, not {self.file.size}"
        if self.file.sha256 not in (None, checksum):
            fault = fault or f"has SHA-256 {checksum}, not {self.file.sha256}"
        if fault:
            self.part.unlink()
            raise failure(fault)
        return checksum

    def _check_address(self, url: str) -> None:
        where, plain = urlsplit(url), urlsplit(self.file.url).hostname if self.file.plain_http else ""
        if where.scheme != "https" and not (where.scheme == "http" and where.hostname in (*_LOOPBACK, plain)):
            raise _FailedError(f"leads to {url}, which is not https")

    def _check_redirect(self, response: Any, **_: Any) -> None:
        if response.is_redirect:
            self._check_address(urljoin(response.url, response.headers["Location"]))


def _session(retries: int, pause: float) -> Any:
    """A session that retries requests without an answer or with a transient status."""
    requests, urllib3 = required("requests", "datasets"), required("urllib3", "datasets")
    again = urllib3.Retry(
        retries,
        status_forcelist=_TRANSIENT,
        raise_on_status=False,
        backoff_factor=pause,
        respect_retry_after_header=False,
    )
    session = requests.Session()
    for scheme in ("https://", "http://"):
        session.mount(scheme, requests.adapters.HTTPAdapter(max_retries=again))
    return session


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise _FailedError(f"{folder} has {free} bytes free, {needed} are needed")


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
