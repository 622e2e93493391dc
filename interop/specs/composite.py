"""Specs of tensordicts."""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, reduce
from typing import Any, Self, TypeGuard

import torch
from tensordict import TensorDict, TensorDictBase, is_tensor_collection
from tensordict.base import _NESTED_TENSORS_AS_LISTS
from tensordict.utils import NestedKey
from torch import Size

from interop.data.tensordicts import of_entries, unchecked
from interop.specs import shapes, torchrl_classes
from interop.specs.masks import places_of, product_of
from interop.specs.non_tensor import NonTensor
from interop.specs.spec import TensorSpec, all_or_nothing, as_device, block
from interop.specs.views import View, path_of

_RESERVED = ("shape", "device", "dtype", "space")
_REQUIRED: Any = object()
Entry = TensorSpec | None
IsLeaf = Callable[[type], bool] | None


class Composite(TensorSpec):
    """Specs of the entries of a tensordict, by key; a Composite in a Composite for a nested tensordict.

    The shape is the batch size, a prefix of the shape of every entry. Shape operations and indices act on it.
    `is_in` ignores entries of a tensordict that have no spec. It raises KeyError for a missing entry.

    Args:
        *args: at most one dict or Composite of entries. A nested dict becomes a Composite; None is an entry of unknown
            kind.
        shape, batch_size: the batch size, under either name; () by default.
        device: the device of all entries; None allows several devices.
        data_cls: the tensorclass that `rand` and `zero` return.
        step_mdp_static: whether a step of an environment keeps the entries unchanged.
        names: the names of the dims.
        **specs: more entries.

    Raises:
        ValueError: the batch size is not a prefix of the shape of an entry.
        RuntimeError: an entry is on another device.
    """

    domain = "composite"
    dtype = None

    def __init__(
        self, *args: Any, shape: Any = None, batch_size: Any = None, device: Any = None, data_cls: Any = None,
        step_mdp_static: bool = False, names: Sequence[str | None] | None = None, **specs: Any,
    ) -> None:  # fmt: skip
        if shape is not None and batch_size is not None:
            raise TypeError("shape and batch_size are the same: give only one of them")
        if len(args) > 1:
            raise RuntimeError(f"Got multiple arguments, when at most one is expected for {type(self).__name__}")
        given = [torchrl_classes.converted(each) for each in args]
        if given and not isinstance(given[0], Mapping | Composite):
            raise RuntimeError(f"Expected a dictionary of specs, but got an argument of type {type(args[0]).__name__}")
        self._specs: dict[str, Entry] = {}
        size = batch_size if shape is None else shape
        self._start(shapes.as_shape(() if size is None else size), device, data_cls, step_mdp_static)
        for each in (*given, specs):
            for key, entry in each.items():
                self.set(key, entry)
        if names is not None:
            self.names = names

    def _start(self, shape: Size, device: Any, data_cls: Any = None, step_mdp_static: bool = False) -> None:
        """Set all attributes but the entries."""
        self._shape = shape
        self._device = None if device is None else as_device(device)
        self.data_cls, self.step_mdp_static = data_cls, step_mdp_static
        self._is_locked = False
        self.locked_by: list[weakref.ref[Any]] = []  # parents that were locked together with it, also of torchrl
        self._names: list[str | None] = [None] * len(self._shape)

    def _each(
        self, shape: Size, change: Callable[[Any], TensorSpec], names: Sequence[str | None] | None = None, **fields: Any
    ) -> Self:
        """An unlocked Composite of another shape, with `change` applied to each entry."""
        specs = {name: None if entry is None else change(entry) for name, entry in self._specs.items()}
        names = [None] * len(shape) if names is None else list(names)
        return self._replaced(_shape=shape, _specs=specs, _names=names, _is_locked=False, locked_by=[], **fields)

    # ------------------------------------------------------------------ shape, device, names

    @property
    def shape(self) -> Size:
        """The dims that all entries begin with; a value has them as its `batch_size`."""
        return self._shape

    @shape.setter
    def shape(self, value: Any) -> None:
        self._check_unlocked()
        with all_or_nothing(self):
            self._set_shape(shapes.as_shape(value))

    def _set_shape(self, new: Size) -> None:
        for key, entry in self.items():
            if isinstance(entry, Composite) and entry.shape[: len(new)] != new:
                entry.shape = new
            elif entry is not None and entry.shape[: len(new)] != new:
                raise ValueError(f"the shape {list(new)} does not begin that of {key!r}, {list(entry.shape)}")
        self._shape, self._names = new, [*self._names[: len(new)], *[None] * (len(new) - len(self._names))]

    batch_size = shape

    @property
    def device(self) -> torch.device | None:
        """The device of all entries; None if it differs."""
        return self._device

    @device.setter
    def device(self, value: Any) -> None:
        self._check_unlocked()
        if value is None and self._device is not None:
            raise RuntimeError("to let entries be on several devices, call clear_device_()")
        self.__dict__.update(vars(self.to(value)))

    def clear_device_(self) -> Self:
        """Remove the common device, also of nested Composites, in place."""
        self._check_unlocked()
        with all_or_nothing(self):
            self._device = None
            for entry in self.children():
                entry.clear_device_()
        return self

    @property
    def names(self) -> list[str | None]:
        """The names of the dims; None for an unnamed dim."""
        return list(self._names)

    @names.setter
    def names(self, value: Sequence[str | None] | None) -> None:
        new: list[str | None] = [None] * self.ndim if value is None else list(value)
        if len(new) != self.ndim:
            raise ValueError(f"needed is a name, or None, for each of {self.ndim} dims, got {value}")
        self._names = new
        for entry in self.values():
            if isinstance(entry, Composite):
                entry.names = [*new, *entry.names[self.ndim :]]

    def refine_names(self, *names: Any) -> Self:
        """Name unnamed dims; `...` skips dims. RuntimeError for a dim that has another name."""
        if names.count(...) == 1:
            at = names.index(...)
            names = (*names[:at], *self._names[at : self.ndim - (len(names) - at - 1)], *names[at + 1 :])
        if len(names) != self.ndim or any(old not in (None, new) for old, new in zip(self._names, names, strict=True)):
            raise RuntimeError(f"refine_names: cannot coerce the names {self._names} of a Composite to {names}")
        self.names = names
        return self

    # ------------------------------------------------------------------ entries

    def __getitem__(self, index: Any) -> Any:
        """The entry of a key, or the Composite for an index into the batch."""
        if not (isinstance(index, str) or (isinstance(index, tuple) and index and _is_path(index))):
            return self._selected(index)
        found: Any = self
        for name in path_of(index):
            if not isinstance(found, Composite):
                raise KeyError(f"{index!r}: there is no {name!r} in a {type(found).__name__}")
            found = found.entry(name)
        return found

    def entry(self, name: str) -> Entry:
        """The entry of a root key. KeyError if it is missing."""
        if name in _RESERVED:
            raise AttributeError(f"Composite has no key {name!r}")
        if name not in self._specs:
            raise KeyError(f"{name!r} is not one of {list(self._specs)}")
        return self._specs[name]

    def get(self, item: Any, default: Any = _REQUIRED) -> Any:
        """The entry of a key. If it is missing: the default, or KeyError without a default."""
        try:
            return self[path_of(item)]
        except KeyError:
            if default is _REQUIRED:
                raise
            return default

    def __setitem__(self, key: NestedKey, value: Any) -> None:
        first, *rest = path_of(key)
        self._check_unlocked()
        if not rest:
            self._put(first, self._fitted(first, value))
            return
        inner = self.get(first, None)
        holder = self.empty() if inner is None else inner
        if not isinstance(holder, Composite):
            raise TypeError(f"{key!r}: {first!r} is a {type(inner).__name__}, which has no entries")
        holder[tuple(rest)] = value
        if inner is None:
            self[first] = holder

    def set(self, name: Any, spec: Any) -> Self:
        """Set the entry of a key. RuntimeError if the Composite is locked."""
        self[name] = spec
        return self

    def _put(self, name: str, spec: Entry) -> None:
        self._specs[name] = spec

    def _fitted(self, name: str, value: Any) -> Entry:
        """The entry on the device of the Composite; its shape must begin with the batch size."""
        if name in _RESERVED:
            raise AttributeError(f"Composite[{name!r}] cannot be set: the name is an attribute")
        if isinstance(value, Mapping):
            value = Composite(value, shape=self.shape, device=self.device)
        if value is None:
            return None
        value = torchrl_classes.converted(value)
        if not isinstance(value, TensorSpec):
            raise TypeError(f"{name!r} must be a TensorSpec, a dict of them, or None, got {type(value).__name__}")
        ndim = self.ndim
        if value.shape[:ndim] != self.shape:
            if value.ndim >= ndim or not isinstance(value, Composite | NonTensor):
                text = f"The shapes of the spec {type(value).__name__} and the Composite mismatch: that of {name!r}"
                raise ValueError(f"{text}, {list(value.shape)}, must begin with {list(self.shape)}")
            value = value.clone()
            if isinstance(value, Composite):
                value.shape = self.shape
            value = value.expand(self.shape)
        if self.device is not None and value.device != self.device:
            if value.device is not None:
                raise RuntimeError(
                    f"All devices of Composite must match: {name!r} is on {value.device}, not {self.device}"
                )
            value = value.clone().to(self.device)
        return value

    def __delitem__(self, key: NestedKey) -> None:
        first, *rest = path_of(key)
        if rest:
            inner = self[first]
            if not isinstance(inner, Composite):
                raise KeyError(f"{key!r}: {first!r} is a {type(inner).__name__}, which has no entries")
            del inner[tuple(rest)]
            return
        self._check_unlocked()
        if first in _RESERVED:
            raise ValueError(f"Composite[{first!r}] cannot be deleted: the name is an attribute")
        self._drop(first)

    def _drop(self, name: str) -> None:
        if name not in self._specs:
            raise KeyError(f"{name!r} is not one of {list(self._specs)}")
        del self._specs[name]

    def pop(self, key: NestedKey, default: Any = _REQUIRED) -> Any:
        """Remove and return an entry. If it is missing: the default, or KeyError without a default."""
        if default is not _REQUIRED and key not in self.keys(True):
            return default
        found = self[path_of(key)]
        del self[key]
        return found

    def separates(self, *keys: Any, default: Any = None) -> Any:
        """Remove entries and return them as a Composite; `default` if none of them exists."""
        present = [key for key in keys if key in self.keys(True)]
        if not present:
            return default
        made = self.empty()
        with all_or_nothing(self):
            for key in present:
                made[key] = self.pop(key)
        return made

    def update(self, dict_or_spec: Any) -> Self:
        """Set all entries or, after an error, none. Composites are merged with Composites."""
        with all_or_nothing(self):
            for key, given in dict_or_spec.items():
                old, value = self.get(key, None), torchrl_classes.converted(given)
                if isinstance(old, Composite) and isinstance(value, Composite | Mapping):
                    old.update(value)
                else:
                    self[key] = value
        return self

    def empty(self) -> "Composite":
        """A Composite of the same shape and device, without entries."""
        return Composite(shape=self.shape, device=self.device, names=self.names)

    def is_empty(self, recurse: bool = False) -> bool:
        """Whether there are no entries; with `recurse`, empty Composites do not count as entries."""
        entries = [entry for _, entry in self._roots()]
        return not entries or (recurse and all(isinstance(each, Composite) and each.is_empty(True) for each in entries))

    def __len__(self) -> int:
        return len(self._specs)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._specs)

    def __contains__(self, key: object) -> bool:
        return key in self.keys(True)

    def _roots(self) -> Iterator[tuple[str, Entry]]:
        return iter(self._specs.items())

    def walk(
        self, include_nested: bool = False, leaves_only: bool = False, is_leaf: IsLeaf = None,
        step_mdp_static_only: bool = False,
    ) -> Iterator[tuple[tuple[str, ...], Entry]]:  # fmt: skip
        """Pairs of path and entry; arguments as for `keys`."""
        if step_mdp_static_only and self.step_mdp_static:
            return
        as_lists = is_leaf is _NESTED_TENSORS_AS_LISTS
        for path, entry in self._listed() if as_lists else [((name,), entry) for name, entry in self._roots()]:
            is_node = _is_composite(entry) and (as_lists or is_leaf is None or not is_leaf(type(entry)))
            is_whole = step_mdp_static_only and _is_composite(entry) and entry.step_mdp_static
            if is_node and include_nested:
                assert isinstance(entry, Composite)
                inner = entry.walk(True, leaves_only, is_leaf, step_mdp_static_only)
                yield from (((*path, *rest), each) for rest, each in inner)
            if is_whole or not (leaves_only and is_node):
                yield path, entry

    def _listed(self) -> "list[tuple[tuple[str, ...], Entry]]":
        """The paths and entries; the members of a lazy stack are entries named by their numbers."""
        found: list[tuple[tuple[str, ...], Entry]] = []
        for name, entry in self._roots():
            members = [((), None)] if entry is None else entry.unstacked()
            found += [((name, *path), each) for path, each in members]
        return found

    def keys(
        self, include_nested: bool = False, leaves_only: bool = False, *, is_leaf: IsLeaf = None,
        step_mdp_static_only: bool = False,
    ) -> View:  # fmt: skip
        """The keys in insertion order. The keys of a nested Composite precede its own key.

        Args:
            include_nested: include the keys of nested Composites, as tuples.
            leaves_only: exclude Composites.
            is_leaf: class of an entry -> whether it is a leaf; by default all classes but Composite. Tensordict's
                constant for lists makes each member of a lazy stack an entry, with its number as a name.
            step_mdp_static_only: Composites with `step_mdp_static` count as leaves, as a step of an environment keeps them
                whole: they are included, their entries are not. One with `step_mdp_static` has no keys itself.
        """
        walk = partial(self.walk, include_nested, leaves_only, is_leaf, step_mdp_static_only)
        return View(walk, lambda key, entry: key)

    def values(self, *args: Any, **kwargs: Any) -> View:
        """The entries; arguments as for `keys`."""
        return View(partial(self.walk, *args, **kwargs), lambda key, entry: entry)

    def items(self, *args: Any, **kwargs: Any) -> View:
        """Pairs of key and entry; arguments as for `keys`."""
        return View(partial(self.walk, *args, **kwargs), lambda key, entry: (key, entry))

    # ------------------------------------------------------------------ locks

    @property
    def is_locked(self) -> bool:
        """Whether the entries are locked against changes."""
        return self._is_locked

    @is_locked.setter
    def is_locked(self, value: bool) -> None:
        self.lock_() if value else self.unlock_()

    locked = is_locked

    def _check_unlocked(self) -> None:
        if self._is_locked:
            raise RuntimeError("Cannot modify a locked Composite.")

    def _lockable(self) -> "Iterator[Composite]":
        return (entry for entry in self.children() if isinstance(entry, Composite))

    def lock_(self, recurse: bool | None = None) -> Self:
        """Lock the entries against changes, also those of nested Composites unless `recurse` is False."""
        self._is_locked = True
        for entry in self._lockable() if recurse is not False else ():
            entry.locked_by.append(weakref.ref(self))
            entry.lock_()
        return self

    def unlock_(self, recurse: bool | None = None) -> Self:
        """Unlock the entries. RuntimeError for a nested Composite that was locked by its parent."""
        with all_or_nothing(self):
            self._check_unlock()
            self._is_locked = False
            for entry in self._lockable() if recurse is not False else ():
                entry.unlock_()
        return self

    def _propagate_lock(
        self, *, recurse: bool, lock_parents_weakrefs: Sequence[weakref.ref[Any]] | None = None, is_compiling: bool
    ) -> None:
        """Lock the entries. Torchrl's Composite calls it for its entries, with the parents that are locked."""
        self.locked_by.extend(lock_parents_weakrefs or ())
        self.lock_(recurse)

    def _propagate_unlock(self, recurse: bool) -> "list[Composite]":
        """Unlock the entries and return them. Torchrl's Composite calls `_check_unlock` of all of them afterwards."""
        self._is_locked = False
        inner = list(self._lockable()) if recurse else []
        return [found for entry in inner for found in (*Composite._propagate_unlock(entry, recurse), entry)]

    def _check_unlock(self) -> None:
        """RuntimeError if a parent that locked the Composite is locked still; otherwise the parents are forgotten."""
        if any((holder := each()) is not None and holder.is_locked for each in self.locked_by):
            raise RuntimeError("Cannot unlock a Composite that is part of a locked graph: unlock its outermost one")
        self.locked_by = []

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "locked_by": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        for entry in self._lockable() if self._is_locked else ():
            if entry.is_locked:
                entry.locked_by.append(weakref.ref(self))

    # ------------------------------------------------------------------ values

    def _made(self, how: str, lead: Size) -> Any:
        values = {name: getattr(entry, how)(lead) for name, entry in self._specs.items() if entry is not None}
        size = shapes.concrete((*lead, *self._shape))
        if any(self._names):
            made = unchecked(values, size, self._device, [*([None] * len(lead)), *self._names])
        else:
            made = of_entries(values, size, self._device)
        return made if self.data_cls in (None, type(made)) else self.data_cls.from_tensordict(made)

    def _update(self, data: TensorDictBase, how: str) -> TensorDictBase:
        lead = data.batch_size[: data.ndim - self.ndim]
        return data.update(getattr(self, how)(lead))

    def rand_update(self, data: TensorDictBase) -> TensorDictBase:
        """Set the entries of a tensordict to random values, in place. Entries without a spec are unchanged."""
        return self._update(data, "rand")

    def zeros_update(self, data: TensorDictBase) -> TensorDictBase:
        """Set the entries of a tensordict to zeros, in place. Entries without a spec are unchanged."""
        return self._update(data, "zero")

    def ones_update(self, data: TensorDictBase) -> TensorDictBase:
        """Set the entries of a tensordict to ones, in place. Entries without a spec are unchanged."""
        return self._update(data, "one")

    def _has(self, val: Any) -> bool:
        if self.data_cls not in (None, type(val)) or not (isinstance(val, Mapping) or is_tensor_collection(val)):
            return False
        return all(entry.is_in(_value_of(val, name)) for name, entry in self._roots() if _demands(entry))

    def project(self, val: Any) -> Any:
        """Project each entry that violates its spec, in place. Returns the same tensordict."""
        found = [(name, entry, _value_of(val, name)) for name, entry in self._roots() if _demands(entry)]
        for name, old, new in [(name, old, entry.project(old)) for name, entry, old in found]:  # all, then set
            if new is not old:
                val.set(name, new)
        return val

    def type_check(self, value: Any, selected_keys: Any = None) -> None:
        """TypeError for an entry of a wrong dtype.

        Args:
            value: a tensordict; or the value of one entry, whose key is then `selected_keys`.
            selected_keys: root keys, by default all.
        """
        if not (isinstance(value, Mapping) or is_tensor_collection(value)):
            if selected_keys is None:
                raise TypeError(
                    f"the value of an entry needs its key: type_check(value, key), got {type(value).__name__}"
                )
            entry = self[path_of(selected_keys)]
            if entry is not None:
                entry.type_check(value, selected_keys)
            return
        wanted = [selected_keys] if isinstance(selected_keys, str) else selected_keys
        for name, entry in self._roots():
            if _demands(entry) and (wanted is None or name in wanted):
                inner = _value_of(value, name)
                entry.type_check(inner) if isinstance(entry, Composite) else entry.type_check(inner, name)

    def encode(self, val: Any, *, ignore_device: bool = False) -> Any:
        """Encode a dict of raw values, nested dicts too, as a tensordict.

        Raises:
            KeyError: a key has no entry.
            RuntimeError: a value is None, or does not fit its spec; the message names the key.
        """
        made, fits, shape, ndim = {}, True, self._shape, len(self._shape)
        for key, value in val.items():
            if value is None:
                raise RuntimeError(f"Composite.encode cannot be used with missing values: {key!r} is None")
            entry = self._specs.get(key)
            if entry is None and self.entry(key) is None:
                raise KeyError(f"{key!r} has no spec (None), it cannot be encoded")
            assert entry is not None
            try:
                made[key] = each = entry.encode(value, ignore_device=ignore_device)
            except RuntimeError as error:
                raise RuntimeError(f"encoding {key!r} failed: {error}") from error
            fits = fits and each.shape[:ndim] == shape
        device = None if ignore_device else self._device
        if fits:
            return of_entries(made, shape, device)
        return TensorDict(made, batch_size=shape, device=device)  # raises an error that names the entry

    def to_numpy(self, val: Any, safe: bool | None = None) -> dict[str, Any]:
        self._assert_safe(val, safe)
        return {key: entry.to_numpy(_value_of(val, key), safe) for key, entry in self._roots() if entry is not None}

    def cardinality(self) -> Any:
        """The product of the entries' cardinalities; 0 without entries."""
        counts = [entry.cardinality() for entry in self.values() if entry is not None]
        return product_of(counts) if counts else 0

    def enumerate(self, use_mask: bool = False) -> Any:
        """All combinations of the entries' values: a tensordict [number, *shape]. The first key varies slowest."""
        every = {key: entry.enumerate(use_mask) for key, entry in self._roots() if entry is not None}
        places = places_of([len(each) for each in every.values()])
        made = {key: each[at] for (key, each), at in zip(every.items(), places, strict=True)}
        number = len(places[0]) if places else 0
        return TensorDict(made, batch_size=(number, *self.shape), device=self.device)

    # ------------------------------------------------------------------ shapes: of the batch dims

    def _expanded(self, new: Size) -> Self:
        ndim = self.ndim
        names = [*[None] * (len(new) - ndim), *self._names]
        return self._each(new, lambda entry: entry.expand((*new, *entry.shape[ndim:])), names)

    def _regrouped(self, new: Size, names: Sequence[str | None] | None = None) -> Self:
        ndim = self.ndim
        if new == self.shape:
            return self
        return self._each(new, lambda entry: entry.reshape((*new, *entry.shape[ndim:])), names)

    def squeeze(self, dim: int | None = None) -> Self:
        at = None if dim is None else shapes.dim_of(dim, self.ndim)
        kept = [place for place, size in enumerate(self.shape) if size != 1 or at not in (None, place)]
        gone = [place for place in reversed(range(self.ndim)) if place not in kept]
        if not gone:
            return self
        new, names = Size([self.shape[place] for place in kept]), [self._names[place] for place in kept]
        return self._each(new, lambda entry: reduce(lambda made, place: made.squeeze(place), gone, entry), names)

    def unsqueeze(self, dim: int) -> Self:
        new = shapes.unsqueezed(self.shape, dim)
        at = dim % len(new)
        return self._each(new, lambda entry: entry.unsqueeze(at), [*self._names[:at], None, *self._names[at:]])

    def _selected(self, index: Any) -> Self:
        index = shapes.normalized(self.shape, index)
        new = shapes.indexed(self.shape, index)
        names = _names_after(index, self._names, len(new))
        return self._each(new, lambda entry: entry[index], names, data_cls=None)

    def make_neg_dim(self, dim: int) -> None:
        self._check_unlocked()
        at = shapes.dim_of(dim, self.ndim)
        with all_or_nothing(self):
            for entry in self.children():
                entry.make_neg_dim(at)
        self._shape = Size([*self.shape[:at], -1, *self.shape[at + 1 :]])

    # ------------------------------------------------------------------ copies, comparison

    def to(self, dest: Any) -> Self:
        """Move every entry to a device, or cast it to a dtype. ValueError for any other argument."""
        if dest is not None and not isinstance(dest, str | int | torch.device | torch.dtype):
            raise ValueError(f"a Composite goes to a device or a dtype, got {dest!r}")
        is_dtype = isinstance(dest, torch.dtype)
        device = self._device if dest is None or is_dtype else as_device(dest)
        if device == self._device and not is_dtype:
            return self
        return self._each(self.shape, lambda entry: entry.to(dest), self._names, _device=device)

    def children(self) -> Iterator[Any]:
        return (entry for entry in self._specs.values() if entry is not None)

    def clone(self) -> Self:
        """An unlocked copy with clones of the entries."""
        return self._each(self.shape, lambda entry: entry.clone(), self._names)

    def _is_like(self, other: Any) -> bool:
        same = self.shape == other.shape and self.device == other.device and self.data_cls is other.data_cls
        return same and dict(self.items()) == dict(other.items())

    def __rich_repr__(self) -> Iterator[tuple[str, object]]:
        """The entries by key, shape and device, for tables: see `fbuf.shown`."""
        yield from self.items()
        yield from (("shape", list(self.shape)), ("device", str(self.device)))

    def __repr__(self) -> str:
        entries = [f"{key}: {entry}" for key, entry in self.items()]
        rest = [f"device={self.device}", f"shape={self.shape}", f"data_cls={self.data_cls}"]
        if not entries:
            return f"{type(self).__name__}({', '.join(rest)})"
        return block(type(self).__name__, [*entries, *rest])


