"""Keys of tensordicts: a name, or a tuple of names for a nested entry."""

from typing import Any


def as_path(key: Any) -> tuple[Any, ...]:
    """The key as a tuple."""
    return key if isinstance(key, tuple) else (key,)
