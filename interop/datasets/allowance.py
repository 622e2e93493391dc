"""How much memory the content of a file may take: sizes that a file announces are compared with its bytes first.

A file is believed where its bytes are there. Where it is compressed, the content may be larger by a factor: `UNPACKED` is
more than deflate, the method of gzip, PNG, `.npz` and HDF5, reaches for any content (1,032). `HELD` is for content of which
a whole object has to be in memory, such as a pickled episode: real ones are compressed by far less.
"""

from interop.datasets.errors import CorruptDatasetError

SMALL = 1 << 26
"""Bytes that any file may take: small files may be compressed well."""
UNPACKED = 1_100
HELD = 64


def unpacked(stored: int) -> int:
    """The most bytes that `stored` compressed bytes may announce, of content that is read piece by piece."""
    return SMALL + UNPACKED * stored


def held(stored: int) -> int:
    """The most bytes of one object in memory, of a file of `stored` bytes."""
    return SMALL + HELD * stored


def check(announced: int, most: int, where: str) -> None:
    """CorruptDatasetError, prefixed by `what`, for more bytes than may be."""
    if announced > most:
        raise CorruptDatasetError(f"{where}: it announces {announced} bytes, which a file of its size does not hold")
