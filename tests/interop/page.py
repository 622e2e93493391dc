"""The code of docs/do/extending.md, for tests of the classes that it shows."""

import re
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

import interop

_BLOCKS = re.findall(
    r"```python\n(.*?)```", (Path(__file__).parents[2] / "docs" / "do" / "extending.md").read_text(), re.DOTALL
)


def names_of(word: str) -> dict[str, Any]:
    """The names that the only block with this word defines."""
    [block] = [block for block in _BLOCKS if word in block]
    names: dict[str, Any] = {"torch": torch, "TensorDict": TensorDict, "__name__": "page"}
    names |= {name: getattr(interop, name) for name in interop.__all__}
    exec("import tempfile", names)
    exec(block, names)
    return names
