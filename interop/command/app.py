"""The command line: the name of each command, its arguments, what it prints and its exit status.

`inspect`, `verify` and `seal` import neither torch nor JAX. Commands that build buffers import what they need when they
run. The parser is argparse: Typer imports pydantic, which takes twice as long as all of `inspect`.
"""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO

from fbuf._version import __version__
from fbuf.checkpoint import CheckpointCorrupt, CheckpointError
from interop.looking import Report, inspect, seal, verify

DAMAGED, FAILED = 1, 2
_ABOUT = """Look at replay buffers on disk; check, convert, merge and resize them.

A PATH is a checkpoint, a folder of rows, a Minari, LeRobot or hub folder, an H5 file, a folder of torchrl, or a folder with
some of these below it."""
_STATUS = "exit status: 0 fine, 1 damage found, 2 wrong arguments, nothing there, or it cannot be done, 130 Ctrl-C"
_FORMATS = ("checkpoint", "rows", "hub", "minari", "h5")
_STOPPED = 130  # as shells count Ctrl-C
_REFUSED = (CheckpointError, OSError, ValueError, TypeError, RuntimeError, LookupError, ImportError, MemoryError)

Command = Callable[[argparse.Namespace], int]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with these arguments, or those of the process. Returns its exit status."""
    try:
        given = _parser().parse_args(arguments)
    except SystemExit as end:  # argparse has printed the help, or the error
        return FAILED if end.code else 0
    try:
        status: int = given.run(given)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return _STOPPED
    except BrokenPipeError:  # what reads the output has ended, such as `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it at its end
        return FAILED
    except _REFUSED as error:
        text = str(error.args[0] if isinstance(error, KeyError) and error.args else error) or type(error).__name__
        if given.json:
            print(json.dumps({"error": text, "type": type(error).__name__}))
        print(_printable(f"error: {text}", sys.stderr), file=sys.stderr)
        return DAMAGED if _is_damage(error) else FAILED
    return status


def _is_damage(error: BaseException) -> bool:
    """Whether an error says that what is there is damaged."""
    datasets = sys.modules.get("interop.datasets.errors")  # loaded where one of its errors was raised
    corrupt = () if datasets is None else (datasets.CorruptDatasetError,)
    return isinstance(error, (CheckpointCorrupt, *corrupt))


def _parser() -> argparse.ArgumentParser:
    wrapped = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("fbuf", description=_ABOUT, epilog=_STATUS, formatter_class=wrapped)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, run: Command, summary: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=summary, description=summary, epilog=_STATUS)
        command.set_defaults(run=run)
        command.add_argument("--json", action="store_true", help="print JSON")
        return command

    looks = add("inspect", _inspect, "what is at PATH: kind, size, keys, components; reads no row")
    looks.add_argument("paths", nargs="+", metavar="PATH")

    checks = add("verify", _verify, "compare every checksum at PATH; exit status 1 where anything is damaged")
    checks.add_argument("paths", nargs="+", metavar="PATH")
    checks.add_argument("--quiet", action="store_true", help="no progress bar")

    seals = add("seal", _seal, "write checksums of a folder of rows that is not in use, for verify")
    seals.add_argument("path", metavar="PATH")

    views = add("view", _view, "a page for the browser with the rows, episodes and sampler at PATH")
    views.add_argument("path", metavar="PATH")
    views.add_argument("--out", default="buffer.html", help="the page to write, by default %(default)s")
    views.add_argument(
        "--serve", action="store_true", help="serve the page to this machine until Ctrl-C, without a file"
    )
    views.add_argument("--port", type=int, default=8000, help="of --serve, by default %(default)s")
    views.add_argument("--member", type=int, metavar="N", help="of an ensemble, the member to show: 0 is the first")

    converts = add("convert", _convert, "write the rows at SOURCE to TARGET, in the order of time")
    converts.add_argument("source", metavar="SOURCE")

    merges = add("merge", _merge, "write the rows of all SOURCES, one after the other, to TARGET")
    merges.add_argument("sources", nargs="+", metavar="SOURCE")
    for command in (converts, merges):
        command.add_argument(
            "target", metavar="TARGET", help="must not be there; for minari the id, such as toy/line-v0"
        )
        command.add_argument("--to", choices=_FORMATS, help="the format: by default checkpoint, or h5 for a name *.h5")
        command.add_argument(
            "--exclude", action="append", default=[], metavar="KEY", help="leave an entry out: next.info"
        )

    resizes = add("resize", _resize, "write SOURCE to TARGET with room for ITEMS; the newest rows stay")
    resizes.add_argument("source", metavar="SOURCE")
    resizes.add_argument("target", metavar="TARGET", help="must not be there")
    resizes.add_argument("items", type=int, metavar="ITEMS")

    doctors = add("doctor", _doctor, "versions, devices, file system, environment, and what is wrong: for a bug report")
    doctors.add_argument("path", nargs="?", default=".", metavar="PATH", help="a folder on the file system to look at")
    return parser


def _print(results: Sequence[Any], as_json: bool) -> None:
    """Print results: one JSON value for one path, a list for several."""
    if as_json:
        plain = [each.to_dict() for each in results]
        print(json.dumps(plain[0] if len(plain) == 1 else plain, indent=1, default=str))
    else:
        print(_printable("\n\n".join(map(str, results)), sys.stdout))


def _printable(text: str, stream: TextIO) -> str:
    """The text with what a stream cannot print as escapes, such as names of files that are no text."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def _inspect(given: argparse.Namespace) -> int:
    _print([inspect(each) for each in given.paths], given.json)
    return 0


