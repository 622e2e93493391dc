"""The memory of a buffer, array by array, before anything is allocated."""

import dataclasses
import errno
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp

from fbuf import checks, free_memory
from fbuf.keywords import checked

_SMALL = 1 << 26  # bytes of a buffer below which free memory is not asked for
_A_SLOT = 64  # bytes of a slot in the sampler and the trajectories, roughly
_MOST_NAMED = 4  # keys in an error


class NotEnoughMemoryError(MemoryError):
    """A plan needs more memory than is free; nothing was allocated."""


class NotEnoughDiskError(NotEnoughMemoryError, OSError):
    """A plan needs more than is free on a disk; also an OSError, with `errno` ENOSPC."""

    def __init__(self, text: str) -> None:
        super().__init__(errno.ENOSPC, text)
        self.errno, self.strerror = errno.ENOSPC, text

    def __str__(self) -> str:
        return str(self.args[-1])


@checked
@dataclasses.dataclass(frozen=True)
class Share:
    """One array or file of a plan.

    Attributes:
        part: what it belongs to: "items", "sampler", ...
        key: its path there.
        place: of its memory, see `free_memory.at`.
        bytes: None: not known before it is written.
        shape: of the array; None for a file.
        dtype: of the array.
        counts: when it is allocated; "at most": it grows with use.

    Attributes:
        part: what it belongs to: "items", "sampler", ...
        key: TODO.
        place: TODO.
        bytes: TODO.
        shape: of the array; None for a file.
        dtype: of the array.
        counts: when it is allocated; "at most": it grows with use.
    """

    part: str
    key: str
    place: str
    bytes: int | None
    shape: tuple[int, ...] | None = None
    dtype: str = ""
    counts: Literal["always", "in a call", "at most"] = "always"

    @property
    def name(self) -> str:
        """The part and the key."""
        return f"{self.part} {self.key}".rstrip()

    def row(self) -> tuple[str, ...]:
        """The cells of its row in a table."""
        shape = "" if self.shape is None else str(list(self.shape))
        count = "?" if self.bytes is None else str(self.bytes)
        text = size_text(self.bytes) + ("" if self.counts == "always" else f" {self.counts}")
        return self.part, self.key, shape, self.dtype, self.place, count, text


