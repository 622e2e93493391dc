"""Inventories for intersphinx, made from `inventories.toml`: the names of other projects that our pages mention.

The full inventories have 30 MB, change every week, and cannot be fetched without a network. A build would then have other
links, or fail. The list has what signatures and docstrings name; `nitpicky` stays off, so a name that is not there is text.
"""

import tomllib
import zlib
from pathlib import Path

LIST = Path(__file__).with_name("inventories.toml")


def mapping(folder: Path) -> dict[str, tuple[str, str]]:
    """Write the inventories into a folder. Returns what `intersphinx_mapping` needs."""
    folder.mkdir(parents=True, exist_ok=True)
    found = {}
    for project, entries in tomllib.loads(LIST.read_text()).items():
        path = folder / f"{project}.inv"
        path.write_bytes(inventory(project, entries["names"]))
        found[project] = (entries["url"], str(path))
    return found


def inventory(project: str, names: dict[str, list[str]]) -> bytes:
    """An inventory in Sphinx's format 2. `names` has lists "name page" by the role of the names, such as "class"."""
    lines = [
        f"{name} py:{role} 1 {page if '#' in page else f'{page}#{name}'} -"
        for role, entries in names.items()
        for name, page in (entry.split() for entry in entries)
    ]
    head = f"# Sphinx inventory version 2\n# Project: {project}\n# Version: \n# The rest is compressed with zlib.\n"
    return head.encode() + zlib.compress("".join(f"{line}\n" for line in lines).encode())
