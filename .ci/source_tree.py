"""The sources as a tree of modules: their imports, wherever they are written, their classes and functions.

Everything is read with `ast`; nothing is imported. A module is named as Python names it (`interop.storages` is the file
`interop/storages/__init__.py`), a class or function by its module and its name. Only those of the packages are known.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Import:
    """What a module takes from a module of the packages: one name, or the module itself."""

    importer: str
    imported: str  # the module that is taken, or that the name is taken from
    name: str  # "" for the module itself, "*" for all names
    alias: str  # the name in the importer, "" for a module that is named in full
    line: int
    where: str  # "", "for types" (under TYPE_CHECKING) or "in a function"

    def __str__(self) -> str:
        return f"{self.importer} -> {self.imported} (line {self.line}{self.where and ', ' + self.where})"


@dataclass(frozen=True)
class Module:
    """A file."""

    name: str
    path: Path  # from the root
    imports: list[Import]

    @property
    def folder(self) -> str:
        """The child of a package that the module is in: a file directly in a package counts as a folder."""
        return ".".join(self.name.split(".")[:2])


class SourceTree:
    """The modules of some packages below a folder, and the classes and functions that are defined outside of others."""

    def __init__(self, root: Path, packages: tuple[str, ...]) -> None:
        self.modules: dict[str, Module] = {}
        self.classes: dict[str, ast.ClassDef] = {}
        self.functions: dict[str, Function] = {}
        texts: dict[str, bytes] = {}
        for path in sorted(path for package in packages for path in (root / package).rglob("*.py")):
            within = path.relative_to(root)
            name = ".".join(within.parent.parts if path.name == "__init__.py" else within.with_suffix("").parts)
            self.modules[name], texts[name] = Module(name, within, []), path.read_bytes()
        for name, module in self.modules.items():
            parsed = ast.parse(texts[name])
            module.imports.extend(self._imports(module, parsed.body, ""))
            if b"import_module" in texts[name]:
                module.imports.extend(self._imports_by_call(name, parsed))
            for each in statements(parsed.body):
                if isinstance(each, ast.ClassDef):
                    self.classes[f"{name}.{each.name}"] = each
                elif isinstance(each, Function):
                    self.functions[f"{name}.{each.name}"] = each

    def imports(self) -> Iterator[Import]:
        """All imports of one module by another."""
        for module in self.modules.values():
            yield from (each for each in module.imports if each.imported != module.name)

    def home(self, name: str) -> Module:
        """The module that defines a class or function."""
        return self.modules[name.rpartition(".")[0]]

    def resolve(self, module: str, name: str) -> str | None:
        """The class or function that a name means in a module, through the modules that pass it on. None for others."""
        return self._resolve(module, name.split("."), set())

    def ancestors(self, name: str) -> list[str]:
        """A class, and the classes of the packages that it inherits from."""
        found = [name]
        for each in found:  # which grows
            parents = [self.resolve(self.home(each).name, dotted(base)) for base in self.classes[each].bases]
            found += [parent for parent in parents if parent in self.classes and parent not in found]
        return found

    def _resolve(self, module: str, names: list[str], seen: set[tuple[str, ...]]) -> str | None:
        if module not in self.modules or not names or (module, *names) in seen:
            return None
        seen.add((module, *names))
        first, rest = names[0], names[1:]
        full = f"{module}.{first}"
        if full in self.classes or full in self.functions:
            return None if rest else full
        further = [(full, rest), (first, rest)]  # a module in this one, and a name in full
        for each in self.modules[module].imports:
            if each.name == "*":
                further.append((each.imported, names))
            elif each.alias == first:
                further.append((each.imported, [each.name, *rest] if each.name else rest))
        return next(filter(None, (self._resolve(*each, seen) for each in further)), None)

    def _imports(self, module: Module, body: list[ast.stmt], where: str) -> Iterator[Import]:
        for each in body:
            if isinstance(each, ast.Import):
                for taken in each.names:
                    if taken.name in self.modules:
                        yield Import(module.name, taken.name, "", taken.asname or "", each.lineno, where)
            elif isinstance(each, ast.ImportFrom):
                source = _source(module, each)
                for taken in each.names:
                    alias, inner = taken.asname or taken.name, f"{source}.{taken.name}"
                    if inner in self.modules:
                        yield Import(module.name, inner, "", alias, each.lineno, where)
                    elif source in self.modules:
                        yield Import(module.name, source, taken.name, alias, each.lineno, where)
            elif isinstance(each, Function):
                yield from self._imports(module, each.body, where or "in a function")
            elif isinstance(each, ast.If) and last(dotted(each.test)) == "TYPE_CHECKING":
                yield from self._imports(module, each.body, where or "for types")
                yield from self._imports(module, each.orelse, where)
            else:
                yield from self._imports(module, _branches(each), where)

    def _imports_by_call(self, module: str, parsed: ast.Module) -> Iterator[Import]:
        """The calls of `import_module` with the name of a module."""
        for each in ast.walk(parsed):
            if isinstance(each, ast.Call) and last(dotted(each.func)) == "import_module" and each.args:
                name = each.args[0].value if isinstance(each.args[0], ast.Constant) else None
                if isinstance(name, str) and name in self.modules:
                    yield Import(module, name, "", "", each.lineno, "in a function")


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements and those in their branches, without those in functions and classes."""
    for each in body:
        yield each
        if not isinstance(each, ast.ClassDef | Function):
            yield from statements(_branches(each))


def dotted(node: ast.expr) -> str:
    """A name as it is written, without the types in its brackets: "a.B" for `a.B[int]`. "" for other expressions."""
    if isinstance(node, ast.Subscript):
        return dotted(node.value)
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def last(name: str) -> str:
    """The part of a name after its last dot."""
    return name.rpartition(".")[2]


def _branches(statement: ast.stmt) -> list[ast.stmt]:
    """The statements in a statement."""
    parts = [statement, *getattr(statement, "handlers", []), *getattr(statement, "cases", [])]
    return [each for part in parts for name in ("body", "orelse", "finalbody") for each in getattr(part, name, [])]


def _source(module: Module, node: ast.ImportFrom) -> str:
    """The name of the module that names are imported from."""
    if not node.level:
        return node.module or ""
    package = module.name.split(".") + (["__init__"] if module.path.name == "__init__.py" else [])
    return ".".join([*package[: -node.level], *([node.module] if node.module else [])])
