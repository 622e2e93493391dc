"""References to frames: the pixels of a plain pass over the file, in any order, in all storages; the cache is bounded."""

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from interop import (
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    TensorDictReplayBuffer,
    VideoClipRef,
    clear_video_decoder_cache,
    set_video_decoder_cache_size,
)
from interop.datasets import CorruptDatasetError, video_decoders

av = pytest.importorskip("av")


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> list[tuple[str, torch.Tensor]]:
    """Two videos with B-frames and few key frames, and all of their frames."""
    made = []
    for name, count in (("a", 40), ("b", 25)):
        path = str(tmp_path_factory.mktemp("videos") / f"{name}.mp4")
        with av.open(path, "w") as file:
            stream = file.add_stream("libx264", rate=10)
            stream.width, stream.height, stream.pix_fmt, stream.options = 64, 48, "yuv420p", {"g": "12", "bf": "2"}
            for number in range(count):
                frame = av.VideoFrame.from_ndarray(np.full((48, 64, 3), number * 6, np.uint8), format="rgb24")
                file.mux(stream.encode(frame))
            file.mux(stream.encode())
        with av.open(path) as file:
            frames = [frame.to_ndarray(format="rgb24").transpose(2, 0, 1) for frame in file.decode(video=0)]
        made.append((path, torch.from_numpy(np.stack(frames))))
    return made


def test_frames_in_any_order(files) -> None:
    (one, pixels), (two, others) = files
    ref = VideoClipRef.from_file(one)
    assert torch.equal(ref.decode(), pixels) and len(ref) == 40
    for index in (torch.randperm(40), torch.tensor([39, 0, 39]), torch.tensor([[11, 12], [13, 2]]), 5):
        assert torch.equal(ref[index].decode(), pixels[index])
    both = VideoClipRef.from_files([one, two, one])
    assert torch.equal(both.frames, torch.cat([pixels, others, pixels]))
    assert both.rebin(30, frames_per_bin=4).decode(dtype=torch.float32).shape == (30, 4, 3, 48, 64)
    times = torch.tensor([0.0, 0.1, 0.149, 0.151, 9.0, -1.0])
    assert VideoClipRef.from_timestamps(one, times).frame_index.tolist() == [0, 1, 1, 2, 39, 0]
    assert VideoClipRef.from_file(one, auto_decode=True)[2:4].shape == (2, 3, 48, 64)


@pytest.mark.parametrize(
    ("bins", "each", "expected"),  # what torchrl 0.14.1 gives for 10 frames
    [(3, None, [1, 4, 8]), (7, None, [0, 2, 3, 4, 6, 8, 9]), (3, 2, [[0, 2], [3, 6], [7, 9]]), (1, 1, [[0]])],
)
def test_bins(bins: int, each: int | None, expected: list) -> None:
    assert (
        VideoClipRef.from_file("a.mp4", num_frames=10, num_bins=bins, frames_per_bin=each).frame_index.tolist()
        == expected
    )


@pytest.mark.parametrize("kind", [LazyTensorStorage, LazyMemmapStorage, LazyStackStorage])
def test_storages(files, kind) -> None:
    rb = TensorDictReplayBuffer(storage=kind(100), batch_size=16)
    for path, pixels in files:
        rb.extend(TensorDict({"v": VideoClipRef.from_file(path), "x": pixels[:, 0, 0, 0]}, [len(pixels)]))
    batch = rb.sample()
    assert torch.equal(batch["v"].decode()[:, 0, 0, 0], batch["x"])
    assert rb[60]["v"].source == files[1][0]


def test_the_cache_is_bounded_and_wrong_files_are_refused(files, tmp_path) -> None:
    ref = VideoClipRef.from_files([path for path, _ in files])
    try:
        set_video_decoder_cache_size(1)
        ref.decode()
        assert len(video_decoders.CACHE) == 1
        clear_video_decoder_cache()
        assert len(video_decoders.CACHE) == 0
    finally:
        set_video_decoder_cache_size(32)
    (tmp_path / "no.mp4").write_bytes(b"no video")
    with pytest.raises(CorruptDatasetError, match="as a video"):
        VideoClipRef.from_file(tmp_path / "no.mp4")
    with pytest.raises(FileNotFoundError):
        VideoClipRef.from_file(tmp_path / "none.mp4")
    with pytest.raises(IndexError, match="40 frames"):
        VideoClipRef.from_file(files[0][0], num_frames=41).decode()
    with pytest.raises(ValueError, match="at least 1"):
        set_video_decoder_cache_size(0)
