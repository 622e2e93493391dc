"""The state of a component as a tree of arrays and plain values. With it the component continues exactly.

`state()` returns the tree. `with_state(tree, options)` checks one and returns a function that puts it in, so that nothing
changes when a part of a load fails. `dumps` and `loads`, `state_dict` and `load_state_dict` are views of these two: a
folder with the tree, and the tree with tensors.
"""

import contextlib
import copy
import inspect
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from fbuf.checkpoint import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointMismatch,
    Fields,
    Reading,
    Verify,
    Writing,
    load,
)
from fbuf.shown import Shown
from interop.checkpoint.values import NO_PICKLE, decode, encode, is_encoded
from interop.data.arguments import class_of, refuse_unknown
from interop.host.threads import finished


@dataclass(frozen=True)
class LoadOptions:
    """The differences between a checkpoint and its target that a load accepts. See `ReplayBuffer.loads`.

    Attributes:
        strict, cast, allow_pickle: as in `ReplayBuffer.loads`.
        source: the folder whose tree it is; None for a tree in memory.
        where: what is loaded, for messages.
        beside: buffers that are loaded before; they load a storage that they share.
        resize: as in `ReplayBuffer.loads`.
        batch_size: of the buffer after the load, which its sampler must be able to draw; None if it has none.
    """

    strict: bool = True
    cast: bool = False
    allow_pickle: bool = False
    source: Reading | None = None
    where: str = "the state of a buffer"
    beside: tuple[object, ...] = ()
    resize: bool = False
    batch_size: int | None = None


EXACT = LoadOptions()
Apply = Callable[[], None]  # applies a state that was checked, and does not fail


class Entries(Fields):
    """The entries of a saved state. Each must be read; differences to the target are collected until `settle`.

    Args:
        saved: should be a dict.
        target: the component that loads it; of a dict inside another one its place.
    """

    def __init__(self, saved: Any, target: Any) -> None:
        super().__init__(saved, target if isinstance(target, str) else f"the state of a {type(target).__name__}")
        self._all = dict(saved)
        self._unread = set(saved)
        self._refused: list[str] = []
        self._changed: list[str] = []

    @classmethod
    @contextlib.contextmanager
    def of(cls, tree: object, target: object) -> Iterator["Entries"]:
        """The entries of a tree, with arrays in the place of tensors. They are settled at the end of the block.

        Entries, which the `with_state` of a subclass passes on, are settled by that one.
        """
        if isinstance(tree, Entries):
            yield tree
            return
        entries = cls(as_arrays(tree, target), target)
        yield entries
        entries.settle()

    def any(self, name: str) -> Any:
        if name not in self:
            raise CheckpointMismatch(f"{self.where}: the entry {name!r} is missing, it was saved from something else")
        self._unread.discard(name)
        return super().any(name)

    def all(self) -> dict[Any, Any]:
        """Every entry."""
        self._unread.clear()
        return self._all

    def refuse(self, difference: str) -> None:
        """Add a difference; `settle` raises it with all others."""
        self._refused.append(difference)

    def parameter(self, name: str, saved: Any, here: Any) -> Any:
        """The saved value of a parameter; `settle` warns where it differs from the one here."""
        if type(saved) is not type(here) or saved != here:
            self._changed.append(f"{name}={saved!r} instead of {here!r}")
        return saved

    def settle(self) -> None:
        """CheckpointMismatch for differences and unknown entries; one UserWarning for changed parameters.

        It warns before anything is applied: a filter may turn the warning into an error.
        """
        if self._unread:
            self.refuse(f"it has unknown entries {sorted(map(str, self._unread))}")
        if self._refused:
            raise CheckpointMismatch(f"{self.where}: {'; '.join(self._refused)}")
        changed, self._changed = self._changed, []
        if changed:
            warnings.warn(
                f"{self.where}: the checkpoint counts: it has {', '.join(changed)}, with which this one was built",
                UserWarning,
                stacklevel=6,
            )


class Aliases:
    """The other names of `dumps` and `loads`."""

    dumps: Callable[..., None]
    loads: Callable[..., None]

    def dump(self, *args: Any, **kwargs: Any) -> None:
        """An alias of `dumps`."""
        self.dumps(*args, **kwargs)

    def save(self, *args: Any, **kwargs: Any) -> None:
        """An alias of `dumps`."""
        self.dumps(*args, **kwargs)

    def load(self, *args: Any, **kwargs: Any) -> None:
        """An alias of `loads`."""
        self.loads(*args, **kwargs)


