"""Tests of folders collect garbage, each of them once or twice: cheap where what tests of other files left is frozen."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def frozen() -> Iterator[None]:
    """Nothing that is there before the first test of a file is looked through."""
    gc.collect()
    gc.freeze()
    yield
