"""A chain of transforms: forward when a buffer is read, backward when it is written."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from fbuf.checkpoint import CheckpointMismatch
from interop.checkpoint.rule import EXACT, Rule


class Call(nn.Module):
    """A function or module as a transform: applied when reading, nothing when writing."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, data: Any) -> Any:
        return self.function(data)

    def inv(self, data: Any) -> Any:
        return data

    def __repr__(self) -> str:
        return f"{getattr(self.function, '__name__', self.function)}"


class Inverted(nn.Module):
    """A transform with its two directions exchanged."""

    def __init__(self, transform: nn.Module) -> None:
        super().__init__()
        self.transform = transform

    def forward(self, data: Any) -> Any:
        inverse: Any = self.transform.inv
        return inverse(data)

    def inv(self, data: Any) -> Any:
        return self.transform(data)

    def __repr__(self) -> str:
        return f"Inverted({self.transform})"


class Compose(nn.Module):
    """Transforms in order: first to last when reading (`forward`), last to first when writing (`inv`).

    A transform is a module with `forward` and `inv`, or any callable, which then only works on reading. A buffer runs it
    outside of its lock, from as many threads as read and write: one that keeps a state of its own has to guard it.
    """

    def __init__(self, *transforms: Any) -> None:
        super().__init__()
        self._hold([as_transform(each) for each in transforms])
        self.eval()

    def _hold(self, transforms: Sequence[nn.Module]) -> None:
        self.transforms = nn.ModuleList(transforms)
        self._count = len(transforms)  # asked for in every call of a buffer; a ModuleList takes a microsecond to find

    def append(self, transform: Any, *, invert: bool = False) -> None:
        """Add a transform at the end."""
        self.insert(len(self.transforms), transform, invert=invert)

    def insert(self, index: int, transform: Any, *, invert: bool = False) -> None:
        """Add a transform before the one at index."""
        if not -len(self.transforms) <= index <= len(self.transforms):
            raise IndexError(f"index {index} is out of range for {len(self.transforms)} transforms")
        ready = as_transform(transform)
        changed = list(self.transforms)
        changed.insert(index, Inverted(ready) if invert else ready)
        self._hold(changed)  # another list: a thread may be going through the old one
        self.eval()

    def forward(self, data: Any) -> Any:
        for transform in self.transforms:
            data = transform(data)
        return data

    def inv(self, data: Any) -> Any:
        """What is to be stored; None to store nothing."""
        for transform in reversed(self.transforms):
            if data is None:
                return None
            inverse: Any = transform.inv
            data = inverse(data)
        return data

    def _saved(self) -> dict[str, Any]:
        """A saved tree of the `state_dict`, which is that of the modules; functions have none."""
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

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        return self.transforms[index]

    def __repr__(self) -> str:
        inner = ",".join(f"\n        {each}" for each in self.transforms)
        return f"Compose({inner})"


def as_transform(transform: Any) -> nn.Module:
    """A module with `forward` and `inv`. RuntimeError for what cannot be called."""
    if isinstance(transform, nn.Module) and callable(getattr(transform, "inv", None)):
        return transform
    if not callable(transform):
        raise RuntimeError(f"a transform must be callable, got {type(transform).__name__}")
    return Call(transform)


def as_chain(transform: Any) -> Compose:
    """A chain of the transform, in eval mode; an empty one for None."""
    if isinstance(transform, Compose):
        return transform.eval()
    return Compose() if transform is None else Compose(transform)


def _kind(value: Any) -> tuple[Any, ...]:
    """What has to agree for one value to take the place of another."""
    return (value.dtype, tuple(value.shape)) if isinstance(value, Tensor) else (type(value).__name__,)


def _words(kind: tuple[Any, ...]) -> str:
    return f"{kind[0]} of shape {list(kind[1])}" if len(kind) > 1 else str(kind[0])


def _loads_itself(module: nn.Module) -> bool:
    """Whether code of the module's own takes part in loading."""
    own = ("_load_from_state_dict", "set_extra_state", "load_state_dict")
    return any(getattr(type(module), name) is not getattr(nn.Module, name) for name in own)
