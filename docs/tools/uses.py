"""Where the pages and examples use a public name: found in the syntax trees of their code."""

import ast
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

from public_names import PACKAGES, ROOT

DOCS = ROOT / "docs"
OUTPUTS = DOCS / "outputs"  # of pages with code cells
FENCE = re.compile(r"^```(?:python|\{code-cell\}[^\n]*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
HEADING = re.compile(r"^(#{1,4}) (.+)$", re.MULTILINE)
OPTION = re.compile(r"^:[\w-]+:.*$", re.MULTILINE)  # of a code cell


@dataclasses.dataclass(frozen=True)
class Use:
    """A place that uses a name: a document of the site, and the heading above the code."""

    document: str  # "do/datasets"
    title: str
    section: str = ""  # the heading above the code, where it is not the title


def pages() -> list[Path]:
    """The written pages of the site."""
    return sorted(each for part in ("learn", "do", "know", "lookup") for each in (DOCS / part).glob("*.md"))


def document_of(page: Path) -> str:
    """The name of a page as a document of the site: "do/datasets"."""
    return str(page.relative_to(DOCS).with_suffix(""))


def write_changed(path: Path, text: str) -> None:
    """Write a file, if its text differs: a second build reads only those."""
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def outputs_of(page: Path) -> Path:
    """The notebook with the outputs of a page."""
    return OUTPUTS / f"{page.stem}.ipynb"


def blocks(text: str) -> Iterator[tuple[int, str]]:
    """The blocks of Python code of a page, and where each begins. What is before a sign `>>>` or `%` is no code."""
    for found in FENCE.finditer(text):
        yield found.start(1), OPTION.sub("", found[1])


def uses() -> dict[str, list[Use]]:
    """The places that use each dotted name, such as "fbuf.Buffer", pages before examples."""
    found: dict[str, list[Use]] = {}

    def enter(name: str, use: Use) -> None:
        if use not in found.setdefault(name, []):
            found[name].append(use)

    for page in pages():
        text, names = page.read_text(), dict[str, str]()
        document = document_of(page)
        masked = FENCE.sub(lambda block: re.sub(r"[^\n]", " ", block[0]), text)  # a comment is no heading
        headings = [(at.start(), at[2].strip()) for at in HEADING.finditer(masked)]
        title = headings[0][1]
        for begin, code in blocks(text):
            section = [heading for at, heading in headings if at < begin][-1]
            for name in dotted_names(ast.parse(code), names):
                enter(name, Use(document, title, "" if section == title else section))
    for program in sorted((ROOT / "examples").glob("*.py")):
        for name in dotted_names(ast.parse(program.read_text()), {}):
            enter(name, Use("learn/gallery", "Gallery", program.name))
    return found


def mentions() -> dict[str, list[Use]]:
    """The pages whose prose has a name as code, by its last part: `SliceSampler`, also with arguments."""
    found: dict[str, list[Use]] = {}
    for page in pages():
        text = FENCE.sub("", page.read_text())
        title = HEADING.search(text)
        use = Use(document_of(page), title[2].strip() if title else page.stem)
        for name in {
            code for each in re.findall(r"`([^`\n]+)`", text) for code in re.findall(r"^(?:\w+\.)*(\w+)", each)
        }:
            found.setdefault(name, []).append(use)
    return found


def dotted_names(tree: ast.Module, imported: dict[str, str]) -> set[str]:
    """The dotted names below our packages in a program. `imported` is what its names mean; imports are added to it."""
    found = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] in PACKAGES:
                    imported[alias.asname or alias.name.partition(".")[0]] = (alias.asname and alias.name) or (
                        alias.name.partition(".")[0]
                    )
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in PACKAGES:
            for alias in node.names:
                imported[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute) and (name := resolved(node, imported)):
            found.add(name)
        elif isinstance(node, ast.Name) and node.id in imported:
            found.add(imported[node.id])
    return found


def resolved(node: ast.expr, imported: dict[str, str]) -> str | None:
    """The dotted name of `a.b.c`, if `a` is imported from our packages."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in imported:
        return None
    return ".".join([imported[node.id], *reversed(parts)])
