"""Download files over HTTPS: resumed where they broke off, retried, and checked before they get their names."""

import ipaddress
import os
import shutil
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urljoin, urlsplit
from urllib.request import url2pathname

from interop.datasets.checksums import Checksums, sha256_of
from interop.datasets.errors import DownloadError
from interop.optional import required

_BLOCK = 1 << 16  # bytes
_LONGEST_PAUSE = 60.0  # seconds that a server may ask for


@dataclass(frozen=True)
class RemoteFile:
    """A file to download.

    Args:
        url: `https`. `http` is accepted for loopback addresses, and `file`: such a file is copied.
        name: its path below the folder.
        size: in bytes, where it is known.
        sha256: in lower-case hexadecimal, where it is known.
        plain_http: accepts `http` for this host. `https` is tried first.
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

    A file is written to `<name>.part`, checked, and renamed. Parts are resumed, also by later calls, where the server
    names the version of the file (`ETag`, `Last-Modified`). Files that earlier calls finished are not downloaded again.

    Args:
        files: with names that differ.
        folder: is made where it is missing.
        timeout: seconds without an answer, or without data.
        retries: how many times in succession a request without new data is repeated.
        pause: seconds before the first repetition. Each further pause is twice as long.

    Raises:
        DownloadError: what was tried, and which files to put into a folder by hand. Parts are kept.
    """
    if len({file.name for file in files}) < len(files):
        raise ValueError(f"names of files to download must differ, got {[file.name for file in files]}")
    requests, tqdm = required("requests", "datasets"), required("tqdm", "datasets").tqdm
    try:
        folder.mkdir(parents=True, exist_ok=True)
        kept = Checksums(folder)
        done = {file.name: kept.of(file.name, file.size, file.sha256) for file in files}
        missing = [file for file in files if done[file.name] is None]
        _check_space(folder, sum(file.size - _size(_part(kept.path(file.name))) for file in missing if file.size))
        total = sum(file.size or 0 for file in missing) if all(file.size for file in missing) else None
        with (
            requests.Session() as session,
            tqdm(total=total, unit="B", unit_scale=True, disable=None) as bar,  # None: only on a terminal
        ):
            downloads = _Downloads(session, bar, kept, timeout)
            session.hooks["response"].append(downloads.follow)
            for file in missing:
                done[file.name] = downloads.download(file, retries, pause)
    except (_AttemptError, OSError) as error:
        reason = error if isinstance(error, _AttemptError) else f"{folder}: {error}"
        raise DownloadError(f"{reason}\n{by_hand([f'{file.name}  ({file.url})' for file in files])}") from error
    return {name: checksum for name, checksum in done.items() if checksum}


def by_hand(files: Sequence[str]) -> str:
    """What to do where files cannot be downloaded."""
    some = [*files[:6], *([f"and {len(files) - 6} more"] if len(files) > 6 else [])]
    return "\n  ".join(["To go on by hand, put these files into a folder and pass it as from_local=...", *some])


class _AttemptError(Exception):
    """A download failed. `again`: the cause may go away. `after`: the seconds to wait for that, where they are known."""

    def __init__(self, reason: str, again: bool = False, after: float | None = None) -> None:
        super().__init__(reason)
        self.again, self.after = again, after


