"""Keys of tensordicts: a name, or a tuple of names for a nested entry."""

from collections.abc import Iterator, Mapping
from typing import Any

from tensordict import TensorDictBase, is_non_tensor, is_tensor_collection


def as_path(key: Any) -> tuple[Any, ...]:
    """The key as a tuple."""
    return key if isinstance(key, tuple) else (key,)


def as_key(path: tuple[Any, ...]) -> Any:
    """The path as users write it: a name for an entry of the root."""
    return path if len(path) > 1 else path[0]


def checked_key(name: str, key: Any) -> Any:
    """The key, or None. TypeError, with the name of the argument, for other than a text or a tuple of texts."""
    if key is None or (as_path(key) and all(isinstance(each, str) for each in as_path(key))):
        return key
    raise TypeError(f"{name} must be a name, a tuple of names or None, got {key!r}")


def entries_below(given: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The entries of a dict or tensordict by path, and of those in it."""
    for key, value in given.items():
        path = (*above, *as_path(key))
        if (isinstance(value, Mapping) or is_tensor_collection(value)) and not is_non_tensor(value):
            yield from entries_below(value, path)
        else:
            yield path, value


def known_keys(data: TensorDictBase) -> str:
    """The keys of a tensordict, for a message."""
    return ", ".join(sorted(map(repr, data.keys(True, True)))) or "none"
