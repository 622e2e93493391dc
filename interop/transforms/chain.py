"""A chain of transforms: forward when a buffer is read, backward when it is written."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX

from fbuf.checkpoint import CheckpointMismatch
from interop.checkpoint.state import EXACT, Apply, LoadOptions
from interop.checkpoint.values import NO_PICKLE, decode, encode, is_encoded
from interop.storages.ensemble import chains_are_made_by
from interop.transforms.transform import Transform


class Call(Transform):
    """A function or module as a transform: applied when reading, nothing when writing."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # what the user's function takes
        return self.function(*args, **kwargs)

    def inv(self, data: Any) -> Any:
        return data

    def __repr__(self) -> str:
        return f"{getattr(self.function, '__name__', self.function)}"


class Inverted(Transform):
    """A transform with its two directions exchanged."""

    def __init__(self, transform: nn.Module) -> None:
        super().__init__()
        if _keeping(transform):
            raise ValueError(
                f"{transform} keeps state of writes and cannot be inverted: it would take data that is read for new data"
            )
        self.transform = transform

    def forward(
        self, *args: Any, **kwargs: Any
    ) -> Any:  # what the transform takes, which names its arguments by its keys
        inverse: Any = self.transform.inv
        return inverse(*args, **kwargs)

    def inv(self, *args: Any, **kwargs: Any) -> Any:
        return self.transform(*args, **kwargs)

    def set_missing_tolerance(self, mode: bool = False) -> None:
        super().set_missing_tolerance(mode)
        tolerate(self.transform, mode)

    def __repr__(self) -> str:
        return f"Inverted({self.transform})"


