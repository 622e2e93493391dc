"""Files arrive whole or not at all, and what came once is not sent again."""

import hashlib
import os
import random
import re
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from interop.datasets import fetching
from interop.datasets.errors import DownloadError
from interop.datasets.fetching import RemoteFile
from tests.interop.datasets.server import Answer, Server

DATA = np.random.default_rng(0).bytes(1_000_000)
SHA256 = hashlib.sha256(DATA).hexdigest()
fetch = partial(fetching.fetch, timeout=0.3, pause=0.01)


@pytest.fixture
def to(tmp_path: Path) -> Path:
    return tmp_path / "to"


@pytest.fixture
def remote(server: Server) -> RemoteFile:
    """`a.bin`, a megabyte, of which nothing is known beforehand."""
    (server.folder / "a.bin").write_bytes(DATA)
    return RemoteFile(server.at("a.bin"), "a.bin")


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.is_file() and path.suffix != ".version"}


def fails(remote: RemoteFile, to: Path, match: str, left: set[str] = frozenset(), **settings: float) -> str:
    """The error of a fetch, after which nothing stands under the final name. It says how to go on by hand."""
    with pytest.raises(DownloadError, match=match) as caught:
        fetch([remote], to, **settings)
    assert names(to) == left
    assert all(text in str(caught.value) for text in (remote.url, remote.name, "from_local="))
    return str(caught.value)


def test_files_arrive_with_their_checksums(server: Server, remote: RemoteFile, to: Path) -> None:
    (server.folder / "sub").mkdir()
    (server.folder / "sub" / "b c.bin").write_bytes(b"b")
    other = RemoteFile(server.at("sub/b%20c.bin"), "deep/b.bin", size=1, sha256=hashlib.sha256(b"b").hexdigest())
    assert fetch([remote, other], to) == {"a.bin": SHA256, "deep/b.bin": other.sha256}
    assert (to / "a.bin").read_bytes() == DATA
    assert names(to) == {"a.bin", "b.bin"}


@pytest.mark.parametrize("known", [{"size": len(DATA)}, {"sha256": SHA256}], ids=repr)
def test_a_file_that_was_damaged_is_fetched_again(known: dict, server: Server, remote: RemoteFile, to: Path) -> None:
    to.mkdir()
    (to / "a.bin").write_bytes(DATA[::-1][: len(DATA) - ("size" in known)])
    assert fetch([RemoteFile(remote.url, "a.bin", **known)], to) == {"a.bin": SHA256}
    assert (to / "a.bin").read_bytes() == DATA


def test_a_cut_connection_is_resumed(server: Server, remote: RemoteFile, to: Path) -> None:
    server.answer("a.bin", Answer(cut=300_000), times=2)
    assert fetch([remote], to) == {"a.bin": SHA256}
    assert server.bytes_sent("a.bin") == len(DATA)
    assert [request.range for request in server.requests] == [None, "bytes=300000-", "bytes=600000-"]


def test_a_later_call_goes_on(server: Server, remote: RemoteFile, to: Path) -> None:
    server.answer("a.bin", Answer(cut=300_000), times=1)
    server.answer("a.bin", Answer(status=503), times=5)
    fails(remote, to, "503", left={"a.bin.part"})
    assert fetch([remote], to) == {"a.bin": SHA256}
    assert server.bytes_sent("a.bin") == len(DATA) + 5 * len(b"no")


KILLED = """
import os, pathlib, signal, time
from interop.datasets.fetching import RemoteFile, fetch

to = pathlib.Path(to)
part = to / "a.bin.part"
if (child := os.fork()) == 0:
    fetch([RemoteFile(url, "a.bin")], to)
    os._exit(0)
while not part.exists() or part.stat().st_size < until:
    assert os.waitpid(child, os.WNOHANG) == (0, 0)
    time.sleep(0.001)
os.kill(child, signal.SIGKILL)
os.waitpid(child, 0)
"""


