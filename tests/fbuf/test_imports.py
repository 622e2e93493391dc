"""Imports point one way: `interop` to `fbuf` to `jax`."""

import ast
import subprocess
import sys
from pathlib import Path

import fbuf

ROOT = Path(__file__).parents[2]
LATER = {"torch", "tensordict", "torchrl", "interop", "flax", "chex", "h5py", "scipy.stats", "hypothesis"}


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def imported(path: Path) -> set[str]:
    """The packages that a file imports anywhere in it, also by `import_module` or `__import__` of a plain name."""
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module or "" if node.level == 0 else path.relative_to(ROOT).parts[0])
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            names += [str(node.args[0].value)] if called in ("import_module", "__import__") else []
    return {name.partition(".")[0] for name in names}


def sources(package: str) -> list[Path]:
    found = sorted((ROOT / package).rglob("*.py"))
    assert found, f"no sources under {ROOT / package}"
    return found


def test_importing_fbuf_loads_neither_torch_nor_what_is_optional() -> None:
    loaded = run("import sys, fbuf; print(*sys.modules)").split()
    assert "fbuf" in loaded
    assert "jax" in loaded
    assert not LATER & set(loaded)


def test_importing_fbuf_starts_no_device() -> None:
    code = "import fbuf; from jax._src.xla_bridge import backends_are_initialized as started; print(started())"
    assert run(code).strip() == "False"


def test_fbuf_imports_jax_and_jaxtyping_and_nothing_else() -> None:
    known = {"jax", "jaxtyping", "ml_dtypes", "numpy", "fbuf"}  # jax itself needs ml_dtypes and numpy
    others = {path: imported(path) - set(sys.stdlib_module_names) - known for path in sources("fbuf")}
    assert not {path: found for path, found in others.items() if found}


def test_interop_never_imports_torchrl() -> None:
    assert not [path for path in sources("interop") if "torchrl" in imported(path)]


def test_the_public_names_are_there_once() -> None:
    assert all(getattr(fbuf, name) is not None for name in fbuf.__all__)
    assert len(set(fbuf.__all__)) == len(fbuf.__all__)
