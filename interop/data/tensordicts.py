"""Fast paths through private attributes of tensordict; in versions without these attributes its public methods are used."""

import math
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase
from tensordict.utils import LinkedList
from torch import Tensor

_UNCHECKED: Any = getattr(TensorDict, "_new_unsafe", TensorDict)
_EMPTY: Any = _UNCHECKED(batch_size=torch.Size([]))
_NON_TENSOR = {"_tensordict", "_non_tensordict", "_is_initialized"}
_KNOWN_NON_TENSOR = vars(NonTensorData(0)).keys() == _NON_TENSOR
# The class of plain tensordicts, whose entries `held` gives; None where this version has other insides.
PLAIN: Any = TensorDict if vars(_EMPTY).keys() == {"_tensordict", "_batch_size", "_device", "_td_dim_names"} else None
_dtype = attrgetter("dtype")
held = attrgetter("_tensordict")  # of tensordicts, also of tensorclasses
_dim_names = attrgetter("_td_dim_names")


def shallow(data: TensorDictBase) -> TensorDictBase:
    """A shallow copy."""
    if type(data) is not TensorDict:
        return data.copy()
    names = data.names
    return unchecked(dict(data.items()), data.batch_size, data.device, names if any(names) else None)


def densely_stacked(items: Sequence[Any]) -> TensorDictBase | None:
    """Plain tensordicts stacked along a new first dim; None for other kinds, or where their layouts differ.

    `torch.stack` of the tensordicts takes twenty times as long.
    """
    first = items[0]
    shape = first.batch_size
    device = first.device
    if set(map(type, items)) != {PLAIN} or any(item.batch_size != shape for item in items):
        return None
    every = list(map(held, items))
    if len(set(map(len, every))) > 1:
        return None
    entries: dict[str, Any] = {}
    for key in every[0]:
        column = [tensordict.get(key) for tensordict in every]
        kinds = set(map(type, column))
        if kinds == {Tensor} and len(set(map(_dtype, column))) == 1:
            try:
                entries[key] = torch.stack(column)
            except RuntimeError:  # unlike shapes
                return None
        elif kinds != {TensorDict} or (nested := densely_stacked(column)) is None:
            return None
        else:
            entries[key] = nested
    size = torch.Size((len(items), *shape))
    names = first.names if _dim_names(first) else []
    return unchecked(entries, size, device, [None, *names]) if any(names) else of_entries(entries, size, device)


def unchecked(
    source: dict[str, Any], batch_size: torch.Size, device: torch.device | None, names: list[str | None] | None
) -> TensorDictBase:
    """A tensordict of entries that fit, without checks."""
    tensordict: TensorDictBase = _UNCHECKED(source=source, batch_size=batch_size, device=device, names=names)
    return tensordict


def entries_of(data: Any) -> dict[str, Any] | None:
    """The entries of a plain tensordict whose dims have no names, not to be changed; None for other data."""
    named = type(data) is not PLAIN or (_dim_names(data) and any(data.names))
    return None if named else held(data)


def of_entries(entries: Any, batch_size: torch.Size, device: torch.device | None) -> TensorDictBase:
    """`unchecked` for tensors without names, in a fifth of the time."""
    if PLAIN is None:
        return TensorDict(dict(entries), batch_size, device=device)
    tensordict: TensorDictBase = object.__new__(TensorDict)
    attributes = tensordict.__dict__
    attributes.update(_EMPTY.__dict__)
    attributes.update(_tensordict=dict(entries), _batch_size=batch_size, _device=device)
    return tensordict


def values_of(data: Any) -> list[Any]:
    """The values of `NonTensorData`, or of a stack of it in the order of its items."""
    if isinstance(data, NonTensorStack):
        parts = data.tensordicts if data.stack_dim == 0 else data.unbind(0)
        if _KNOWN_NON_TENSOR and len(data.batch_size) == 1 and set(map(type, parts)) == {NonTensorData}:
            return [vars(part)["_non_tensordict"]["data"] for part in parts]  # `.data` takes fifty times as long
        return [value for part in parts for value in values_of(part)]
    return [data.data] * math.prod(data.batch_size)


