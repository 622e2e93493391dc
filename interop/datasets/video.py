"""The frames of a video by time."""

from pathlib import Path

import numpy as np

from interop.datasets.errors import CorruptDatasetError
from interop.optional import required


class Video:
    """The frames of a video file, decoded one after the other by PyAV.

    Args:
        path: the file.
        start: seconds from which on frames are wanted. Decoding begins at the last key frame before it.
        tolerance: seconds by which a frame may differ from the time it is wanted for.
    """

    def __init__(self, path: Path, start: float, tolerance: float) -> None:
        self.path, self._tolerance = path, tolerance
        self._av = required("av", "video")
        try:
            self._container = self._av.open(str(path))
            stream = self._container.streams.video[0]
            stream.thread_type = "AUTO"
            if start:
                self._container.seek(int(max(start - tolerance, 0) / stream.time_base), stream=stream)
            self._frames = self._container.decode(stream)
            self._frame = next(self._frames, None)
        except (self._av.FFmpegError, IndexError, OSError) as error:
            raise CorruptDatasetError(f"{path} cannot be read as a video: {error}") from error

    def at(self, seconds: float) -> np.ndarray:
        """The frame of this time, uint8 [3, H, W]. Times do not decrease from call to call.

        CorruptDatasetError where there is none within the tolerance.
        """
        passed = None
        try:
            while self._frame is not None and self._frame.time < seconds - self._tolerance:
                passed, self._frame = self._frame.time, next(self._frames, None)
        except self._av.FFmpegError as error:
            raise CorruptDatasetError(f"{self.path} cannot be decoded at {seconds:.4f} s: {error}") from error
        if self._frame is None or self._frame.time > seconds + self._tolerance:
            near = [f"{each:.4f} s" for each in (passed, self._frame and self._frame.time) if each is not None]
            raise CorruptDatasetError(
                f"{self.path} has no frame within {self._tolerance} s of {seconds:.4f} s. The nearest: {', '.join(near)}"
            )
        frame: np.ndarray = self._frame.to_ndarray(format="rgb24")
        return frame.transpose(2, 0, 1)
