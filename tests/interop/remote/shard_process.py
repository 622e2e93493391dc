"""A storage that leaves the id of its process in a file, so that a test can kill the process of a shard."""

import os
import signal
from pathlib import Path

from interop import LazyTensorStorage


def storage(capacity: int, folder: Path, shard: int) -> LazyTensorStorage:
    (folder / str(shard)).write_text(str(os.getpid()))
    return LazyTensorStorage(capacity)


def kill(folder: Path, shard: int, by: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to the process of a shard."""
    os.kill(int((folder / str(shard)).read_text()), by)
