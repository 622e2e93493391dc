"""Servers that misbehave: the right bytes arrive, or a DownloadError; never other bytes, and never without an end."""

import gzip
import hashlib
import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path

import numpy as np
import pytest

from interop.datasets import fetching
from interop.datasets.answers import LONGEST_WAIT
from interop.datasets.errors import DownloadError
from interop.datasets.fetching import RemoteFile, RemoteStream
from interop.datasets.json_answers import fetch_json

DATA = np.random.default_rng(0).bytes(10_240)
OTHER = DATA[::-1]
SHA256 = hashlib.sha256(DATA).hexdigest()
TAG = '"version-1"'
PAGE = b"<!DOCTYPE html><html><head><title>Sign in</title></head></html>"


class Raw:
    """Sends bytes of the test's choice: `answers` in turn, the last one from then on. Each connection has one."""

    def __init__(self, *answers: bytes | Callable[[str], bytes]) -> None:
        self.answers, self.requests = answers, list[str]()
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}/a.bin"
        self.thread = threading.Thread(target=self._serve)
        self.thread.start()

    def _serve(self) -> None:
        for number in itertools.count():
            connection = self.socket.accept()[0]
            with connection:
                connection.settimeout(5)
                request = connection.recv(1 << 16).decode("latin-1")
                if request.startswith("GET /stop"):
                    return
                self.requests.append(request)
                answer = self.answers[min(number, len(self.answers) - 1)]
                try:
                    connection.sendall(answer(request) if callable(answer) else answer)
                    connection.shutdown(socket.SHUT_WR)
                    connection.settimeout(0.5)
                    connection.recv(1)  # until the client has gone: closing with unread data would reset
                except OSError:
                    pass

    def close(self) -> None:
        with socket.create_connection(self.socket.getsockname()) as last:
            last.sendall(b"GET /stop HTTP/1.1\r\n\r\n")
        self.thread.join()
        self.socket.close()


@contextmanager
def raw(*answers: bytes | Callable[[str], bytes]) -> Iterator[Raw]:
    server = Raw(*answers)
    try:
        yield server
    finally:
        server.close()


def answer(status: int = 200, body: bytes = DATA, **headers: str | None) -> bytes:
    """An answer with the headers of a well-behaved server, some of them replaced, or left out for None."""
    common = {"Content-Length": str(len(body)), "ETag": TAG, "Connection": "close"}
    given = common | {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [f"HTTP/1.1 {status} Said", *(f"{name}: {value}" for name, value in given.items() if value is not None)]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def part(first: int, last: int, total: int | str = len(DATA), data: bytes = DATA, **headers: str | None) -> bytes:
    """An answer with a range of the file."""
    return answer(206, data[first : last + 1], **{"Content_Range": f"bytes {first}-{last}/{total}", **headers})


def cut(data: bytes, size: int) -> bytes:
    """An answer of which only so many bytes of the body are sent."""
    head = data.index(b"\r\n\r\n") + 4
    return data[: head + size]


BEGUN = cut(answer(), 1000)  # 1,000 bytes come, and then the connection is lost
CHUNKED = {"Transfer_Encoding": "chunked", "Content_Length": None}


def chunks(*pieces: bytes, end: bool = True) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(each), each) for each in pieces) + (b"0\r\n\r\n" if end else b"")