def _verify(given: argparse.Namespace) -> int:
    reports = [_verified(each, given.quiet or given.json) for each in given.paths]
    _print(reports, given.json)
    return 0 if all(each.ok for each in reports) else DAMAGED


def _verified(path: str, quiet: bool) -> Report:
    if quiet or not sys.stderr.isatty():
        return verify(path)
    with _bar(path) as progress:
        return verify(path, progress)


@contextlib.contextmanager
def _bar(title: str) -> Iterator[Callable[[int, int], None] | None]:
    """A progress bar of bytes on the terminal, where rich is installed."""
    try:
        from rich import progress
        from rich.console import Console
    except ImportError:
        yield None
        return
    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _seal(given: argparse.Namespace) -> int:
    seal(given.path)
    _print([inspect(given.path)], given.json)
    return 0


def _view(given: argparse.Namespace) -> int:
    from interop import view
    from interop.opening import open_as_stored

    found: object = open_as_stored(given.path)
    if given.member is not None:
        members = getattr(found, "members", None)
        if members is None or not 0 <= given.member < len(members):
            there = "no ensemble" if members is None else f"an ensemble of {len(members)} members"
            raise ValueError(f"--member {given.member} does not fit: {given.path} is {there}")
        found = members[given.member]
    elif hasattr(found, "members"):
        raise ValueError(f"{given.path} is an ensemble: choose a member by --member 0, --member 1 and so on")
    if given.serve:
        view.serve(found, given.port)
        return 0
    written = view.write(found, given.out)
    print(json.dumps({"page": str(written), "bytes": written.stat().st_size}) if given.json else written)
    return 0


def _convert(given: argparse.Namespace) -> int:
    from interop.command.conversions import convert

    _print([inspect(convert(given.source, given.target, given.to, given.exclude))], given.json)
    return 0


def _merge(given: argparse.Namespace) -> int:
    from interop.command.conversions import merge

    _print([inspect(merge(given.sources, given.target, given.to, given.exclude))], given.json)
    return 0


def _resize(given: argparse.Namespace) -> int:
    from interop.command.conversions import resize

    _print([inspect(resize(given.source, given.target, given.items))], given.json)
    return 0


def _doctor(given: argparse.Namespace) -> int:
    from interop.doctor import doctor

    found = doctor(given.path)
    _print([found], given.json)
    return 0 if found.ok else FAILED
