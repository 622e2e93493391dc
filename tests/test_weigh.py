"""What `.ci/weigh.py` counts, on small packages, each with one thing of each kind, and beside it what is not counted."""

from collections.abc import Callable
from pathlib import Path

import measures
import pytest
import weigh
from source_tree import SourceTree

Write = Callable[[dict[str, str]], SourceTree]

CONTRACTS = """
[[tool.importlinter.contracts]]
type = "forbidden"
source_modules = ["core"]
forbidden_modules = ["app", "torch"]

[[tool.importlinter.contracts]]
type = "layers"
containers = ["app"]
layers = ["top", "left | right", "low"]
"""


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes the modules of packages `app` and `core`, and reads them."""

    def written(texts: dict[str, str]) -> SourceTree:
        for name, text in texts.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return SourceTree(tmp_path, ("app", "core"))

    return written


@pytest.fixture
def layers(tmp_path: Path) -> measures.Layers:
    (tmp_path / "pyproject.toml").write_text(CONTRACTS)
    return measures.Layers.read(tmp_path)


@pytest.mark.parametrize(
    "back",
    [
        "from app.one import f",
        "from app import one",
        "from . import one",
        "from .one import f",
        "import app.one as first",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from app.one import f",
        "class A:\n    def g(self):\n        from app.one import f",
        "try:\n    import torch\nexcept ImportError:\n    from app.one import f",
        "import importlib\ndef g():\n    return importlib.import_module('app.one')",
    ],
)
def test_a_circle_of_files_is_found_wherever_its_imports_are(write: Write, back: str):
    tree = write(
        {"app/__init__.py": "", "app/one.py": "import app.two", "app/two.py": back, "app/three.py": "import app.one"}
    )
    assert measures.circles_of_files(tree) == [["app.one", "app.two"]]


def test_a_circle_of_files_through_others_is_one_circle(write: Write):
    texts = {f"app/m{n}.py": f"import app.m{(n + 1) % 4}" for n in range(4)}
    tree = write(texts | {"app/out.py": "import app.m0, app.end", "app/end.py": "import app.end"})
    assert measures.circles_of_files(tree) == [["app.m0", "app.m1", "app.m2", "app.m3"]]


def test_a_circle_leads_through_the_init_of_a_folder(write: Write):
    tree = write(
        {
            "app/low/__init__.py": "from app.low.a import A",
            "app/low/a.py": "from app.high import f\nclass A: ...",
            "app/high.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from app.low import A",
        }
    )
    (circle,) = measures.circles_of_files(tree)
    assert circle == ["app.high", "app.low", "app.low.a"]
    assert list(map(str, measures.closing(tree, circle))) == ["app.high -> app.low (line 3, for types)"]


def test_a_circle_of_folders_needs_no_circle_of_files(write: Write):
    tree = write(
        {
            "app/__init__.py": "import app.a.one, app.b.one, app.single",
            "app/a/one.py": "import app.b.one",
            "app/b/one.py": "",
            "app/b/two.py": "import app.a.one, app.single",
            "app/single.py": "",
        }
    )
    assert measures.circles_of_files(tree) == []
    assert measures.circles(measures.arrows_of_folders(tree)) == [["app.a", "app.b"]]


def test_arrows_upward_are_those_against_the_contracts(write: Write, layers: measures.Layers):
    tree = write(
        {
            "app/top/a.py": "import app.low.a, app.left.a, core.a",
            "app/left/a.py": "import app.left.b, app.low.a\ndef f():\n    import app.right.a",
            "app/left/b.py": "",
            "app/right/a.py": "",
            "app/low/a.py": "import app.beside\ndef f():\n    import app.top.a\ndef g():\n    import app.top.a",
            "app/beside.py": "import app.top.a",
            "core/a.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import app.low.a",
        }
    )
    assert [f"{each.importer} -> {each.imported}" for each in measures.upward(tree, layers)] == [
        "app.left.a -> app.right.a",
        "app.low.a -> app.top.a",
        "core.a -> app.low.a",
    ]


FOR_TYPES = "from typing import TYPE_CHECKING, Optional\nif TYPE_CHECKING:\n    from app.left import Stored\n"


@pytest.mark.parametrize(
    ("annotation", "found"),
    [
        ("'Stored'", True),
        ("Stored", True),
        ("Optional['Stored']", True),
        ("'Stored | None'", True),
        ("'list[Stored]'", False),
        ("int", False),
    ],
)
def test_a_companion_is_half_of_a_class_in_the_same_folder(
    write: Write, layers: measures.Layers, annotation: str, found: bool
):
    tree = write(
        {
            "app/left/__init__.py": "from app.left.stored import Stored",
            "app/left/stored.py": "class Stored: ...",
            "app/left/half.py": f"{FOR_TYPES}def f(stored: {annotation}, n: int): ...\ndef g(n: int, stored: Stored): ...",
        }
    )
    assert measures.companions(tree, layers) == ["app.left.half.f(Stored)"] * found


def test_a_companion_is_half_of_a_class_above_and_not_below(write: Write, layers: measures.Layers):
    tree = write(
        {
            "app/left/__init__.py": "class Stored: ...",
            "app/low/half.py": f"{FOR_TYPES}def f(stored: 'Stored'): ...",
            "app/top/caller.py": f"{FOR_TYPES}def f(stored: 'Stored'): ...",
            "app/left/caller.py": "from app.left import Stored\ndef f(stored: Stored): ...",
        }
    )
    assert measures.companions(tree, layers) == ["app.low.half.f(Stored)"]


def test_a_companion_may_import_its_class_where_the_class_imports_it_in_a_function(
    write: Write, layers: measures.Layers
):
    stored = "class Stored:\n    def m(self):\n        from app.left.half import f\n        return f(self)"
    half = "from app.left.stored import Stored\ndef f(stored: Stored): ..."
    tree = write({"app/left/stored.py": stored, "app/left/half.py": half})
    assert measures.companions(tree, layers) == ["app.left.half.f(Stored)"]


@pytest.mark.parametrize(
    "definition",
    [
        "from dataclasses import dataclass\n@dataclass(frozen=True)\nclass Stored: ...",
        "import dataclasses\n@dataclasses.dataclass\nclass Base: ...\nclass Stored(Base): ...",
        "from typing import Protocol\nclass Stored(Protocol): ...",
        "from typing import NamedTuple\nclass Stored(NamedTuple): ...",
        "Stored = int",
    ],
)
def test_functions_on_plain_data_and_protocols_are_no_companions(
    write: Write, layers: measures.Layers, definition: str
):
    tree = write({"app/left/__init__.py": definition, "app/left/f.py": f"{FOR_TYPES}def f(stored: 'Stored'): ..."})
    assert measures.companions(tree, layers) == []


def test_public_methods_are_those_of_our_base_classes_too(write: Write):
    tree = write(
        {
            "app/__init__.py": "from app.base import *",
            "app/base.py": "class Base(list):\n    def a(self): ...\n    def b(self): ...\n    def _c(self): ...",
            "app/made.py": "def made(name): return property(len)",
            "app/sub.py": (
                "import app\nfrom app.made import made\n"
                "class Sub(app.Base):\n"
                "    def b(self): ...\n"
                "    @property\n    def d(self): ...\n"
                "    def __len__(self): ...\n"
                "    e = f = d\n"
                "    g, h = made('g'), property(len)\n"
                "    constant, other = 3, dict()\n"
                "    field: int = 0\n"
            ),
        }
    )
    assert measures.public_methods(tree)["app.sub.Sub"] == set("abdefgh")


def test_names_with_two_meanings_are_those_with_homes_of_different_groups(write: Write):
    one = "class One: ...\nclass Two: ...\nclass Three: ..."
    tree = write({"app/a/x.py": one, "app/b/x.py": "class Two: ...\nclass Three: ...", "core/x.py": "class Three: ..."})
    same = {("app.a.x.Two", "app.b.x.Two"): "", ("app.a.x.Three", "core.x.Three"): ""}
    assert list(measures.with_two_meanings(measures.homes_of_classes(tree), ())) == ["Three", "Two"]
    assert list(measures.with_two_meanings(measures.homes_of_classes(tree), same)) == ["Three"]
    homes = measures.homes_of_files(tree)
    assert measures.with_two_meanings(homes, ()) == {"x.py": ["app/a/x.py", "app/b/x.py", "core/x.py"]}
    assert measures.with_two_meanings(homes, [("app/a/x.py", "app/b/x.py", "core/x.py")]) == {}


def test_types_imported_under_another_name_are_found(write: Write):
    tree = write(
        {
            "app/a.py": "class Share: ...\nPath = tuple[str, ...]\ndef f(): ...",
            "app/b.py": "from os import P as Q\nfrom app.a import Share as Part, f as g, Path as Path\nimport app.a as c",
        }
    )
    assert [(each.name, each.alias) for each in measures.renamed(tree)] == [("Share", "Part")]


def test_ruff_finds_private_names_and_untyped_parameters(tmp_path: Path):
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "a.py").write_text("from typing import Any\n\n\ndef f(x: Any) -> int:\n    return x._y\n")
    assert measures.places(tmp_path, ("SLF001", "ANN401"), ["app"]) == {
        "SLF001": ["app/a.py:5:12"],
        "ANN401": ["app/a.py:4:10"],
    }


def test_a_class_has_the_limit_of_its_family_or_its_debt(write: Write, monkeypatch: pytest.MonkeyPatch):
    methods = "".join(f"    def m{n}(self): ...\n" for n in range(3))
    tree = write(
        {"app/a.py": f"class Sampler:\n{methods}class Draws(Sampler):\n    def m(self): ...\nclass Other:\n{methods}"}
    )
    monkeypatch.setattr(weigh, "FAMILIES", {"samplers": (2, ("Sampler",))})
    monkeypatch.setattr(weigh, "OTHERS", 3)
    monkeypatch.setattr(weigh, "SAME_MEANING", {})
    monkeypatch.setattr(weigh, "DEBTS", {"app.a.Draws": 4})
    classes = weigh.of_classes(tree)
    (text,) = (each.excess() for each in classes.values() if each.excess())
    assert (
        "app.a.Sampler" in text
        and "3, which is 1 above the limit of 2. Remove methods" in text
        and "m0, m1, m2" in text
    )
    assert weigh.outdated(tree, classes) == []

    monkeypatch.setattr(weigh, "DEBTS", {"app.a.Other": 4, "app.b.Gone": 9})
    monkeypatch.setattr(weigh, "SAME_MEANING", {("app.a.Gone", "app.a.Other"): ""})
    lines = "\n".join(weigh.outdated(tree, classes))
    assert [word in lines for word in ("app.a.Other is no", "app.b.Gone is no", "app.a.Gone does not")] == [True] * 3


def test_a_passed_limit_says_by_how_much_and_a_loose_one_how_low_it_may_be():
    assert weigh.Measure("circles", 3, 3, "Move it.", ["a"]).excess() == ""
    assert weigh.Measure("circles", 5, 3, "Move it.", ["a", "b"]).excess() == (
        "circles: 5, which is 2 above the limit of 3. Move it.\n    a\n    b"
    )
    assert "lower it to 2" in str(weigh.Measure("circles", 2, 3, "Move it."))
