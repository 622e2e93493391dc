"""How much memory is free: of this machine, of a device, of a disk."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import jax

HOST = "cpu"
_CGROUPS, _OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_FILES = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))  # of cgroups v2, v1


def at(place: str) -> int | None:
    """Bytes free at a place; None where that is not known.

    A place is "cpu" for the memory of this machine, the path of a folder, which need not be there yet, for the disk that
    it is on, or a device as JAX prints it, such as "cuda:0".
    """
    if place == HOST:
        return of_machine()
    return of_disk(place) if place.startswith("/") else _of_device(place)


def of_machine() -> int | None:
    """What this process can still have: free memory, droppable caches and swap, within the limits of its cgroups.

    All installed memory where the system does not report what is free.
    """
    reported = _reported()
    found = [_installed() if reported is None else reported, *_limits()]
    return min((each for each in found if each is not None), default=None)


def of_disk(folder: str) -> int:
    """Bytes that a user can still write to the disk of a folder."""
    path = Path(folder)
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free


def place_of(device: jax.Device) -> str:
    """The name of the memory of a device of JAX, see `at`."""
    return HOST if device.platform == "cpu" else str(device)


def _of_device(place: str) -> int | None:
    for device in jax.devices():
        if str(device) == place:
            stats = device.memory_stats() or {}
            if "bytes_limit" in stats and "bytes_in_use" in stats:
                return int(stats["bytes_limit"]) - int(stats["bytes_in_use"])
    return None


def _reported() -> int | None:
    """What Linux reports as free."""
    fields = _fields(Path("/proc/meminfo"))
    kilobytes = fields.get("MemAvailable:")
    return None if kilobytes is None else 1024 * (kilobytes + fields.get("SwapFree:", 0))


def _installed() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


def _limits() -> Iterator[int]:
    """Bytes that each cgroup of this process, and each above it, leaves."""
    for folder in _folders():
        for limit, usage in _FILES:
            most, used = _number(folder / limit), _number(folder / usage)
            if most is not None and used is not None:
                held = _fields(folder / "memory.stat")
                yield most - used + held.get("active_file", 0) + held.get("inactive_file", 0)


def _folders() -> Iterator[Path]:
    for line in _text(_OWN_CGROUPS).splitlines():
        _, kinds, path = line.split(":", 2)
        if kinds == "" or "memory" in kinds.split(","):
            root = _CGROUPS / "memory" if kinds else _CGROUPS
            below = Path(path.lstrip("/"))
            yield from (root / each for each in (below, *below.parents))


def _number(path: Path) -> int | None:
    """The number in a file; None where there is none, or "max"."""
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _fields(path: Path) -> dict[str, int]:
    """Numbers by name, a line each."""
    lines = map(str.split, _text(path).splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
