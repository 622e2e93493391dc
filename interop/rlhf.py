"""The earlier name of `interop.llm`."""

import sys
import warnings

from interop.llm import *  # noqa: F403
from interop.llm import __all__ as __all__
from interop.llm import dataset, prompt, reward, utils

warnings.warn("interop.rlhf is deprecated: use interop.llm", DeprecationWarning, stacklevel=2)

__path__: list[str] = []  # its modules are those of `interop.llm`
for _module, _name in ((dataset, "dataset"), (prompt, "prompt"), (reward, "reward"), (utils, "utils")):
    sys.modules[f"{__name__}.{_name}"] = _module
