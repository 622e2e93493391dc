"""Tests of folders collect garbage, each of them once or twice."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def cheap_collection(frozen: None) -> None:
    """What tests of other files left is frozen."""
