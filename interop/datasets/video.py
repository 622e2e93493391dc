"""Video frames by time."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from interop.data.arguments import required
from interop.datasets.errors import CorruptDatasetError

if TYPE_CHECKING:
    import av


def frames_at(path: Path, times: Sequence[float], tolerance: float) -> Iterator[np.ndarray]:
    """Decode the frames of a video file at non-decreasing times, in seconds, as uint8 [3, H, W]. Uses PyAV.

    Yields the nearest frame of each time, the earlier one of two. CorruptDatasetError for a damaged file, or if the nearest
    frame is not within the tolerance, in seconds.
    """
    av = required("av", "video")
    try:
        with av.open(str(path)) as container:
            stream = container.streams.video[0]
            stream.thread_type = "AUTO"
            container.seek(int(times[0] / stream.time_base), stream=stream)  # to the key frame before it
            decoded = container.decode(stream)
            before = None
            after = next(decoded, None)
            for seconds in times:
                while after is not None and _time(after, path) <= seconds:
                    before = after
                    after = next(decoded, None)
                frame = None
                distance = math.inf
                for candidate in (before, after):
                    if candidate is not None and abs(_time(candidate, path) - seconds) < distance:
                        frame = candidate
                        distance = abs(_time(candidate, path) - seconds)
                if frame is None or distance > tolerance:
                    raise CorruptDatasetError(f"{path} has no frame within {tolerance} s of {seconds:.4f} s")
                yield frame.to_ndarray(format="rgb24").transpose(2, 0, 1)
    except (av.FFmpegError, IndexError, OSError) as error:
        raise CorruptDatasetError(f"{path} cannot be read as a video: {error}") from error


def _time(frame: "av.VideoFrame", path: Path) -> float:
    if frame.time is None:
        raise CorruptDatasetError(f"{path} has frames without a time")
    seconds: float = frame.time
    return seconds
