"""Checkpoints of all shards of a remote buffer at one point in time.

A checkpoint folder has a manifest, and a folder named by it with the checkpoint of each shard. Replacing the manifest
commits the checkpoint; the folder of the previous one is removed afterwards.
"""

import secrets
import time
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from fbuf.checkpoint import CheckpointMismatch, Fields, Writing, load
from fbuf.checkpoint.files import remove_folder
from fbuf.checkpoint.writing import flush
from interop.data.pytrees import length_of
from interop.remote.errors import RemoteTimeoutError
from interop.remote.gathering import rows_at, together
from interop.remote.shards import Call, Shards

_KIND, _FOLDER = "sharded replay buffer", "shards-"


def save(shards: Shards, path: str | PathLike[str]) -> None:
    """Save all shards at one point in time, and make it their restart point."""
    with Writing(path) as out:
        folder = out.path / f"{_FOLDER}{secrets.token_hex(8)}"
        folders = _folders(folder, len(shards.facts))
        try:
            folder.mkdir()
            probe = folder / "visible"
            probe.touch()
            shards.all("look", str(probe))
            probe.unlink()
            cuts, sampled = _cut(shards, folders)
            flush(folder)
            limiter = {} if sampled is None else {"sampled": sampled}
            out.write({"kind": _KIND, "shards": len(folders), "folder": folder.name, **limiter})
        except BaseException:
            remove_folder(folder)
            raise
    shards.restart_from(folders, cuts)
    for each in folder.parent.glob(f"{_FOLDER}*"):
        if each != folder:
            remove_folder(each)


def _cut(shards: Shards, folders: list[str]) -> tuple[dict[int, int], int | None]:
    """Save all shards while all are blocked. Returns the last durable write of each shard, and the draws of a limiter.

    The coordinator admits one client at a time. Otherwise two clients could each hold some shards, and deadlock.
    """
    token, until = secrets.token_hex(8), time.monotonic() + shards.timeout
    while not shards.coordinate("begin", token, shards.timeout):
        if time.monotonic() > until:
            raise RemoteTimeoutError(f"another client has held the shards for {shards.timeout} s")
        time.sleep(0.05)
    try:
        cuts = shards.some(
            {n: ("save", (each, token, shards.timeout), {}) for n, each in enumerate(folders)}, is_long=True
        )
        return cuts, shards.coordinate("rates").sampled if shards.is_limited else None
    finally:
        shards.coordinate("end", token)


def restore(shards: Shards, path: str | PathLike[str]) -> None:
    """Load a checkpoint. With another number of shards, its rows are redistributed."""
    found, sampled = load(path, lambda source: _saved(source.tree, Path(path).absolute()))
    if len(found) != len(shards.facts):
        _deal(shards, found)
    else:
        shards.some({n: ("verify", (folder,), {}) for n, folder in enumerate(found)}, is_long=True)
        # All shards have equal configurations: the first one raises any error before a shard has changed.
        for group in ([0], range(1, len(found))):
            shards.some({n: ("load", (found[n],), {}) for n in group}, is_long=True)
        shards.restart_from(found)
    shards.coordinate("restart")
    if shards.is_limited:
        shards.begin_rates(sampled if len(found) == len(shards.facts) else None)


def _saved(tree: Any, path: Path) -> tuple[list[str], int | None]:
    """The folder of each saved shard, and what a limiter has counted as drawn."""
    fields = Fields(tree, str(path))
    if fields.text("kind") == "replay buffer":
        return [str(path)], None
    if fields.text("kind") != _KIND:
        raise CheckpointMismatch(f"{path}: was saved from a {fields.text('kind')}, not from a replay buffer")
    sampled = fields.whole("sampled") if "sampled" in fields else None
    return _folders(path / fields.text("folder"), fields.whole("shards", 1)), sampled


def _folders(above: Path, count: int) -> list[str]:
    return [str(above / f"shard-{n}") for n in range(count)]


def _deal(shards: Shards, saved: list[str]) -> None:
    """Empty the shards, and distribute the rows of the saved shards over them."""
    found = [shards.some({0: ("rows", (folder,), {})}, is_long=True)[0] for folder in saved]
    read = [part for part in found if part is not None]
    sizes = [length_of(rows) for rows, _ in read]
    count, facts, total = len(shards.facts), shards.facts[0], sum(sizes)
    if -(-total // count) + len(read) * facts.slices > facts.rows:
        raise CheckpointMismatch(f"{total} rows were saved, {count} shards have room for {facts.rows} each")
    parts: dict[int, Call] = {}
    if total:
        rows = together([each for each, _ in read])
        priorities = None if read[0][1] is None else torch.cat([each for _, each in read])
        for shard, places in enumerate(chosen(sizes, count, facts.slices)):
            if len(places):
                parts[shard] = ("fill", (rows_at(rows, places, total), rows_at(priorities, places, total)), {})
    shards.restart_from(None)
    shards.all("empty")
    shards.some(parts, is_long=True)


def chosen(sizes: list[int], count: int, slices: bool) -> list[torch.Tensor]:
    """The row numbers for each of `count` new shards, in write order; rows of the saved shards are numbered consecutively.

    Rows of similar age stay together, as every shard overwrites its oldest rows first. With slices, each new shard gets
    one consecutive piece of each saved shard.
    """
    ends = torch.tensor(sizes).cumsum(0).tolist()
    ranges = [torch.arange(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    if slices:
        pieces = [each.tensor_split(count) for each in ranges]
        return [torch.cat([each[shard] for each in pieces]) for shard in range(count)]
    age = torch.cat([(torch.arange(size) + 1) / size for size in sizes if size])
    order = torch.cat(ranges)[age.argsort(stable=True)]
    return [order[shard::count] for shard in range(count)]
