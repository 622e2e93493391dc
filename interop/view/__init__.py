"""A page in the browser: what is in a buffer, as one file that opens without a network.

`interop.view(buffer, out="buffer.html")` writes it; see `write`.
"""

import os
import sys
from types import ModuleType

from interop.view.pages import html, serve, server, to_rerun, write

__all__ = ["html", "serve", "server", "to_rerun", "write"]


class _View(ModuleType):
    """A module that can be called: `interop.view(...)` is `interop.view.write(...)`."""

    def __call__(self, source: object, out: str | os.PathLike[str] = "buffer.html", **choices: object) -> object:
        return write(source, out, **choices)  # type: ignore[arg-type]  # checked there


sys.modules[__name__].__class__ = _View
