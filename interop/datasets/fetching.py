"""HTTPS downloads with resume, retries and verification."""

import hashlib
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit
from urllib.request import url2pathname

from interop.data.arguments import required
from interop.datasets.answers import Answer, FailedError, OtherFileError, TransientError, asked
from interop.datasets.errors import DownloadError
from interop.datasets.progress import progress

_T = TypeVar("_T")
_PAGE = (
    re.compile(  # the beginning of a page of HTML, perhaps behind a byte order mark, an XML declaration and comments
        rb"(\xef\xbb\xbf)?\s*(<\?xml[^>]*>\s*)?(<!--|<!doctype\s+html|<(html|head|body|meta|script|title)\b)",
        re.IGNORECASE,
    )
)


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
    files: Sequence[RemoteFile],
    folder: Path,
    *,
    timeout: float = 30.0,
    retries: int = 4,
    pause: float = 0.5,
    headers: Mapping[str, str] | None = None,
    at_once: int = 1,
) -> dict[str, str]:
    """Download files into a folder. Returns the SHA-256 of each by its name.

    A file is written to `<name>.part`, verified and renamed. Partial files are resumed, also by later calls, if the server
    identifies the version of the file (`ETag`, or `Last-Modified` of a minute before). Finished files are not downloaded
    again.

    An answer counts if its status, range, length and coding agree with the request and with each other. The file is whole
    when it has as many bytes as the server announces for all of it (`Content-Range`, `Content-Length`) and as `size` says.

    Args:
        files: the files, with distinct names.
        folder: created if missing.
        timeout: seconds to wait for an answer or data.
        retries: the maximum number of successive retries without new data.
        pause: seconds before the first retry; doubled for each further one. A longer `Retry-After` is obeyed up to a minute.
        headers: more headers of the requests. Authorization is not sent to other hosts that a server redirects to.
        at_once: concurrent downloads.

    Raises:
        DownloadError: names the attempts, and the files to download by hand. Partial files are kept.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        done = {file.name: checksum_of(folder, file.name, file.size, file.sha256) for file in files}
        missing = [file for file in files if done[file.name] is None]
        _check_space(folder, sum(file.size - _size(folder / f"{file.name}.part") for file in missing if file.size))
        total = sum(file.size or 0 for file in missing) if all(file.size for file in missing) else None
        stopped = threading.Event()
        with session() as opened, progress("Downloading", total, "B") as advance:

            def download(file: RemoteFile) -> tuple[str, str]:
                part = folder / f"{file.name}.part"
                (folder / file.name).unlink(missing_ok=True)  # another size or checksum than the known one
                begun = _Download(file, part, part.with_suffix(".version"), opened, timeout, advance, headers, stopped)
                checksum = begun.run(retries, pause)
                os.replace(part, folder / file.name)
                begun.version.unlink(missing_ok=True)
                return file.name, checksum

            if at_once == 1:
                done |= map(download, missing)
            else:
                with ThreadPoolExecutor(at_once) as pool:
                    try:
                        done |= pool.map(download, missing)
                    finally:
                        stopped.set()
                        pool.shutdown(cancel_futures=True)
    except (FailedError, OSError) as error:
        raise DownloadError(
            f"{folder}: {error}\n{by_hand([f'{file.name}  ({file.url})' for file in files])}"
        ) from error
    return {name: checksum for name, checksum in done.items() if checksum}


class RemoteStream:
    """The bytes of a remote file in order, as a context. A lost connection is resumed like a partial file of `fetch`.

    The arguments of `fetch`; DownloadError, also while it is read. Memory holds up to 64 KiB beside the bytes asked for.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout: float = 30.0,
        retries: int = 4,
        pause: float = 0.5,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._url = url
        self._timeout = timeout
        self._retries = retries
        self._pause = pause
        self._headers = headers or {}
        self._session = session()
        self._answer = ExitStack()
        self._blocks: Iterator[bytes] = iter(())
        self._opened = self._ended = False
        self._place = 0
        self._version = ""
        self._total: int | None = None
        self._waiting: bytes = b""  # received, and not read yet

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._answer.close()
        self._session.close()

    def read(self, size: int = -1, /) -> bytes:
        """Up to `size` bytes; by default the rest."""
        data = bytearray()
        while size < 0 or len(data) < size:
            if not self._waiting and not self._next():
                break
            count = len(self._waiting) if size < 0 else min(size - len(data), len(self._waiting))
            data += self._waiting[:count]
            self._waiting = self._waiting[count:]
        return bytes(data)

    def _next(self) -> bool:
        """Receive more bytes; False at the end of the file."""
        if self._ended:
            return False
        try:
            self._waiting = patiently(self._block, lambda: self._place, self._retries, self._pause)
        except FailedError as error:
            raise DownloadError(f"{self._url}: {error}") from error
        self._place += len(self._waiting)
        self._ended = not self._waiting
        return not self._ended

    def _block(self) -> bytes:
        if not self._opened:
            self._open()
        try:
            block = next(self._blocks, b"")
            if not block and self._total is not None and self._place < self._total:
                raise TransientError(f"{self._place} of {self._total} bytes came")
            if not self._place and _PAGE.match(block):
                raise FailedError("is a page of HTML, not the file")
            return block
        except FailedError:
            self._answer.close()
            self._opened = False
            raise

    def _open(self) -> None:
        start = self._place
        if start and not self._version:
            raise FailedError(f"the connection was lost after {start} bytes, and the server cannot resume")
        resume = {"Range": f"bytes={start}-", "If-Range": self._version} if start else {}
        request = asked(self._session, self._url, {**self._headers, **resume}, self._timeout, start)
        answer = self._answer.enter_context(request)
        refused = answer.is_page or answer.encoding or not answer.delimited
        other = (answer.start, answer.version, answer.total) != (start, self._version, self._total)
        if refused or (start and other):
            self._answer.close()
            raise FailedError(
                "is no file" if refused else f"is another file than the one that was read up to byte {start}"
            )
        self._version = answer.version
        self._total = answer.total
        self._blocks = answer.blocks()
        self._opened = True


