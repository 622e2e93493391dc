"""An HTTP server on the loopback address: serves a folder, fails on request, and answers as the Hugging Face hub does.

    server.answer("a.bin", Answer(status=503), times=2)      # then as it should
    server.answer("a.bin", Answer(cut=1000))                 # every time
    fetch([RemoteFile(server.at("a.bin"), "a.bin")], folder)
    server.bytes_sent("a.bin")

A hub repository is the folder `datasets/<author>/<name>` below the served one; further revisions of it are folders
`revisions/<author>/<name>/<revision>`. As an HTTP proxy (`http_proxy`), the
server answers for every host.
"""

import hashlib
import json
import mimetypes
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

BLOCK = 1 << 14
LFS = {".hdf5", ".arrow", ".parquet", ".mp4", ".npz", ".tar", ".gz", ".bin", ".h5"}  # the hub keeps these by SHA-256


@dataclass(frozen=True)
class Answer:
    """How the server answers, in the place of the file alone.

    Args:
        status: an error of this number.
        headers: replace those of the file; None leaves one out.
        body: replaces the bytes of the file.
        redirect: an address to go on at.
        cut: the connection is cut after this many bytes of the body.
        stall: nothing more is sent after this many bytes of the body, until the server is closed.
        pause: seconds between blocks of 16 KiB.
        ranges: False ignores the header `Range`.
        if_range: False ignores the header `If-Range`, and sends the range of a file that changed.
        methods: requests with others are answered well.
    """

    status: int = 200
    headers: Mapping[str, str | None] = field(default_factory=dict)
    body: bytes | None = None
    redirect: str | None = None
    cut: int | None = None
    stall: int | None = None
    pause: float = 0.0
    ranges: bool = True
    if_range: bool = True
    methods: tuple[str, ...] = ("GET", "HEAD")


@dataclass
class Request:
    """What the server was asked for, and how it answered."""

    method: str
    path: str  # of the file below the served folder
    range: str | None
    status: int = 0
    sent: int = 0  # bytes of the body, up to the block at which the client went away


class Server:
    """Serves the files of `folder` at `url`. `requests` are those that it had, in order."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.requests: list[Request] = []
        self.closed = threading.Event()
        self._answers: dict[str, list[tuple[Answer, int | None]]] = {}
        self._http = _Http(("127.0.0.1", 0), type("Handler", (_Handler,), {"server_of": self}))
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def at(self, path: str) -> str:
        """The address of a file."""
        return f"{self.url}/{path}"

    def answer(self, path: str, answer: Answer, times: int | None = None) -> None:
        """Answer requests for a path so, `times` times or always, after what was said before for this path.

        The path is that of a file below the folder, also where the hub's address of it is another, or that of an
        address of the hub (`api/datasets/...`).
        """
        self._answers.setdefault(path, []).append((answer, times))

    def heal(self, path: str) -> None:
        """Answer requests for a path well from now on."""
        self._answers.pop(path, None)

    def bytes_sent(self, path: str) -> int:
        """Bytes of all bodies that were sent for a file."""
        return sum(request.sent for request in self.requests if request.path == path)

    def close(self) -> None:
        self.closed.set()
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()

    def answer_to(self, path: str, method: str) -> Answer:
        """The answer to a request. Counts it."""
        queue = self._answers.get(path, [])
        if not queue or method not in queue[0][0].methods:
            return Answer()
        answer, times = queue[0]
        if times is not None:
            queue[:1] = [(answer, times - 1)] if times > 1 else []
        return answer


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    """A server of a folder, which is made where it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    server = Server(folder)
    try:
        yield server
    finally:
        server.close()


def as_hub(server: Server, home: Path, patch: pytest.MonkeyPatch) -> None:
    """Have the server be the Hugging Face hub of this process and of processes that it starts. Its cache is in `home`."""
    from huggingface_hub import (
        constants,
        hf_api,
    )  # first: it keeps what it finds in the environment when it is imported

    for name, value in {"HF_ENDPOINT": server.url, "HF_HOME": str(home), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}.items():
        patch.setenv(name, value)
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE"):
        patch.delenv(name, raising=False)
    patch.setattr(constants, "HF_HUB_OFFLINE", False)
    patch.setattr(constants, "ENDPOINT", server.url)
    template = f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    patch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    patch.setattr(hf_api.api, "endpoint", server.url)  # of `huggingface_hub.dataset_info` and the like