def test_a_kill_costs_only_what_was_under_way(
    in_a_fork: Callable[..., str], server: Server, remote: RemoteFile, to: Path
) -> None:
    """A process that is killed leaves no file under the final name; the next one asks for the rest only."""
    part, kept = to / "a.bin.part", 0
    server.answer("a.bin", Answer(pause=0.005), times=3)
    for _ in range(3):
        in_a_fork(KILLED, url=remote.url, to=str(to), until=kept + random.randrange(1, 250_000))
        assert server.requests[-1].range == (f"bytes={kept}-" if kept else None)
        assert names(to) == {"a.bin.part"}
        kept = part.stat().st_size
        assert part.read_bytes() == DATA[:kept]
    assert fetch([remote], to) == {"a.bin": SHA256}
    assert server.requests[-1].sent == len(DATA) - kept


@pytest.mark.parametrize(
    "answer",
    [
        Answer(),
        Answer(ranges=False),
        Answer(if_range=False),
        Answer(if_range=False, headers={"ETag": None}),
        Answer(headers={"ETag": 'W/"1"'}),
        Answer(headers={"ETag": None, "Last-Modified": None}),
    ],
    ids=repr,
)
@pytest.mark.parametrize("smaller", [False, True])
def test_two_versions_are_never_mixed(
    answer: Answer, smaller: bool, server: Server, remote: RemoteFile, to: Path
) -> None:
    """A file that changed after a part of it came, at servers that know of ranges and versions or do not."""
    server.answer("a.bin", Answer(cut=300_000, headers=answer.headers), times=1)
    server.answer("a.bin", Answer(status=404), times=1)
    fails(remote, to, "404", left={"a.bin.part"})
    changed = DATA[::-1][: 200_000 if smaller else len(DATA)]
    (server.folder / "a.bin").write_bytes(changed)
    os.utime(server.folder / "a.bin", (0, 0))
    server.answer("a.bin", answer)
    fetch([remote], to)
    assert (to / "a.bin").read_bytes() == changed


def test_a_checksum_that_a_resumed_file_fails_is_tried_once_more(server: Server, remote: RemoteFile, to: Path) -> None:
    lie = {"ETag": '"always the same"'}
    server.answer("a.bin", Answer(body=b"x" * len(DATA), cut=300_000, headers=lie), times=1)
    server.answer("a.bin", Answer(headers=lie))
    assert fetch([RemoteFile(remote.url, "a.bin", sha256=SHA256)], to) == {"a.bin": SHA256}


@pytest.mark.parametrize("status", [429, 503])
def test_errors_that_go_away_are_waited_for(status: int, server: Server, remote: RemoteFile, to: Path) -> None:
    server.answer("a.bin", Answer(status=status), times=2)
    assert fetch([remote], to) == {"a.bin": SHA256}


def test_a_stalled_body_is_resumed(server: Server, remote: RemoteFile, to: Path) -> None:
    server.answer("a.bin", Answer(stall=200_000), times=1)
    assert fetch([remote], to) == {"a.bin": SHA256}
    assert server.requests[-1].status == 206


def test_no_network(to: Path) -> None:
    fails(RemoteFile("http://127.0.0.1:9/a.bin", "a.bin"), to, "127.0.0.1.*[Rr]efused")
    fails(RemoteFile("https://nowhere.invalid/a.bin", "a.bin"), to, "nowhere.invalid", retries=0)


@pytest.mark.parametrize(
    ("answer", "match"),
    [
        (Answer(body=b"\n<!DOCTYPE HTML><title>Sign in"), "page of HTML"),
        (Answer(body=b""), "is empty"),
        (Answer(headers={"Content-Length": "2000000"}), "1000000 bytes read, 1000000 more expected"),
    ],
    ids=repr,
)
def test_what_is_no_data_is_refused(answer: Answer, match: str, server: Server, remote: RemoteFile, to: Path) -> None:
    server.answer("a.bin", answer)
    fails(remote, to, match, left={"a.bin.part"} if "more" in match else set())


