"""Tables of text, and sizes as people read them."""

from collections.abc import Sequence


def table(rows: Sequence[Sequence[object]], head: Sequence[str]) -> str:
    """Rows in columns, under a head."""
    cells = [[str(each) for each in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in cells)


def size(count: float) -> str:
    """A number of bytes, such as "1.2 GiB"."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