def _demands(entry: Entry) -> TypeGuard[TensorSpec]:
    """Whether a value must be there: not for an entry of unknown kind, nor for an empty Composite."""
    return entry is not None and not (_is_composite(entry) and entry.is_empty())


def _is_composite(entry: Entry) -> TypeGuard[Composite]:
    """`isinstance`, which would ask an entry of another class for its `__class__`, too: see `TensorSpec`."""
    return issubclass(type(entry), Composite)


def _is_path(index: tuple[Any, ...]) -> bool:
    return all(isinstance(each, str) or (isinstance(each, tuple) and each and _is_path(each)) for each in index)


def _value_of(data: Any, name: str) -> Any:
    value = data.get(name, None)
    if value is None:
        raise KeyError(f"{name!r} is missing: there are the keys {sorted(map(str, data.keys()))}")
    return value


def _names_after(index: tuple[Any, ...], names: Sequence[str | None], ndim: int) -> list[str | None]:
    """The names of the dims after indexing; all None for an index with several arrays, which may move dims."""
    arrays = [part for part in index if not (part is None or isinstance(part, int | slice))]
    if len(arrays) > 1 or any(part.ndim != 1 for part in arrays):
        return [None] * ndim
    left = iter(names)
    named = [(part, None if part is None else next(left)) for part in index]
    return [name for part, name in named if not isinstance(part, int)]
