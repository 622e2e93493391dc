"""Dataset cards, `README.md` of the Hugging Face hub: a head in YAML, and Markdown."""

import json
from collections.abc import Iterable, Mapping, Sequence

from interop.data.trajectory_keys import KeyPath


def card(front: Mapping[str, object], title: str, lines: Sequence[str]) -> str:
    """The text of a card. Entries of `front` that are None are left out; the others are written as JSON, which is YAML."""
    head = [f"{key}: {json.dumps(value)}" for key, value in front.items() if value is not None]
    return "\n".join(["---", *head, "---", f"# {title}", "", *lines, ""])


def keys_in_words(paths: Iterable[KeyPath]) -> str:
    """Keys as Markdown: "`next.done` or `episode`"."""
    return " or ".join(f"`{'.'.join(map(str, path))}`" for path in paths)
