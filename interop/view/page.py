"""A page of facts: one file of HTML that opens without a network."""

import base64
import functools
import gzip
import json
import math
from importlib import resources
from typing import Any

import numpy as np

from interop.data.arguments import required
from interop.view.sampler_facts import Facts


class PackedFacts:
    """Facts as JSON and two blobs: numbers, as `{"at", "n", "t"}`, and images, as `{"at", "n"}` in place of bytes.

    Attributes:
        tree: the facts, of values that JSON has. Floats that are not finite become None.
    """

    def __init__(self, facts: Facts) -> None:
        self._numbers = bytearray()
        self._images = bytearray()
        self.tree = self._plain(facts)

    def _plain(self, value: object) -> object:
        if isinstance(value, dict):
            return {str(name): self._plain(each) for name, each in value.items()}
        if isinstance(value, list | tuple):
            return [self._plain(each) for each in value]
        if isinstance(value, np.ndarray):
            start = len(self._numbers)
            self._numbers += value.tobytes() + bytes(-value.nbytes % 4)
            return {"at": start, "n": value.size, "t": value.dtype.str[1:], "shape": list(value.shape)}
        if isinstance(value, bytes):
            start = len(self._images)
            self._images += value
            return {"at": start, "n": len(value)}
        if isinstance(value, np.generic):
            value = value.item()
        return None if isinstance(value, float) and not math.isfinite(value) else value

    @property
    def numbers(self) -> str:
        """The blob of numbers: compressed, then as text."""
        return _as_text(gzip.compress(bytes(self._numbers), 6, mtime=0))

    @property
    def images(self) -> str:
        """The blob of images, as text."""
        return _as_text(bytes(self._images))


def render(facts: Facts) -> str:
    """The page of `facts_of`. ImportError where jinja2 or plotly is not installed."""
    jinja2 = required("jinja2", "view")
    packed = PackedFacts(facts)
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    page: str = environment.from_string(_file("page.html")).render(
        buffer=facts["buffer"],
        style=_file("page.css"),
        script=_file("page.js"),
        facts=json.dumps(packed.tree, allow_nan=False).replace("<", "\\u003c"),
        numbers=packed.numbers,
        images=packed.images,
        plotly=_plotly(),
    )
    return page


def _file(name: str) -> str:
    return resources.files("interop.view").joinpath(name).read_text("utf-8")


@functools.lru_cache(1)
def _plotly() -> str:
    """The library of the curves, compressed, as text."""
    offline: Any = required("plotly.offline", "view")
    return _as_text(gzip.compress(offline.get_plotlyjs().encode(), 6, mtime=0))


def _as_text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