class _Downloads:
    """The downloads of one call."""

    def __init__(self, session: Any, bar: Any, kept: Checksums, timeout: float) -> None:
        self._session, self._bar, self._kept, self._timeout = session, bar, kept, timeout
        self._url = ""  # the address that was asked last
        self._shown = 0  # bytes of this file that the progress bar counts

    def download(self, file: RemoteFile, retries: int, pause: float) -> str:
        """Download a file. Returns its checksum."""
        url, path = urlsplit(file.url), self._kept.path(file.name)
        plain = url.scheme == "http" and file.plain_http
        if url.scheme not in ("https", "file") and not plain and not _is_local(file.url):
            raise _AttemptError(f"{file.url} is not https")
        _part(path).parent.mkdir(parents=True, exist_ok=True)
        self._shown, failures = 0, []
        secure = [(url._replace(scheme="https").geturl(), min(retries, 1))] if plain else []
        for address, times in [*secure, (file.url, retries)]:
            try:
                checksum = self._repeat(file, address, _part(path), times, pause)
            except _AttemptError as failed:
                failures.append(f"{address}: {failed}")
            else:
                os.replace(_part(path), path)
                self._kept.keep(file.name, checksum)
                return checksum
        raise _AttemptError("\n".join(failures))

    def _repeat(self, file: RemoteFile, url: str, part: Path, retries: int, pause: float) -> str:
        """Download what is missing, and try again after failures that may go away."""
        requests, urllib3 = required("requests", "datasets"), required("urllib3", "datasets").exceptions
        tries, fruitless, furthest = 0, 0, _size(part)
        while True:
            try:
                return self._attempt(file, url, part)
            except _AttemptError as error:
                failed = error
            except (requests.Timeout, urllib3.TimeoutError):
                failed = _AttemptError(f"{urlsplit(self._url).hostname} did not answer for {self._timeout:g} s", True)
            except (requests.RequestException, urllib3.HTTPError) as error:
                passing = isinstance(error, requests.ConnectionError | urllib3.HTTPError)
                failed = _AttemptError(f"request to {urlsplit(self._url).hostname} failed: {error}", passing)
            tries, fruitless = tries + 1, 1 if _size(part) > furthest else fruitless + 1
            furthest = max(furthest, _size(part))
            if not failed.again or fruitless > retries:
                raise _AttemptError(f"{failed} (tries: {tries}, bytes kept: {_size(part)})") from failed
            time.sleep(pause * 2 ** (fruitless - 1) if failed.after is None else failed.after)

    def _attempt(self, file: RemoteFile, url: str, part: Path) -> str:
        resumed = _size(part) > 0
        if url.startswith("file:"):
            shutil.copyfile(url2pathname(urlsplit(url).path), part)
        else:
            self._receive(file, url, part)
        checksum = sha256_of(part)
        fault = _fault(file, part, checksum)
        if fault:
            part.unlink()
            raise _AttemptError(fault, again=resumed)
        return checksum

    def _receive(self, file: RemoteFile, url: str, part: Path) -> None:
        """Append to a part what it lacks."""
        size, version, self._url = _size(part), self._kept.version(file.name), url
        resumed = {"Range": f"bytes={size}-", "If-Range": version} if size and version else {}
        headers = {"Accept-Encoding": "identity", **resumed}
        with closing(self._session.get(url, headers=headers, stream=True, timeout=self._timeout)) as response:
            _check_status(response)
            status, span, new = response.status_code, response.headers.get("Content-Range", ""), _version(response)
            if status == 416 or (status == 206 and not (span.startswith(f"bytes {size}-") and new == version)):
                part.unlink(missing_ok=True)
                raise _AttemptError("is another file than the one that was begun", again=True, after=0.0)
            start = size if status == 206 else 0
            if response.headers.get("Content-Type", "").startswith("text/html") and not _may_be_html(file):
                raise _AttemptError("is a page of HTML, not the file")
            length = response.headers.get("Content-Length")
            total = start + int(length) if length else file.size
            if file.size not in (None, total):
                raise _AttemptError(f"has {total} bytes, not {file.size}")
            _check_space(part.parent, (total or 0) - size)
            with part.open("ab" if start else "wb") as out:
                self._kept.begin(file.name, new)
                self._show(start)
                for block in response.raw.stream(_BLOCK, decode_content=False):
                    out.write(block)
                    self._show(self._shown + len(block))
                out.flush()
                os.fsync(out.fileno())
        if _size(part) < (total or 0):
            raise _AttemptError(f"{_size(part)} of {total} bytes came", again=True)

    def follow(self, response: Any, *args: Any, **kwargs: Any) -> None:
        """Refuse redirects from https to http, and from http to http elsewhere."""
        if response.is_redirect:
            here, self._url = urlsplit(response.url), urljoin(response.url, response.headers["Location"])
            there = urlsplit(self._url)
            plain = here.scheme == there.scheme == "http" and (here.hostname == there.hostname or _is_local(self._url))
            if there.scheme != "https" and not plain:
                response.close()
                raise _AttemptError(f"{here.hostname} redirects to {self._url}, which is not https")

    def _show(self, position: int) -> None:
        self._bar.update(position - self._shown)
        self._shown = position


def _check_status(response: Any) -> None:
    status, after = response.status_code, response.headers.get("Retry-After", "")
    if status not in (200, 206, 416):
        wait = float(after) if after.isdigit() else None
        again = (status in (408, 429) or status >= 500) and (wait or 0.0) <= _LONGEST_PAUSE
        asks = f", which asks to wait {after} s" if wait else ""
        raise _AttemptError(f"{status} {response.reason} from {urlsplit(response.url).hostname}{asks}", again, wait)


def _fault(file: RemoteFile, part: Path, checksum: str) -> str | None:
    """What is wrong with a file that came, or None."""
    with part.open("rb") as content:
        begin = content.read(256).lstrip().lower()
    if file.size != 0 and _size(part) == 0:
        return "is empty"
    if file.size not in (None, _size(part)):
        return f"has {_size(part)} bytes, not {file.size}"
    if begin.startswith((b"<!doctype html", b"<html")) and not _may_be_html(file):
        return "is a page of HTML, not the file"
    return f"has SHA-256 {checksum}, not {file.sha256}" if file.sha256 not in (None, checksum) else None


def _may_be_html(file: RemoteFile) -> bool:
    return file.name.endswith((".html", ".htm"))


def _version(response: Any) -> str | None:
    """What names this version of a file in the header `If-Range`, if anything does."""
    tag = response.headers.get("ETag", "W/")
    return response.headers.get("Last-Modified") if tag.startswith("W/") else tag


def _is_local(url: str) -> bool:
    """Whether an address is `http` to this machine."""
    host = urlsplit(url).hostname or ""
    try:
        return url.startswith("http:") and (host == "localhost" or ipaddress.ip_address(host).is_loopback)
    except ValueError:
        return False


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise _AttemptError(f"{folder} has {free} bytes free, {needed} are needed")


def _part(path: Path) -> Path:
    return path.with_name(f"{path.name}.part")


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0
