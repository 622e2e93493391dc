"""Keys of tensordicts: a name, or a tuple of names for a nested entry."""

from typing import Any

from tensordict import TensorDictBase


def as_path(key: Any) -> tuple[Any, ...]:
    """The key as a tuple."""
    return key if isinstance(key, tuple) else (key,)


def known_keys(data: TensorDictBase) -> str:
    """The keys of a tensordict, for a message."""
    return ", ".join(sorted(map(repr, data.keys(True, True)))) or "none"
