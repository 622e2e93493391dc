"""The built package: what is in the wheel, what it needs, and what type checkers see of it."""

import json
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

import fbuf

ROOT = Path(__file__).parents[1]
SOURCES = ("fbuf", "interop")
BESIDE = ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "MANIFEST.in")
MOST_BYTES = 1_300_000  # of the wheel: source alone; lower it when code goes

# Refuses what the declared needs of fbuf do not bring, then uses the package from the folder.
WITH_JAX_ALONE = """
import importlib.metadata, re, sys
sys.path.insert(0, sys.argv[1])

def closure(names):
    found = set()
    while names:
        name = re.sub(r"[-_.]+", "-", names.pop()).lower()
        if name not in found:
            found.add(name)
            try:
                needed = importlib.metadata.requires(name) or []
            except importlib.metadata.PackageNotFoundError:
                continue
            names |= {re.match(r"[\\w.-]+", each)[0] for each in needed if "extra ==" not in each}
    return found

allowed = closure({"fbuf"})
homes = importlib.metadata.packages_distributions()

class Refusing:
    def find_spec(self, name, path=None, target=None):
        owners = {re.sub(r"[-_.]+", "-", each).lower() for each in homes.get(name.partition(".")[0], ())}
        if owners and not owners & allowed:
            raise ModuleNotFoundError(f"{name} is no part of what fbuf needs", name=name)

sys.meta_path.insert(0, Refusing())
try:
    import torch
except ModuleNotFoundError:
    pass
else:
    sys.exit("torch was to be refused")

import fbuf, jax, jax.numpy as jnp

assert fbuf.__file__.startswith(sys.argv[1]), fbuf.__file__
for name in fbuf.__all__:
    getattr(fbuf, name)
buffer = fbuf.Buffer(capacity=8, sampler=fbuf.Prioritized(alpha=0.6))
state, slots = jax.jit(buffer.extend)(buffer.init(jnp.zeros(2)), jnp.ones((4, 2)))
state, items, draw = buffer.sample(state, jax.random.key(0), 3)
fbuf.describe(buffer, state)
assert items.shape == (3, 2)
"""

# Each line that ends in "# wrong" has one mistake; the other ones have none.
PROGRAM = """
import fbuf
import interop

buffer = fbuf.Buffer(capacity=10, sampler=fbuf.Prioritized(alpha=0.6))
storage = interop.LazyTensorStorage(10)
fbuf.Buffer(capcity=10)  # wrong
fbuf.Prioritized(alpa=0.6)  # wrong
interop.LazyTensorStorage(10, divice="cpu")  # wrong
interop.RandomSampler(replacment=False)  # wrong
fbuf.Bufer(10)  # wrong
"""
WRONG = [number for number, line in enumerate(PROGRAM.splitlines(), 1) if line.endswith("# wrong")]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the package is built of: a build writes into its folder."""
    folder = tmp_path_factory.mktemp("sources")
    for name in SOURCES:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in BESIDE:
        shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def built(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the wheel, which is built of the source distribution, and with that one."""
    pytest.importorskip("build")
    folder = tmp_path_factory.mktemp("dist")
    ran("-m", "build", "--no-isolation", "--outdir", folder, sources)
    return folder


def ran(*arguments: object, **options: object) -> str:
    """What a Python prints that runs with these arguments; its errors are the error of the test."""
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, (done.stdout + done.stderr)[-3_000:]
    return str(done.stdout)


def test_the_wheel_has_each_file_of_the_packages_and_nothing_else(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    assert wheel.name == f"fbuf-{fbuf.__version__}-py3-none-any.whl"
    assert wheel.stat().st_size <= MOST_BYTES
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if ".dist-info/" not in name}
        (about,) = [name for name in archive.namelist() if name.endswith("/WHEEL")]
        assert "Root-Is-Purelib: true" in archive.read(about).decode()
    files = {path for name in SOURCES for path in (ROOT / name).rglob("*") if path.is_file()}
    assert inside == {path.relative_to(ROOT).as_posix() for path in files if "__pycache__" not in path.parts}
    assert {f"{name}/py.typed" for name in SOURCES} <= inside


def test_an_index_takes_both_distributions(built: Path) -> None:
    pytest.importorskip("twine")
    assert ran("-m", "twine", "--no-color", "check", "--strict", *built.iterdir()).count("PASSED") == 2


def test_the_installed_fbuf_needs_what_it_declares_and_no_torch(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    ran("-c", WITH_JAX_ALONE, tmp_path, cwd=tmp_path)


def environment(folder: Path) -> tuple[Path, Path]:
    """The Python of a new environment, and the folder for its packages."""
    ran("-m", "venv", "--without-pip", folder)
    return folder / "bin" / "python", Path(sysconfig.get_path("purelib", "venv", {"base": str(folder)}))


@pytest.fixture(scope="module", params=["wheel", "editable"])
def typed(request: pytest.FixtureRequest, sources: Path, built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that has the package alone, installed in one of two ways."""
    python, packages = environment(tmp_path_factory.mktemp(request.param))
    install = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile", "--ignore-installed"]
    given = [*built.glob("*.whl")] if request.param == "wheel" else ["--no-build-isolation", "--editable", sources]
    ran(*install, "--prefix", packages.parents[2], *given)
    return python


def mypy_errors(python: Path, program: Path) -> Mapping[int, str]:
    options = ["--ignore-missing-imports", "--cache-dir", program.parent / "cache", "--python-executable", python]
    command = [sys.executable, "-m", "mypy", *map(str, options), str(program)]
    done = subprocess.run(command, cwd=program.parent, capture_output=True, text=True)
    assert done.returncode == 1 and not done.stderr, done.stdout + done.stderr
    return {int(line): text for line, text in re.findall(rf"^{program.name}:(\d+): error: (.*)$", done.stdout, re.M)}


def pyright_errors(python: Path, program: Path) -> Mapping[int, str]:
    pytest.importorskip("pyright")
    if shutil.which("node") is None:
        pytest.skip("pyright would download node")
    command = [sys.executable, "-m", "pyright", "--pythonpath", str(python), "--outputjson", str(program)]
    done = subprocess.run(command, cwd=program.parent, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    told = json.loads(done.stdout)["generalDiagnostics"]
    return {each["range"]["start"]["line"] + 1: each["message"] for each in told if each["severity"] == "error"}


@pytest.mark.slow  # half a minute
@pytest.mark.parametrize("errors", [mypy_errors, pyright_errors])
def test_type_checkers_report_a_wrong_keyword(typed: Path, errors: object, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    assert callable(errors)
    found = errors(typed, program)
    assert sorted(found) == WRONG, found