@pytest.mark.parametrize("known", [{"size": 999_999}, {"sha256": "0" * 64}, {"size": 1_000_001}], ids=repr)
def test_what_is_known_is_checked(known: dict, server: Server, remote: RemoteFile, to: Path) -> None:
    fails(RemoteFile(remote.url, remote.name, **known), to, f"not {next(iter(known.values()))}")
    assert len(server.requests) == 1
    source = server.folder / "a.bin"
    fails(RemoteFile(source.as_uri(), remote.name, **known), to, f"not {next(iter(known.values()))}")


def test_file_addresses_are_copied(server: Server, remote: RemoteFile, to: Path) -> None:
    (server.folder / "b %.bin").write_bytes(DATA)
    assert fetch([RemoteFile((server.folder / "b %.bin").as_uri(), "a.bin")], to) == {"a.bin": SHA256}
    fails(RemoteFile("file:///nowhere/b.bin", "b.bin"), to, "No such file.*nowhere/b.bin", left={"a.bin"})


@pytest.mark.parametrize("name", ["../a.bin", "/tmp/a.bin", "", ".", "link/a.bin"])
def test_names_stay_in_the_folder(name: str, remote: RemoteFile, to: Path, tmp_path: Path) -> None:
    to.mkdir()
    (to / "link").symlink_to(tmp_path)
    with pytest.raises(DownloadError, match=re.escape(repr(name))):
        fetch([RemoteFile(remote.url, name)], to)
    assert not (tmp_path / "a.bin").exists()


@pytest.mark.parametrize("url", ["http://example.invalid/a.bin", "a.bin"])
def test_only_https(url: str, to: Path) -> None:
    fails(RemoteFile(url, "a.bin"), to, "which is not https")


@contextmanager
def proxy(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every host is the server, by http only."""
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, server.url)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    yield


def test_a_host_of_plain_http(server: Server, remote: RemoteFile, to: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`https` is asked first, and both are named where neither answers."""
    plain = RemoteFile("http://example.invalid/a.bin", "a.bin", plain_http=True)
    with proxy(server, monkeypatch):
        assert fetch([plain], to) == {"a.bin": SHA256}
        missing = RemoteFile("http://example.invalid/b.bin", "b.bin", plain_http=True)
        message = fails(missing, to, "https://example.invalid/b.bin: ", left={"a.bin"})
    assert "http://example.invalid/b.bin: 404" in message


def test_redirects(server: Server, remote: RemoteFile, to: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server.answer("old.bin", Answer(redirect="/a.bin"))
    assert fetch([RemoteFile(server.at("old.bin"), "a.bin")], to) == {"a.bin": SHA256}
    server.answer("away.bin", Answer(redirect="http://example.invalid/a.bin"))
    server.answer("file.bin", Answer(redirect="file:///etc/passwd"))
    server.answer("round.bin", Answer(redirect="/round.bin"))
    with proxy(server, monkeypatch):
        for name in ("away", "file"):
            fails(RemoteFile(server.at(f"{name}.bin"), "b.bin"), to, "leads to .* not https", left={"a.bin"})
    fails(RemoteFile(server.at("round.bin"), "b.bin"), to, "redirects", left={"a.bin"})


def test_full_disks_are_foreseen(server: Server, remote: RemoteFile, to: Path) -> None:
    known = RemoteFile(remote.url, "a.bin", size=2**60)
    fails(known, to, f"bytes free, {2**60} are needed")
    assert not server.requests
    server.answer("a.bin", Answer(headers={"Content-Length": str(2**60)}))
    fails(remote, to, f"bytes free, {2**60} are needed")


def test_a_disk_that_fills_up_keeps_the_part(remote: RemoteFile, to: Path) -> None:
    _, hard = before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, hard))
    try:
        fails(remote, to, f"{to}: .*File too large", left={"a.bin.part"})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert fetch([remote], to) == {"a.bin": SHA256}