_STACK = vars(NonTensorStack(NonTensorData(0)))
_KNOWN_STACK = _STACK.keys() == {"_is_locked", "stack_dim", "_batch_size", "tensordicts", "hook_out", "hook_in"}


class UnreadStack(NonTensorStack):
    """A `NonTensorStack` of one dim whose values are read at first use; from then on it is a plain `NonTensorStack`."""

    _read: Callable[[], list[Any]]

    def __getattr__(self, name: str) -> Any:
        if name != "tensordicts":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        attributes = self.__dict__
        read = attributes.get("_read")
        if read is None:  # another thread was here
            return attributes["tensordicts"]
        items = attributes.setdefault("tensordicts", non_tensors(read()))
        lock = attributes.pop("_lock", None)
        attributes.pop("_read", None)
        self.__class__ = NonTensorStack
        if lock is not None:
            self._propagate_lock(lock[0], is_compiling=lock[1])
        return items

    def _propagate_lock(self, lock_parents_weakrefs: list[Any] | None = None, *, is_compiling: bool) -> None:
        if "_read" in self.__dict__:  # the values are locked when they are read
            self.__dict__.update(_is_locked=True, _lock=(lock_parents_weakrefs, is_compiling))
        else:
            super()._propagate_lock(lock_parents_weakrefs, is_compiling=is_compiling)

    def _propagate_unlock(self) -> list[Any]:
        if "_read" not in self.__dict__:
            unlocked: list[Any] = super()._propagate_unlock()
            return unlocked
        self.__dict__.pop("_lock", None)
        self.__dict__["_is_locked"] = None
        return []

    @property
    def is_locked(self) -> bool:
        """Whether the stack is locked."""
        if "_read" in self.__dict__:
            return bool(self.__dict__["_is_locked"])
        locked: bool = NonTensorStack.is_locked.fget(self)
        return locked

    @is_locked.setter
    def is_locked(self, value: bool) -> None:
        NonTensorStack.is_locked.fset(self, value)

    def tolist(self, **options: Any) -> list[Any]:  # those of this version of tensordict
        """The values, without a `NonTensorData` for each."""
        read = self.__dict__.get("_read")
        if read is None or any(value for name, value in options.items() if name != "as_linked_list"):
            return NonTensorStack.tolist(self, **options)
        values: list[Any] = read()
        return LinkedList(values, td=self) if options.get("as_linked_list") else values

    def __getstate__(self) -> dict[str, Any]:
        self.tensordicts  # noqa: B018
        return self.__dict__

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.tensordicts  # noqa: B018
        return self.__reduce_ex__(protocol)


def unread_stack(read: Callable[[], list[Any]], count: int) -> NonTensorStack:
    """A stack of `count` values, at least one, that `read` returns when they are looked at."""
    if not _KNOWN_STACK:
        return NonTensorStack(*non_tensors(read()))
    stack = UnreadStack.__new__(UnreadStack)
    stack.__dict__.update({name: value for name, value in _STACK.items() if name != "tensordicts"})
    stack.__dict__.update(_batch_size=torch.Size([count]), _read=read)
    return stack


def non_tensors(values: Sequence[Any]) -> list[NonTensorData]:
    """`NonTensorData` of each value, in a tenth of the time that the constructor takes."""
    if not _KNOWN_NON_TENSOR:
        return list(map(NonTensorData, values))
    attributes = vars(NonTensorData(None))
    items = []
    for value in values:
        item = NonTensorData.__new__(NonTensorData)
        vars(item).update(attributes, _non_tensordict={**attributes["_non_tensordict"], "data": value})
        items.append(item)
    return items
