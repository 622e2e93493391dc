"""A short history of a queue on files, each call of which may be stopped: what may be there after it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from interop.transfer_queue import QueueFiles

State = dict[int, dict[str, Any]]


def begin(path: Path) -> QueueFiles:
    """A new run, whose indexes are those of the run before."""
    generation, _ = QueueFiles.begin(path, lambda rows: [row.index for row in rows])
    return QueueFiles(path, generation)


def prepared(path: Path) -> QueueFiles:
    """A run with rows 0 to 2, in two segments."""
    files = begin(path)
    files.put("p", [0, 1, 2], {"a": torch.tensor([0, 1, 2])}, ["k0", "k1", "k2"])
    files.put("p", [1], {"b": ["one"]}, ["k1"])
    return files


def state(path: Path) -> State:
    """All that is stored, read by an object that knows nothing."""
    files = QueueFiles(path, 0)
    rows = {}
    for row in files.stored():
        found = files.get([row.index], row.fields)
        rows[row.index] = {
            field: value.tolist() if kind == "tensor" else value for field, (kind, value) in found.items()
        }
    files.close()
    return rows


def put_new(files: QueueFiles, path: Path) -> None:
    files.put("p", [7, 8], {"a": torch.tensor([7, 8]), "b": ["seven", "eight"]}, ["k7", "k8"])


def put_again(files: QueueFiles, path: Path) -> None:
    files.put("p", [2, 0, 1], {"a": torch.tensor([22, 20, 21])})  # the segment that had these fields is freed


def clear(files: QueueFiles, path: Path) -> None:
    files.clear([0, 1, 2, 5])


def next_run(files: QueueFiles, path: Path) -> None:
    begin(path).close()


CALLS: dict[str, Callable[[QueueFiles, Path], None]] = {
    "put_new": put_new,
    "put_again": put_again,
    "clear": clear,
    "next_run": next_run,
}
