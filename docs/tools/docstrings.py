"""Docstrings as reStructuredText: they are plain text with `code`, sections such as "Args:", and Markdown tables."""

import re

CODE = re.compile(r"(`[^`]*`)")
SPECIAL = re.compile(
    r"(?<!\\)([*|])|(?<=\w)(_)(?=\W|$)"
)  # what would begin or end emphasis, substitutions and references
CELLS = re.compile(r"\|(?=(?:[^`]*`[^`]*`)*[^`]*$)")  # not in code
RULE = re.compile(r"^\s*\|(?:\s*:?-+:?\s*\|)+\s*$")


def process(_app: object, what: str, _name: str, _value: object, _options: object, lines: list[str]) -> None:
    """For the event `autodoc-process-docstring`, before napoleon: change the lines in place."""
    # Napoleon takes what is before a colon in the first line of a property for a type.
    lines[:] = [*([""] if what == "property" else []), *as_rst(lines)]


def process_signature(
    _app: object, _what: str, _name: str, _value: object, _options: object, arguments: str | None, result: str | None
) -> tuple[str | None, str | None]:
    """For the event `autodoc-process-signature`: JAX's array by its public name."""
    public = [text and text.replace("jaxlib._jax.Array", "jax.Array") for text in (arguments, result)]
    return public[0], public[1]


def as_rst(lines: list[str]) -> list[str]:
    """The lines with tables as list tables, and without characters that have a meaning outside of code."""
    found: list[str] = []
    lines = with_whole_names(lines)
    at = 0
    while at < len(lines):
        end = at + 1
        if is_table(lines, at):
            while end < len(lines) and lines[end].lstrip().startswith("|"):
                end += 1
            found += list_table([lines[at], *lines[at + 2 : end]])
        elif announces_block(lines, at):
            while end < len(lines) and (not lines[end].strip() or lines[end].startswith("    ")):
                end += 1
            found += [f"{escaped(lines[at])}:", *lines[at + 1 : end]]
        elif lines[at].strip():
            while (
                end < len(lines) and lines[end].strip() and not is_table(lines, end) and not announces_block(lines, end)
            ):
                end += 1
            found += escaped("\n".join(lines[at:end])).split("\n")
        else:
            found.append("")
        at = end
    return found


def with_whole_names(lines: list[str]) -> list[str]:
    """Lines of arguments whose names take two lines are joined: napoleon expects the colon in the first."""
    found: list[str] = []
    for line in lines:
        if found and re.fullmatch(r"\s+[\w, ]+,", found[-1]) and indent(line) > indent(found[-1]):
            found[-1] += f" {line.strip()}"
        else:
            found.append(line)
    return found


def indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def is_table(lines: list[str], at: int) -> bool:
    return at + 1 < len(lines) and lines[at].lstrip().startswith("|") and bool(RULE.match(lines[at + 1]))


def announces_block(lines: list[str], at: int) -> bool:
    """Whether an indented block, after an empty line, follows a line of text that ends with a colon."""
    if at + 2 >= len(lines) or not lines[at].endswith(":") or lines[at].startswith(" "):
        return False
    return not lines[at + 1].strip() and lines[at + 2].startswith("    ")


def escaped(text: str) -> str:
    """Text without special characters outside of code; code that a letter follows ends there."""
    parts = CODE.split(text)
    for at, part in enumerate(parts):
        if part.startswith("`") and at + 1 < len(parts) and re.match(r"\w", parts[at + 1]):
            parts[at] = f"{part}\\ "
        elif not part.startswith("`"):
            parts[at] = SPECIAL.sub(lambda found: f"\\{found[0]}", part)
    return "".join(parts)


def list_table(rows: list[str]) -> list[str]:
    indent = rows[0][: len(rows[0]) - len(rows[0].lstrip())]
    found = ["", f"{indent}.. list-table::", f"{indent}   :header-rows: 1", ""]
    for row in rows:
        for number, cell in enumerate(CELLS.split(row.strip().strip("|"))):
            found.append(f"{indent}   {'*' if number == 0 else ' '} - {escaped(cell.strip())}")
    return [*found, ""]