# The first answer, and those to the request for the rest.
RESUMED: dict[str, tuple[bytes, ...]] = {
    "as it should be": (BEGUN, part(1000, 10_239)),
    "a shorter range": (BEGUN, part(1000, 3999), part(4000, 10_239)),
    "a shorter range, then nothing new": (BEGUN, part(1000, 3999)),
    "a range that begins before": (BEGUN, part(0, 10_239)),
    "a range that begins behind": (BEGUN, part(1001, 10_239)),
    "a range of another length than its body": (BEGUN, part(1000, 10_239, Content_Length="3000")),
    "a body longer than its range": (BEGUN, part(1000, 3999, Content_Length=None) + DATA),
    "a body shorter than its range": (BEGUN, cut(part(1000, 10_239), 500)),
    "a range that ends behind the file": (BEGUN, part(1000, 10_240)),
    "a range that ends before it begins": (BEGUN, answer(206, b"", Content_Range="bytes 1000-999/10240")),
    "a file of another length": (BEGUN, part(1000, 10_239, 20_480)),
    "a file of unknown length": (BEGUN, part(1000, 3999, "*")),
    "no range": (BEGUN, answer(206, DATA[1000:])),
    "a range of text": (BEGUN, answer(206, DATA[1000:], Content_Range="bytes all/10240")),
    "a negative range": (BEGUN, answer(206, DATA[1000:], Content_Range="bytes -1000-10239/10240")),
    "a huge range": (BEGUN, answer(206, DATA[1000:], Content_Range=f"bytes 1000-10239/{'9' * 30}")),
    "several ranges": (BEGUN, answer(206, DATA[1000:], Content_Type="multipart/byteranges; boundary=x")),
    "another tag": (BEGUN, part(1000, 10_239, data=OTHER, ETag='"version-2"')),
    "a weak tag": (BEGUN, part(1000, 10_239, data=OTHER, ETag=f"W/{TAG}")),
    "no tag": (BEGUN, part(1000, 10_239, data=OTHER, ETag=None)),
    "all of it": (BEGUN, answer()),
    "no more": (BEGUN, answer(416, b"", Content_Range="bytes */10240")),
    "no more of another length": (BEGUN, answer(416, b"", Content_Range="bytes */1000"), answer()),
    "no content in place of the rest": (BEGUN, answer(204, b"")),
    "a compressed rest": (BEGUN, answer(206, gzip.compress(DATA[1000:]), Content_Encoding="gzip")),
}
FIRST: dict[str, tuple[bytes, ...]] = {
    "a part that was not asked for": (part(0, 999), part(1000, 10_239)),
    "a part from the middle": (part(1000, 10_239),),
    "a part, always": (part(0, 999),),
    "shorter than announced": (cut(answer(), 9000),),
    "longer than announced": (answer() + b"more",),
    "chunks": (answer(body=chunks(DATA[:5000], DATA[5000:]), **CHUNKED),),
    "chunks that end too soon": (answer(body=chunks(DATA[:5000], end=False), **CHUNKED),),
    "chunks of text": (answer(body=b"no number\r\n" + DATA, **CHUNKED),),
    "negative chunks": (answer(body=b"-5\r\n" + DATA, **CHUNKED),),
    "an end that cannot be told from a lost connection": (cut(answer(Content_Length=None), 9000),),
    "compressed": (answer(body=gzip.compress(DATA), Content_Encoding="gzip"),),
    "compressed, in capitals": (answer(body=gzip.compress(DATA), Content_Encoding=" GZIP "),),
    "compressed twice": (answer(body=gzip.compress(DATA), Content_Encoding="gzip, br"),),
    "not compressed, and says so": (answer(Content_Encoding="identity"),),
    "a page": (answer(body=PAGE),),
    "a page by its type": (answer(body=b"{}", Content_Type="text/html; charset=utf-8"),),
    "a page behind a mark": (answer(body=b"\xef\xbb\xbf\n" + PAGE),),
    "a page behind a declaration": (answer(body=b'<?xml version="1.0"?>\n<!-- x -->' + PAGE),),
    "a page without a doctype": (answer(body=b" <head><meta charset=utf-8></head>please sign in"),),
    "empty": (answer(body=b""),),
    "accepted": (answer(202, DATA[:50]),),
    "no content": (answer(204, b""),),
    "a reset": (answer(205, b""),),
    "not modified": (answer(304, b""),),
    "several": (answer(300, DATA[:50]),),
    "a status of its own": (answer(299, DATA[:50]),),
    "a low status": (b"HTTP/1.1 099 Low\r\nContent-Length: 3\r\n\r\nabc",),
    "a status of text": (b"HTTP/1.1 fine\r\n\r\nabc",),
    "no HTTP": (DATA[:100],),
    "nothing": (b"",),
    "a length of text": (answer(Content_Length="many"),),
    "a negative length": (answer(Content_Length="-1"),),
    "a huge length": (answer(Content_Length="9" * 400),),
    "a fractional length": (answer(Content_Length="1e4"),),
    "a length twice": (answer(Content_Length="10240, 10240"),),
    "two lengths": (answer(Content_Length="10240, 1000"),),
    "many headers": (answer(**{f"X-{number}": "x" for number in range(500)}),),
    "a header without an end": (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 200_000 + b"\r\n\r\n",),
    "a tag with a line end": (answer(ETag='"a\tb"'),),
    "a tag of bytes": (cut(answer(ETag='"\xff\xfe"'), 1000), answer(ETag='"\xff\xfe"')),
    "dates of text": (cut(answer(ETag=None, Last_Modified="yesterday", Date="now"), 1000), answer()),
    **{
        f"a redirect to {place!r}": (answer(302, b"", Location=place),)
        for place in (
            None, "", " ", "http://[::1", "http://127.0.0.1:99999999/", "https://a b/", "//", "http:///x", "ftp://127.0.0.1/",
            "\xff\xfe", "http://" + "a" * 300 + "/", "https://[v1.x]/", "javascript:1", "http://127.0.0.1:port/",
            "a" * 60_000, "https://.invalid/", "\x00", "http://127.0.0.1:1\\@example.org/",
        )
    },
    "a redirect with a large body": (answer(302, b"x" * 1000, Location="", Content_Length=str(2**62)),),
}  # fmt: skip