def publish_minari(server: Server, namespace: Path) -> None:
    """Upload the datasets of a namespace, a folder in a local Minari root, as `minari.upload_dataset` does."""
    repo = server.folder / "datasets" / "farama-minari" / namespace.name
    shutil.copytree(namespace, repo)
    ids = [f"{namespace.name}/{path.parent.relative_to(repo).as_posix()}" for path in sorted(repo.rglob("data"))]
    described = repo / "namespace_metadata.json"
    described.write_text(json.dumps(json.loads(described.read_text()) | {"datasets": ids}))


class _Http(ThreadingHTTPServer):
    request_queue_size = 128  # of 5, connections of clients that were killed leave no room for others
    daemon_threads = False  # `close` waits for them


class _Handler(BaseHTTPRequestHandler):
    server_of: Server
    timeout = 20  # of a client that is silent

    def do_GET(self) -> None:
        address = urlsplit(self.path)  # of a proxy's request with the host, which counts for nothing
        path = unquote(address.path).lstrip("/")
        with suppress(ConnectionError):
            if path.startswith("api/datasets"):
                self._hub(path, parse_qs(address.query))
            elif path.startswith("datasets/") and path.split("/")[3:4] == ["resolve"]:
                self._resolve(path)
            else:
                self._file(path, {})

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _resolve(self, path: str) -> None:
        """A file of a hub repository: `datasets/<author>/<name>/resolve/<revision>/<path>`."""
        _, author, name, _, revision, *rest = path.split("/")
        repo, file = f"{author}/{name}", "/".join(rest)
        if not self._is_revision(repo, revision):
            return
        here = self._place(repo, revision)
        headers: dict[str, str | None] = {"X-Repo-Commit": _commit(here)}
        if (here / file).is_file():
            oid, lfs = _oids(here / file)
            headers |= {"ETag": f'"{lfs or oid}"'}
            if lfs:
                headers |= {"X-Linked-Etag": f'"{lfs}"', "X-Linked-Size": str((here / file).stat().st_size)}
        else:
            headers |= {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"}
        self._file(str((here / file).relative_to(self.server_of.folder)), headers)

    def _place(self, repo: str, revision: str) -> Path:
        """The files of a repository in a revision: of the main branch, unless there is a folder `revisions`."""
        other = self.server_of.folder / "revisions" / repo / revision
        return other if other.is_dir() else self.server_of.folder / "datasets" / repo

    def _hub(self, path: str, query: Mapping[str, list[str]]) -> None:
        """`api/datasets`, `api/datasets/<author>/<name>` and below it `revision/<revision>` and `tree/<revision>/<path>`."""
        repos = self.server_of.folder / "datasets"
        if path == "api/datasets":
            every = sorted(each for author in repos.iterdir() for each in author.iterdir())
            wanted = [
                each
                for each in every
                if each.parent.name in query.get("author", [each.parent.name])
                and all(word.lower() in each.name.lower() for word in query.get("search", []))
            ]
            return self._json(path, [_info(each, blobs=False) for each in wanted])
        author, name, *rest = path.removeprefix("api/datasets/").split("/")
        what, revision, *below = rest or ["", "main"]
        if not self._is_revision(f"{author}/{name}", revision):
            return None
        here = self._place(f"{author}/{name}", revision)
        if what == "tree":
            return self._json(
                path, list(_tree(here, "/".join(below), "true" in [each.lower() for each in query["recursive"]]))
            )
        return self._json(path, _info(here, blobs="blobs" in query))

    def _is_revision(self, repo: str, revision: str) -> bool:
        here = self.server_of.folder / "datasets" / repo
        if not here.is_dir():
            self._json(repo, {"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
        elif revision not in ("main", _commit(here)) and self._place(repo, revision) == here:
            self._json(repo, {"error": "Invalid rev id"}, 404, {"X-Error-Code": "RevisionNotFound"})
        else:
            return True
        return False

    def _json(self, path: str, content: object, status: int = 200, headers: Mapping[str, str | None] = {}) -> None:
        body = json.dumps(content).encode()
        answer = self.server_of.answer_to(path, self.command)
        self._send(path, answer, status, {"Content-Type": "application/json", **headers}, body)

    def _file(self, path: str, headers: Mapping[str, str | None]) -> None:
        file = self.server_of.folder / path
        answer = self.server_of.answer_to(path, self.command)
        if not file.resolve().is_relative_to(self.server_of.folder.resolve()) or not file.is_file():
            return self._send(path, answer, 404, headers, b"not here")
        changed = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(file.stat().st_mtime))
        common = {
            "Content-Type": mimetypes.guess_type(path)[0] or "application/octet-stream",
            "ETag": f'"{_oids(file)[0]}"',
            "Last-Modified": changed,
            "Accept-Ranges": "bytes",
        }
        return self._send(path, answer, 200, {**common, **headers}, file.read_bytes())

    def _send(self, path: str, answer: Answer, status: int, headers: Mapping[str, str | None], body: bytes) -> None:
        headers = {**headers, **answer.headers}
        if answer.body is not None:
            body = answer.body
        if answer.redirect is not None:
            status, headers["Location"], body = 302, answer.redirect, b""
        elif answer.status != 200:
            status, body = answer.status, b"no"
        request = Request(self.command, path, self.headers["Range"], status)
        if status == 200 and answer.ranges and self._is_wanted(headers, answer):
            start, end = _range(self.headers["Range"], len(body))
            if start < len(body):
                headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(body)}"
                request.status, body = 206, body[start:end]
            else:
                headers["Content-Range"] = f"bytes */{len(body)}"
                request.status, body = 416, b""
        self.server_of.requests.append(request)
        self.send_response(request.status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            if value is not None:
                self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self._stream(request, body, answer)

    def _is_wanted(self, headers: Mapping[str, str | None], answer: Answer) -> bool:
        """Whether the client wants a range of this version of the file."""
        version = self.headers["If-Range"]
        unchanged = version is None or version in (headers.get("ETag"), headers.get("Last-Modified"))
        return self.headers["Range"] is not None and (unchanged or not answer.if_range)

    def _stream(self, request: Request, body: bytes, answer: Answer) -> None:
        end = min(each for each in (len(body), answer.cut, answer.stall) if each is not None)
        for at in range(0, end, BLOCK):
            request.sent += min(at + BLOCK, end) - at  # before: the client may be done before the next line
            self.wfile.write(body[at : min(at + BLOCK, end)])
            if answer.pause and self.server_of.closed.wait(answer.pause):
                return
        if answer.stall is not None:
            self.server_of.closed.wait()


def _range(header: str, size: int) -> tuple[int, int]:
    first, _, last = header.removeprefix("bytes=").partition("-")
    return int(first), min(int(last) + 1 if last else size, size)


@lru_cache
def _hashed(path: Path, size: int, changed: int) -> tuple[str, str]:
    """Git's SHA-1 of the file, and its SHA-256."""
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest(), hashlib.sha256(content).hexdigest()


def _oids(path: Path) -> tuple[str, str | None]:
    """Git's id of a file, and its SHA-256 where the hub keeps it as a large file."""
    state = path.stat()
    oid, sha256 = _hashed(path, state.st_size, state.st_mtime_ns)
    return oid, sha256 if path.suffix in LFS else None


def _files(repo: Path) -> dict[str, Path]:
    return {path.relative_to(repo).as_posix(): path for path in sorted(repo.rglob("*")) if path.is_file()}


def _commit(repo: Path) -> str:
    """The revision of a repository: another one when a file changes."""
    return hashlib.sha1(repr([(name, _oids(path)[0]) for name, path in _files(repo).items()]).encode()).hexdigest()


def _info(repo: Path, blobs: bool) -> dict[str, object]:
    def sibling(name: str, path: Path) -> dict[str, object]:
        oid, sha256 = _oids(path)
        size = path.stat().st_size
        lfs = {"lfs": {"sha256": sha256, "size": size, "pointerSize": 130}} if sha256 else {}
        return {"rfilename": name, **({"size": size, "blobId": oid, **lfs} if blobs else {})}

    return {
        "id": f"{repo.parent.name}/{repo.name}",
        "author": repo.parent.name,
        "sha": _commit(repo),
        "lastModified": "2024-01-01T00:00:00.000Z",
        "private": False,
        "gated": False,
        "disabled": False,
        "tags": [],
        "siblings": [sibling(name, path) for name, path in _files(repo).items()],
    }


def _tree(repo: Path, below: str, recursive: bool) -> Iterator[dict[str, object]]:
    for path in sorted((repo / below).rglob("*") if recursive else (repo / below).iterdir()):
        name = path.relative_to(repo).as_posix()
        if path.is_dir():
            yield {"type": "directory", "oid": hashlib.sha1(name.encode()).hexdigest(), "size": 0, "path": name}
            continue
        oid, sha256 = _oids(path)
        size = path.stat().st_size
        lfs = {"lfs": {"oid": sha256, "size": size, "pointerSize": 130}} if sha256 else {}
        yield {"type": "file", "oid": oid, "size": size, "path": name, **lfs}
