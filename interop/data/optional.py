"""Libraries of extras, imported where they are first used."""

import importlib
from types import ModuleType


def required(name: str, extra: str) -> ModuleType:
    """The module of an optional library. ImportError that names the extra where it is not installed."""
    library = name.partition(".")[0]
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != library:
            raise
        raise ImportError(f"{library} is not installed: pip install 'fbuf[{extra}]'", name=library) from error
