"""What all transforms have in common: the entries they read and write, in each of the two directions."""

import copy
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, Self

from tensordict import TensorDictBase, is_tensor_collection, unravel_key
from tensordict.nn import dispatch
from tensordict.utils import NestedKey
from torch import nn

from interop.data.keys import known_keys
from interop.transforms.setting import expect_tensordict, put

Keys = NestedKey | Sequence[NestedKey] | None


class Transform(nn.Module):
    """What data goes through: `forward` when a buffer is read, `inv` when it is written.

    A subclass changes one tensor at a time, in `_apply_transform` and `_inv_apply_transform`, or the tensordict as a whole,
    in `forward` and `_inv_call`. `forward` works in place; `inv` on a tensordict of its own, which shares the tensors. Both
    also take the tensors by name and return those of the other keys: `t(pixels=x)`. Usable inside `nn.Sequential`.

    A buffer calls a transform outside of its lock, from as many threads as use the buffer. One that keeps something from one
    write to the next says so with `keeps`: it is called in turn, and what it kept comes back where the write fails.

    Args:
        in_keys: entries that `forward` reads; a tuple is one nested key, a list holds keys.
        out_keys: entries that it writes; as many.
        in_keys_inv: entries that `inv` writes: their names in the storage.
        out_keys_inv: entries that it reads: their names outside.

    TypeError for keys that are none, ValueError for lists of different lengths.
    """

    invertible = False
    """Whether `inv` undoes `forward`."""
    keeps = False
    """Whether a write leaves something here for the next one; then there are `_kept` and `_keep`."""

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
        self._missing_tolerance = False
        self.__dict__["_container"] = None

    # ------------------------------------------------------------------ keys

    @property
    def in_keys(self) -> list[NestedKey]:
        """Entries that `forward` reads."""
        return self._in_keys

    @in_keys.setter
    def in_keys(self, keys: Keys) -> None:
        self._in_keys = as_keys("in_keys", keys)

    @property
    def out_keys(self) -> list[NestedKey]:
        """Entries that `forward` writes."""
        return self._out_keys

    @out_keys.setter
    def out_keys(self, keys: Keys) -> None:
        self._out_keys = as_keys("out_keys", keys)

    @property
    def in_keys_inv(self) -> list[NestedKey]:
        """Entries that `inv` writes."""
        return self._in_keys_inv

    @in_keys_inv.setter
    def in_keys_inv(self, keys: Keys) -> None:
        self._in_keys_inv = as_keys("in_keys_inv", keys)

    @property
    def out_keys_inv(self) -> list[NestedKey]:
        """Entries that `inv` reads."""
        return self._out_keys_inv

    @out_keys_inv.setter
    def out_keys_inv(self, keys: Keys) -> None:
        self._out_keys_inv = as_keys("out_keys_inv", keys)

    # ------------------------------------------------------------------ reading

    # Tensors given by name have no batch dims in common: they may change their shapes.
    @dispatch(source="in_keys", dest="out_keys", auto_batch_size=False)
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Transform each of `in_keys` into the one of `out_keys`, in place. KeyError for a missing one."""
        return self._each(tensordict, self._in_keys, self._out_keys, self._apply_transform)

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        """The same for what a step of an environment returned."""
        return self._each(next_tensordict, self._in_keys, self._out_keys, self._apply_transform)

    def _apply_transform(self, obs: Any) -> Any:
        """One transformed tensor."""
        raise NotImplementedError(
            f"{type(self).__name__} changes no single tensors when it is read: write _apply_transform() or forward()"
        )

    # ------------------------------------------------------------------ writing

    @dispatch(source="out_keys_inv", dest="in_keys_inv", auto_batch_size=False)
    def inv(self, tensordict: TensorDictBase) -> Any:
        """What is to be stored of a tensordict, which stays as it is; None for nothing."""
        return self._inv_call(tensordict.copy() if is_tensor_collection(tensordict) else tensordict)

    def _inv_call(self, tensordict: TensorDictBase) -> Any:
        """Transform each of `out_keys_inv` into the one of `in_keys_inv`, in place. KeyError for a missing one."""
        if not self._in_keys_inv:
            return tensordict
        return self._each(tensordict, self._out_keys_inv, self._in_keys_inv, self._inv_apply_transform)

    def _inv_apply_transform(self, state: Any) -> Any:
        """One tensor as it is to be stored."""
        if self.invertible:
            raise NotImplementedError(f"{type(self).__name__} is invertible: write _inv_apply_transform()")
        return state

    def _kept(self) -> Any:
        """What was kept for the next write, as of now: later calls must not change it."""
        raise NotImplementedError(f"{type(self).__name__}.keeps is True: write _kept() and _keep()")

    def _keep(self, kept: Any) -> None:
        """Go back to what `_kept` returned."""
        raise NotImplementedError(f"{type(self).__name__}.keeps is True: write _kept() and _keep()")

    def _emptied(self) -> None:
        """The buffer was emptied: what was kept to be stored later is to be forgotten too."""

    def _each(self, data: Any, sources: Sequence[NestedKey], destinations: Sequence[NestedKey], function: Any) -> Any:
        """Set what the function makes of entries: of all, or of none where one is refused."""
        expect_tensordict(type(self).__name__, data)
        if len(sources) != len(destinations):
            raise ValueError(
                f"{type(self).__name__} reads {list(sources)} and writes {list(destinations)}: as many keys are needed"
            )
        ready: dict[NestedKey, Any] = {}
        for source, destination in zip(sources, destinations, strict=True):
            # What was made for one key and is read for the next is the new one.
            value = ready[source] if source in ready else self._get(data, source)
            if value is not None:
                ready[destination] = self._made(source, function, value)
        put(type(self).__name__, data, ready.items())
        return data

    def _made(self, key: NestedKey, function: Callable[[Any], Any], value: Any) -> Any:
        """What the function makes of the entry of a key."""
        return function(value)

    def _get(self, data: TensorDictBase, key: NestedKey) -> Any:
        """The entry; None for a missing one that may be missing, else KeyError."""
        value = data.get(key, None)
        if value is None and not self._missing_tolerance:
            self._refuse_missing(key, data)
        return value

    def _refuse_missing(self, key: NestedKey, data: TensorDictBase) -> NoReturn:
        raise KeyError(
            f"{type(self).__name__}: {key!r} not found in tensordict, which has {known_keys(data)}. "
            "Name entries that there are, or call set_missing_tolerance(True)"
        )

    # ------------------------------------------------------------------ what it is part of

    @property
    def missing_tolerance(self) -> bool:
        """Whether missing entries are passed over."""
        return self._missing_tolerance

    def set_missing_tolerance(self, mode: bool = False) -> None:
        """Have missing entries passed over, or be errors."""
        self._missing_tolerance = bool(mode)

    @property
    def container(self) -> Any:
        """The buffer, or the outermost chain, that it is part of; None for nothing."""
        held = self._holder()
        outer = getattr(held, "container", None) if isinstance(held, Transform) else None
        return held if outer is None else outer

    @property
    def parent(self) -> None:
        """None: a buffer, unlike an environment, has no part that ends before a transform."""
        return

    def _holder(self) -> Any:
        reference = self.__dict__["_container"]
        return None if reference is None else reference()

    def set_container(self, container: Any) -> None:
        """Have this be part of a chain or buffer. ValueError for one that keeps something and is part of another."""
        held = self._holder()
        if self.keeps and container is not None and held is not None and held is not container:
            raise ValueError(
                f"{type(self).__name__} keeps what was written last and is part of a {type(held).__name__} already: give "
                "each buffer a clone() of its own"
            )
        self.__dict__["_container"] = None if container is None else weakref.ref(container)

    def reset_parent(self) -> None:
        """Have this be part of nothing."""
        self.__dict__["_container"] = None

    def clone(self) -> Self:
        """A copy that is part of nothing. Tensors are shared."""
        made = type(self).__new__(type(self))
        made.__dict__.update(self.__dict__)
        for name in ("_parameters", "_buffers", "_modules"):
            made.__dict__[name] = copy.copy(self.__dict__[name])
        made.__dict__["_container"] = None
        return made

    def __copy__(self) -> Self:
        return self.clone()

    def close(self) -> None:
        """Nothing has to be closed."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_container": None}

    def __repr__(self) -> str:
        return f"{type(self).__name__}(keys={self.in_keys})"


def as_keys(name: str, keys: Any) -> list[NestedKey]:
    """A list of keys: a string or a tuple is one, None is none of them."""
    if keys is None:
        return []
    found = [keys] if isinstance(keys, str | tuple) else keys
    if not isinstance(found, Iterable) or not all(map(_is_key, found := list(found))):
        raise TypeError(f"{name} must be a key or a list of keys (strings, or tuples of them), got {keys!r}")
    return [unravel_key(key) for key in found]


def _is_key(key: Any) -> bool:
    return isinstance(key, str) or (isinstance(key, tuple) and len(key) > 0 and all(map(_is_key, key)))
