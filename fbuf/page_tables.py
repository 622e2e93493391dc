"""Tables as text for a terminal and as HTML for a notebook, from the same rows."""

import dataclasses
import html
from collections.abc import Sequence

from fbuf.keywords import checked

# Colours follow the page: half of them are the text's own, so that they fit a light and a dark one.
_STYLE = """<style>
.fbuf-look{font-family:system-ui,sans-serif;font-size:13px;color:inherit;line-height:1.5}
.fbuf-look h3,.fbuf-look h4{margin:.6em 0 .2em;font-weight:600}
.fbuf-look table{border-collapse:collapse;margin:.2em 0}
.fbuf-look th,.fbuf-look td{padding:.15em .7em;text-align:left;border-bottom:1px solid rgba(128,128,128,.3);color:inherit}
.fbuf-look th{font-weight:600;background:rgba(128,128,128,.12)}
.fbuf-look td{vertical-align:top}
.fbuf-look td table{margin:0}
.fbuf-look td.n{text-align:right;font-variant-numeric:tabular-nums}
.fbuf-look p{margin:.2em 0}
.fbuf-look .fbuf-note{opacity:.75}
</style>"""

Cell = int | float | str | None


@checked
@dataclasses.dataclass(frozen=True)
class Section:
    """A table with a title.

    Attributes:
        title: of the section.
        header: the names of the columns; () for none.
        rows: the cells; None shows as a dash.
        note: a sentence below the table.
    """

    title: str
    header: tuple[str, ...] = ()
    rows: tuple[tuple[Cell, ...], ...] = ()
    note: str = ""

    def text(self) -> str:
        """The section as lines of text. Numbers are aligned to the right."""
        shown = [[cell_text(cell) for cell in row] for row in self.rows]
        lines = [self.title] if self.title else []
        table = [list(self.header), *shown] if self.header else shown
        if table:
            widths = [max(map(len, column)) for column in zip(*table, strict=True)]
            right = [all(not isinstance(row[i], str) for row in self.rows) for i in range(len(widths))]
            for row in table:
                cells = [each.rjust(n) if r else each.ljust(n) for each, n, r in zip(row, widths, right, strict=True)]
                lines.append(("  " + "  ".join(cells)).rstrip())
        return "\n".join([*lines, *([f"  {self.note}"] if self.note else [])])

    def html(self) -> str:
        """The section as HTML."""
        parts = [f"<h4>{html.escape(self.title)}</h4>"] if self.title else []
        if self.rows or self.header:
            parts.append("<table>")
            if self.header:
                names = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in self.header)
                parts.append(f"<tr>{names}</tr>")
            for row in self.rows:
                cells = (
                    f"<td>{html.escape(cell)}</td>"
                    if isinstance(cell, str)
                    else f'<td class="n">{cell_text(cell)}</td>'
                    for cell in row
                )
                parts.append(f"<tr>{''.join(cells)}</tr>")
            parts.append("</table>")
        if self.note:
            parts.append(f'<p class="fbuf-note">{html.escape(self.note)}</p>')
        return "".join(parts)


def cell_text(cell: Cell) -> str:
    """A cell as text: four digits of a float, all of an integer."""
    if cell is None:
        return "-"
    return f"{cell:.4g}" if isinstance(cell, float) else str(cell)


@checked
def text_page(title: str, sections: Sequence[Section]) -> str:
    """A title and sections as text."""
    return "\n".join([title, *(section.text() for section in sections)])


@checked
def html_page(title: str, sections: Sequence[Section]) -> str:
    """A title and sections as one element of HTML, which needs nothing else. It fits light and dark pages."""
    return html_element(title, "".join(section.html() for section in sections))


def html_element(title: str, body: str) -> str:
    """A title as text, and a body that is HTML already."""
    return f'<div class="fbuf-look">{_STYLE}<h3>{html.escape(title)}</h3>{body}</div>'