@checked
@dataclasses.dataclass(frozen=True)
class Plan:
    """The memory that a buffer takes. `print` it for a table.

    Attributes:
        shares: the arrays and files.
        free: bytes at each place when the plan was made; None: not known.

    Attributes:
        shares: the arrays and files.
        free: TODO.
    """

    shares: tuple[Share, ...]
    free: Mapping[str, int | None]

    @classmethod
    def of(cls, shares: Iterable[Share], free_at: Callable[[str], int | None] | None = None) -> "Plan":
        """A plan with the memory that is free now, by default from `free_memory.at`."""
        shares, free_at = tuple(shares), free_at or free_memory.at
        return cls(shares, {place: free_at(place) for place in dict.fromkeys(share.place for share in shares)})

    @property
    def total(self) -> int:
        """Bytes of all shares that are always allocated, as far as they are known."""
        return sum(self.by_part.values())

    @property
    def unknown(self) -> tuple[str, ...]:
        """Names of shares whose size is not known yet; the total does not include them."""
        return tuple(share.name for share in self.shares if share.bytes is None)

    @property
    def by_part(self) -> dict[str, int]:
        """Bytes by part: items, sampler and so on."""
        return self._sums(lambda share: share.part, "always")

    @property
    def by_key(self) -> dict[str, int]:
        """Bytes by array, named by part and path."""
        return self._sums(lambda share: share.name, "always")

    @property
    def needed(self) -> dict[str, int]:
        """Bytes by place, including those that are needed only during a call."""
        return self._sums(lambda share: share.place, "always", "in a call")

    def _sums(self, of: Callable[[Share], str], *counts: str) -> dict[str, int]:
        found: dict[str, int] = {}
        for share in self.shares:
            if share.bytes is not None and share.counts in counts:
                found[of(share)] = found.get(of(share), 0) + share.bytes
        return found

    def check(self) -> "Plan":
        """The plan itself. NotEnoughMemoryError if a place has less than is needed; NotEnoughDiskError for a disk."""
        for place, needed in self.needed.items():
            free = self.free.get(place)
            if free is not None and needed > free:
                kind = NotEnoughDiskError if place.startswith("/") else NotEnoughMemoryError
                raise kind(self._refusal(place, needed, free))
        return self

    def _refusal(self, place: str, needed: int, free: int) -> str:
        largest = sorted(
            (share for share in self.shares if share.place == place and share.bytes),
            key=lambda share: -(share.bytes or 0),
        )
        named = ", ".join(f"{share.name} {size_text(share.bytes)}" for share in largest[:_MOST_NAMED])
        more = f" and {len(largest) - _MOST_NAMED} more" if len(largest) > _MOST_NAMED else ""
        where = f"on the disk of {place}" if place.startswith("/") else f"in the memory of {place}"
        return (
            f"the buffer needs {size_text(needed)} {where}, where {size_text(free)} are free: {named}{more}; nothing was "
            f"allocated. About {max(free, 0) / needed:.1%} of the capacity would fit; or store smaller items, or elsewhere"
        )

    def __str__(self) -> str:
        rows = [("part", "key", "shape", "dtype", "at", "bytes", ""), *map(Share.row, self.shares)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = []
        for row in rows:
            cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
            cells[5] = row[5].rjust(widths[5])
            lines.append("  ".join(cells).rstrip())
        most = self._sums(lambda share: share.place, "at most")
        for place, needed in {**dict.fromkeys(most, 0), **self.needed}.items():
            free = self.free.get(place)
            left = "what is free there is not known" if free is None else f"{size_text(free)} free"
            more = most.get(place)
            also = "" if more is None else f", at most {size_text(more)} more as it is used"
            lines.append(f"{place}: {needed} bytes, {size_text(needed)} needed{also}, {left}")
        if self.unknown:
            lines.append(f"not known before it is written: {', '.join(self.unknown)}")
        return "\n".join(lines)


@checked
def plan(buffer: Any, example: Any, *, device: jax.Device | None = None) -> Plan:
    """The memory that `buffer.init(example)` would allocate, to the byte, on a device, by default JAX's default device.

    Allocates nothing. `buffer` may be a `Mixture`. A program with a donated state needs this memory and that of its batch;
    without donation each write copies the whole state.
    """
    if device is None:
        with jax.ensure_compile_time_eval():
            device = next(iter(jnp.zeros(()).devices()))
    state = jax.eval_shape(lambda: buffer.init(example))
    return Plan.of(shares_of(state, free_memory.place_of(device)))


def shares_of(state: Any, place: str) -> list[Share]:
    """The arrays of a state, by its fields."""
    found = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        part = jax.tree_util.keystr(path[:1]).strip(".")
        size = leaf.size * leaf.dtype.itemsize
        found.append(Share(part, jax.tree_util.keystr(path[1:]), place, size, tuple(leaf.shape), str(leaf.dtype)))
    return found


def refuse_large(init: Callable[[], Any], example: Any, slots: int) -> None:
    """NotEnoughMemoryError for a state that does not fit; not inside jit, which may ask only for shapes."""
    item = checks.item_spec(example)
    about = slots * (sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(item)) + _A_SLOT)
    if about < _SMALL or isinstance(probe := jnp.zeros(()), jax.core.Tracer):
        return
    Plan.of(shares_of(jax.eval_shape(init), free_memory.place_of(next(iter(probe.devices()))))).check()


def size_text(count: int | None) -> str:
    """Bytes for people, such as 1.5 GiB."""
    if count is None:
        return "?"
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if abs(size) < 1024:
            break
        size, unit = size / 1024, larger
    return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"