class Component(Aliases, Shown):
    """A class with a state: it defines `state` and `with_state`. Everything else is a view of these."""

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        if kwargs:
            refuse_unknown(cls, kwargs)  # before `__init__`, whose error would not name what it takes
        return super().__new__(cls)

    def state(self) -> dict[str, Any]:
        """A tree of arrays and plain values, which may be views."""
        return {}

    def with_state(self, tree: object, options: LoadOptions = EXACT) -> Apply:
        """Check a result of `state`, or of `state_dict`. The returned function puts it in; until then nothing changes."""
        with Entries.of(tree, self):
            return nothing

    def state_dict(self) -> dict[str, Any]:
        """A copy of the state, of tensors and plain values: `torch.load(weights_only=True)` reads it."""
        state: dict[str, Any] = as_tensors(state_of(self))
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a copy of a state. CheckpointError, a RuntimeError, for one of something else: nothing has changed."""
        with self._unchanging():
            self._put_in(checked_state(self, state_dict, EXACT))

    def _unchanging(self) -> contextlib.AbstractContextManager[Any]:
        """The lock for saving and loading."""
        return contextlib.nullcontext()

    def _put_in(self, apply: Apply) -> None:
        """Put a checked state in."""
        apply()

    def dumps(self, path: str | os.PathLike[str]) -> None:
        """Save it in a folder, which is made if it is missing.

        The checkpoint is complete and flushed when this returns. A process that is killed before leaves the previous one.
        OSError where the disk is full or fails.
        """
        with Writing(path) as out:
            out.write(described(self, state_of(self)))

    def loads(
        self,
        path: str | os.PathLike[str],
        *,
        verify: Verify = "full",
        strict: bool = True,
        cast: bool = False,
        allow_pickle: bool = False,
    ) -> None:
        """Load what `dumps` saved, for the options see `ReplayBuffer.loads`. After an error nothing has changed.

        FileNotFoundError, `CheckpointCorrupt` for damage, `CheckpointMismatch` for a checkpoint of something else.
        """
        options = LoadOptions(strict, cast, allow_pickle)

        def use(source: Reading) -> Apply:
            return checked_state(self, state_for(self, source.tree, str(source.path)), options)

        finished(load(path, use, verify))


class Stateful(Component):
    """A component that users may define too.

    A class of the user's that has attributes defines `state_dict`, which returns tensors and plain values, in dicts with
    text keys and lists, and `load_state_dict`, which takes them back and changes nothing where it raises. `state` and
    `with_state` are views of this pair then. Without it, and without `stateless = True`, the class is not saved:
    NotImplementedError.
    """

    stateless = False  # whether the attributes that a class of the user's adds never change, so that nothing is lost

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not is_ours(cls):
            for name, function in (("state", _state_of_users), ("with_state", _with_state_of_users)):
                if name not in vars(cls):
                    setattr(cls, name, function)

    def state_dict(self) -> dict[str, Any]:
        """A copy of the state, of tensors and plain values: `torch.load(weights_only=True)` reads it."""
        is_users(self)  # raises where something would be lost
        state: dict[str, Any] = as_tensors(_of_library(self, "state")())
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a copy of a state. CheckpointError, a RuntimeError, for one of something else: nothing has changed."""
        apply: Apply = _of_library(self, "with_state")(state_dict, EXACT)
        apply()


def described(component: object, state: Any) -> dict[str, Any]:
    """The state of a component with the name of its class."""
    return {"class": type(component).__name__, "state": state}


def state_for(component: object, saved: Any, where: str) -> Any:
    """The state in a tree of `described`. CheckpointMismatch where it is of another class."""
    fields = Fields(saved, where)
    name = fields.text("class")
    if name != type(component).__name__:
        raise CheckpointMismatch(f"{where}: was saved from a {name}, to be loaded into a {type(component).__name__}")
    return fields.any("state")


# ------------------------------------------------------------------ several states


def nothing() -> None:
    """Applies nothing."""


