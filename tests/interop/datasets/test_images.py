"""Images are decoded to the values that Pillow gives, with simplejpeg and without."""

import importlib
import io
import sys
from collections.abc import Iterator

import numpy as np
import pytest
from PIL import Image

from interop.datasets import images
from interop.datasets.errors import CorruptDatasetError


@pytest.fixture(autouse=True, params=["simplejpeg", "Pillow"])
def decoder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with monkeypatch.context() as changed:
        if request.param == "Pillow":
            changed.setitem(sys.modules, "simplejpeg", None)
        importlib.reload(images)
        yield request.param
    importlib.reload(images)


def encoded(array: np.ndarray, mode: str | None = None, **options: object) -> bytes:
    file, image = io.BytesIO(), Image.fromarray(array)
    (image.convert(mode) if mode else image).save(file, **options)
    return file.getvalue()


def noise(*shape: int, dtype: type = np.uint8) -> np.ndarray:
    return np.random.default_rng(0).integers(0, np.iinfo(dtype).max, shape, dtype, endpoint=True)


@pytest.mark.parametrize("shape", [(33, 47), (33, 47, 3), (1, 1, 3), (64, 64, 3)])
@pytest.mark.parametrize("options", [{}, {"quality": 30}, {"quality": 95, "subsampling": 0}, {"progressive": True}])
def test_jpeg(shape: tuple[int, ...], options: dict[str, int]) -> None:
    data = encoded(noise(*shape), format="JPEG", **options)
    found = images.decoded(data)
    assert found.dtype == np.uint8 and found.shape == shape
    np.testing.assert_array_equal(found, np.array(Image.open(io.BytesIO(data))))


@pytest.mark.parametrize("shape", [(5, 7), (5, 7, 2), (5, 7, 3), (5, 7, 4)])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_png_is_lossless(shape: tuple[int, ...], dtype: type) -> None:
    if dtype == np.uint16 and len(shape) > 2:
        shape = shape[:2]
    image = noise(*shape, dtype=dtype)
    found = images.decoded(encoded(image, format="PNG"))
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, image)


@pytest.mark.parametrize(
    ("mode", "kind", "shape"), [("P", "PNG", (5, 7, 3)), ("1", "PNG", (5, 7)), ("CMYK", "JPEG", (5, 7, 3))]
)
def test_other_colors(mode: str, kind: str, shape: tuple[int, ...]) -> None:
    data = encoded(noise(5, 7, 3), mode, format=kind)
    expected = np.array(Image.open(io.BytesIO(data)).convert("RGB" if len(shape) > 2 else "L"))
    found = images.decoded(data)
    assert found.shape == shape
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_many_in_one_array(kind: str) -> None:
    several = [encoded(noise(6, 8, 3) // (place + 1), format=kind) for place in range(3)]
    found = images.stacked([*several, np.frombuffer(several[0], np.uint8)], "here")
    np.testing.assert_array_equal(found, [images.decoded(each) for each in [*several, several[0]]])
    for other in (noise(6, 9, 3), noise(6, 8)):
        with pytest.raises(CorruptDatasetError, match=r"here, image 1: it is uint8 \[6, .*, not uint8 \[6, 8, 3\]"):
            images.stacked([several[0], encoded(other, format=kind)], "here")


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
@pytest.mark.parametrize("cut", [0, 1, 20, 100, 400, -30])
def test_damaged_images(kind: str, cut: int) -> None:
    data = encoded(noise(40, 40, 3), format=kind)
    for damaged in (data[:cut], b"\0" * 8 + data[8:], b"<html>no</html>"):
        with pytest.raises(CorruptDatasetError, match="no JPEG or PNG image"):
            images.decoded(damaged)


def test_more_pixels_than_memory() -> None:
    jpeg = bytearray(encoded(noise(8, 8, 3), format="JPEG"))
    place = jpeg.index(b"\xff\xc0")
    jpeg[place + 5 : place + 9] = b"\xff\xff\xff\xff"
    with pytest.raises(CorruptDatasetError, match="pixels"):
        images.decoded(bytes(jpeg))