@pytest.fixture
def to(tmp_path: Path) -> Path:
    return tmp_path / "to"


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds of each pause; none is made."""
    found = list[float]()
    monkeypatch.setattr("time.sleep", found.append)
    return found


def arrives(server: Raw, to: Path, **known: int | str) -> bool:
    """Whether the file arrives. Otherwise there is a DownloadError, and nothing under its name. Other bytes fail."""
    begun = time.monotonic()
    file = RemoteFile(server.url, "a.bin", **known)
    try:
        assert fetching.fetch([file], to, timeout=2, pause=0.001) == {"a.bin": SHA256}
        assert (to / "a.bin").read_bytes() == DATA
        return True
    except DownloadError as error:
        assert not (to / "a.bin").exists() and "from_local=" in str(error)
        return False
    finally:
        assert time.monotonic() - begun < 15


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # urllib3 leaves a socket open
@pytest.mark.parametrize("known", [{}, {"size": len(DATA)}, {"sha256": SHA256}], ids=["", "size", "sha256"])
@pytest.mark.parametrize("name", [*RESUMED, *FIRST])
def test_the_right_bytes_or_an_error(name: str, known: dict, to: Path, waits: list[float]) -> None:
    with raw(*{**FIRST, **RESUMED}[name]) as server:
        came = arrives(server, to, **known)
    if name in ("as it should be", "a shorter range", "all of it", "chunks", "a length twice", "a tag of bytes"):
        assert came
    if name == "as it should be":
        assert "Range: bytes=1000-" in server.requests[1] and f"If-Range: {TAG}" in server.requests[1]
    assert len(server.requests) <= 12 and sum(waits) < 10


def test_another_file_is_taken_as_a_whole(to: Path, waits: list[float]) -> None:
    with raw(BEGUN, answer(body=OTHER, ETag='"version-2"')) as server:
        fetching.fetch([RemoteFile(server.url, "a.bin")], to, pause=0.001)
    assert (to / "a.bin").read_bytes() == OTHER


def test_a_date_names_a_version_a_minute_later(to: Path, waits: list[float]) -> None:
    """A file may change twice within the second of its date."""
    now = datetime.now(UTC)
    for age, resumes in ((timedelta(seconds=5), False), (timedelta(hours=1), True)):
        date = {"Date": format_datetime(now, usegmt=True), "Last_Modified": format_datetime(now - age, usegmt=True)}
        begun = cut(answer(ETag=None, **date), 1000)
        rest = part(1000, 10_239, ETag=None, **date) if resumes else answer(ETag=None, **date)
        with raw(begun, rest) as server:
            assert arrives(server, to / str(resumes))
        assert ("Range:" in server.requests[1]) == resumes


@pytest.mark.parametrize("damage", [b"", b"\xff\xfe", b"\n" * 9, TAG.encode() + b"\nmany", b'"a"\n' + b"9" * 40])
def test_a_damaged_note_of_the_version(damage: bytes, to: Path, waits: list[float]) -> None:
    to.mkdir()
    (to / "a.bin.part").write_bytes(b"x" * 100)
    (to / "a.bin.version").write_bytes(damage)
    with raw(lambda request: part(100, 10_239, ETag='"b"') if "Range:" in request else answer()) as server:
        assert arrives(server, to)


# ------------------------------------------------------------------ waiting


def later(seconds: float) -> str:
    return format_datetime(datetime.now(UTC) + timedelta(seconds=seconds), usegmt=True)


@pytest.mark.parametrize(
    ("text", "least", "most"),
    [
        ("3", 3, 3),
        (" 3 ", 3, 3),
        ("0", 0, 0.02),
        ("3600", LONGEST_WAIT, LONGEST_WAIT),
        ("9" * 5000, LONGEST_WAIT, LONGEST_WAIT),
        ("-5", 0, 0.02),
        ("1e9", 0, 0.02),
        ("nan", 0, 0.02),
        ("soon", 0, 0.02),
        ("", 0, 0.02),
        (20.0, 5, 20),
        (1e7, LONGEST_WAIT, LONGEST_WAIT),
        (-100.0, 0, 0.02),
        ("Fri, 99 Foo 99999 99:99:99 GMT", 0, 0.02),
        ("Fri, 31 Dec 9999 23:59:59 -2359", 0, LONGEST_WAIT),
    ],
    ids=lambda given: str(given)[:20],
)
@pytest.mark.parametrize("status", [429, 503])
def test_a_wait_that_the_server_asks_for_has_a_bound(
    status: int, text: str | float, least: float, most: float, to: Path, waits: list[float]
) -> None:
    """A number of seconds, or (here: a float) a date in so many seconds."""
    busy = answer(status, b"busy", Retry_After=text if isinstance(text, str) else later(text))
    with raw(busy, answer()) as server:
        assert arrives(server, to)
    assert len(waits) == 1 and least <= waits[0] <= most
    waits.clear()
    with raw(busy) as server, pytest.raises(DownloadError, match=str(status)):
        fetching.fetch([RemoteFile(server.url, "b.bin")], to, pause=0.001)
    assert len(waits) == 4 and sum(waits) <= 4 * most + 0.1


# ------------------------------------------------------------------ JSON and streams


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    "name", [name for name in FIRST if "chunks" not in name and "length twice" not in name and "identity" not in name]
)
def test_an_answer_that_is_no_json(name: str, waits: list[float]) -> None:
    with raw(*FIRST[name]) as server, pytest.raises(DownloadError):
        fetch_json(server.url, timeout=2, pause=0.001)


@pytest.mark.parametrize(
    "text",
    [b"[" * 100_000, b'{"a":' * 100_000, b'{"a": 1, "a": 2}', b"\xff", b'"\\ud800"', b"1" * 10_000, b"nul", b"[1,]"],
)
def test_json_that_cannot_be_read(text: bytes, waits: list[float]) -> None:
    with raw(answer(body=text)) as server, pytest.raises(DownloadError, match="JSON"):
        fetch_json(server.url, timeout=2, pause=0.001)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", [*RESUMED, *FIRST])
def test_a_stream_has_the_right_bytes_or_an_error(name: str, waits: list[float]) -> None:
    with raw(*{**FIRST, **RESUMED}[name]) as server, RemoteStream(server.url, timeout=2, pause=0.001) as stream:
        came = bytearray()
        try:
            while block := stream.read(700):
                assert len(block) == 700 or len(came) + len(block) == len(DATA)
                came += block
        except DownloadError:
            assert DATA.startswith(came)
        else:
            assert came == DATA or (name == "empty" and not came)
    if name in ("as it should be", "a shorter range", "chunks"):
        assert came == DATA
