"""How much memory is free: of this machine, of a device, of a disk."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import jax

HOST = "cpu"
_CGROUPS, _OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_FILES = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))  # of cgroups v2, v1


def at(place: str) -> int | None:
    """Bytes free at a place; None if that is not known.

    A place is "cpu" for the memory of this machine, a folder, existing or not, for its disk, or a device as JAX prints
    it, such as "cuda:0".
    """
    if place == HOST:
        return of_machine()
    if place.startswith("/"):
        return of_disk(place)
    for device in jax.devices():
        if str(device) == place and {"bytes_limit", "bytes_in_use"} <= (stats := device.memory_stats() or {}).keys():
            return int(stats["bytes_limit"]) - int(stats["bytes_in_use"])
    return None


def of_machine() -> int | None:
    """Free memory for this process: free and droppable pages and swap, within the limits of its cgroups.

    All installed memory if the system does not report what is free.
    """
    found, reported = list(_limits()), _fields(Path("/proc/meminfo"))
    if "MemAvailable:" in reported:
        found.append(1024 * (reported["MemAvailable:"] + reported.get("SwapFree:", 0)))
    else:
        with contextlib.suppress(AttributeError, OSError, ValueError):
            found.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return min(found, default=None)


def of_disk(folder: str) -> int:
    """Bytes that a user can still write to the disk of a folder."""
    path = Path(folder)
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free


def place_of(device: jax.Device) -> str:
    """The name of the memory of a device of JAX, see `at`."""
    return HOST if device.platform == "cpu" else str(device)


def _limits() -> Iterator[int]:
    """Free bytes of each cgroup of this process, and of each above it. File caches count as free."""
    for folder in _folders():
        for limit, usage in _FILES:
            most, used = _text(folder / limit).strip(), _text(folder / usage).strip()
            if most.isdigit() and used.isdigit():  # "max" is no limit
                held = _fields(folder / "memory.stat")
                yield int(most) - int(used) + held.get("active_file", 0) + held.get("inactive_file", 0)


def _folders() -> Iterator[Path]:
    for line in _text(_OWN_CGROUPS).splitlines():
        _, kinds, path = line.split(":", 2)
        if kinds == "" or "memory" in kinds.split(","):
            root = _CGROUPS / "memory" if kinds else _CGROUPS
            below = Path(path.lstrip("/"))
            yield from (root / each for each in (below, *below.parents))


def _fields(path: Path) -> dict[str, int]:
    """Numbers by name, a line each."""
    lines = map(str.split, _text(path).splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
