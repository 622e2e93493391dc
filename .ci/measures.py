"""What a reader must hold in mind, one function a measure. Each returns the names that are counted.

Imports under TYPE_CHECKING and in functions count as all others: a reader follows them too.
"""

import ast
import subprocess
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from source_tree import Function, Import, SourceTree, dotted, last, statements


@dataclass(frozen=True)
class Layers:
    """The order of the folders, as the import contracts of pyproject.toml have it."""

    rows: dict[str, int]  # by folder; 0 is the highest
    forbidden: frozenset[tuple[str, str]]  # a package, and one that it must not import

    @classmethod
    def read(cls, root: Path) -> "Layers":
        """The contracts of the pyproject.toml in a folder."""
        contracts = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
        rows: dict[str, int] = {}
        forbidden: set[tuple[str, str]] = set()
        for each in contracts:
            if each["type"] == "layers":
                for row, folders in enumerate(each["layers"]):
                    for name in folders.split("|"):  # folders of one layer
                        rows |= {f"{container}.{name.strip()}": row for container in each["containers"]}
            elif each["type"] == "forbidden":
                forbidden |= {(lower, upper) for lower in each["source_modules"] for upper in each["forbidden_modules"]}
        return cls(rows, frozenset(forbidden))

    def is_below(self, folder: str, other: str) -> bool:
        """Whether a folder is in a layer below that of another one. False if the contracts do not order them."""
        if (folder.partition(".")[0], other.partition(".")[0]) in self.forbidden:
            return True
        return folder in self.rows and other in self.rows and self.rows[folder] > self.rows[other]

    def is_upward(self, importer: str, imported: str) -> bool:
        """Whether an import goes to a higher layer, or to another folder of the same layer."""
        beside = importer != imported and self.rows.get(importer, -1) == self.rows.get(imported, -2)
        return beside or self.is_below(importer, imported)


def lines(files: Iterable[Path]) -> int:
    """The lines of some files."""
    return sum(len(each.read_bytes().splitlines()) for each in files)


def places(root: Path, rules: Collection[str], folders: Iterable[str]) -> dict[str, list[str]]:
    """The places where ruff finds rules broken, with its exceptions for single files switched off."""
    settings = ["--isolated", "--no-cache", "--select", ",".join(rules), "--output-format", "concise", "--exit-zero"]
    command = [sys.executable, "-m", "ruff", "check", *settings, *folders]
    found = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.splitlines()
    return {rule: [line.partition(" ")[0].strip(":") for line in found if f" {rule} " in line] for rule in rules}


def by_folder(places: Iterable[str]) -> list[str]:
    """How many of places in files are in each folder, the most first."""
    counts = Counter(str(Path(each).parent) for each in places)
    return [f"{folder}: {count}" for folder, count in counts.most_common()]


def public_methods(tree: SourceTree) -> dict[str, set[str]]:
    """The public methods and properties of each class, those inherited from our own classes included."""
    own = {name: _methods(tree, name) for name in tree.classes}
    with_inherited = {name: set[str]().union(*(own[each] for each in tree.ancestors(name))) for name in own}
    return {name: {each for each in methods if not each.startswith("_")} for name, methods in with_inherited.items()}


def _methods(tree: SourceTree, name: str) -> set[str]:
    """The methods and properties that the body of a class defines, also by an assignment."""
    methods = set[str]()
    for each in statements(tree.classes[name].body):
        if isinstance(each, Function):
            methods.add(each.name)
        elif isinstance(each, ast.Assign):
            for target in each.targets:
                pairs = zip(_elements(target), _elements(each.value), strict=False)
                methods |= {dotted(to) for to, value in pairs if _is_method(tree, name, value, methods)}
    return methods


def _elements(node: ast.expr) -> list[ast.expr]:
    return node.elts if isinstance(node, ast.Tuple) else [node]


def _is_method(tree: SourceTree, name: str, value: ast.expr, methods: set[str]) -> bool:
    """Whether a value in the body of a class is a method under another name, or made by `property` or by our functions."""
    if not isinstance(value, ast.Call):
        return dotted(value) in methods
    maker = dotted(value.func)
    makers = ("property", "cached_property", "classmethod", "staticmethod", "partialmethod")
    return last(maker) in makers or tree.resolve(tree.home(name).name, maker) in tree.functions


def circles(arrows: Iterable[tuple[str, str]]) -> list[list[str]]:
    """The largest groups whose members all lead to each other, directly or through others; the largest group first."""
    following: dict[str, set[str]] = defaultdict(set)
    for start, end in arrows:
        following[start].add(end)
    reached: dict[str, set[str]] = {}
    for start in following:
        found, left = set[str](), [start]
        while left:
            new = following.get(left.pop(), set()) - found
            found |= new
            left += new
        reached[start] = found
    groups = {tuple(sorted(end for end in ends if start in reached.get(end, ()))) for start, ends in reached.items()}
    return sorted((list(group) for group in groups if len(group) > 1), key=lambda group: (-len(group), group))


