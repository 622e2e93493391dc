"""The base of transforms: entries to read and to write in each of the two directions."""

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Self

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase, is_non_tensor, is_tensor_collection, unravel_key
from tensordict.nn import dispatch
from tensordict.utils import NestedKey
from torch import Size, Tensor, nn

from interop.data.keys import as_path, known_keys

Keys = NestedKey | Sequence[NestedKey] | None


class Transform(nn.Module):
    """Changes data: `forward` when a buffer is read, `inv` when it is written.

    A subclass changes one tensor at a time, in `_apply_transform` and `_inv_apply_transform`, or the whole tensordict, in
    `forward` and `_inv_call`. `forward` works in place; `inv` works on a shallow copy. Both also take the tensors by name
    and return those of the other keys: `t(pixels=x)`.

    A buffer calls a transform outside of its lock, from many threads. A transform whose state changes with writes sets
    `keeps`: its writes run one by one, and the state is restored if a write fails.

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
    """Whether a write changes the state; then there are `snapshot` and `restore`."""
    learns_from_steps = False
    """Whether the state in an environment is of the steps that it returned, not of writes."""

    def __init__(
        self, in_keys: Keys = None, out_keys: Keys = None, in_keys_inv: Keys = None, out_keys_inv: Keys = None
    ) -> None:
        super().__init__()
        self.in_keys = as_keys("in_keys", in_keys)
        self.out_keys = as_keys("out_keys", out_keys)
        self.in_keys_inv = as_keys("in_keys_inv", in_keys_inv)
        self.out_keys_inv = as_keys("out_keys_inv", out_keys_inv)
        for one, other in (("in_keys", "out_keys"), ("in_keys_inv", "out_keys_inv")):
            first = getattr(self, one)
            second = getattr(self, other)
            if first and second and len(first) != len(second):
                raise ValueError(f"{one} and {other} must be as many: got {first} and {second}")
        self.missing_tolerance = False
        self.__dict__["_container"] = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # the tensors of `in_keys`, by these names
        """The tensordict, transformed in place; or the tensors of `out_keys` for those of `in_keys`."""
        if len(args) == 1 and not kwargs and (is_tensor_collection(args[0]) or not self.in_keys):
            return self._call(args[0])
        return self._by_name(*args, **kwargs)

    @dispatch(source="in_keys", dest="out_keys", auto_batch_size=False)
    def _by_name(self, tensordict: TensorDictBase) -> Any:
        return self._call(tensordict)

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        """Transform a tensordict: the data of a buffer, or the result of a step of an environment."""
        return self._for_each_entry(next_tensordict, self.in_keys, self.out_keys, self._apply_transform)

    def _apply_transform(self, obs: Any) -> Any:
        """One transformed tensor."""
        raise NotImplementedError(
            f"{type(self).__name__} changes no single tensors when it is read: write _apply_transform() or forward()"
        )

    @dispatch(source="out_keys_inv", dest="in_keys_inv", auto_batch_size=False)
    def inv(self, tensordict: TensorDictBase) -> Any:
        """The data to store; None to store nothing. The tensordict is not changed."""
        return self._inv_call(tensordict.copy() if is_tensor_collection(tensordict) else tensordict)

    def _inv_call(self, tensordict: TensorDictBase) -> Any:
        """Transform each of `out_keys_inv` into the one of `in_keys_inv`, in place."""
        if not self.in_keys_inv:
            return tensordict
        return self._for_each_entry(tensordict, self.out_keys_inv, self.in_keys_inv, self._inv_apply_transform)

    def _inv_apply_transform(self, state: Any) -> Any:
        """One tensor to store."""
        if self.invertible:
            raise NotImplementedError(f"{type(self).__name__} is invertible: write _inv_apply_transform()")
        return state

    def on_step(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        """Transform the result of a step of an environment: `_call`, unless a subclass has only `forward`."""
        only_forward = self._overrides("forward") and not self._overrides("_call")
        return self(next_tensordict) if only_forward else self._call(next_tensordict)

    def read_tensor(self, stored: Tensor) -> Tensor:
        """The result of `_apply_transform`; the tensor itself if there is no such method."""
        return self._apply_transform(stored) if self._overrides("_apply_transform") else stored

    def _overrides(self, method: str) -> bool:
        """Whether a subclass defines a method."""
        return getattr(type(self), method) is not getattr(Transform, method)

    def transform_observation_spec(self, spec: object) -> object:
        """The spec of the data that is read, of a Composite or of the entry of the one key in `in_keys`.

        A copy of the transform is run on zeros. An entry that is not changed, or only renamed, keeps its spec; a changed one
        becomes unbounded, or a choice of two for bools. Entries without a spec are skipped.
        """
        from interop.specs.changed import changed  # here: programs without specs do not import them

        twin = copy.deepcopy(self)
        twin.set_missing_tolerance(True)
        return changed(spec, twin, self.in_keys)

    transform_reward_spec = transform_done_spec = transform_observation_spec

    def transform_action_spec(self, spec: object) -> object:
        """The spec of the data that is to be written, `out_keys_inv`, for the spec of what `inv` makes of it, `in_keys_inv`.

        Found as by `transform_observation_spec`, with `_apply_transform` as the opposite of the inverse: an entry keeps its
        spec if there is none.
        """
        from interop.specs.changed import changed

        return changed(spec, copy.deepcopy(self).outside, self.in_keys_inv)

    transform_state_spec = transform_action_spec

    def outside(self, stored: TensorDictBase) -> TensorDictBase:
        """Change entries that `inv` writes back to those that it reads, in place. Missing ones are skipped."""
        for inner, outer in zip(self.in_keys_inv, self.out_keys_inv, strict=False):
            value = stored.get(inner, None)
            if value is not None:
                stored.set(outer, self.read_tensor(value))
                if outer != inner:
                    del stored[inner]
        return stored

    def transform_env_batch_size(self, batch_size: Size) -> Size:
        """The batch size of the data that is read: unchanged."""
        return batch_size

    def transform_env_device(self, device: object) -> object:
        """The device of the data that is read: that of the transform, if it moves data to one."""
        own = getattr(self, "device", None)
        return device if own is None else torch.device(own)

    def snapshot(self) -> Any:
        """The state, as `restore` takes it. Later writes must not change it."""
        raise NotImplementedError(f"{type(self).__name__}.keeps is True: write snapshot() and restore()")

    def restore(self, snapshot: Any) -> None:
        """Go back to a snapshot: the write after it failed."""
        raise NotImplementedError(f"{type(self).__name__}.keeps is True: write snapshot() and restore()")

    def forget(self) -> None:
        """Drop data that waits to be stored: the buffer was emptied."""

    def _for_each_entry(
        self,
        data: Any,
        sources: Sequence[NestedKey],
        destinations: Sequence[NestedKey],
        function: Callable[[Any], Any],
    ) -> Any:
        """Set the result of a function for each entry; for none if one is refused."""
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

    def _of_entry(self, data: TensorDictBase, key: NestedKey, function: Callable[[Any], Any], value: Any) -> Any:
        """The result of the function for the entry of a key."""
        return function(value)

    def _get(self, data: TensorDictBase, key: NestedKey) -> Any:
        """The entry. For a missing one KeyError, or None with `missing_tolerance`."""
        value = data.get(key, None)
        if value is None and not self.missing_tolerance:
            raise missing(type(self).__name__, key, data)
        return value

    def set_missing_tolerance(self, mode: bool = False) -> None:
        """Skip missing entries, or raise KeyError for them."""
        self.missing_tolerance = bool(mode)

    @property
    def container(self) -> Any:
        """The buffer, or else the outermost chain, that it is part of; or None."""
        reference = self.__dict__["_container"]
        owner = None if reference is None else reference()
        outer = owner.container if isinstance(owner, Transform) else None
        return owner if outer is None else outer

    @property
    def parent(self) -> None:
        """None: buffers have no environment that ends before a transform."""
        return

    def set_container(self, container: Any) -> None:
        """Make this part of a chain or buffer. ValueError if it `keeps` state and is part of another one."""
        reference = self.__dict__["_container"]
        owner = None if reference is None else reference()
        if self.keeps and container is not None and owner is not None and owner is not container:
            raise ValueError(
                f"{type(self).__name__} keeps state between writes and is part of a {type(owner).__name__} already: give "
                "each buffer a clone() of its own"
            )
        self.__dict__["_container"] = None if container is None else weakref.ref(container)

    def reset_parent(self) -> None:
        """Make this part of nothing."""
        self.__dict__["_container"] = None

    def clone(self) -> Self:
        """A copy that is part of nothing. Tensors are shared."""
        twin = type(self).__new__(type(self))
        twin.__dict__.update(self.__dict__, _container=None)
        for name in ("_parameters", "_buffers", "_modules"):
            twin.__dict__[name] = copy.copy(self.__dict__[name])
        return twin

    def __copy__(self) -> Self:
        return self.clone()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_container": None}

    def __repr__(self) -> str:
        return f"{type(self).__name__}(keys={self.in_keys})"


class TensorTransform(Transform):
    """The base of transforms of single tensors. A subclass gives the functions, and declares what they take and return.

    An error is raised with the name of the entry: for an entry that is no tensor, for too few dims, for a result of another
    shape, and if a function raises.

    Args, of all subclasses that take them:
        in_keys: entries to change when a buffer is read; `default_key` by default.
        out_keys: where the results go; `in_keys` by default.
        in_keys_inv: where the results go when a buffer is written: their names in the storage.
        out_keys_inv: entries to change then; `in_keys_inv` by default.
    """

    default_key: str | None = None
    """The default of `in_keys`."""
    shown: tuple[str, ...] = ()
    """Attributes in the repr."""
    keeps_shape = False
    """Whether results have the shapes of the entries."""
    least_dims = least_dims_inv = 0
    """Number of dims behind the batch dims that an entry needs when it is read or written, so that no batch dim moves."""

    def __init__(
        self, in_keys: Keys = None, out_keys: Keys = None, in_keys_inv: Keys = None, out_keys_inv: Keys = None
    ) -> None:
        in_keys = self.default_key if in_keys is None else in_keys
        out_keys = in_keys if out_keys is None else out_keys
        super().__init__(in_keys, out_keys, in_keys_inv, in_keys_inv if out_keys_inv is None else out_keys_inv)

    def _of_entry(self, data: TensorDictBase, key: NestedKey, function: Callable[[Any], Any], value: Any) -> Tensor:
        expect_tensor(type(self).__name__, key, value)
        least = self.least_dims_inv if function == self._inv_apply_transform else self.least_dims
        if value.ndim < data.batch_dims + least:
            needed = f"{least} dims are needed behind {data.batch_dims} batch dims"
            raise ValueError(f"{self._at(key, value)}: {needed}")
        try:
            result = function(value)
        except _NAMED as error:
            if type(error) not in _NAMED:
                raise
            raise type(error)(f"{self._at(key, value)}: {error}") from error
        if self.keeps_shape and result.shape != value.shape:
            raise ValueError(f"{self._at(key, value)}: the result would be of shape {list(result.shape)}")
        return result

    def _at(self, key: NestedKey, value: Tensor) -> str:
        return f"{type(self).__name__}: {key!r} of shape {list(value.shape)}"

    def __repr__(self) -> str:
        options = "".join(f"{name}={getattr(self, name)}, " for name in self.shown)
        return f"{type(self).__name__}({options}keys={self.in_keys})"


_NAMED = TypeError, ValueError, RuntimeError, IndexError, NotImplementedError  # errors that are raised with a key


def as_keys(name: str, keys: Any) -> list[NestedKey]:
    """A list of keys. A string or a tuple is one key, None is none."""
    if keys is None:
        return []
    key_list = [keys] if isinstance(keys, str | tuple) else keys
    if not isinstance(key_list, Iterable) or not all(map(_is_key, key_list := list(key_list))):
        raise TypeError(f"{name} must be a key or a list of keys (strings, or tuples of them), got {keys!r}")
    return [unravel_key(key) for key in key_list]


def as_key(name: str, key: Any) -> NestedKey:
    """One key."""
    return as_keys(name, [key])[0]


def _is_key(key: object) -> bool:
    return isinstance(key, str) or (isinstance(key, tuple) and len(key) > 0 and all(map(_is_key, key)))


def before_key(key: NestedKey) -> NestedKey | None:
    """The key without its "next"; None for a key that has none."""
    path = as_path(key)
    return unravel_key(path[1:]) if path[0] == "next" and len(path) > 1 else None


# ------------------------------------------------------------------ entries of tensordicts


def expect_tensordict(name: str, data: Any) -> None:
    """TypeError for data that is no tensordict."""
    if not is_tensor_collection(data):
        raise TypeError(f"{name} transforms the entries of a tensordict, got {type(data).__name__}")


def expect_tensor(name: str, key: NestedKey, value: Any) -> None:
    """TypeError for an entry that is no tensor."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: {key!r} must be a tensor, got {type(value).__name__}")


