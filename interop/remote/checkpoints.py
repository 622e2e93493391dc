"""Checkpoints of all shards of a remote buffer: one point in time, one manifest.

The folder has a manifest, and a folder that only this manifest names with the checkpoint of each shard. The manifest is
what counts: the previous checkpoint is removed after it was replaced.
"""

import contextlib
import secrets
import shutil
import time
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from fbuf.checkpoint import CheckpointMismatch, Fields, Writing, load
from fbuf.checkpoint.writing import flush
from interop.remote.errors import RemoteError, RemoteTimeoutError
from interop.remote.gathering import gathered
from interop.remote.shards import Shards

_KIND, _FOLDER = "sharded replay buffer", "shards-"
_SLOW = 3600.0  # seconds that a shard may read or write its checkpoint; a process that dies is noticed at once


def save(shards: Shards, path: str | PathLike[str], client: str) -> None:
    """Write a checkpoint of all shards, held meanwhile, and have them restart from it."""
    with Writing(path) as out:
        folder = out.path / f"{_FOLDER}{secrets.token_hex(8)}"
        folders = _folders(folder, len(shards))
        try:
            folder.mkdir()
            probe = folder / "visible"
            probe.touch()
            shards.all("look", str(probe))
            probe.unlink()
            with _held(shards, client):
                cuts = shards.some({n: ("save", (each,), {}) for n, each in enumerate(folders)}, _SLOW)
            flush(folder)
            out.write({"kind": _KIND, "shards": len(shards), "folder": folder.name})
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    shards.commit(folders, cuts)
    for each in folder.parent.glob(f"{_FOLDER}*"):
        if each != folder:
            shutil.rmtree(each, ignore_errors=True)


@contextlib.contextmanager
def _held(shards: Shards, client: str) -> Iterator[None]:
    """A block in which no shard is written to or drawn from before it was saved. One client at a time asks for that."""
    until = time.monotonic() + shards.timeout
    while not shards.coordinate("hold", client, shards.timeout):
        if time.monotonic() > until:
            raise RemoteTimeoutError(f"another client has held the shards for {shards.timeout} s")
        time.sleep(0.05)
    try:
        shards.all("hold", shards.timeout)
        yield
    finally:
        with contextlib.suppress(RemoteError):
            shards.all("release")
        shards.coordinate("release", client)


def restore(shards: Shards, path: str | PathLike[str]) -> None:
    """Load a checkpoint of as many shards as it is, or deal out its rows to another number of them."""
    found = load(path, lambda source: _saved(source.tree, Path(path).absolute()))
    if len(found) != len(shards):
        _dealt(shards, found)
    else:
        shards.some({n: ("verify", (folder,), {}) for n, folder in enumerate(found)}, _SLOW)
        # All shards are built alike: what one of them refuses, the first one refuses before any has changed.
        for group in ([0], range(1, len(shards))):
            shards.some({n: ("load", (found[n],), {}) for n in group}, _SLOW)
        shards.commit(found)
    shards.coordinate("restart")


def _saved(tree: Any, path: Path) -> list[str]:
    """The folder of each saved shard."""
    fields = Fields(tree, str(path))
    if fields.text("kind") == "replay buffer":
        return [str(path)]
    if fields.text("kind") != _KIND:
        raise CheckpointMismatch(f"{path}: was saved from a {fields.text('kind')}, not from a replay buffer")
    return _folders(path / fields.text("folder"), fields.whole("shards", 1))


def _folders(above: Path, count: int) -> list[str]:
    return [str(above / f"shard-{n}") for n in range(count)]


def _dealt(shards: Shards, saved: list[str]) -> None:
    """Empty the shards, and fill them with the rows of the saved ones."""
    read = [shards.some({0: ("rows", (folder,), {})}, _SLOW)[0] for folder in saved]
    read = [part for part in read if part is not None]
    count, facts = len(shards), shards.facts[0]
    total = sum(len(rows) for rows, _ in read)
    if -(-total // count) + len(read) * facts.slices > facts.rows:
        raise CheckpointMismatch(f"{total} rows were saved, {count} shards have room for {facts.rows} each")
    parts: dict[int, Any] = {}
    if total:
        rows = gathered([each for each, _ in read], None)
        priorities = None if read[0][1] is None else torch.cat([each for _, each in read])
        for shard, places in enumerate(chosen([len(each) for each, _ in read], count, facts.slices)):
            if len(places):
                mine = [rows[n] for n in places.tolist()] if isinstance(rows, list) else rows[places]
                parts[shard] = ("fill", (mine, None if priorities is None else priorities[places]), {})
    shards.commit(None)
    shards.all("empty")
    shards.some(parts, _SLOW)


def chosen(sizes: list[int], count: int, slices: bool) -> list[torch.Tensor]:
    """Which of the rows of shards of these sizes, one behind the other, each of `count` shards is to have, in order.

    Rows of the same age stay together: every shard overwrites the oldest ones first. Of slices each shard has one piece of
    each saved shard.
    """
    ends = torch.tensor(sizes).cumsum(0).tolist()
    ranges = [torch.arange(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    if slices:
        pieces = [each.tensor_split(count) for each in ranges]
        return [torch.cat([each[shard] for each in pieces]) for shard in range(count)]
    age = torch.cat([(torch.arange(size) + 1) / size for size in sizes if size])
    order = torch.cat(ranges)[age.argsort(stable=True)]
    return [order[shard::count] for shard in range(count)]
