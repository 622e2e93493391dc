"""What is saved of a chain of transforms, and checked before it is put in."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX
from torch.nn.parameter import is_lazy

from fbuf.checkpoint import CheckpointMismatch
from interop.checkpoint.rule import EXACT, Rule


class States(nn.Module):
    """The `state_dict` of modules in a checkpoint; functions have none."""

    def _state(self) -> dict[str, Any]:
        """The `state_dict`, without buffers that have no shape yet."""
        return dict(_settled(self).state_dict())

    def _saved(self) -> dict[str, Any]:
        """A saved tree."""
        from interop.checkpoint.values import encode

        return encode(self._state(), "the state_dict() of the transforms")

    def _restoring(self, saved: Any, rule: Rule = EXACT) -> Callable[[], None]:
        """Check a saved tree against these modules; what is returned puts it in."""
        from interop.checkpoint.values import decode

        where = "the state of the transforms"
        return self._loading(decode(saved, rule, where), where, rule)

    def _loading(self, given: Any, where: str, rule: Rule) -> Callable[[], None]:
        """Check a `state_dict`: CheckpointMismatch where it is of other transforms. What is returned loads it."""
        if not isinstance(given, Mapping):
            raise CheckpointMismatch(f"{where} is a dict, got {type(given).__name__}")
        settled, found = _settled(self), dict(given)
        held = settled.state_dict()
        wrong = [f"{key} is only in the checkpoint" for key in found.keys() - held.keys()]
        wrong += [f"{key} is only here" for key in held.keys() - found.keys()]
        for key in held.keys() & found.keys():
            if key.endswith(_EXTRA_STATE_KEY_SUFFIX):
                continue  # the module itself knows; it is asked below
            one, other = _kind(found[key]), _kind(held[key])
            if one != other and not (rule.cast and one[1:] == other[1:]):
                wrong.append(f"{key} is {_words(one)}, here {_words(other)}")
        if wrong:
            raise CheckpointMismatch(f"{where} does not fit: {'; '.join(sorted(wrong))}")
        if any(not isinstance(value, Tensor) for value in found.values()) or any(map(_loads_itself, self.modules())):
            try:
                copy.deepcopy(settled).load_state_dict(copy.deepcopy(found))
            except Exception as error:
                raise CheckpointMismatch(f"{where} is refused: {type(error).__name__}: {error}") from error

        def put() -> None:
            _settled(self).load_state_dict(found)

        return put


def _settled(module: nn.Module) -> nn.Module:
    """The module without the buffers that have no shape yet, of which torch makes no `state_dict`; all else is shared."""
    lazy = {name for name, each in module._buffers.items() if each is not None and is_lazy(each)}
    children = {name: child and _settled(child) for name, child in module._modules.items()}
    if not lazy and all(child is module._modules[name] for name, child in children.items()):
        return module
    made = object.__new__(type(module))
    buffers = {name: each for name, each in module._buffers.items() if name not in lazy}
    made.__dict__.update(module.__dict__, _buffers=buffers, _modules=children)
    return made


def _kind(value: Any) -> tuple[Any, ...]:
    """What has to agree for one value to take the place of another."""
    return (value.dtype, tuple(value.shape)) if isinstance(value, Tensor) else (type(value).__name__,)


def _words(kind: tuple[Any, ...]) -> str:
    return f"{kind[0]} of shape {list(kind[1])}" if len(kind) > 1 else str(kind[0])


def _loads_itself(module: nn.Module) -> bool:
    """Whether code of the module's own takes part in loading."""
    own = ("_load_from_state_dict", "set_extra_state", "load_state_dict")
    return any(getattr(type(module), name) is not getattr(nn.Module, name) for name in own)
