"""Decoding of JPEG, PNG and TIFF images to arrays, and arrays as PNG images."""

import functools
import importlib.util
import io
from collections.abc import Sequence
from typing import Any

import numpy as np

from interop.data.arguments import required
from interop.datasets import allowance
from interop.datasets.errors import CorruptDatasetError

_FAULTS = (OSError, SyntaxError, ValueError, OverflowError)  # errors of decoders for damaged images
_KEPT = ("L", "LA", "RGB", "RGBA", "I;16", "I;16B", "F", "I")  # Pillow modes that keep the values of the file
_WIDTHS = {"I;16": 2, "I;16B": 2, "F": 4, "I": 4}  # bytes of a value in a mode; 1 in others
_MOST_PIXELS = 1 << 25  # per image, as in 8K video
_SMALL = 1 << 20  # bytes that any image may take in memory: JPEG of one color is smaller than deflate would make it


def decoded(data: bytes | np.ndarray) -> np.ndarray:
    """Decode a JPEG, PNG or TIFF image to uint8 [H, W, C], or [H, W] if gray. Gray images of 16 bits a pixel become uint16;
    TIFF images of floats or 32 bits, such as depths, float32 or int32.

    Palettes and CMYK become RGB. If simplejpeg is installed, it decodes JPEG to the same values, in a quarter to three
    quarters of Pillow's time, and detects damage that Pillow decodes as pixels. CorruptDatasetError for data that is no
    image, truncated or damaged. Before it is decoded, also for one of more than 33 million pixels, or of more than 1 MiB and
    1,100 times its bytes.
    """
    try:
        return _by_turbo(data) if _turbo() else _by_pillow(data)
    except _FAULTS as error:
        raise CorruptDatasetError(f"this is no JPEG or PNG image and no TIFF, or a damaged one ({error})") from error


def stacked(images: Sequence[bytes | np.ndarray], where: str) -> np.ndarray:
    """Decode images of equal size to one array [n, H, W, C] or [n, H, W].

    CorruptDatasetError, prefixed by `where`, names a damaged image or one of another size. All together take no more
    memory than `allowance.unpacked` of their bytes; one that comes again counts once.
    """
    most = allowance.unpacked(sum(len(data) for data in {id(one_image): one_image for one_image in images}.values()))
    out = np.empty(0, np.uint8)
    for place, data in enumerate(images):
        try:
            image = decoded(data)
        except CorruptDatasetError as error:
            raise CorruptDatasetError(f"{where}, image {place}: {error}") from error
        if place == 0:
            allowance.check(len(images) * image.nbytes, most, f"{where}, {len(images)} images of {[*image.shape]}")
            out = np.empty((len(images), *image.shape), image.dtype)
        if (image.shape, image.dtype) != (out.shape[1:], out.dtype):
            came = f"{image.dtype} {[*image.shape]}"
            needed = f"{out.dtype} {[*out.shape[1:]]}"
            raise CorruptDatasetError(f"{where}, image {place}: it is {came}, not {needed}")
        out[place] = image
    return out


def encoded(image: np.ndarray) -> bytes:
    """A PNG image of uint8 [H, W, C] or [H, W], of 1 to 4 channels, or of uint16 [H, W]. `decoded` gives the same values."""
    pillow = required("PIL.Image", "datasets")
    file = io.BytesIO()
    plain = image[..., 0] if image.ndim == 3 and image.shape[-1] == 1 else image
    pillow.fromarray(np.ascontiguousarray(plain)).save(file, "PNG", compress_level=1)
    return file.getvalue()


def _by_turbo(data: bytes | np.ndarray) -> np.ndarray:
    try:
        height, width, colors, _ = _turbo().decode_jpeg_header(data)
    except ValueError:
        return _by_pillow(data)  # PNG, or a kind of JPEG that simplejpeg does not support
    if colors not in ("Gray", "YCbCr"):
        return _by_pillow(data)
    _check_size(height, width, 1 if colors == "Gray" else 3, data)
    image = _turbo().decode_jpeg(data, "GRAY" if colors == "Gray" else "RGB")
    return image[..., 0] if colors == "Gray" else image


def _by_pillow(data: bytes | np.ndarray) -> np.ndarray:
    pillow = required("PIL.Image", "datasets")
    try:
        with pillow.open(io.BytesIO(bytes(data)), formats=("JPEG", "PNG", "TIFF")) as image:
            _check_size(image.height, image.width, len(image.getbands()) * _WIDTHS.get(image.mode, 1), data)
            array = np.array(image if image.mode in _KEPT else image.convert("L" if image.mode == "1" else "RGB"))
            return array.astype(array.dtype.newbyteorder("="), copy=False)
    except (pillow.DecompressionBombError, pillow.DecompressionBombWarning) as error:
        raise ValueError(str(error)) from error


def _check_size(height: int, width: int, size: int, data: bytes | np.ndarray) -> None:
    """ValueError for a header that announces more than an image of so many bytes has; `size` is the bytes of a pixel."""
    pixels = height * width
    if pixels > _MOST_PIXELS or pixels * size > _SMALL + allowance.UNPACKED * len(data):
        raise ValueError(f"{len(data)} bytes announce {height} x {width} pixels")


@functools.cache
def _turbo() -> Any:
    """The module simplejpeg, or None."""
    return required("simplejpeg", "datasets") if importlib.util.find_spec("simplejpeg") else None
