"""Objects by pickle: the only place that does it for files, and only where the caller asks for it twice.

To read a pickle is to run what it says. It is written with `allow_pickle=True` at save, and read with `allow_pickle=True` at
load.
"""

import pickle
from typing import Any

from fbuf.checkpoint import CheckpointMismatch


def to_bytes(value: Any) -> bytes:
    """The pickle of an object. TypeError for one that has none."""
    try:
        return pickle.dumps(value, protocol=5)
    except Exception as error:
        raise TypeError(f"an object of type {type(value).__name__} cannot be pickled: {error}") from error


def from_bytes(content: bytes, allowed: bool, where: str) -> Any:
    """The object of a pickle. CheckpointMismatch where that was not allowed, before anything is read, or cannot be done."""
    refuse(allowed, where)
    try:
        return pickle.loads(content)
    except Exception as error:
        raise CheckpointMismatch(f"{where}: an object that was saved by pickle cannot be read: {error!r}") from error


def refuse(allowed: bool, where: str) -> None:
    """CheckpointMismatch where reading pickles was not allowed."""
    if allowed is not True:
        raise CheckpointMismatch(
            f"{where}: holds objects that were saved by pickle, which runs code when it is read: pass allow_pickle=True at "
            "load if you trust whoever wrote it"
        )
