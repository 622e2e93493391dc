"""The gate for HTTP answers: addresses, redirects, statuses and headers are checked before a byte of the body is used."""

import re
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from http.client import HTTPException
from typing import Any
from urllib.parse import urljoin, urlsplit

from interop.data.arguments import required

LONGEST_WAIT = 60.0
"""The most seconds that are waited because of one `Retry-After`."""

_BLOCK = 1 << 16  # bytes
_MOST_REDIRECTS = 10
_TRANSIENT = (408, 425, 429, 500, 502, 503, 504)
_NOT_THERE = (401, 404, 410)  # the hub answers 401 for a repository that does not exist
_REDIRECTS = (301, 302, 303, 307, 308)
_LOOPBACK = ("127.0.0.1", "localhost")
_NUMBER = r"([0-9]{1,19})"
_RANGE = re.compile(rf"bytes\s+{_NUMBER}\s*-\s*{_NUMBER}\s*/\s*(?:{_NUMBER}|\*)", re.IGNORECASE)
_STRONG_TAG = re.compile(r'"[\x21\x23-\x7e\x80-\xff]*"')
_SAFE_AFTER = timedelta(
    seconds=60
)  # a file may change twice within the second of its Last-Modified (RFC 9110, 8.8.2.2)


class FailedError(Exception):
    """A request failed, and another one would fail as well."""


class NotFoundError(FailedError):
    """The server does not have what was asked for, or does not show it."""


class TransientError(FailedError):
    """A request failed, and the next one may not. `wait`: the seconds that the server asks for, up to `LONGEST_WAIT`."""

    def __init__(self, message: str, wait: float = 0.0) -> None:
        super().__init__(message)
        self.wait = wait


class ConnectError(TransientError):
    """No connection, or no answer."""


class OtherFileError(TransientError):
    """The answer is about another file, or another part of it, than the one that was begun."""


@dataclass(frozen=True)
class Answer:
    """An answer of status 200 or 206 whose headers agree with each other and with the request.

    Args:
        start: the place of the first byte of the body in the file: 0, or where the request asked to begin.
        length: bytes of the body; None if not announced.
        total: bytes of the file; None if not announced.
        delimited: whether the end of the body can be told from a lost connection.
        version: names these bytes of the file exactly (a strong ETag, or a safe Last-Modified); "" if nothing does.
        encoding: a coding of the body although none was asked for, such as "gzip"; "" for none.
        is_page: whether the server calls it HTML.
    """

    start: int
    length: int | None
    total: int | None
    delimited: bool
    version: str
    encoding: str
    is_page: bool
    _response: Any

    def blocks(self) -> Iterator[bytes]:
        """Yield the body. TransientError if it ends too soon; FailedError as soon as it is longer than announced."""
        came = 0
        stream = self._response.raw.stream(_BLOCK, decode_content=False)
        while True:
            try:
                block = next(stream, b"")
            except (required("urllib3", "datasets").exceptions.HTTPError, HTTPException, OSError) as error:
                raise TransientError(str(error)) from error
            except ValueError as error:  # of lengths of chunks
                raise FailedError(f"sends a body that is no HTTP ({error})") from error
            if not block:
                break
            came += len(block)
            if self.length is not None and came > self.length:
                raise FailedError(f"sends more than the {self.length} bytes that it announces")
            yield block
        if self.length is not None and came < self.length:
            raise TransientError(f"sends {came} of the {self.length} bytes that it announces")


@contextmanager
def asked(
    session: Any, url: str, headers: Mapping[str, str], timeout: float, start: int = 0, plain_host: str = ""
) -> Iterator[Answer]:
    """Ask for a file. Redirects are followed; the header Authorization is sent to the first host alone.

    Args:
        session: a `requests.Session`.
        url: the address: `https`, or `http` at the loopback address and at `plain_host`.
        headers: of the request, with a Range if `start` is not 0.
        timeout: seconds to wait for an answer, and for each piece of the body.
        start: the first byte that the request asks for.

    Raises:
        FailedError, NotFoundError, TransientError, ConnectError, OtherFileError: see there.
    """
    sent = {**headers, "Accept-Encoding": "identity"}
    for _ in range(_MOST_REDIRECTS + 1):
        host = _checked_address(url, plain_host)
        with closing(_sent(session, url, sent, timeout)) as response:
            if response.status_code not in _REDIRECTS:
                yield _answer(response, start)
                return
            url = _target(url, response.headers.get("Location"))
        if _checked_address(url, plain_host) != host:
            sent = {name: value for name, value in sent.items() if name.lower() != "authorization"}
    raise FailedError(f"has more than {_MOST_REDIRECTS} redirects")


