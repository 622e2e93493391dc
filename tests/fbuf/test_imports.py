"""Imports point one way: `interop` to `fbuf` to `jax`. (The import contracts in pyproject.toml have the rest.)"""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import fbuf

ROOT = Path(__file__).parents[2]
LATER = {"torch", "tensordict", "torchrl", "interop", "flax", "chex", "h5py", "scipy.stats", "hypothesis"}


def run(code: str) -> list[str]:
    process = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    return process.stdout.split()


def imported(package: str) -> set[str]:
    """The packages that import statements anywhere in the sources of a package name."""
    text = "\n".join(path.read_text() for path in (ROOT / package).rglob("*.py"))
    assert text
    return {one or other for one, other in re.findall(r"^\s*(?:from (\w+)\S* import|import (\w+))", text, re.MULTILINE)}


def test_importing_fbuf_loads_nothing_optional_and_starts_no_device() -> None:
    started, *loaded = run(
        "import sys, fbuf; fbuf.Buffer; from jax._src.xla_bridge import backends_are_initialized; "
        "print(backends_are_initialized(), *sys.modules)"
    )
    assert started == "False"
    assert {"fbuf", "jax"} <= set(loaded)
    assert not LATER & set(loaded)


def test_files_are_read_without_jax() -> None:
    loaded = run("import sys, fbuf, fbuf.checkpoint; fbuf.checkpoint.Reading; print(*sys.modules)")
    assert "numpy" in loaded
    assert not {"jax", *LATER} & set(loaded)


def test_modules_and_names_are_found_without_an_import_of_their_own() -> None:
    found = run(
        "import fbuf; print(fbuf.writers.RoundRobin is fbuf.RoundRobin, callable(fbuf.plan), hasattr(fbuf, 'nothing'))"
    )
    assert found == ["True", "True", "False"]


def test_fbuf_imports_jax_and_jaxtyping_and_interop_never_torchrl() -> None:
    known = {"jax", "jaxtyping", "ml_dtypes", "numpy", "fbuf"}  # jax itself needs ml_dtypes and numpy
    assert imported("fbuf") <= known | sys.stdlib_module_names
    assert "torchrl" not in imported("interop")


def test_the_public_names_are_there_once() -> None:
    assert all(getattr(fbuf, name) is not None for name in fbuf.__all__)
    assert len(set(fbuf.__all__)) == len(fbuf.__all__)
    # Type checkers read the second list, `from fbuf import *` the first.
    assert [name for name in fbuf.__all__ if name != "__version__"] == importlib.import_module("fbuf.names").__all__
