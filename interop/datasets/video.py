"""Video frames by time, and videos of frames."""

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
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


class VideoWriter:
    """An MP4 file that frames are appended to, at `fps` frames a second. Uses PyAV.

    Frames go to the encoder one by one: memory holds as many as the encoder looks ahead, not the video.

    Args:
        path: the file, which is created.
        codec: the name of an encoder of FFmpeg, such as "libsvtav1", "h264" or "hevc".
        fps: frames a second.
        height, width: of the frames, in pixels.
        crf: the quality of the encoder: 0 is the best, larger numbers make smaller files.

    Raises: ValueError if there is no such encoder, or it does not take frames of this size.
    """

    KEY_FRAMES = 2
    """Every second frame is a key frame, as in videos of LeRobot: a reader decodes two frames to get any one."""

    def __init__(self, path: Path, codec: str, fps: int, height: int, width: int, crf: int) -> None:
        av = required("av", "video")
        options = {"g": str(self.KEY_FRAMES), "crf": str(crf)}
        if codec == "libsvtav1":
            options["preset"] = "12"  # the fastest but one; slower ones take many times as long
        self.path = path
        self.frames = 0
        """The number of frames so far."""
        self.size = 0
        """The bytes of the encoded frames so far."""
        self._where = f"{codec}, {height} x {width} pixels"
        self._unit = Fraction(1, fps)
        self._container = av.open(str(path), "w")
        try:
            self._stream = self._container.add_stream(codec, rate=fps, options=options)
        except (av.FFmpegError, ValueError, LookupError) as error:
            self._container.close()
            raise self._refused(error) from error
        self._stream.height = height
        self._stream.width = width
        self._stream.pix_fmt = "yuv420p"
        self._stream.time_base = self._unit

    def append(self, frames: np.ndarray) -> None:
        """Encode uint8 frames [n, H, W, 3]."""
        av = required("av", "video")
        for image in frames:
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(image), format="rgb24")
            frame.pts = self.frames
            frame.time_base = self._unit
            self.frames += 1
            self._encode(frame)

    def close(self) -> None:
        """Write the frames that the encoder has, and the end of the file."""
        try:
            if self.frames:
                self._encode(None)
        finally:
            self._container.close()

    def _encode(self, frame: "av.VideoFrame | None") -> None:
        try:
            for packet in self._stream.encode(frame):
                self.size += packet.size
                self._container.mux(packet)
        except (required("av", "video").FFmpegError, ValueError) as error:
            raise self._refused(error) from error

    def _refused(self, error: Exception) -> ValueError:
        return ValueError(f"the encoder does not write such a video ({self._where}): {error}")