class Compose(Transform):
    """Transforms in order: first to last when reading (`forward`), last to first when writing (`inv`).

    A transform is a `Transform`, any module with `forward` and `inv`, or any callable, which then only works on reading. A
    buffer runs the chain outside of its lock, from many threads, except for writes if a transform `keeps` state.

    Args:
        transforms: the transforms, or one list of them.

    ValueError for an object that cannot be called.
    """

    keeping: tuple[Transform, ...]
    """The transforms in it that keep state between writes."""

    def __init__(self, *args: Any, transforms: Sequence[Any] | None = None) -> None:  # any number of them, as torchrl's
        super().__init__()
        if transforms is None:
            transforms = args[0] if len(args) == 1 and isinstance(args[0], list) else args
        elif args:
            raise ValueError("give the transforms by position, or as transforms=[...], not both")
        self._hold([as_transform(transform, ValueError) for transform in transforms])

    def _hold(self, transforms: Sequence[nn.Module]) -> None:
        """Hold these transforms, in a new list: a thread may be going through the old one."""
        keeping = [keeper for transform in transforms for keeper in _keeping(transform)]
        if len(keeping) > len({id(keeper) for keeper in keeping}):
            raise ValueError(f"{keeping[0]} keeps state between writes and is twice in the chain: put in a clone()")
        for transform in transforms:
            if isinstance(transform, Transform):
                transform.set_container(self)
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
            for keeper in ready.keeping:
                keeper.reset_parent()
        else:
            added = [Inverted(ready) if invert else ready]
        self[index:index] = added

    def pop(self, index: int | None = None) -> Any:
        """Take out the last transform, or the one at index."""
        changed = list(self)
        removed = changed.pop(-1 if index is None else index)
        self._hold(changed)
        if isinstance(removed, Transform):
            removed.reset_parent()
        return removed

    def __setitem__(self, index: Any, transform: Any) -> None:
        changed = list(self)
        several = isinstance(index, slice)
        ready = [as_transform(one, ValueError) for one in (transform if several else [transform])]
        changed[index] = ready if several else ready[0]
        self._hold(changed)

    def __delitem__(self, index: Any) -> None:
        changed = list(self)
        del changed[index]
        self._hold(changed)

    def __getitem__(self, index: Any) -> Any:
        """One transform; a chain of clones for a slice."""
        if isinstance(index, slice):
            return type(self)(*(_cloned(transform) for transform in list(self)[index]))
        return self.transforms[index]

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Any]:
        return iter(self.transforms)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The data as all transforms change it."""
        if kwargs or len(args) != 1:
            raise TypeError("a chain takes one argument: which keys its transforms read depends on the data")
        data = args[0]
        for transform in self.transforms:
            data = transform(data)
        return data

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
        """Whether one of them keeps state between writes."""
        return bool(self.keeping)

    def snapshot(self) -> Any:
        return [keeper.snapshot() for keeper in self.keeping]

    def restore(self, snapshot: Any) -> None:
        for keeper, state in zip(self.keeping, snapshot, strict=True):
            keeper.restore(state)

    def forget(self) -> None:
        for keeper in self.keeping:
            keeper.forget()

    def outside(self, stored: TensorDictBase) -> TensorDictBase:
        """The opposite of `inv`, of each transform in order: see `Transform.outside`."""
        for transform in self.transforms:
            stored = transform.outside(stored) if isinstance(transform, Transform) else stored
        return stored

    def transform_env_device(self, device: object) -> object:
        """The device behind the last transform that moves data."""
        for transform in self.transforms:
            device = transform.transform_env_device(device) if isinstance(transform, Transform) else device
        return device

    def set_missing_tolerance(self, mode: bool = False) -> None:
        """Have all of them skip missing entries, or not."""
        super().set_missing_tolerance(mode)
        for transform in self.transforms:
            tolerate(transform, mode)

    def clone(self) -> Self:
        """A chain of clones that is part of nothing."""
        twin = super().clone()
        twin[:] = [_cloned(transform) for transform in self]
        return twin

    def state(self) -> dict[str, Any]:
        """The `state_dict` as a tree for a checkpoint. Functions have no state."""
        return encode(self.state_dict(), "the state_dict() of the transforms", remedy=NO_PICKLE)

    def with_state(self, tree: object, options: LoadOptions = EXACT) -> Apply:
        """Check a result of `state`, or of `state_dict`. The returned function puts it in; until then nothing changes.

        CheckpointMismatch if it is of other transforms.
        """
        where = "the state of the transforms"
        state_dict = decode(tree, options.allow_pickle, where) if is_encoded(tree) else tree
        if not isinstance(state_dict, Mapping):
            raise CheckpointMismatch(f"{where} is a dict, got {type(state_dict).__name__}")
        state = dict(state_dict)
        here = self.state_dict()
        wrong = [f"{key} is only in the checkpoint" for key in state.keys() - here.keys()]
        wrong += [f"{key} is only here" for key in here.keys() - state.keys()]
        for key in here.keys() & state.keys():
            one = state[key]
            other = here[key]
            alike = type(one) is type(other)
            if isinstance(one, Tensor) and isinstance(other, Tensor):
                alike = one.shape == other.shape and (options.cast or one.dtype == other.dtype)
            if not alike and not key.endswith(_EXTRA_STATE_KEY_SUFFIX):  # which the module checks itself, below
                wrong.append(f"{key} is {_described(one)}, here {_described(other)}")
        if wrong:
            raise CheckpointMismatch(f"{where} does not fit: {'; '.join(sorted(wrong))}")
        if any(not isinstance(value, Tensor) for value in state.values()) or any(map(_loads_itself, self.modules())):
            try:
                copy.deepcopy(self).load_state_dict(copy.deepcopy(state))
            except Exception as error:
                raise CheckpointMismatch(f"{where} is refused: {type(error).__name__}: {error}") from error
        return lambda: self.load_state_dict(state) and None

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._hold(list(self))

    def __repr__(self) -> str:
        inner = ",".join(f"\n        {transform}" for transform in self.transforms)
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


chains_are_made_by(as_chain)


def tolerate(transform: nn.Module, mode: bool) -> None:
    """Set whether a transform skips missing entries, if it is one that can."""
    set_tolerance = getattr(transform, "set_missing_tolerance", None)
    if callable(set_tolerance):
        set_tolerance(mode)


def _keeping(transform: nn.Module) -> tuple[Transform, ...]:
    if isinstance(transform, Compose):
        return transform.keeping
    return (transform,) if isinstance(transform, Transform) and transform.keeps else ()


def _cloned(transform: nn.Module) -> nn.Module:
    return transform.clone() if isinstance(transform, Transform) else copy.copy(transform)


def _described(value: Any) -> str:
    return f"{value.dtype} of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _loads_itself(module: nn.Module) -> bool:
    """Whether the module overrides a part of loading."""
    own = ("_load_from_state_dict", "set_extra_state", "load_state_dict")
    return any(getattr(type(module), name) is not getattr(nn.Module, name) for name in own)
