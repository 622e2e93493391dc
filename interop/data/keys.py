"""Keys of tensordicts: a name, or a tuple of names for a nested entry."""

import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tensordict import NestedKey, TensorDictBase, is_non_tensor, is_tensor_collection


def as_path(key: object) -> tuple[Any, ...]:
    """The key as a tuple."""
    return key if isinstance(key, tuple) else (key,)


def as_key(path: tuple[Any, ...]) -> Any:
    """The path as users write it: a name for an entry of the root."""
    return path if len(path) > 1 else path[0]


def checked_key(name: str, key: Any) -> Any:
    """The key, or None. TypeError, with the name of the argument, for other than a text or a tuple of texts."""
    if key is None or (as_path(key) and all(isinstance(step, str) for step in as_path(key))):
        return key
    raise TypeError(f"{name} must be a name, a tuple of names or None, got {key!r}")


def entries_below(entries: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The entries of a dict or tensordict by path, and of those in it."""
    for key, value in entries.items():
        path = (*above, *as_path(key))
        if (isinstance(value, Mapping) or is_tensor_collection(value)) and not is_non_tensor(value):
            yield from entries_below(value, path)
        else:
            yield path, value


def entry_at(data: TensorDictBase, key: NestedKey) -> Any:
    """The entry of a tensordict, or None; also where a part of a nested key names something that has no entries."""
    entry: Any = data
    for name in as_path(key):
        entry = entry.get(name, None) if isinstance(entry, TensorDictBase) else None
    return entry


def known_keys(data: TensorDictBase) -> str:
    """The keys of a tensordict, for a message."""
    return ", ".join(sorted(map(repr, data.keys(True, True)))) or "none"


def nearest(unknown: Iterable[Any], known: Iterable[Any]) -> str:
    """Which of the known keys the unknown ones may stand for, for a message; empty if none is near."""
    names = {".".join(map(str, as_path(path))): path for path in known}
    near = {key: difflib.get_close_matches(".".join(map(str, as_path(key))), list(names), n=1) for key in unknown}
    meant = [(key, names[found[0]]) for key, found in near.items() if found]
    if len(near) == len(meant) == 1:
        return f" (did you mean {meant[0][1]!r}?)"
    return f" (did you mean {', '.join(f'{name!r} by {key!r}' for key, name in meant)}?)" if meant else ""


def missing(owner: str, key: NestedKey, data: TensorDictBase, cure: str = "") -> KeyError:
    """The error for an entry that a tensordict lacks. Names the key, the keys that are there, and the nearest of them."""
    advice = nearest([key], data.keys(True, True))
    return KeyError(f"{owner} has no entry {key!r}; its entries are {known_keys(data)}{advice}{cure}")


def no_priorities(key: NestedKey, data: TensorDictBase) -> KeyError:
    """The error for a sample without the entry that should hold priorities."""
    cure = ". Set this entry, or priority_key of the buffer; mark_update(index) gives items the default priority"
    return missing("no priorities were set: the sample", key, data, cure)
