"""Open decoders of video files, of which a bounded number stays open: frames by their numbers."""

import bisect
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

from interop.data.arguments import required, whole
from interop.datasets.errors import CorruptDatasetError


class VideoDecoder:
    """One video stream of a file, open for reads of frames by their numbers in the order of display. Uses PyAV.

    Opening reads the times of all packets, and decodes nothing. A read decodes from the last key frame before the frame, or
    goes on where the previous read ended. For one thread at a time.

    CorruptDatasetError for a file that is not a video, or lacks a frame that it lists; FileNotFoundError.
    """

    def __init__(self, path: str, stream: int | None) -> None:
        av: Any = required("av", "video")
        self._errors = (av.FFmpegError, IndexError, OSError)
        self._path = path
        try:
            self._container = av.open(path)
            streams = self._container.streams
            self._stream = streams.best("video") if stream is None else streams[stream]
            if self._stream is None or self._stream.type != "video":
                raise CorruptDatasetError(f"{path} has no video stream{'' if stream is None else f' {stream}'}")
            packets = [
                (packet.pts, packet.is_keyframe)
                for packet in self._container.demux(self._stream)
                if packet.pts is not None
            ]
        except FileNotFoundError:
            raise
        except self._errors as error:
            raise CorruptDatasetError(f"{path} cannot be read as a video: {error}") from error
        self._times = sorted(time for time, _ in packets)
        self._key_times = sorted(time for time, is_key in packets if is_key)
        self._stream.thread_type = "AUTO"
        self._frames: Any = iter(())
        self._time: int | None = None  # of the frame that was decoded last

    @property
    def count(self) -> int:
        """How many frames there are."""
        return len(self._times)

    @property
    def fps(self) -> float:
        """Frames in a second, on average."""
        return float(self._stream.average_rate)

    def frames(self, numbers: Sequence[int]) -> np.ndarray:
        """The frames with these numbers, uint8 [n, 3, H, W]. They are decoded in order, each once."""
        for number in numbers:
            if not 0 <= number < self.count:
                raise IndexError(f"frame {number} is out of range: {self._path} has {self.count} frames")
        try:
            decoded = {number: self._decoded(self._times[number]) for number in sorted(set(numbers))}
        except self._errors as error:
            self._time = None
            raise CorruptDatasetError(f"{self._path} cannot be decoded: {error}") from error
        return np.stack([decoded[number] for number in numbers])

    def _decoded(self, time: int) -> np.ndarray:
        key_time = self._key_times[max(bisect.bisect_right(self._key_times, time) - 1, 0)] if self._key_times else time
        if self._time is None or time <= self._time or self._time < key_time:
            self._container.seek(time, stream=self._stream)
            self._frames = self._container.decode(self._stream)
        for frame in self._frames:
            self._time = frame.pts
            if frame.pts == time:
                return frame.to_ndarray(format="rgb24").transpose(2, 0, 1)
            if frame.pts is not None and frame.pts > time:
                break
        self._time = None
        raise CorruptDatasetError(f"{self._path} lists a frame at time {time} that it does not have")

    def close(self) -> None:
        """Close the file."""
        self._container.close()


class DecoderCache:
    """The decoders that were used last, at most `most` of them. For all threads; a forked child begins with none."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._start()

    def _start(self) -> None:
        self._lock = threading.RLock()
        self._process = os.getpid()
        self._open: OrderedDict[tuple[str, int | None], VideoDecoder] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def frames(self, path: str, stream: int | None, numbers: Sequence[int]) -> np.ndarray:
        """The frames of a file, uint8 [n, 3, H, W]."""
        with self._held():
            return self._decoder(path, stream).frames(numbers)

    def count(self, path: str, stream: int | None) -> int:
        """How many frames a file has."""
        with self._held():
            return self._decoder(path, stream).count

    def fps(self, path: str, stream: int | None) -> float:
        """Frames in a second, on average."""
        with self._held():
            return self._decoder(path, stream).fps

    def resize(self, most: int) -> None:
        """Keep at most `most` decoders open, at least 1."""
        most = whole("maxsize", most)
        with self._held():
            self._most = most
            self._close_oldest(most)

    def clear(self) -> None:
        """Close all."""
        with self._held():
            self._close_oldest(0)

    def _held(self) -> threading.RLock:
        if self._process != os.getpid():  # the files and the lock are those of the parent, whose position they share
            self._start()
        return self._lock

    def _decoder(self, path: str, stream: int | None) -> VideoDecoder:
        decoder = self._open.pop((path, stream), None)
        if decoder is None:
            self._close_oldest(self._most - 1)
            decoder = VideoDecoder(path, stream)
        self._open[path, stream] = decoder
        return decoder

    def _close_oldest(self, left: int) -> None:
        while len(self._open) > left:
            self._open.popitem(last=False)[1].close()


CACHE = DecoderCache(32)


def clear_video_decoder_cache() -> None:
    """Close the decoders that this process keeps open."""
    CACHE.clear()


def set_video_decoder_cache_size(maxsize: int) -> None:
    """Keep at most `maxsize` decoders of videos open in this process, at least 1; by default 32. The oldest are closed."""
    CACHE.resize(maxsize)
