"""The base of transforms: entries to read and to write, in each of the two directions."""

import copy
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Self

from tensordict import TensorDictBase, is_tensor_collection, unravel_key
from tensordict.nn import dispatch
from tensordict.utils import NestedKey
from torch import Tensor, nn

from interop.transforms.entries import expect_tensor, expect_tensordict, missing, put

Keys = NestedKey | Sequence[NestedKey] | None


class KeyList:
    """An attribute that is a list of keys. A string or a tuple is one key, None is none."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type | None = None) -> list[NestedKey]:
        return instance.__dict__[self._name]

    def __set__(self, instance: Any, keys: Keys) -> None:
        instance.__dict__[self._name] = as_keys(self._name, keys)


class Transform(nn.Module):
    """Changes data: `forward` when a buffer is read, `inv` when it is written.

    A subclass changes one tensor at a time, in `_apply_transform` and `_inv_apply_transform`, or the tensordict as a whole,
    in `forward` and `_inv_call`. `forward` works in place; `inv` works on a shallow copy. Both also take the tensors by
    name and return those of the other keys: `t(pixels=x)`.

    A buffer calls a transform outside of its lock, from many threads. A transform that keeps state from one write to the
    next sets `keeps`: its writes come one at a time, and the state is restored where a write fails.

    Args:
        in_keys: entries that `forward` reads; a tuple is one nested key, a list holds keys.
        out_keys: entries that it writes; as many.
        in_keys_inv: entries that `inv` writes: their names in the storage.
        out_keys_inv: entries that it reads: their names outside.

    TypeError for wrong keys, ValueError for lists of different lengths.
    """

    invertible = False
    """Whether `inv` undoes `forward`."""
    keeps = False
    """Whether a write leaves state here for the next one; then there are `_kept` and `_keep`."""
    learns_from_steps = False
    """Whether the state in an environment is of the steps that it returned, not of writes."""

    in_keys, out_keys, in_keys_inv, out_keys_inv = KeyList(), KeyList(), KeyList(), KeyList()

    def __init__(
        self, in_keys: Keys = None, out_keys: Keys = None, in_keys_inv: Keys = None, out_keys_inv: Keys = None
    ) -> None:
        super().__init__()
        self.in_keys, self.out_keys = in_keys, out_keys
        self.in_keys_inv, self.out_keys_inv = in_keys_inv, out_keys_inv
        for one, other in (("in_keys", "out_keys"), ("in_keys_inv", "out_keys_inv")):
            first, second = getattr(self, one), getattr(self, other)
            if first and second and len(first) != len(second):
                raise ValueError(f"{one} and {other} must be as many: got {first} and {second}")
        self.missing_tolerance = False
        self.__dict__["_container"] = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The tensordict, transformed in place; or the tensors of `out_keys` for those of `in_keys`."""
        if len(args) == 1 and not kwargs and (is_tensor_collection(args[0]) or not self.in_keys):
            return self._call(args[0])
        return self._by_name(*args, **kwargs)

    @dispatch(source="in_keys", dest="out_keys", auto_batch_size=False)
    def _by_name(self, tensordict: TensorDictBase) -> Any:
        return self._call(tensordict)

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        """Transform a tensordict: the data of a buffer, or what a step of an environment returned."""
        return self._each(next_tensordict, self.in_keys, self.out_keys, self._apply_transform)

    def _apply_transform(self, obs: Any) -> Any:
        """One transformed tensor."""
        raise NotImplementedError(
            f"{type(self).__name__} changes no single tensors when it is read: write _apply_transform() or forward()"
        )

    @dispatch(source="out_keys_inv", dest="in_keys_inv", auto_batch_size=False)
    def inv(self, tensordict: TensorDictBase) -> Any:
        """The data to store; None to store nothing. The tensordict stays as it is."""
        return self._inv_call(tensordict.copy() if is_tensor_collection(tensordict) else tensordict)

    def _inv_call(self, tensordict: TensorDictBase) -> Any:
        """Transform each of `out_keys_inv` into the one of `in_keys_inv`, in place."""
        if not self.in_keys_inv:
            return tensordict
        return self._each(tensordict, self.out_keys_inv, self.in_keys_inv, self._inv_apply_transform)

    def _inv_apply_transform(self, state: Any) -> Any:
        """One tensor as it is to be stored."""
        if self.invertible:
            raise NotImplementedError(f"{type(self).__name__} is invertible: write _inv_apply_transform()")
        return state

    def on_step(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        """Transform the data that a step of an environment returned: `_call`, unless a subclass has only `forward`."""
        for kind in type(self).__mro__:
            if "_call" in vars(kind):
                break
            if "forward" in vars(kind):
                return self(next_tensordict)
        return self._call(next_tensordict)

    def inverts(self) -> bool:
        """Whether `inv` changes anything."""
        return self._overrides("inv") or self._overrides("_inv_call") or bool(self.in_keys_inv)

    def read_tensor(self, stored: Tensor) -> Tensor:
        """What reading makes of one stored tensor: itself where there is no `_apply_transform`."""
        return self._apply_transform(stored) if self._overrides("_apply_transform") else stored

    @classmethod
    def _overrides(cls, method: str) -> bool:
        return getattr(cls, method) is not getattr(Transform, method)

    def _kept(self) -> Any:
        """The state for the next write; later calls must not change it."""
        raise NotImplementedError(f"{type(self).__name__}.keeps is True: write _kept() and _keep()")

    def _keep(self, kept: Any) -> None:
        """Go back to a state that `_kept` returned."""
        raise NotImplementedError(f"{type(self).__name__}.keeps is True: write _kept() and _keep()")

    def _emptied(self) -> None:
        """The buffer was emptied: forget data that waits to be stored."""

    def snapshot(self) -> Any:
        """The state for the next write, as `restore` takes it."""
        return self._kept()

    def restore(self, snapshot: Any) -> None:
        """Go back to a snapshot: the write after it failed."""
        self._keep(snapshot)

    def forget(self) -> None:
        """The buffer was emptied."""
        self._emptied()

    def _each(self, data: Any, sources: Sequence[NestedKey], destinations: Sequence[NestedKey], function: Any) -> Any:
        """Set the result of a function for each entry: of all, or of none where one is refused."""
        expect_tensordict(type(self).__name__, data)
        if len(sources) != len(destinations):
            raise ValueError(
                f"{type(self).__name__} reads {list(sources)} and writes {list(destinations)}: as many keys are needed"
            )
        ready: dict[NestedKey, Any] = {}
        for source, destination in zip(sources, destinations, strict=True):
            # A key that is written here and read after is the new one.
            value = ready[source] if source in ready else self._get(data, source)
            if value is not None:
                ready[destination] = self._of_entry(data, source, function, value)
        put(type(self).__name__, data, ready.items())
        return data

    def _of_entry(self, data: TensorDictBase, key: NestedKey, function: Any, value: Any) -> Any:
        """The result of the function for the entry of a key."""
        return function(value)

    def _get(self, data: TensorDictBase, key: NestedKey) -> Any:
        """The entry; None for a missing one that may be missing, else KeyError."""
        value = data.get(key, None)
        if value is None and not self.missing_tolerance:
            raise missing(type(self).__name__, key, data)
        return value

    def set_missing_tolerance(self, mode: bool = False) -> None:
        """Skip missing entries, or raise KeyError for them."""
        self.missing_tolerance = bool(mode)

    @property
    def container(self) -> Any:
        """The buffer, or the outermost chain, that it is part of; None for nothing."""
        held = self._holder()
        outer = held.container if isinstance(held, Transform) else None
        return held if outer is None else outer

    @property
    def parent(self) -> None:
        """None: a buffer, unlike an environment, has no part that ends before a transform."""
        return

    def _holder(self) -> Any:
        reference = self.__dict__["_container"]
        return None if reference is None else reference()

    def set_container(self, container: Any) -> None:
        """Make this part of a chain or buffer. ValueError where it `keeps` state and is part of another one."""
        held = self._holder()
        if self.keeps and container is not None and held is not None and held is not container:
            raise ValueError(
                f"{type(self).__name__} keeps what was written last and is part of a {type(held).__name__} already: give "
                "each buffer a clone() of its own"
            )
        self.__dict__["_container"] = None if container is None else weakref.ref(container)

    def reset_parent(self) -> None:
        """Make this part of nothing."""
        self.__dict__["_container"] = None

    def clone(self) -> Self:
        """A copy that is part of nothing. Tensors are shared."""
        made = type(self).__new__(type(self))
        made.__dict__.update(self.__dict__, _container=None)
        for name in ("_parameters", "_buffers", "_modules"):
            made.__dict__[name] = copy.copy(self.__dict__[name])
        return made

    def __copy__(self) -> Self:
        return self.clone()

    def close(self) -> None:
        """Nothing has to be closed."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_container": None}

    def __repr__(self) -> str:
        return f"{type(self).__name__}(keys={self.in_keys})"


class EntriesTransform(Transform):
    """Changes single tensors. Errors name the entry that they are about.

    Args, of all subclasses that take them:
        in_keys: entries to change when a buffer is read; None for `default_key`.
        out_keys: where results go; None for `in_keys`.
        in_keys_inv: where results go when a buffer is written: their names in the storage.
        out_keys_inv: entries to change then; None for `in_keys_inv`.
    """

    default_key: str | None = None
    """The entry to read where no `in_keys` are given."""
    shown: tuple[str, ...] = ()
    """Attributes in the repr."""

    def __init__(
        self, in_keys: Keys = None, out_keys: Keys = None, in_keys_inv: Keys = None, out_keys_inv: Keys = None
    ) -> None:
        in_keys = self.default_key if in_keys is None else in_keys
        out_keys = in_keys if out_keys is None else out_keys
        super().__init__(in_keys, out_keys, in_keys_inv, in_keys_inv if out_keys_inv is None else out_keys_inv)

    def _of_entry(self, data: TensorDictBase, key: NestedKey, function: Any, value: Any) -> Tensor:
        expect_tensor(type(self).__name__, key, value)
        try:
            return function(value)
        except (TypeError, ValueError, NotImplementedError) as error:
            kind = TypeError if type(error) is NotImplementedError else type(error)  # torch's, for a dtype
            if kind not in (TypeError, ValueError):
                raise
            raise kind(f"{type(self).__name__}: {key!r}: {error}") from error

    def __repr__(self) -> str:
        options = "".join(f"{name}={getattr(self, name)}, " for name in self.shown)
        return f"{type(self).__name__}({options}keys={self.in_keys})"


def as_keys(name: str, keys: Any) -> list[NestedKey]:
    """A list of keys: a string or a tuple is one, None is none of them."""
    if keys is None:
        return []
    found = [keys] if isinstance(keys, str | tuple) else keys
    if not isinstance(found, Iterable) or not all(map(_is_key, found := list(found))):
        raise TypeError(f"{name} must be a key or a list of keys (strings, or tuples of them), got {keys!r}")
    return [unravel_key(key) for key in found]


def as_key(name: str, key: Any) -> NestedKey:
    """One key."""
    return as_keys(name, [key])[0]


def _is_key(key: Any) -> bool:
    return isinstance(key, str) or (isinstance(key, tuple) and len(key) > 0 and all(map(_is_key, key)))
