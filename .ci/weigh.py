"""What the sources weigh: lines a folder, reaches into private names, untyped parameters, large classes, names used twice.

`python .ci/weigh.py` prints it. With `--check` the exit status is 1 where one of LIMITS is passed: each may only fall. Lines
have no limit: code is as long as it takes to be read at the first reading.
"""

import ast
import inspect
import subprocess
import sys
from collections import Counter, defaultdict
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parent.parent
# Parts of the product that are not the buffers themselves; the weight of the core is counted without them.
BESIDE = ("specs", "maps", "llm", "datasets", "remote")
LIMITS = {"SLF001": 0, "ANN401": 1_530}


def lines(folder: Path) -> int:
    """Lines of the Python files below a folder, without those of BESIDE."""
    files = [each for each in folder.rglob("*.py") if not set(BESIDE) & set(each.relative_to(ROOT).parts)]
    return sum(len(each.read_bytes().splitlines()) for each in files)


def findings(rule: str) -> int:
    """How often ruff finds a rule broken in the sources, with its exceptions for single files switched off."""
    settings = ["--isolated", "--select", rule, "--output-format", "concise", "--exit-zero", "fbuf", "interop"]
    found = subprocess.run(
        [sys.executable, "-m", "ruff", "check", *settings], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return sum(rule in line for line in found.stdout.splitlines())


def classes() -> list[tuple[int, str]]:
    """The classes of the core with the number of their methods, inherited ones of ours included, the largest first."""
    sys.path.insert(0, str(ROOT))
    found: dict[str, int] = {}
    for path in [*ROOT.glob("fbuf/**/*.py"), *ROOT.glob("interop/**/*.py")]:
        parts = path.relative_to(ROOT).with_suffix("").parts
        if set(BESIDE) & set(parts) or parts[-1] == "__init__":
            continue
        module = import_module(".".join(parts))
        for name, each in vars(module).items():
            if inspect.isclass(each) and each.__module__ == module.__name__:
                ours = [base for base in each.__mro__ if base.__module__.split(".")[0] in ("fbuf", "interop")]
                methods = {key for base in ours for key, held in vars(base).items() if _is_method(held)}
                found[f"{module.__name__}.{name}"] = len(methods)
    return sorted(((count, name) for name, count in found.items()), reverse=True)


def _is_method(held: object) -> bool:
    return inspect.isfunction(held) or isinstance(held, property | classmethod | staticmethod)


def twice() -> dict[str, int]:
    """Names of classes that several modules of the core define, and of files in several folders."""
    names: dict[str, set[str]] = defaultdict(set)
    for path in [*ROOT.glob("fbuf/**/*.py"), *ROOT.glob("interop/**/*.py")]:
        if set(BESIDE) & set(path.parts):
            continue
        if path.name != "__init__.py":
            names[path.name].add(str(path))
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                names[node.name].add(str(path))
    return {name: len(places) for name, places in sorted(names.items()) if len(places) > 1}


def main() -> int:
    folders = {
        "fbuf": lines(ROOT / "fbuf"),
        "interop/*.py": sum(len(p.read_bytes().splitlines()) for p in ROOT.glob("interop/*.py")),
    }
    for folder in sorted(each for each in (ROOT / "interop").iterdir() if each.is_dir() and each.name not in BESIDE):
        folders[f"interop/{folder.name}"] = lines(folder)
    for name, count in folders.items():
        if count:
            print(f"{count:8,}  {name}")
    print(f"{lines(ROOT / 'fbuf') + lines(ROOT / 'interop'):8,}  core lines")
    print(f"{lines(ROOT / 'tests'):8,}  test lines")
    measured = {rule: findings(rule) for rule in LIMITS}
    for name, count in measured.items():
        print(f"{count:8,}  {name} (limit {LIMITS[name]:,})")
    if "--check" not in sys.argv:
        sizes = classes()
        print("Methods a class: " + ", ".join(f"{name} {count}" for count, name in sizes[:8]))
        named = Counter(twice())
        print(
            f"{len(named)} names with several homes: " + ", ".join(f"{name} {n}" for name, n in named.most_common(12))
        )
    passed = [name for name, count in measured.items() if count > LIMITS[name]]
    for name in passed:
        print(f"{name}: {measured[name]:,}, which must not pass {LIMITS[name]:,}", file=sys.stderr)
    return 1 if passed and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
