"""References to frames of videos, which are decoded when they are needed."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from tensordict import TensorClass
from torch import Tensor

from interop.data.arguments import whole
from interop.datasets.video_decoders import CACHE


class VideoClipRef(TensorClass["nocast"]):  # type: ignore[name-defined]
    """Frames of video files by their numbers, without their pixels: an entry of items, whose batch dims are its own.

    Indexing, stacking and storing are those of a tensordict of two integers a frame. `decode` reads the pixels, uint8
    [*batch, 3, H, W]; frames that follow each other cost one pass over the file. The files must stay where they are.
    Decoders stay open, see `set_video_decoder_cache_size`. Needs the extra `video`.

        >>> ref = VideoClipRef.from_file("episode.mp4")  # all of its frames
        >>> rb.extend(TensorDict({"pixels": ref, "action": actions}, batch_size=[len(actions)]))
        >>> pixels = rb.sample(32)["pixels"].decode()  # [32, 3, H, W]

    - sources: the paths of the files, one or a tuple; kept as a text with a path a line, which all storages keep.
      Each stored frame has this text: where there are many files, write a reference of each.
    - frame_index: int64 [*batch], the number of each frame in its file, from 0; by default all frames of the first file.
    - file_id: int64 [*batch], the place of its file in `sources`; by default 0.
    - stream: the number of the stream; by default the best video stream.
    - auto_decode: whether indexing returns pixels instead of a reference.
    - out_device, out_dtype: of the pixels, where `decode` is not told; by default that of the reference, and uint8.

    Of wrong files `decode` raises FileNotFoundError, CorruptDatasetError or, for a number that is not a frame, IndexError.
    """

    sources: Any
    frame_index: torch.Tensor | None = None
    file_id: torch.Tensor | None = None
    stream: int | None = None
    auto_decode: bool = False
    out_device: Any = None
    out_dtype: Any = None

    def __post_init__(self) -> None:
        if isinstance(self.sources, tuple | os.PathLike):
            paths = self.sources if isinstance(self.sources, tuple) else (self.sources,)
            self.sources = _as_text(map(os.fspath, paths))
        if self.frame_index is None:
            self.frame_index = torch.arange(CACHE.count(self.sources.splitlines()[0], self.stream))
            self.batch_size = self.frame_index.shape
        elif not self.batch_size:
            self.batch_size = self.frame_index.shape
        if self.frame_index.is_floating_point():
            raise TypeError(f"frame_index must be integers, got {self.frame_index.dtype}: see from_timestamps()")
        if self.file_id is None:
            self.file_id = torch.zeros_like(self.frame_index)

    @classmethod
    def from_file(
        cls,
        path: str | os.PathLike[str],
        *,
        stream: int | None = None,
        num_frames: int | None = None,
        frame_index: Tensor | None = None,
        num_bins: int | None = None,
        frames_per_bin: int | None = None,
        auto_decode: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> VideoClipRef:
        """The frames of a file: all, the first `num_frames`, those of `frame_index`, or some of each bin, see `rebin`.

        The file is opened only to count its frames, if neither of `num_frames` and `frame_index` is given. `device` and
        `dtype` are those of the pixels.
        """
        if frame_index is not None and num_bins is not None:
            raise ValueError("num_bins and frame_index exclude each other: both say which frames")
        if frames_per_bin is not None and num_bins is None:
            raise ValueError("frames_per_bin needs num_bins")
        path = os.fspath(path)
        if frame_index is None:
            count = CACHE.count(path, stream) if num_frames is None else whole("num_frames", num_frames, least=0)
            frame_index = torch.arange(count)
        made = cls._made((path,), frame_index, torch.zeros_like(frame_index), stream, auto_decode, device, dtype)
        return made if num_bins is None else made.rebin(num_bins, frames_per_bin)

    @classmethod
    def from_files(
        cls,
        paths: Sequence[str | os.PathLike[str]],
        *,
        num_frames_per_file: int | Sequence[int] | None = None,
        num_bins: int | None = None,
        frames_per_bin: int | None = None,
        stream: int | None = None,
        auto_decode: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> VideoClipRef:
        """The frames of several files, one file after the other. The other arguments are those of `from_file`.

        `num_frames_per_file` is one number for all, or one a file; by default the files are opened to count their frames.
        """
        if frames_per_bin is not None and num_bins is None:
            raise ValueError("frames_per_bin needs num_bins")
        names = [os.fspath(path) for path in paths]
        if not names:
            raise ValueError("from_files needs at least one path")
        if num_frames_per_file is None:
            counts = [CACHE.count(name, stream) for name in names]
        elif isinstance(num_frames_per_file, Sequence):
            counts = [whole("num_frames_per_file", count, least=0) for count in num_frames_per_file]
        else:
            counts = [whole("num_frames_per_file", num_frames_per_file, least=0)] * len(names)
        if len(counts) != len(names):
            raise ValueError(f"num_frames_per_file has {len(counts)} numbers for {len(names)} paths")
        sources = tuple(dict.fromkeys(names))
        numbers = torch.cat([torch.arange(count) for count in counts])
        files = torch.tensor([sources.index(name) for name in names]).repeat_interleave(torch.tensor(counts))
        made = cls._made(sources, numbers, files, stream, auto_decode, device, dtype)
        return made if num_bins is None else made.rebin(num_bins, frames_per_bin)

    @classmethod
    def from_timestamps(
        cls,
        path: str | os.PathLike[str],
        timestamps: Tensor,
        *,
        stream: int | None = None,
        fps: float | None = None,
        auto_decode: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> VideoClipRef:
        """The frames nearest to times in seconds, of a video with a constant rate; the first and the last one beyond it.

        `fps` is the rate; by default that of the file, which is opened.
        """
        path = os.fspath(path)
        rate = CACHE.fps(path, stream) if fps is None else float(fps)
        if not rate > 0:
            raise ValueError(f"fps must be above 0, got {fps}")
        numbers = (torch.as_tensor(timestamps).double() * rate).round().long().clamp(min=0)
        if fps is None:
            numbers = numbers.clamp(max=CACHE.count(path, stream) - 1)
        return cls._made((path,), numbers, torch.zeros_like(numbers), stream, auto_decode, device, dtype)

    @classmethod
    def _made(
        cls,
        sources: tuple[str, ...],
        numbers: Tensor,
        files: Tensor,
        stream: int | None,
        auto_decode: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> VideoClipRef:
        return cls(
            sources=_as_text(sources),
            frame_index=numbers.long(),
            file_id=files,
            stream=stream,
            auto_decode=bool(auto_decode),
            out_device=device,
            out_dtype=dtype,
            batch_size=numbers.shape,
        )

    @property
    def source(self) -> str | list[str]:
        """The path of the file; a list with one for each frame where they are of several files."""
        paths = list(self._paths(self.sources, self.file_id))
        return paths[0] if len(set(paths)) == 1 else paths

    def rebin(self, num_bins: int, frames_per_bin: int | None = None) -> VideoClipRef:
        """The frames in order, cut into `num_bins` parts of as equal a length as can be: some frames of each part.

        By default one frame, in the middle: [num_bins]. With `frames_per_bin` that many at equal distances, from the first
        to the last of the part: [num_bins, frames_per_bin]; frames are left out or repeated.
        """
        bins = whole("num_bins", num_bins)
        if self.batch_dims != 1 or not len(self):
            raise ValueError(f"rebin() is for frames [n] in order, got batch size {list(self.batch_size)}")
        edges = torch.linspace(0, len(self), bins + 1, dtype=torch.float64).round().long()
        first = edges[:-1].clamp(max=len(self) - 1)
        last = torch.maximum(edges[1:] - 1, first)
        if frames_per_bin is None:
            return self._at(((first + last) / 2).round().long())
        part = torch.linspace(0, 1, whole("frames_per_bin", frames_per_bin), dtype=torch.float64)
        return self._at((first[:, None] + (last - first)[:, None] * part).round().long())

    def decode(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """The pixels of the frames, [*batch, 3, H, W]: each file is read once, in order.

        Args:
            device: where they are put; by default `out_device`, else the device of the reference, else the CPU. Decoding is
                on the CPU.
            dtype: by default `out_dtype`, else uint8. Values stay 0 to 255.

        ValueError for frames of different sizes, and for a reference without frames.
        """
        assert self.frame_index is not None  # since __post_init__
        numbers = self.frame_index.reshape(-1).tolist()
        if not numbers:
            raise ValueError("a reference without frames has no pixels: the size of a frame is not known")
        paths = list(self._paths(self.sources, self.file_id))
        pixels: Tensor | None = None
        for path in dict.fromkeys(paths):
            places = [place for place, each in enumerate(paths) if each == path]
            frames = torch.from_numpy(CACHE.frames(path, self.stream, [numbers[place] for place in places]))
            if pixels is None:
                pixels = torch.empty((len(numbers), *frames.shape[1:]), dtype=torch.uint8)
            if frames.shape[1:] != pixels.shape[1:]:
                raise ValueError(f"{path} has frames {list(frames.shape[1:])}, other files {list(pixels.shape[1:])}")
            pixels[places] = frames
        assert pixels is not None
        pixels = pixels.reshape(*self.batch_size, *pixels.shape[1:])
        return pixels.to(device=device or self.out_device or self.device, dtype=dtype or self.out_dtype)

    @property
    def frames(self) -> Tensor:
        """`decode()`."""
        return self.decode()

    def __getitem__(self, index: object) -> VideoClipRef | Tensor:
        found = self._at(index)
        return found.decode() if self.auto_decode else found

    def _at(self, index: object) -> VideoClipRef:
        """The reference at an index."""
        return type(self).from_tensordict(self._tensordict[index])

    def _paths(self, sources: object, files: Tensor | None) -> Iterator[str]:
        """The path of each frame. References of different files that were stacked have a list of their sources."""
        if isinstance(sources, list):
            for each, part in zip(sources, files if files is not None else (), strict=True):
                yield from self._paths(each, part)
        else:
            assert isinstance(sources, str) and files is not None
            paths = sources.splitlines()
            for file in files.reshape(-1).tolist():
                yield paths[file]


def _as_text(paths: Iterable[str]) -> str:
    """The paths, one a line. ValueError for a path with a line break."""
    paths = list(paths)
    for path in paths:
        if path.splitlines() != [path]:
            raise ValueError(f"a path must have one line, got {path!r}")
    return "\n".join(paths)