def missing(name: str, key: NestedKey, data: TensorDictBase) -> KeyError:
    """The error for a missing entry."""
    return KeyError(
        f"{name}: {key!r} not found in tensordict, which has {known_keys(data)}. "
        "Name entries that there are, or call set_missing_tolerance(True)"
    )


def put(
    name: str, data: TensorDictBase, entries: Iterable[tuple[NestedKey, Any]], gone: Iterable[NestedKey] = ()
) -> None:
    """Delete entries, then set others; nothing is changed if one is refused.

    KeyError for an entry within one that is no tensordict, ValueError for a value without the batch dims that it needs,
    RuntimeError for a locked tensordict.
    """
    entries = list(entries)
    gone = list(gone)
    for key, value in [*((key, None) for key in gone), *entries]:
        holder = data
        for step in as_path(key)[:-1]:
            inner = holder.get(step, None)
            if inner is None:
                break
            if not is_tensor_collection(inner) or is_non_tensor(inner):
                raise KeyError(
                    f"{name}: {key!r} cannot be set, as {step!r} is no tensordict but a {type(inner).__name__}"
                )
            holder = inner
        if holder.is_locked:
            raise RuntimeError(f"{name}: {key!r} cannot be changed: the tensordict that holds it is locked")
        shaped = isinstance(value, Tensor) or (is_tensor_collection(value) and not is_non_tensor(value))
        if shaped and value.shape[: holder.batch_dims] != holder.batch_size:
            raise ValueError(
                f"{name}: {key!r} would be of shape {list(value.shape)} in a tensordict of batch size "
                f"{list(holder.batch_size)}: the batch dims have to stay as they are"
            )
    for key in gone:
        if data.get(key, None) is not None:  # not deleted with one above it
            data.del_(key)
    for key, value in entries:
        data.set(key, value)


def tensors(data: TensorDictBase, path: tuple[str, ...] = ()) -> Iterator[tuple[Any, str, NestedKey, Tensor]]:
    """All tensors: the tensordict that holds one, its name there, its key, the tensor.

    A lazy stack gives those of each element, which may differ in shape and in keys.
    """
    if isinstance(data, LazyStackedTensorDict):
        for item in data.tensordicts:
            yield from tensors(item, path)
        return
    for name, value in list(data.items()):
        if isinstance(value, Tensor):
            yield data, name, (*path, name) if path else name, value
        elif is_tensor_collection(value) and not is_non_tensor(value):
            yield from tensors(value, (*path, name))
