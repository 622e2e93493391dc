"""Episodes of a buffer as a recording of Rerun, a viewer of its own (https://rerun.io)."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from interop.buffers import ReplayBuffer
from interop.data.arguments import required
from interop.shared.storage_lock import locked
from interop.view.entries import entries_of, read_numbers, read_texts
from interop.view.png import as_pixels


def record(buffer: ReplayBuffer, path: str | os.PathLike[str], include: Sequence[int] | None) -> Path:
    """Write the rows of episodes into a recording. Its time is "step"; entities are `episode_3/next/reward` and the like.

    RuntimeError or TypeError where the buffer has no episodes, IndexError for one that is not stored, ImportError where
    `rerun-sdk` is not installed.
    """
    rerun: Any = required("rerun", "rerun")
    with locked(buffer):
        episodes = buffer.episodes
        entries = entries_of(buffer.storage)
        numbers = range(len(episodes)) if include is None else include
        chosen = [(number, episodes.slots(number)) for number in numbers]  # raises before there is a file
        recording = rerun.RecordingStream("interop")
        recording.save(os.fspath(path))
        for number, slots in chosen:
            steps = [rerun.TimeColumn("step", sequence=np.arange(len(slots)))]
            for entry in entries:
                entity = "/".join((f"episode_{number}", *map(str, entry.path)))
                if entry.kind == "text":
                    texts = rerun.TextDocument.columns(text=read_texts(buffer.storage, entry, slots))
                    recording.send_columns(entity, steps, texts)
                elif entry.kind in ("curves", "flag"):
                    values = read_numbers(buffer.storage, entry, slots).reshape(len(slots), -1).astype(np.float64)
                    scalars = rerun.Scalars.columns(scalars=values.reshape(-1))
                    recording.send_columns(entity, steps, scalars.partition([values.shape[1]] * len(slots)))
                elif entry.kind == "images":
                    for step, pixels in enumerate(as_pixels(read_numbers(buffer.storage, entry, slots))):
                        recording.set_time("step", sequence=step)
                        recording.log(entity, rerun.Image(pixels))
    recording.flush()
    recording.disconnect()
    return Path(path)
