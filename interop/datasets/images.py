"""Arrays of JPEG and PNG images."""

import functools
import importlib.util
import io
from collections.abc import Sequence
from typing import Any

import numpy as np

from interop.datasets.errors import CorruptDatasetError
from interop.optional import required

_FAULTS = (OSError, SyntaxError, ValueError, OverflowError)  # what decoders raise for damaged images
_KEPT = ("L", "LA", "RGB", "RGBA", "I;16")  # modes of Pillow whose values are those of the file
_MOST_PIXELS = 1 << 27  # of an image: a header can announce more than the memory of the machine


def decoded(data: bytes | np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """A JPEG or PNG image as uint8 [H, W, C], or [H, W] where it is gray; uint16 for PNG of 16 bits.

    It is written to `out`, if that is given. Palettes and CMYK become RGB. Where simplejpeg is installed, it decodes JPEG:
    in a quarter to three quarters of the time of Pillow, to the same values, and it also finds damage that Pillow takes
    for pixels. CorruptDatasetError for no image, a truncated or damaged one, and one that is not as `out`.
    """
    try:
        return _by_turbo(data, out) if _turbo() else _by_pillow(data, out)
    except _FAULTS as error:
        raise CorruptDatasetError(f"this is no JPEG or PNG image, or a damaged one ({error})") from error


def stacked(images: Sequence[bytes | np.ndarray], where: str) -> np.ndarray:
    """Images of one size in one array [n, H, W, C] or [n, H, W], each decoded in its place.

    CorruptDatasetError, which begins with `where`, names a damaged image, or one of another size.
    """
    out: np.ndarray | None = None
    for place, data in enumerate(images):
        try:
            image = decoded(data, None if out is None else out[place])
        except CorruptDatasetError as error:
            raise CorruptDatasetError(f"{where}, image {place}: {error}") from error
        if out is None:
            out = np.empty((len(images), *image.shape), image.dtype)
            out[0] = image
    return np.empty(0, np.uint8) if out is None else out


def _by_turbo(data: bytes | np.ndarray, out: np.ndarray | None) -> np.ndarray:
    try:
        height, width, colors, _ = _turbo().decode_jpeg_header(data)
    except ValueError:
        return _by_pillow(data, out)  # PNG, or a kind of JPEG that simplejpeg does not know
    if colors not in ("Gray", "YCbCr"):
        return _by_pillow(data, out)
    if height * width > _MOST_PIXELS:
        raise ValueError(f"{height} x {width} pixels")
    out = _place(out, (height, width) if colors == "Gray" else (height, width, 3), np.dtype(np.uint8))
    _turbo().decode_jpeg(data, "GRAY" if colors == "Gray" else "RGB", buffer=out)
    return out


def _by_pillow(data: bytes | np.ndarray, out: np.ndarray | None) -> np.ndarray:
    pillow = required("PIL.Image", "datasets")
    try:
        with pillow.open(
            io.BytesIO(data if isinstance(data, bytes) else data.tobytes()), formats=("JPEG", "PNG")
        ) as image:
            found = np.asarray(image if image.mode in _KEPT else image.convert("L" if image.mode == "1" else "RGB"))
    except pillow.DecompressionBombError as error:
        raise ValueError(str(error)) from error
    out = _place(out, found.shape, found.dtype)
    out[...] = found
    return out


def _place(out: np.ndarray | None, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Where an image of this shape is written."""
    if out is None:
        return np.empty(shape, dtype)
    if (out.shape, out.dtype) != (shape, dtype):
        raise CorruptDatasetError(f"it is {dtype} {[*shape]}, not {out.dtype} {[*out.shape]}")
    return out


@functools.cache
def _turbo() -> Any:
    """simplejpeg, or None."""
    return required("simplejpeg", "datasets") if importlib.util.find_spec("simplejpeg") else None
