"""Video frames by time."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from interop.data.arguments import required
from interop.datasets.errors import CorruptDatasetError


def frames_at(path: Path, times: Sequence[float], tolerance: float) -> Iterator[np.ndarray]:
    """Decode the frames of a video file at non-decreasing times, in seconds, as uint8 [3, H, W]. Uses PyAV.

    CorruptDatasetError for a damaged file, or if no frame is within the tolerance, in seconds.
    """
    av = required("av", "video")
    try:
        with av.open(str(path)) as container:
            stream = container.streams.video[0]
            stream.thread_type = "AUTO"
            container.seek(int(max(times[0] - tolerance, 0) / stream.time_base), stream=stream)
            decoded = container.decode(stream)
            frame = next(decoded, None)
            for seconds in times:
                while frame is not None and frame.time < seconds - tolerance:
                    frame = next(decoded, None)
                if frame is None or frame.time > seconds + tolerance:
                    raise CorruptDatasetError(f"{path} has no frame within {tolerance} s of {seconds:.4f} s")
                yield frame.to_ndarray(format="rgb24").transpose(2, 0, 1)
    except (av.FFmpegError, IndexError, OSError) as error:
        raise CorruptDatasetError(f"{path} cannot be read as a video: {error}") from error
