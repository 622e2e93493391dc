"""Writes the pages of the reference: one for each public name, one for each topic, from the name tables of the packages.

    python docs/tools/reference.py FOLDER

The build calls `write`. A page has what autodoc makes of the docstrings, and links to the code that uses the name.
"""

import dataclasses
import inspect
import re
import sys
import typing
from collections.abc import Iterable
from pathlib import Path

import public_names
import uses
from public_names import PublicName
from uses import Use

FOLDER = uses.DOCS / "lookup" / "reference"


@dataclasses.dataclass(frozen=True)
class Links:
    """What a page links to, beside its docstrings.

    Attributes:
        code: the code of pages and programs that uses the name.
        prose: pages that explain the name.
        through: public names with code whose signatures have this name, as a parameter or a result; or the new name of an
            earlier one.
    """

    code: list[Use]
    prose: list[Use]
    through: list[PublicName]

    def __bool__(self) -> bool:
        return bool(self.code or self.prose or self.through)


def slug(title: str) -> str:
    """The anchor of a heading, as MyST makes it."""
    return re.sub(r"[^\w\- ]", "", title.strip().lower().replace("`", "").replace(" ", "-"))


def links(names: list[PublicName]) -> dict[str, Links]:
    """The links of each name."""
    used, prose, types = uses.uses(), uses.mentions(), signatures(names)
    code = {each.name: code_of(each, used) for each in names}
    for each in names:  # a module has the code of its names
        if each.kind == "module":
            inner = [other.name for other in names if public_names.home_of(other.value).startswith(each.name)]
            code[each.name] = list(dict.fromkeys(use for name in [each.name, *inner] for use in code[name]))
    found = {}
    for each in names:
        through = [other for other in names if code[other.name] and each.short in types[other.name]]
        found[each.name] = Links(code[each.name], prose.get(each.short, []), [*through, *renamed(each, names)])
    return found


def code_of(each: PublicName, found: dict[str, list[Use]]) -> list[Use]:
    """The places that use a name under any of its dotted names: the ones of its module count as well."""
    home, short = public_names.HOMES.get(each.short) or public_names.home_of(each.value), each.short
    dotted = {each.name, *each.others, f"{home}.{short}"}
    if each.name == "interop.view.write":
        dotted.add("interop.view")  # the module can be called
    parts = home.split(".")
    dotted |= {".".join([*parts[:size], short]) for size in range(1, len(parts) + 1)}
    if each.kind == "module":
        dotted |= {name for name in found if name.startswith(f"{each.name}.")}
    return list(dict.fromkeys(use for name in sorted(dotted) for use in found.get(name, [])))


def renamed(each: PublicName, names: list[PublicName]) -> list[PublicName]:
    """The new name of an earlier one."""
    new = vars(each.value).get("new") if inspect.isclass(each.value) else None
    return [other for other in names if new is not None and other.value is new]


def signatures(names: list[PublicName]) -> dict[str, set[str]]:
    """The names of types in the signatures of each public name and of its methods."""
    found: dict[str, set[str]] = {}
    for each in names:
        functions = [each.value]
        if inspect.isclass(each.value):
            functions = [vars(owner)[name] for name, owner in public_names.members(each.value)]
            functions += [vars(each.value).get("__init__"), vars(each.value).get("__call__"), each.value]
        words: set[str] = set()
        for function in functions:
            function = function.fget if isinstance(function, property) else getattr(function, "__func__", function)
            function = function if inspect.isclass(function) else inspect.unwrap(function) if function else function
            for annotation in getattr(function, "__annotations__", {}).values():
                text = annotation if isinstance(annotation, str) else written(annotation)
                words |= set(re.findall(r"\w+", text))
        found[each.name] = words
    return found


def written(annotation: object) -> str:
    """An annotation as text, with the names of its types."""
    inner = " ".join(written(each) for each in typing.get_args(annotation))
    return f"{getattr(annotation, '__name__', annotation)} {inner}"


def page(each: PublicName, its_links: Links, names: list[PublicName]) -> str:
    """The text of the page of a name."""
    # No toctree has these pages, so the sidebar, which every page of the site repeats, has the topics alone.
    lines = ["---", "orphan: true", "---", "", f"# {each.short}", ""]
    if each.others:
        lines += ["Also " + ", ".join(f"`{other}`" for other in each.others) + ".", ""]
    lines += ["```{eval-rst}", *directive(each, names), "```", ""]
    if inherited := inherited_members(each, names):
        lines += ["## Inherited", ""]
        for base, members in inherited.items():
            listed = ", ".join(f"{{py:obj}}`{member} <{base}.{member}>`" for member in members)
            lines += [f"From {{py:obj}}`{base}`: {listed}.", ""]
    lines += ["## Examples", ""] if its_links else []
    lines += [link(use) for use in its_links.code]
    shown = {use.document for use in its_links.code}
    explained = [use for use in its_links.prose if use.document not in shown]
    lines += [f"- explained in {link(use).removeprefix('- ')}" for use in explained[:4]]
    if not its_links.code:
        lines += [f"- with [{other.short}]({other.name}.md#examples)" for other in its_links.through][:6]
    return "\n".join([*lines, ""])