def patiently(attempt: Callable[[], _T], place: Callable[[], int], retries: int, pause: float) -> _T:
    """The result of `attempt`, called again after a TransientError. `place()` is how far it came: progress is no failure.

    Args as for `fetch`.
    """
    failures = 0
    furthest = place()
    while True:
        try:
            return attempt()
        except TransientError as error:
            failures = 1 if place() > furthest else failures + 1
            furthest = max(furthest, place())
            if failures > retries:
                raise
            time.sleep(max(pause * 2 ** (failures - 1), error.wait))


def by_hand(files: Sequence[str]) -> str:
    """Instructions for files that cannot be downloaded."""
    some = [*files[:6], *([f"and {len(files) - 6} more"] if len(files) > 6 else [])]
    return "\n  ".join(["To go on by hand, put these files into a folder and pass it as from_local=...", *some])


def checksum_of(folder: Path, name: str, size: int | None, sha256: str | None) -> str | None:
    """The SHA-256 of a file. None if it is missing, or its size or checksum is not the known one.

    DownloadError if the name points outside of the folder.
    """
    path = folder / name
    try:
        below = folder.resolve() in path.resolve().parents
    except (OSError, ValueError):  # too long, or with a zero byte
        below = False
    if not below:
        raise DownloadError(f"{name!r} is not the name of a file below {folder}")
    if not path.is_file() or size not in (None, _size(path)):
        return None
    checksum = _sha256(path)
    return checksum if sha256 in (None, checksum) else None