class Together:
    """Applies several checked states in order, or releases the memory that they reserved."""

    def __init__(self, parts: Iterable[Apply]) -> None:
        self._parts = list(parts)

    def __call__(self) -> None:
        for each in self._parts:
            each()

    def abandon(self) -> None:
        """Release the reserved memory."""
        for each in self._parts:
            getattr(each, "abandon", nothing)()


def together(checks: Iterable[Callable[[], Apply]]) -> Together:
    """Run the checks one after the other. Where one raises, the states before it are abandoned."""
    parts: list[Apply] = []
    try:
        for check in checks:
            parts.append(check())  # noqa: PERF401  # those before an error are abandoned
    except BaseException:
        Together(parts).abandon()
        raise
    return Together(parts)


def states_of(members: Sequence[Component]) -> list[Any]:
    """The state of each member of an ensemble, with its class."""
    return [described(member, state_of(member)) for member in members]


def with_states(fields: Fields, members: Sequence[Component], options: LoadOptions) -> Together:
    """Check the result of `states_of` under "members"; the returned object puts it in."""
    saved = fields.items("members")
    if len(saved) != len(members):
        raise CheckpointMismatch(f"{fields.where}: {len(saved)} members were saved, there are {len(members)}")
    return together(
        partial(checked_state, member, state_for(member, each, f"member {place}"), options)
        for place, (member, each) in enumerate(zip(members, saved, strict=True))
    )


# ------------------------------------------------------------------ classes of the user's


def state_of(component: Component) -> dict[str, Any]:
    """`state` of the class: an object of a user's class may have an attribute of this name."""
    return type(component).state(component)


def checked_state(component: Component, tree: object, options: LoadOptions) -> Apply:
    """`with_state` of the class."""
    return type(component).with_state(component, tree, options)


def refuse_names(kind: type, reserved: Sequence[str]) -> None:
    """TypeError if a class of the user's defines names that a base class uses for itself.

    Its objects raise an AttributeError where they get such an attribute.
    """
    problem = f"a base class of {kind.__module__}.{kind.__qualname__} uses this name for itself, choose another one: "
    taken = [name for name in reserved if name in vars(kind)]
    if taken:
        raise TypeError(problem + taken[0])
    if "__setattr__" in vars(kind):
        return

    def set_attribute(component: object, name: str, value: object) -> None:
        if name in reserved:
            raise AttributeError(problem + name)
        super(kind, component).__setattr__(name, value)  # type: ignore[arg-type]  # an object of this class

    kind.__setattr__ = set_attribute  # type: ignore[assignment,method-assign]


def _state_of_users(component: Stateful) -> dict[str, Any]:
    """The result of the user's `state_dict`; the state of the class of the library where there is none."""
    if is_users(component):
        where = f"state_dict() of a {type(component).__name__}"
        return {"given": encode(component.state_dict(), where, remedy=NO_PICKLE)}
    state: dict[str, Any] = _of_library(component, "state")()
    return state


def _with_state_of_users(component: Stateful, tree: Any, options: LoadOptions = EXACT) -> Apply:
    """Check a result of `state`, or of `state_dict`. The returned function puts it in."""
    if not is_users(component):
        apply: Apply = _of_library(component, "with_state")(tree, options)
        return apply
    is_saved = isinstance(tree, Mapping) and tree.keys() == {"given"} and is_encoded(tree["given"])
    given = tree
    if is_saved:
        given = decode(tree["given"], options.allow_pickle, f"the state of a {type(component).__name__}")
    return _tried(component, given)


def _tried(component: Stateful, given: Any) -> Apply:
    """Load it into a copy first: errors come before anything changes."""
    storage = getattr(component, "_storage", None)  # of a writer: it is not copied
    trial = None
    with contextlib.suppress(Exception):  # it cannot be copied: then it has to check by itself
        trial = copy.deepcopy(component, {} if storage is None else {id(storage): storage})
    if trial is not None:
        try:
            trial.load_state_dict(copy.deepcopy(given))
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointMismatch(
                f"the state of a {type(component).__name__} is refused: {type(error).__name__}: {error}"
            ) from error
    return lambda: component.load_state_dict(given)


def _of_library(component: Stateful, name: str) -> Callable[..., Any]:
    """The method that the class of the library defines, of which the user's inherits."""
    kind = next(kind for kind in type(component).__mro__ if is_ours(kind) and name in vars(kind))
    return partial(vars(kind)[name], component)


