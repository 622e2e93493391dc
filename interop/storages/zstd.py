"""Zstandard, of Python's own library or of the extra `compression`."""

import functools
import importlib
import sys
import threading
from types import ModuleType
from typing import Any

from interop.data.numbers import whole

_LIBRARIES = ("compression.zstd", "zstandard") if sys.version_info >= (3, 14) else ("zstandard",)
_HIGHEST = 22
_MOST_OF_ONE = 1 << 16  # bytes that come of one; of zeros it is 2^15


class Zstd(threading.local):
    """Bytes compressed and decompressed, in each thread with a state of its own: it costs more to make than to use.

    ImportError where no library is installed, ValueError for a level above 22.
    """

    def __init__(self, level: int) -> None:
        self.level = whole("compression_level", level, least=-(1 << 17))
        if self.level > _HIGHEST:
            raise ValueError(f"compression_level must be at most {_HIGHEST}, got {level}")
        library: Any = _library()
        if library.__name__ == "zstandard":
            self.compress = library.ZstdCompressor(level=self.level).compress
            self.decompress = library.ZstdDecompressor().decompress
            self._size = library.frame_content_size
        else:
            self.compress = functools.partial(library.compress, level=self.level)
            self.decompress = library.decompress
            self._size = lambda data: library.get_frame_info(data).decompressed_size

    def makes(self, data: Any, size: int) -> bool:
        """Whether bytes say that they decompress to `size` bytes, and are not far too few for it."""
        try:
            return bool(self._size(data) == size and size <= _MOST_OF_ONE * len(data))
        except Exception:  # each library has an error of its own for what is no frame
            return False

    def __reduce__(self) -> Any:
        return type(self), (self.level,)


def _library() -> ModuleType:
    for name in _LIBRARIES:
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise ImportError(
        "compression needs the package zstandard: install it with `pip install 'fbuf[compression]'`, or give a "
        "compression_fn and a decompression_fn"
    )
