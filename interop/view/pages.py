"""Pages of buffers, in files and over HTTP."""

import http.server
import importlib
import os
from collections.abc import Sequence
from pathlib import Path

from interop.buffers import ReplayBuffer
from interop.data.arguments import class_of
from interop.view.page import render
from interop.view.page_facts import facts_of
from interop.view.rerun import record


def write(source: object, out: str | os.PathLike[str] = "buffer.html", *, include: Sequence[int] = ()) -> Path:
    """Write the page of a buffer into a file, which opens in a browser without a network. Returns its path.

    The page has the ring with its cursor and episodes, a list of episodes to sort and to filter, the rows of some episodes
    as curves, images and texts, the distribution of each entry, and what the sampler draws. Large buffers are thinned: the
    file has 10 MB at most. The lock of the buffer is held while it is read.

    Args:
        source: a `ReplayBuffer`, or a path that `interop.open` takes.
        out: the file; an earlier one is replaced.
        include: numbers of episodes whose rows are in the page; others are chosen as far as there is room.

    Raises: TypeError for another source, IndexError for an episode that is not stored, ImportError where jinja2 or plotly is
    not installed.
    """
    text = html(source, include=include)
    path = Path(out)
    path.write_text(text, "utf-8")
    return path


def html(source: object, *, include: Sequence[int] = ()) -> str:
    """The page as text; see `write`."""
    return render(facts_of(_buffer_of(source), include))


def server(source: object, port: int = 0, host: str = "127.0.0.1") -> http.server.ThreadingHTTPServer:
    """An HTTP server of the page, made anew at each request. Not started: call its `serve_forever`.

    Args:
        source: as for `write`.
        port: 0 for any free one.
        host: the address it listens at; by default this machine alone.
    """
    buffer = _buffer_of(source)

    class Handler(http.server.BaseHTTPRequestHandler):
        """Answers with the page."""

        def do_GET(self) -> None:  # its name in the standard library
            if self.path.partition("?")[0] != "/":
                self.send_error(404)
                return
            page = html(buffer).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(page)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing is logged."""

    return http.server.ThreadingHTTPServer((host, port), Handler)


def serve(source: object, port: int = 8000, host: str = "127.0.0.1") -> None:
    """Serve the page, as it is at each request, until Ctrl-C. Prints the address. The arguments are those of `server`."""
    with server(source, port, host) as running:
        print(f"http://{host}:{running.server_address[1]}/  (Ctrl-C ends it)", flush=True)
        try:
            running.serve_forever()
        except KeyboardInterrupt:
            return


def to_rerun(
    source: object, path: str | os.PathLike[str] = "buffer.rrd", *, include: Sequence[int] | None = None
) -> Path:
    """Write the rows of episodes into a recording of Rerun, for `rerun buffer.rrd`. Returns its path.

    Args:
        source: as for `write`.
        path: the file.
        include: the numbers of the episodes; all by default.

    Raises: RuntimeError or TypeError where the buffer has no episodes, IndexError for one that is not stored, ImportError
    where `rerun-sdk` is not installed.
    """
    return record(_buffer_of(source), path, include)


def _buffer_of(source: object) -> ReplayBuffer:
    """The buffer, or the one at a path, with rows as they are stored."""
    if isinstance(source, str | os.PathLike):
        source = importlib.import_module("interop.opening").open_as_stored(source)
    if not isinstance(source, ReplayBuffer):
        raise TypeError(
            f"a ReplayBuffer or a path is needed, got {class_of(source)}: view members of an ensemble one by one"
        )
    return source
