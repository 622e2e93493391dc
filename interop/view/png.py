"""Images as PNG files."""

import struct
import zlib

import numpy as np

_KINDS = {1: 0, 2: 4, 3: 2, 4: 6}  # of PNG, by channels
LARGEST = 128  # pixels of the longer side


def png(pixels: np.ndarray) -> bytes:
    """uint8 [height, width, channels] as a PNG file; of larger images every n-th pixel."""
    step = -(-max(pixels.shape[:2]) // LARGEST)
    pixels = np.ascontiguousarray(pixels[::step, ::step])
    height, width, channels = pixels.shape
    lines = np.zeros((height, 1 + width * channels), np.uint8)  # each line begins with its filter: none
    lines[:, 1:] = pixels.reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, _KINDS[channels], 0, 0, 0)
    parts = [(b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes(), 6)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(map(_chunk, parts))


def _chunk(part: tuple[bytes, bytes]) -> bytes:
    kind, data = part
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def as_pixels(images: np.ndarray) -> np.ndarray:
    """Images [n, ...] as uint8 [n, height, width, channels]. Floats from 0 to 1, or from 0 to 255, are scaled."""
    if images.ndim == 3:
        images = images[..., None]
    elif images.shape[-1] not in _KINDS:  # channels first
        images = np.moveaxis(images, 1, -1)
    if images.dtype.kind == "f":
        top = np.nanmax(images, initial=0.0)
        images = np.nan_to_num(images * (255.0 if top <= 1.0 else 1.0)).clip(0, 255)
    elif images.dtype == np.bool_:
        images = images * np.uint8(255)
    return images.astype(np.uint8)
