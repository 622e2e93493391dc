"""What the files at a path hold, in words: keys of items, and values of components."""

from collections.abc import Iterator, Mapping
from typing import Any

from fbuf.checkpoint import Fields
from fbuf.checkpoint.manifest import Manifest

_SHOWN = 8  # names


def of_checkpoint(found: Manifest) -> dict[str, str]:
    """What the files of a checkpoint hold, by name, as far as its tree says."""
    rows: dict[str, str] = {}
    small: list[str] = []
    for name, mark, described in _arrays(found.tree, ""):
        try:
            if mark == "$array":
                small.append(name)
                continue
            count, rows_a_file, first, _ = described
            starts = range(0, count, rows_a_file)
            for entry, start in zip(found.files[first : first + len(starts)], starts, strict=True):
                which = f"rows {start} to {min(start + rows_a_file, count) - 1} of " if len(starts) > 1 else ""
                rows[entry.name] = f"{which}{name}"
        except (TypeError, ValueError):  # `Reading` says what is wrong with it
            continue
    return rows | ({found.files[0].name: _listed(small)} if small and found.files else {})


def _arrays(node: object, name: str) -> Iterator[tuple[str, str, Any]]:
    """The arrays of a tree: the names of what they hold, the mark, and the description."""
    if isinstance(node, Mapping):
        mark = next(iter(node), "")
        if len(node) == 1 and mark in ("$array", "$column", "$columns"):
            yield name, mark, node[mark]
            return
        for key, value in (node["$dict"] if list(node) == ["$dict"] else node).items():
            keys = _keys_of(node) if key == "columns" else []
            yield from _arrays(value, _listed(keys) if keys else f"{name}.{key}".removeprefix("."))
    elif isinstance(node, list):
        named = len(node) > 1 and isinstance(node[0], str)  # the path of a leaf of a pytree
        for place, value in enumerate(node):
            yield from _arrays(value, node[0] if named else f"{name}.{place}")


def _keys_of(rows: Mapping[str, object]) -> list[str]:
    """The keys of the columns of saved rows, in their order; none where it is not known."""
    layout = rows.get("layout")
    leaves = layout.get("leaves") if isinstance(layout, Mapping) else None
    return [_name(path) for path, _, _ in leaves] if isinstance(leaves, list) else []


def of_rows(described: Fields, name: str, first: int, last: int) -> str:
    """What the bytes `first` to `last` of a file in a folder of rows hold; "" for what is no key of items."""
    rows = described.whole("rows")
    for path, _, _ in described.fields("layout").items("leaves"):
        if name == f"{'/'.join(map(str, path))}.memmap":
            row_bytes = described.fields("files").whole(name) // max(rows, 1)
            which = f"rows {first // row_bytes} to {last // row_bytes} of " if row_bytes else ""
            return f"{which}{_name(path)}"
    return ""


def _name(path: list[object]) -> str:
    return ".".join(map(str, path)) or "item"


def _listed(names: list[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