def circles_of_files(tree: SourceTree) -> list[list[str]]:
    """The modules that import each other, directly or through others."""
    return circles((each.importer, each.imported) for each in tree.imports())


def closing(tree: SourceTree, circle: list[str]) -> list[Import]:
    """The imports within a circle of modules that are not made when a module is imported: most circles need them."""
    return [each for each in tree.imports() if each.where and {each.importer, each.imported} <= set(circle)]


def arrows_of_folders(tree: SourceTree) -> Counter[tuple[str, str]]:
    """How many imports go from one folder to another.

    A file directly in a package counts as a folder, the `__init__.py` of a package does not.
    """
    folders = ((tree.modules[each.importer].folder, tree.modules[each.imported].folder) for each in tree.imports())
    return Counter((start, end) for start, end in folders if start != end and "." in start and "." in end)


def upward(tree: SourceTree, layers: Layers) -> list[Import]:
    """The imports against the order of the layers, one for each two modules."""
    found: dict[tuple[str, str], Import] = {}
    for each in tree.imports():
        if layers.is_upward(tree.modules[each.importer].folder, tree.modules[each.imported].folder):
            found.setdefault((each.importer, each.imported), each)
    return list(found.values())


def companions(tree: SourceTree, layers: Layers) -> list[str]:
    """The functions that are halves of a class in another file.

    They are outside of classes, and their first parameter is an object of a class that

    - has methods and state: see `has_state`,
    - is defined in the same folder, or in one that is not in a layer below,
    - is imported under TYPE_CHECKING, or is in a circle with this file: the class needs the function.
    """
    circle = {module: number for number, group in enumerate(circles_of_files(tree)) for module in group}
    found = []
    for name, function in tree.functions.items():
        module = tree.home(name)
        for_types = {each.alias for each in module.imports if each.where == "for types"}
        for written in _first_types(function):
            held = tree.resolve(module.name, written)
            home = tree.home(held) if held is not None and has_state(tree, held) else module
            if held is None or home is module or layers.is_below(home.folder, module.folder):
                continue
            in_circle = module.name in circle and circle[module.name] == circle.get(home.name)
            if in_circle or written.partition(".")[0] in for_types:
                found.append(f"{name}({last(held)})")
    return found


def has_state(tree: SourceTree, name: str) -> bool:
    """Whether objects have methods and state: of a class that is no dataclass, protocol, named tuple or enumeration."""
    if name not in tree.classes:
        return False
    family = [tree.classes[each] for each in tree.ancestors(name)]
    made_by = {last(dotted(_called(each))) for definition in family for each in definition.decorator_list}
    bases = {last(dotted(each)) for each in tree.classes[name].bases}
    plain = {"Protocol", "NamedTuple", "TypedDict", "Enum", "IntEnum", "StrEnum"}
    return not made_by & {"dataclass", "tensorclass"} and not bases & plain


def _called(node: ast.expr) -> ast.expr:
    return node.func if isinstance(node, ast.Call) else node


def _first_types(function: Function) -> list[str]:
    """The names in the annotation of the first parameter."""
    parameters = [*function.args.posonlyargs, *function.args.args]
    return _names(parameters[0].annotation) if parameters and parameters[0].annotation is not None else []


def _names(annotation: ast.expr) -> list[str]:
    """The names in an annotation that is a name, a string, or an `Optional` or union of these."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        return _names(ast.parse(annotation.value.strip(), mode="eval").body)
    if isinstance(annotation, ast.BinOp):
        return _names(annotation.left) + _names(annotation.right)
    if isinstance(annotation, ast.Subscript) and last(dotted(annotation)) in ("Optional", "Union"):
        return [name for each in _elements(annotation.slice) for name in _names(each)]
    return [dotted(annotation)]


def homes_of_classes(tree: SourceTree) -> dict[str, list[str]]:
    """The classes of each name."""
    homes: dict[str, list[str]] = defaultdict(list)
    for name in tree.classes:
        homes[last(name)].append(name)
    return homes


def homes_of_files(tree: SourceTree) -> dict[str, list[str]]:
    """The files of each name, without `__init__.py`."""
    homes: dict[str, list[str]] = defaultdict(list)
    for module in tree.modules.values():
        if module.path.name != "__init__.py":
            homes[module.path.name].append(module.path.as_posix())
    return homes


def with_two_meanings(homes: dict[str, list[str]], same: Collection[tuple[str, ...]]) -> dict[str, list[str]]:
    """The names with several homes, but for those whose homes all mean the same thing: a group of `same`."""
    meanings = {
        name: {next((group for group in same if each in group), (each,)) for each in homes[name]} for name in homes
    }
    return {name: homes[name] for name in sorted(homes) if len(meanings[name]) > 1}


def renamed(tree: SourceTree) -> list[Import]:
    """The imports of a class or type of ours under another name."""
    taken = [each for each in tree.imports() if each.name[:1].isupper()]
    return [each for each in taken if each.alias != each.name]
