"""Zstandard, of Python's own library or of the extra `compression`."""

import functools
import importlib
import sys
import threading
from types import ModuleType
from typing import Any

from interop.numbers import whole

_LIBRARIES = ("compression.zstd", "zstandard") if sys.version_info >= (3, 14) else ("zstandard",)
_HIGHEST = 22


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
        else:
            self.compress = functools.partial(library.compress, level=self.level)
            self.decompress = library.decompress

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