def _checked_address(url: str, plain_host: str) -> tuple[str, str | None, int | None]:
    """Scheme, host and port of an address."""
    try:
        where = urlsplit(url)
        host = where.scheme, where.hostname, where.port
    except ValueError as error:
        raise FailedError(f"leads to {url!r:.200}, which is no address ({error})") from error
    if where.scheme != "https" and not (where.scheme == "http" and where.hostname in (*_LOOPBACK, plain_host)):
        raise FailedError(f"leads to {url:.200}, which is not https")
    return host


def _target(url: str, location: str | None) -> str:
    try:
        if not location:
            raise ValueError("there is no Location")
        return urljoin(url, location.encode("latin-1").decode())  # the headers of http.client are Latin-1
    except ValueError as error:
        raise FailedError(f"redirects to {location!r:.200}, which is no address ({error})") from error


def _sent(session: Any, url: str, headers: Mapping[str, str], timeout: float) -> Any:
    """The response, whose body was not read. `Session.send` would read that of a redirect, of whatever size."""
    requests = required("requests", "datasets")
    urllib3 = required("urllib3", "datasets")
    try:
        request = session.prepare_request(requests.Request("GET", url, headers=headers))
        settings = session.merge_environment_settings(request.url, {}, True, None, None)
        return session.get_adapter(request.url).send(request, timeout=timeout, **settings)
    except (requests.ConnectionError, requests.Timeout) as error:
        raise ConnectError(str(error)) from error
    except (requests.RequestException, urllib3.exceptions.HTTPError, ValueError) as error:
        raise FailedError(f"{url:.200} cannot be asked: {error}") from error


def _answer(response: Any, start: int) -> Answer:
    """Check status and headers."""
    status = response.status_code
    headers = response.headers
    reason = f"{status} {response.reason or ''}"[:100].strip()
    if status == 416:
        raise OtherFileError(f"{reason}: it has no bytes from {start} on")
    if status in _TRANSIENT:
        raise TransientError(reason, _wait(headers.get("Retry-After", "")))
    if status not in (200, 206):
        raise (NotFoundError if status in _NOT_THERE else FailedError)(reason)
    chunked = "chunked" in headers.get("Transfer-Encoding", "").lower()
    length = None if chunked else _length(headers.get("Content-Length"))
    if status == 206:
        first, length, total = _part(headers.get("Content-Range", ""), length, start)
    else:
        first = 0
        total = length
    encoding = headers.get("Content-Encoding", "").strip().lower()
    return Answer(
        start=first,
        length=length,
        total=total,
        delimited=chunked or length is not None,
        version=_version(headers),
        encoding="" if encoding == "identity" else encoding[:40],
        is_page=headers.get("Content-Type", "").strip().lower().startswith(("text/html", "application/xhtml")),
        _response=response,
    )


def _length(text: str | None) -> int | None:
    """The number in a Content-Length, which a proxy may have repeated."""
    if text is None:
        return None
    numbers = {length.strip() for length in text.split(",")}
    if len(numbers) != 1 or not re.fullmatch(_NUMBER, number := numbers.pop()):
        raise FailedError(f"announces a Content-Length of {text!r:.80}, which is no number of bytes")
    return int(number)


def _part(text: str, length: int | None, start: int) -> tuple[int, int, int | None]:
    """Start, bytes of the body and bytes of the file of a Content-Range. OtherFileError if it is not the range asked for."""
    match = _RANGE.fullmatch(text.strip())
    if match is None:
        raise OtherFileError(f"announces the range {text!r:.80}, which is none")
    first = int(match[1])
    last = int(match[2])
    total = None if match[3] is None else int(match[3])
    if (
        first != start
        or last < first
        or (total is not None and last >= total)
        or length not in (None, last - first + 1)
    ):
        raise OtherFileError(f"announces {text!r:.80} and {length} bytes, asked for were those from {start} on")
    return first, last - first + 1, total


def _version(headers: Mapping[str, str]) -> str:
    tag = headers.get("ETag", "").strip()
    if _STRONG_TAG.fullmatch(tag):
        return tag
    changed = headers.get("Last-Modified", "").strip()
    now = headers.get("Date", "")
    at = _date(changed)
    answered = _date(now)
    return changed if at is not None and answered is not None and answered - at >= _SAFE_AFTER else ""


def _wait(text: str) -> float:
    """The seconds that a Retry-After asks for, from 0 to `LONGEST_WAIT`; 0 where it is neither a number nor a date."""
    text = text.strip()
    at = _date(text)
    seconds = 0.0
    if re.fullmatch(r"[0-9]+", text):
        seconds = float(text[:18]) if len(text.lstrip("0")) <= 18 else LONGEST_WAIT
    elif at is not None:
        seconds = (at - datetime.now(UTC)).total_seconds()
    return min(max(seconds, 0.0), LONGEST_WAIT)


def _date(text: str) -> datetime | None:
    """The time of an HTTP date; None for other text."""
    try:
        date = parsedate_to_datetime(text)
        return date.replace(tzinfo=UTC) if date.tzinfo is None else date.astimezone(UTC)
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