def is_users(component: Stateful) -> bool:
    """Whether a class of the user's saves its state; NotImplementedError where some of it would be lost."""
    missing = [name for name in ("state_dict", "load_state_dict") if not defined_outside(component, name)]
    if len(missing) == 1:
        raise NotImplementedError(f"{class_of(component)} has one half of the pair that saves it: define {missing[0]}")
    lost = [] if not missing or component.stateless or is_ours(type(component)) else undeclared(component)
    if lost:
        raise NotImplementedError(
            f"{class_of(component)} has attributes that nothing saves, {', '.join(lost)}: define state_dict and "
            "load_state_dict, or stateless = True if they never change"
        )
    return not missing


def defined_outside(component: object, name: str) -> bool:
    """Whether a class of the user's defines this method of an object, or of a class."""
    kind = component if isinstance(component, type) else type(component)
    return not is_ours(next(each for each in kind.__mro__ if name in vars(each)))


def is_ours(kind: type) -> bool:
    """Whether a class is of this library."""
    return kind.__module__.partition(".")[0] == __name__.partition(".")[0]


def undeclared(component: object) -> list[str]:
    """Attributes of an object that no class of this library declares, by a value or an annotation in the class."""
    return sorted(vars(component).keys() - declared(type(component)))


def declared(kind: type) -> frozenset[str]:
    """The attributes that classes of this library declare for a class. As slow as a short write: keep the result."""
    names: set[str] = set()
    for each in filter(is_ours, kind.__mro__):
        values = (
            name for name, value in vars(each).items() if not inspect.isroutine(value)
        )  # not what shadows a method
        names.update(values, inspect.get_annotations(each))
    return frozenset(names)


# ------------------------------------------------------------------ tensors and arrays


def as_tensors(tree: Any) -> Any:
    """A copy of a tree with tensors in the place of arrays."""
    if isinstance(tree, np.ndarray):
        return torch.from_numpy(tree.copy())
    if isinstance(tree, dict):
        return {key: as_tensors(value) for key, value in tree.items()}
    return [as_tensors(value) for value in tree] if isinstance(tree, list | tuple) else tree


def as_arrays(tree: Any, component: object) -> Any:
    """A tree with arrays in the place of tensors; CheckpointCorrupt for tensors that no array can be."""
    if isinstance(tree, Tensor):
        try:
            return tree.detach().cpu().numpy()
        except (TypeError, RuntimeError) as error:
            what = f"a tensor of {tree.dtype} is no part of the state of a {type(component).__name__}"
            raise CheckpointCorrupt(what) from error
    if isinstance(tree, Mapping):
        return {key: as_arrays(value, component) for key, value in tree.items()}
    return [as_arrays(value, component) for value in tree] if isinstance(tree, list | tuple) else tree


# ------------------------------------------------------------------ entries of several kinds


def integers(fields: Fields, name: str, count: int | None, least: int, below: int) -> np.ndarray:
    """A copy of a 1-d array of int32 or int64 in [least, below), as int64; CheckpointCorrupt for anything else."""
    found = fields.array(name, shape=(count,))
    if found.dtype not in (np.dtype(np.int32), np.dtype(np.int64)):
        raise fields.wrong(name, "an array of int32 or int64", found)
    values = np.array(found, np.int64)
    if values.size and not (values.min() >= least and values.max() < below):
        raise fields.wrong(name, f"integers from {least} to {below - 1}", found)
    return values


def permutation(fields: Fields, name: str, count: int) -> np.ndarray:
    """A copy of an array of [0, count) in some order, int64; CheckpointCorrupt for anything else."""
    values = integers(fields, name, count, 0, count)
    if np.bincount(values, minlength=count).max(initial=0) > 1:
        raise fields.wrong(name, f"each number below {count} once", values)
    return values


def key_of(value: Any) -> Any:
    """A key, or several, as they are saved: texts and lists of them."""
    return [key_of(each) for each in value] if isinstance(value, tuple | list) else value


def a_key(fields: Fields, name: str) -> Any:
    """A saved key: a text, a tuple of texts for a list, or None."""
    value = fields.any(name)
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list | tuple) and value and all(isinstance(each, str) for each in value):
        return tuple(value)
    raise fields.wrong(name, "a key: a text, or a list of texts", value)
