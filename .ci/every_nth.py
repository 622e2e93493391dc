"""A plugin of pytest: of all tests each n-th one runs, so that all files are visited; n is the variable EVERY_NTH."""

import os

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    every = int(os.environ["EVERY_NTH"])
    config.hook.pytest_deselected(items=[item for place, item in enumerate(items) if place % every])
    items[:] = items[::every]
