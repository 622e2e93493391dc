"""Video frames by time, against all frames of the file."""

from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interop.datasets.errors import CorruptDatasetError
from interop.datasets.video import frames_at

FPS, COUNT = 7, 60


def encode(path: Path, places: Iterable[int] = range(COUNT), fps: int = FPS, **options: str) -> Path:
    """A video of gray frames with the colors 0, 4, 8, ..., which are at `place / fps` seconds."""
    with av.open(str(path), "w") as out:
        stream = out.add_stream("libx264", rate=fps, options={"crf": "0", "preset": "ultrafast", **options})
        stream.width, stream.height, stream.pix_fmt, stream.time_base = 32, 16, "yuv444p", Fraction(1, fps)
        for number, place in enumerate(places):
            frame = av.VideoFrame.from_ndarray(np.full((16, 32, 3), color(number), np.uint8), format="rgb24")
            frame.pts, frame.time_base = place, Fraction(1, fps)
            out.mux(stream.encode(frame))
        out.mux(stream.encode(None))
    return path


def color(number: int) -> int:
    return number * 4 % 256


@pytest.fixture(
    scope="module", params=[("a.mp4", "8", "0"), ("b.mp4", "25", "3"), ("c.mkv", "8", "2"), ("d.mp4", "1", "0")]
)
def video(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Containers and groups of pictures of several kinds, with frames that are stored out of order."""
    name, group, between = request.param
    return encode(tmp_path_factory.mktemp("video") / name, g=group, bf=between)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.floats(0, COUNT / FPS + 1), min_size=1, max_size=12).map(sorted),
    st.sampled_from([0.0, 0.01, 0.5 / FPS, 1 / FPS, 3 / FPS, 100.0]),
)
def test_the_nearest_frame_within_the_tolerance(video: Path, times: list[float], tolerance: float) -> None:
    there = np.arange(COUNT) / FPS
    expected: list[int] = []
    for seconds in times:
        distances = abs(there - seconds)
        if distances.min() > tolerance + 1e-3:  # containers round times to milliseconds
            break
        expected.append(int(distances.argmin()))
    found, frames = [], frames_at(video, times, tolerance)
    try:
        for frame in frames:
            assert frame.shape == (3, 16, 32)
            found.append(int(frame.mean().round()))
    except CorruptDatasetError as error:
        assert f"no frame within {tolerance} s of {times[len(found)]:.4f} s" in str(error)
        assert abs(there - times[len(found)]).min() > tolerance - 1e-3
    else:
        assert len(expected) == len(times)
    for number, gray, seconds in zip(expected, found, times, strict=False):
        halfway = abs(abs(seconds * FPS % 1) - 0.5) < 0.01
        assert abs(color(number) - gray) <= (5 if halfway else 1)


def test_of_two_frames_the_earlier(tmp_path: Path) -> None:
    path = encode(tmp_path / "a.mp4", fps=8)
    (frame,) = frames_at(path, [2.5 / 8], 1.0)
    assert frame.mean().round() == color(2)


@pytest.mark.parametrize("name", ["a.mp4", "a.mkv"])
def test_a_video_that_begins_late(tmp_path: Path, name: str) -> None:
    path = encode(tmp_path / name, range(21000, 21020), fps=10)
    found = [frame.mean().round() for frame in frames_at(path, [2099.9, 2100.0, 2100.71, 2101.9], 0.2)]
    assert found == [color(0), color(0), color(7), color(19)]
    with pytest.raises(CorruptDatasetError, match=r"no frame within 0.2 s of 3.0000 s"):
        next(frames_at(path, [3.0], 0.2))
