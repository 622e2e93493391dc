"""Methods that `torch.compile` calls and does not trace: they take locks and work on memory that is not torch's."""

import os
from types import FunctionType

_KNOWN = True
try:
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
except ImportError:  # not a public interface of torch: without it methods are traced as far as that goes
    _KNOWN = False

_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep


def untraced(*classes: type) -> None:
    """Make every method and property of the classes, and of their bases in this package, a graph break.

    As `torch.compiler.disable` does, which puts a wrapper of 1 us around each call: here a call costs nothing more.
    """
    if not _KNOWN:
        return
    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)  # the function, and all that it calls
    for attribute in [attribute for one in classes for base in one.__mro__ for attribute in vars(base).values()]:
        for function in (attribute, *(getattr(attribute, name, None) for name in ("__func__", "fget", "fset"))):
            if isinstance(function, FunctionType) and function.__code__.co_filename.startswith(_PACKAGE):
                function.__dict__["_torchdynamo_disable"] = True
                set_code_exec_strategy(function.__code__, skip)