def link(use: Use) -> str:
    text = f"{use.title}: {use.section}" if use.section else use.title
    anchor = f"#{slug(use.section)}" if use.section else ""
    return f"- [{text}](/{use.document}.md{anchor})"


def directive(each: PublicName, names: list[PublicName]) -> list[str]:
    """What autodoc documents: a class with its own methods and those of bases that have no page."""
    if each.kind == "module":
        return [f".. automodule:: {each.name}", "", *module_members(each, names)]
    lines = [f".. auto{each.kind}:: {each.name}"]
    if inspect.isclass(each.value):
        lines.append("   :show-inheritance:")
        own = [name for name, owner in public_names.members(each.value) if base_of(each, owner, names) is None]
        if own and not renamed(each, names):
            lines.append(f"   :members: {', '.join(own)}")
    return lines


def module_members(each: PublicName, names: list[PublicName]) -> list[str]:
    """The functions and classes of a module: those with pages of their own as links."""
    pages = {id(other.value): other for other in names}
    lines, others = list[str](), list[str]()
    for name, value in module_values(each):
        if id(value) in pages:
            others.append(f":py:obj:`{pages[id(value)].name}`")
        else:
            kind = "class" if inspect.isclass(value) else "function"
            lines += [f".. auto{kind}:: {each.name}.{name}", ""]
    return [*lines, *(["On pages of their own: " + ", ".join(others) + "."] if others else [])]


def module_values(each: PublicName) -> Iterable[tuple[str, object]]:
    listed = getattr(each.value, "__all__", None)
    for name, value in sorted(vars(each.value).items()):
        is_code = inspect.isclass(value) or callable(value)
        if is_code and (name in listed if listed else not name.startswith("_") and value.__module__ == each.name):
            yield name, value


def base_of(each: PublicName, owner: type, names: list[PublicName]) -> str | None:
    """The page of the base class that a member comes from; None if it is the class itself, or has no page."""
    return next((other.name for other in names if other.value is owner and owner is not each.value), None)


def inherited_members(each: PublicName, names: list[PublicName]) -> dict[str, list[str]]:
    """Members that are on the pages of base classes, by page."""
    found: dict[str, list[str]] = {}
    if inspect.isclass(each.value) and not renamed(each, names):
        for name, owner in public_names.members(each.value):
            if base := base_of(each, owner, names):
                found.setdefault(base, []).append(name)
    return found


def topic_page(topic: str, names: list[PublicName]) -> str:
    """A table of the names of a topic, with the first line of each docstring."""
    lines = [f"# {topic}", "", "| name | |", "|---|---|"]
    for each in names:
        documented = "" if each.kind == "data" else (inspect.getdoc(each.value) or "")
        first = documented.partition("\n\n")[0].replace("\n", " ").replace("|", "\\|")
        lines.append(f"| [{each.name}]({each.name}.md) | {first} |")
    return "\n".join([*lines, ""])


def index_page(topics: Iterable[str]) -> str:
    return "\n".join(
        [
            "# Reference",
            "",
            "Every public name of `fbuf` and `interop`, by topic. The build makes these pages from the docstrings.",
            "",
            "```{toctree}",
            ":maxdepth: 1",
            *(slug(topic) for topic in topics),
            "```",
            "",
        ]
    )


def texts() -> dict[str, str]:
    """The names of the files and their texts."""
    names = public_names.public_names()
    its_links = links(names)
    by_topic: dict[str, list[PublicName]] = {}
    for each in names:
        by_topic.setdefault(each.topic, []).append(each)
    found = {f"{each.name}.md": page(each, its_links[each.name], names) for each in names}
    found |= {f"{slug(topic)}.md": topic_page(topic, those) for topic, those in by_topic.items()}
    return found | {"index.md": index_page(by_topic)}


def write(folder: Path = FOLDER) -> None:
    """Write the files that differ; remove all others."""
    folder.mkdir(parents=True, exist_ok=True)
    found = texts()
    for old in folder.iterdir():
        if old.name not in found:
            old.unlink()
    for name, text in found.items():
        uses.write_changed(folder / name, text)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
