"""Answers in JSON."""

from collections.abc import Mapping
from typing import Any

from fbuf.checkpoint import json_text
from interop.datasets.answers import FailedError, asked
from interop.datasets.errors import DownloadError
from interop.datasets.fetching import patiently, session


def fetch_json(
    url: str, *, timeout: float = 30.0, retries: int = 2, pause: float = 0.5, headers: Mapping[str, str] | None = None
) -> Any:
    """The value of a JSON answer of up to 64 MiB. The arguments of `fetch`.

    DownloadError whose cause is the `FailedError` of the request, or for an answer that is no JSON.
    """

    def receive() -> bytes:
        with asked(opened, url, headers or {}, timeout) as answer:
            if answer.is_page or answer.encoding:
                raise FailedError(f"is {'a page of HTML' if answer.is_page else answer.encoding}, not JSON")
            content = bytearray()
            for block in answer.blocks():
                content += block
                if len(content) > json_text.LARGEST:
                    raise FailedError(f"has more than {json_text.LARGEST} bytes")
            return bytes(content)

    try:
        with session() as opened:
            content = patiently(receive, lambda: 0, retries, pause)
    except FailedError as error:
        raise DownloadError(f"{url}: {error}") from error
    return json_text.parsed(content, url, DownloadError)