@dataclass
class _Download:
    """The download of a file to its `.part` file. `version` is the file with the server's version of the partial data."""

    file: RemoteFile
    part: Path
    version: Path
    session: Any
    timeout: float
    advance: Callable[[int], object]
    headers: Mapping[str, str] | None
    stopped: threading.Event

    def run(self, retries: int, pause: float) -> str:
        """Download the file. Returns its checksum."""
        try:
            url = urlsplit(self.file.url)
            failures = []
        except ValueError as error:
            raise FailedError(f"{self.file.url!r:.200} is no address ({error})") from error
        self.part.parent.mkdir(parents=True, exist_ok=True)
        if url.scheme == "file":
            shutil.copyfile(url2pathname(url.path), self.part)
            return self._checked()
        self.advance(_size(self.part))
        addresses = [(url.geturl(), retries)]
        if self.file.plain_http:
            addresses.insert(0, (url._replace(scheme="https").geturl(), 0))
        for address, times in addresses:
            try:
                return patiently(lambda: self._receive(address), lambda: _size(self.part), times, pause)  # noqa: B023
            except FailedError as error:
                failures.append((address, error))
        text = "\n".join(f"{address}: {error}" for address, error in failures)
        raise type(failures[-1][1])(text) from failures[-1][1]

    def _receive(self, url: str) -> str:
        """Append the missing data to the partial file. Returns the checksum of the file."""
        size = _size(self.part)
        version, before = self._begun()
        start = size if version else 0
        headers = {**(self.headers or {}), **({"Range": f"bytes={start}-", "If-Range": version} if start else {})}
        plain = urlsplit(self.file.url).hostname if self.file.plain_http else ""
        try:
            with asked(self.session, url, headers, self.timeout, start, plain or "") as answer:
                resumed = answer.start > 0
                if resumed and (answer.version != version or before not in (None, answer.total)):
                    raise OtherFileError("is another file than the one that was begun")
                total = self._accepted(answer)
                _check_space(self.part.parent, (total or 0) - (size if resumed else 0))
                self.advance(answer.start - size)
                self._write(answer, total)
        except OtherFileError:
            self.part.unlink(missing_ok=True)
            raise
        if _size(self.part) < (total or 0):
            raise TransientError(f"{_size(self.part)} of {total} bytes came")
        return self._checked(TransientError if resumed else FailedError)

    def _accepted(self, answer: Answer) -> int | None:
        """The bytes of the file; None if only the end of the answer tells. FailedError for an answer that is no file."""
        is_checked = self.file.size is not None or self.file.sha256 is not None
        total = self.file.size if answer.total is None else answer.total
        if self.file.size not in (None, total):
            raise FailedError(f"has {total} bytes, not {self.file.size}")
        if answer.is_page and not is_checked:
            raise FailedError("is a page of HTML, not the file")
        if answer.encoding and not is_checked:
            raise FailedError(f"is encoded as {answer.encoding}, although the file as it is was asked for")
        if total is None and answer.length is not None:
            raise FailedError("sends a part of a file, and does not say how long the file is")
        if total is None and not answer.delimited and not is_checked:
            raise FailedError("does not say how long it is, so that a lost connection would look like its end")
        return total

    def _write(self, answer: Answer, total: int | None) -> None:
        """Write the body to the partial file, behind what it answers."""
        with self.part.open("ab" if answer.start else "wb") as out:
            self.version.write_text(f"{answer.version}\n{'' if total is None else total}", "utf-8")
            place = answer.start
            for block in answer.blocks():
                place += len(block)
                if total is not None and place > total:
                    raise FailedError(f"sends more than {total} bytes")
                if self.stopped.is_set():
                    raise FailedError("another download failed")
                out.write(block)
                self.advance(len(block))
            out.flush()
            os.fsync(out.fileno())

    def _begun(self) -> tuple[str, int | None]:
        """The version of the partial data, and the bytes of its file; "" if there is no data, or its version is unknown."""
        try:
            version, _, total = self.version.read_text("utf-8").partition("\n")
        except (OSError, ValueError):
            return "", None
        return (version, int(total) if re.fullmatch("[0-9]{1,19}", total) else None) if _size(self.part) else ("", None)

    def _checked(self, failure: type[FailedError] = FailedError) -> str:
        """Verify the complete partial file and return its checksum. A wrong file is deleted."""
        size = _size(self.part)
        checksum = _sha256(self.part)
        fault = ""
        with self.part.open("rb") as content:
            if self.file.sha256 != checksum and _PAGE.match(content.read(1024)):
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


def session() -> Any:
    """A session whose only retries are those of `patiently`."""
    return required("requests", "datasets").Session()


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise FailedError(f"{folder} has {free} bytes free, {needed} are needed")


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
