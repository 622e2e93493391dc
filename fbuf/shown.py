"""Objects as text, and as nested tables in a notebook, from the facts that they name.

A class names its facts in `__rich_repr__`, which rich reads as well: it yields pairs (name, value), with "" for a value that
needs no name. Values are texts, numbers, and objects that name facts of their own. Of a dataclass the fields are facts.
Facts are cheap: counts, shapes and settings, never stored rows.
"""

import dataclasses
import html
from collections.abc import Iterator, Mapping

from fbuf.page_tables import cell_text, html_element

_LONGEST = 300  # characters of a text in a table
_MOST = 200  # rows of a table


class Shown:
    """The base class of objects that print, and show in a notebook, by their facts."""

    def __repr__(self) -> str:
        """The class and its facts; that of `object` for a class that names none."""
        if not hasattr(type(self), "__rich_repr__"):
            return super().__repr__()
        facts = (f"{name}={value}" if name else str(value) for name, value in facts_of(self) or ())
        return f"{type(self).__name__}({', '.join(facts)})"

    def _repr_html_(self) -> str:
        """The facts as a table, with tables of the objects in it. Any text is escaped."""
        return html_element(type(self).__name__, _table(self))


def facts_of(thing: object) -> list[tuple[str, object]] | None:
    """The facts that an object names, by name; "" for one without a name. None for an object that names none."""
    kind = type(thing)
    if hasattr(kind, "__rich_repr__"):
        named = (fact if isinstance(fact, tuple) else ("", fact) for fact in thing.__rich_repr__())  # type: ignore[attr-defined]
        return [(str(fact[0] or ""), fact[1]) for fact in named]
    if dataclasses.is_dataclass(thing):
        return [(field.name, getattr(thing, field.name)) for field in dataclasses.fields(thing)]
    return None


def _parts_of(value: object) -> list[tuple[str, object]] | None:
    """What a table shows of a value: its facts, the entries of a dict, or the parts of a list or tuple of objects."""
    facts = facts_of(value)
    if facts is None and isinstance(value, Mapping):
        return [(str(key), each) for key, each in value.items()]
    if facts is None and isinstance(value, tuple | list):
        parts = [(str(number), each) for number, each in enumerate(value)]
        return parts if any(_is_array(each) or _parts_of(each) for _, each in parts[:_MOST]) else None
    return facts


def _plain_facts(value: object) -> list[tuple[str, object]] | None:
    """The facts of an object none of whose facts has facts."""
    facts = facts_of(value)
    return facts if facts and not any(_parts_of(each) for _, each in facts) else None


def _table(value: object) -> str:
    """The facts of a value as a table. Objects with the same facts share columns."""
    facts = _parts_of(value)
    if facts is None:
        return f"<p>{_text(value)}</p>"
    names = {tuple(name for name, _ in plain) for _, each in facts if (plain := _plain_facts(each))}
    alike = [_plain_facts(each) is not None for _, each in facts[:_MOST]] if len(names) == 1 else []
    columns = names.pop() if sum(alike) > 1 else ()
    return f"<table>{''.join(_rows(facts[:_MOST], columns))}{_rest(len(facts) - _MOST)}</table>"


def _rows(facts: list[tuple[str, object]], columns: tuple[str, ...]) -> Iterator[str]:
    span = f' colspan="{len(columns) + 1}"' if columns else ""
    if columns:
        names = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in ("", "kind", *columns))
        yield f"<tr>{names}</tr>"
    for name, value in facts:
        head = f'<th scope="row">{html.escape(name)}</th>'
        plain = _plain_facts(value) if columns else None
        if plain is not None:
            cells = [type(value).__name__, *(each for _, each in plain)]
            yield f"<tr>{head}{''.join(f'<td>{_text(each)}</td>' for each in cells)}</tr>"
        elif _parts_of(value) is not None:
            kind = "" if facts_of(value) is None else html.escape(type(value).__name__)
            yield f"<tr>{head}<td{span}>{kind}{_table(value) if _parts_of(value) else ''}</td></tr>"
        else:
            yield f"<tr>{head}<td{span}>{_text(value)}</td></tr>"


def _rest(more: int) -> str:
    return f"<tr><td>and {more} more</td></tr>" if more > 0 else ""


def _text(value: object) -> str:
    """A value as escaped text; of an array its dtype and shape."""
    if _is_array(value):
        text = f"{value.dtype}[{', '.join(map(str, value.shape))}]".removeprefix("torch.")  # type: ignore[attr-defined]
    elif isinstance(value, float):
        text = cell_text(value)
    else:
        text = str(getattr(value, "__qualname__", value))  # of a function its name
    return html.escape(text if len(text) <= _LONGEST else text[:_LONGEST] + " …")


def _is_array(value: object) -> bool:
    return hasattr(value, "dtype") and hasattr(value, "shape")
