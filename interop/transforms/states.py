"""The saved state of a chain of transforms, checked before it is loaded."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX
from torch.nn.parameter import is_lazy

from fbuf.checkpoint import CheckpointMismatch
from interop.checkpoint.state import EXACT, LoadOptions
from interop.checkpoint.values import decode, encode


class States(nn.Module):
    """The `state_dict` of modules in a checkpoint; functions have none."""

    def settled_state_dict(self) -> dict[str, Any]:
        """The `state_dict`, without buffers that have no shape yet."""
        return dict(_settled(self).state_dict())

    def saved(self) -> dict[str, Any]:
        """A saved tree."""
        return encode(self.settled_state_dict(), "the state_dict() of the transforms")

    def restoring(self, saved: Any, options: LoadOptions = EXACT) -> Callable[[], None]:
        """Check a saved tree against these modules; the returned function loads it."""
        where = "the state of the transforms"
        return self.restoring_dict(decode(saved, options.allow_pickle, where), where, options)

    def restoring_dict(self, given: Any, where: str, options: LoadOptions) -> Callable[[], None]:
        """Check a `state_dict`: CheckpointMismatch where it is of other transforms. The returned function loads it."""
        if not isinstance(given, Mapping):
            raise CheckpointMismatch(f"{where} is a dict, got {type(given).__name__}")
        settled, found = _settled(self), dict(given)
        here = settled.state_dict()
        wrong = [f"{key} is only in the checkpoint" for key in found.keys() - here.keys()]
        wrong += [f"{key} is only here" for key in here.keys() - found.keys()]
        for key in here.keys() & found.keys():
            one, other = found[key], here[key]
            alike = type(one) is type(other)
            if isinstance(one, Tensor) and isinstance(other, Tensor):
                alike = one.shape == other.shape and (options.cast or one.dtype == other.dtype)
            if not alike and not key.endswith(_EXTRA_STATE_KEY_SUFFIX):  # which the module checks itself, below
                wrong.append(f"{key} is {_words(one)}, here {_words(other)}")
        if wrong:
            raise CheckpointMismatch(f"{where} does not fit: {'; '.join(sorted(wrong))}")
        if any(not isinstance(value, Tensor) for value in found.values()) or any(map(_loads_itself, self.modules())):
            try:
                copy.deepcopy(settled).load_state_dict(copy.deepcopy(found))
            except Exception as error:
                raise CheckpointMismatch(f"{where} is refused: {type(error).__name__}: {error}") from error
        return lambda: _settled(self).load_state_dict(found) and None


def _settled(module: nn.Module) -> nn.Module:
    """The module without buffers that have no shape yet, of which torch makes no `state_dict`; all else is shared."""
    old, children = dict(module.named_buffers(recurse=False)), dict(module.named_children())
    lazy = {name for name, each in old.items() if is_lazy(each)}
    settled = {name: _settled(child) for name, child in children.items()}
    if not lazy and all(child is children[name] for name, child in settled.items()):
        return module
    made = object.__new__(type(module))
    made.__dict__.update(module.__dict__)
    made.__dict__["_buffers"] = {name: each for name, each in vars(module)["_buffers"].items() if name not in lazy}
    made.__dict__["_modules"] = {**vars(module)["_modules"], **settled}
    return made


def _words(value: Any) -> str:
    return f"{value.dtype} of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _loads_itself(module: nn.Module) -> bool:
    """Whether the module overrides a part of loading."""
    own = ("_load_from_state_dict", "set_extra_state", "load_state_dict")
    return any(getattr(type(module), name) is not getattr(nn.Module, name) for name in own)
