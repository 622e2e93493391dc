"""What every test runs under: strict shapes, settled Hypothesis examples in CI, and each backend that JAX finds here."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator

import jax
import pytest
from hypothesis import settings

jax.config.update("jax_numpy_rank_promotion", "raise")

settings.register_profile("fbuf", deadline=None, max_examples=20, derandomize="CI" in os.environ)
settings.load_profile("fbuf")


@pytest.fixture(autouse=True)
def clean_environment() -> Iterator[None]:
    """tensordict leaves "None" in a variable that it does not understand when a child process imports it."""
    yield
    if os.environ.get("LAZY_LEGACY_OP") == "None":
        del os.environ["LAZY_LEGACY_OP"]


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
