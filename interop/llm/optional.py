"""Libraries of the extra `llm`, imported where they are first used."""

import importlib
from typing import Any


def required(name: str) -> Any:
    """The module of an optional library. ImportError that names the extra where it is not installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ImportError(f"{name} is not installed: pip install 'fbuf[llm]'", name=name) from error
