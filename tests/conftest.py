"""What every test runs under: strict shapes, settled Hypothesis examples in CI, each backend that JAX finds here, and a
folder in which the workers of one run share compiled programs."""

import atexit
import contextlib
import ctypes
import gc
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator

if "JAX_COMPILATION_CACHE_DIR" not in os.environ:  # not a worker: these inherit it
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="fbuf-tests-")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)

import jax
import pytest
from hypothesis import settings

# Bytes of a worker, and more of them, from which on compiled programs are dropped.
MOST_MEMORY, MORE_MEMORY = 2**31, 2**29

jax.config.update("jax_numpy_rank_promotion", "raise")

settings.register_profile("fbuf", deadline=None, max_examples=8, derandomize="CI" in os.environ)
settings.load_profile("fbuf")


def pytest_collection_finish() -> None:
    """Garbage is looked for in what tests make: the million objects of modules and tests would take half a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def clean_environment() -> Iterator[None]:
    """tensordict leaves "None" in a variable that it does not understand when a child process imports it."""
    yield
    if os.environ.get("LAZY_LEGACY_OP") == "None":
        del os.environ["LAZY_LEGACY_OP"]


@pytest.fixture(autouse=True)
def bounded_memory() -> Iterator[None]:
    """JAX keeps compiled programs, 13 MiB each: 5 GiB over all tests. Those that are needed again are in the folder."""
    global _after
    yield
    if _memory() > max(MOST_MEMORY, _after + MORE_MEMORY):
        jax.clear_caches()
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        with contextlib.suppress(OSError, AttributeError):  # not glibc
            ctypes.CDLL(None).malloc_trim(0)
        _after = _memory()


_after = 0  # bytes of this worker, when programs were last dropped: other things grow too


def _memory() -> int:
    """The bytes that this process has in memory; 0 where that is not known."""
    with contextlib.suppress(OSError):
        return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _backends() -> list[str]:
    """Names of the backends; asked of another process, because importing the tests must not start JAX."""
    if not any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)):
        return ["cpu"]
    code = "import jax; print(*{device.platform for device in jax.devices()} | {'cpu'})"
    return sorted(
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    )


@pytest.fixture(scope="module", params=_backends())
def device(request: pytest.FixtureRequest) -> Iterator[jax.Device]:
    """Each device that this machine has, as the one where arrays are made."""
    chosen = jax.devices(request.param)[0]
    with jax.default_device(chosen):
        yield chosen
