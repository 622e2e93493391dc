"""What is saved of a chain of transforms, and checked before it is put in."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX

from fbuf.checkpoint import CheckpointMismatch
from interop.checkpoint.rule import EXACT, Rule


class States(nn.Module):
    """The `state_dict` of modules in a checkpoint; functions have none."""

    def _saved(self) -> dict[str, Any]:
        """A saved tree."""
        from interop.checkpoint.values import encode

        return encode(dict(self.state_dict()), "the state_dict() of the transforms")

    def _restoring(self, saved: Any, rule: Rule = EXACT) -> Callable[[], None]:
        """Check a saved tree against these modules; what is returned puts it in."""
        from interop.checkpoint.values import decode

        where = "the state of the transforms"
        return self._loading(decode(saved, rule, where), where, rule)

    def _loading(self, given: Any, where: str, rule: Rule) -> Callable[[], None]:
        """Check a `state_dict`: CheckpointMismatch where it is of other transforms. What is returned loads it."""
        if not isinstance(given, Mapping):
            raise CheckpointMismatch(f"{where} is a dict, got {type(given).__name__}")
        held, found = self.state_dict(), dict(given)
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
                copy.deepcopy(self).load_state_dict(copy.deepcopy(found))
            except Exception as error:
                raise CheckpointMismatch(f"{where} is refused: {type(error).__name__}: {error}") from error

        def put() -> None:
            self.load_state_dict(found)

        return put


def _kind(value: Any) -> tuple[Any, ...]:
    """What has to agree for one value to take the place of another."""
    return (value.dtype, tuple(value.shape)) if isinstance(value, Tensor) else (type(value).__name__,)


def _words(kind: tuple[Any, ...]) -> str:
    return f"{kind[0]} of shape {list(kind[1])}" if len(kind) > 1 else str(kind[0])


def _loads_itself(module: nn.Module) -> bool:
    """Whether code of the module's own takes part in loading."""
    own = ("_load_from_state_dict", "set_extra_state", "load_state_dict")
    return any(getattr(type(module), name) is not getattr(nn.Module, name) for name in own)
