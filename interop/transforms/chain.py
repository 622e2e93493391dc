"""A chain of transforms: forward when a buffer is read, backward when it is written."""

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

from torch import nn

from interop.transforms.states import States
from interop.transforms.transform import Transform


class Call(Transform):
    """A function or module as a transform: applied when reading, nothing when writing."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def _call(self, next_tensordict: Any) -> Any:
        return self.function(next_tensordict)

    def inv(self, data: Any) -> Any:
        return data

    def inverts(self) -> bool:
        return False

    def __repr__(self) -> str:
        return f"{getattr(self.function, '__name__', self.function)}"


class Inverted(Transform):
    """A transform with its two directions exchanged."""

    def __init__(self, transform: nn.Module) -> None:
        super().__init__()
        if _keeping(transform):
            raise ValueError(
                f"{transform} keeps what is written and cannot be inverted: it would take what is read for new data"
            )
        self.transform = transform

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        inverse: Any = self.transform.inv
        return inverse(*args, **kwargs)

    def inv(self, *args: Any, **kwargs: Any) -> Any:
        return self.transform(*args, **kwargs)

    def set_missing_tolerance(self, mode: bool = False) -> None:
        super().set_missing_tolerance(mode)
        tolerate(self.transform, mode)

    def __repr__(self) -> str:
        return f"Inverted({self.transform})"


class Compose(Transform, States):
    """Transforms in order: first to last when reading (`forward`), last to first when writing (`inv`).

    A transform is a `Transform`, any module with `forward` and `inv`, or any callable, which then only works on reading. A
    buffer runs it outside of its lock, from many threads, but for writes through one that `keeps` state.

    Args:
        transforms: the transforms, or one list of them.

    ValueError for an object that cannot be called.
    """

    def __init__(self, *args: Any, transforms: Sequence[Any] | None = None) -> None:
        super().__init__()
        if transforms is None:
            transforms = args[0] if len(args) == 1 and isinstance(args[0], list) else args
        elif args:
            raise ValueError("give the transforms by position, or as transforms=[...], not both")
        self._hold([as_transform(each, ValueError) for each in transforms])

    keeping: tuple[Transform, ...]
    """The transforms in it that keep state from one write to the next."""

    def _hold(self, transforms: Sequence[nn.Module]) -> None:
        """Hold these transforms, in a new list: a thread may be going through the old one."""
        keeping = [each for transform in transforms for each in _keeping(transform)]
        if len(keeping) > len({id(each) for each in keeping}):
            raise ValueError(f"{keeping[0]} keeps what was written last and is twice in the chain: put in a clone()")
        for each in transforms:
            if isinstance(each, Transform):
                each.set_container(self)
        self.transforms = nn.ModuleList(transforms)
        self.count = len(transforms)  # read in every call of a buffer; a ModuleList takes a microsecond
        self.__dict__["keeping"] = tuple(keeping)  # not as submodules, which they are already
        self.eval()

    def append(self, transform: Any, *, invert: bool = False) -> None:
        """Add a transform at the end, or those of a chain."""
        self.insert(len(self), transform, invert=invert)

    def insert(self, index: int, transform: Any, *, invert: bool = False) -> None:
        """Add a transform before the one at index, or those of a chain. ValueError for an index out of range."""
        if not -len(self) <= index <= len(self):
            raise ValueError(f"index {index} is out of range for {len(self)} transforms")
        ready = as_transform(transform)
        if isinstance(ready, Compose) and not invert:
            ready.set_container(self)  # refused if its transforms serve another buffer
            added: list[nn.Module] = list(ready)
            for each in ready.keeping:
                each.reset_parent()
        else:
            added = [Inverted(ready) if invert else ready]
        self[index:index] = added

    def pop(self, index: int | None = None) -> Any:
        """Take out the last transform, or the one at index."""
        changed = list(self)
        taken = changed.pop(-1 if index is None else index)
        self._hold(changed)
        if isinstance(taken, Transform):
            taken.reset_parent()
        return taken

    def __setitem__(self, index: Any, transform: Any) -> None:
        changed = list(self)
        several = isinstance(index, slice)
        ready = [as_transform(each, ValueError) for each in (transform if several else [transform])]
        changed[index] = ready if several else ready[0]
        self._hold(changed)

    def __delitem__(self, index: Any) -> None:
        changed = list(self)
        del changed[index]
        self._hold(changed)

    def __getitem__(self, index: Any) -> Any:
        """One transform; a chain of clones for a slice."""
        if isinstance(index, slice):
            return type(self)(*(_cloned(each) for each in list(self)[index]))
        return self.transforms[index]

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Any]:
        return iter(self.transforms)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != 1:
            raise TypeError("a chain takes one argument: which keys its transforms read depends on the data")
        data = args[0]
        for transform in self.transforms:
            data = transform(data)
        return data

    def _call(self, next_tensordict: Any) -> Any:
        return self.forward(next_tensordict)

    def inv(self, data: Any) -> Any:
        """The data to store; None to store nothing."""
        for transform in reversed(self.transforms):
            if data is None:
                return None
            inverse: Any = transform.inv
            data = inverse(data)
        return data

    @property
    def keeps(self) -> bool:  # type: ignore[override]
        """Whether one of them keeps state from one write to the next."""
        return bool(self.keeping)

    def _kept(self) -> Any:
        return [(each, each.snapshot()) for each in self.keeping]

    def _keep(self, kept: Any) -> None:
        for each, held in kept:
            each.restore(held)

    def _emptied(self) -> None:
        for each in self.keeping:
            each.forget()

    def set_missing_tolerance(self, mode: bool = False) -> None:
        """Have all of them skip missing entries, or not."""
        super().set_missing_tolerance(mode)
        for each in self.transforms:
            tolerate(each, mode)

    def clone(self) -> Self:
        """A chain of clones that is part of nothing."""
        made = super().clone()
        made[:] = [_cloned(each) for each in self]
        return made

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._hold(list(self))

    def __repr__(self) -> str:
        inner = ",".join(f"\n        {each}" for each in self.transforms)
        return f"Compose({inner or chr(10)})"


def as_transform(transform: Any, error: type[Exception] = RuntimeError) -> nn.Module:
    """A module with `forward` and `inv`. An error for an object that cannot be called."""
    if isinstance(transform, nn.Module) and callable(getattr(transform, "inv", None)):
        return transform
    if not callable(transform):
        raise error(f"transform must be either a Transform instance or a callable, got {type(transform).__name__}")
    return Call(transform)


def as_chain(transform: Any) -> Compose:
    """A chain of the transform, in eval mode; an empty one for None."""
    if isinstance(transform, Compose):
        return transform.eval()
    return Compose() if transform is None else Compose(as_transform(transform))


def tolerate(transform: nn.Module, mode: bool) -> None:
    """Have a transform skip missing entries, or not; other modules do as they do."""
    set_tolerance = getattr(transform, "set_missing_tolerance", None)
    if callable(set_tolerance):
        set_tolerance(mode)


def _keeping(transform: nn.Module) -> tuple[Transform, ...]:
    if isinstance(transform, Compose):
        return transform.keeping
    return (transform,) if isinstance(transform, Transform) and transform.keeps else ()


def _cloned(transform: nn.Module) -> nn.Module:
    return transform.clone() if isinstance(transform, Transform) else copy.copy(transform)
