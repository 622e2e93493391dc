"""The state of samplers, writers and schedulers: what decides their next draws and slots."""

import copy
import dis
import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fbuf.checkpoint import CheckpointCorrupt, CheckpointError, CheckpointMismatch, Fields
from interop.checkpoint.component import Component
from interop.checkpoint.rule import EXACT, Rule
from interop.data.class_names import class_of


class Entries(Fields):
    """The entries of a saved state, each asked for once, and in what they differ from what they are to be put into.

    Args:
        saved: what should be a dict.
        target: what they are to be put into.
    """

    def __init__(self, saved: Any, target: Any) -> None:
        super().__init__(saved, f"the state of a {type(target).__name__}")
        self._names = set(saved)
        self._asked: set[str] = set()
        self._refused: list[str] = []
        self._taken: list[str] = []

    def any(self, name: str) -> Any:
        self._asked.add(name)
        return super().any(name)

    def refuse(self, difference: str) -> None:
        """The checkpoint is of something else: to be raised with all else that is."""
        self._refused.append(difference)

    def parameter(self, name: str, saved: Any, here: Any) -> Any:
        """The saved value, which counts; that it is another one than here will be told."""
        if type(saved) is not type(here) or saved != here:
            self._taken.append(f"{name}={saved!r} instead of {here!r}")
        return saved

    def settle(self) -> None:
        """CheckpointMismatch for what was refused; one UserWarning for parameters that are others than here.

        It is given here and not when they are put in: a filter may make an error of it, and then nothing has changed yet.
        """
        if unknown := sorted(map(str, self._names - self._asked)):
            self.refuse(f"it has nothing to do with the entries {unknown}")
        if self._refused:
            raise CheckpointMismatch(f"{self._where}: {'; '.join(self._refused)}")
        taken, self._taken = self._taken, []
        if taken:
            warnings.warn(f"{self._where}: the checkpoint counts, with {', '.join(taken)}", UserWarning, stacklevel=5)


class Stateful(Component):
    """A component that can be saved, and loaded into another one that was made alike.

    The library's classes give `_entries` and `_loading`. A class of your own that has attributes defines `state_dict`, which
    returns tensors and plain values, in dicts with text keys and lists, and `load_state_dict`, which takes them back and
    changes nothing where it raises. Without both of them it is not saved: NotImplementedError.
    """

    def _entries(self) -> dict[str, Any]:
        """A saved tree of what decides everything later."""
        return {}

    def _loading(self, entries: Entries, rule: Rule) -> Callable[[], None]:
        """Check the entries of `_entries`; what is returned puts them in, and does not fail."""
        return _nothing

    def _as_dict(self, state: dict[str, Any]) -> dict[str, Any]:
        """What `state_dict` gives of a state."""
        return state

    def _of_dict(self, given: Mapping[str, Any]) -> Any:
        """The state that such a dict is of."""
        return given

    # ------------------------------------------------------------------ checkpoints

    def _saved(self) -> dict[str, Any]:
        if is_users(self):
            from interop.checkpoint.values import encode

            return {"given": encode(self.state_dict(), f"state_dict() of a {type(self).__name__}")}
        return self._entries()

    def _restoring(self, saved: Any, rule: Rule = EXACT) -> Callable[[], None]:
        if is_users(self):
            from interop.checkpoint.values import decode

            entries = Entries(saved, self)
            given = decode(entries.any("given"), rule, f"the state of a {type(self).__name__}")
            entries.settle()
            return self._tried(given)
        return self._checked_state(saved, rule)

    def _checked_state(self, saved: Any, rule: Rule) -> Callable[[], None]:
        entries = Entries(saved, self)
        put = self._loading(entries, rule)
        entries.settle()
        return put

    # ------------------------------------------------------------------ state dicts

    def state_dict(self) -> dict[str, Any]:
        """A copy of the state, of tensors and plain values: `torch.load(weights_only=True)` reads it."""
        is_users(self)  # raises where something would be lost
        told: dict[str, Any] = as_tensors(self._as_dict(self._entries()))
        return told

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a copy of a state. CheckpointError, a RuntimeError, for one of something else: nothing has changed."""
        self._loading_dict(state_dict)()

    def _from_dict(self, given: Any, rule: Rule = EXACT) -> Callable[[], None]:
        """Check what `state_dict` gave; what is returned puts it in."""
        if is_users(self):
            return self._tried(given)
        if rule == EXACT:
            return self._loading_dict(given)
        return self._checked_state(self._of_dict(as_arrays(given, self)), rule)

    def _loading_dict(self, given: Any) -> Callable[[], None]:
        if not isinstance(given, Mapping):
            raise CheckpointCorrupt(f"the state of a {type(self).__name__} is a dict, got {type(given).__name__}")
        return self._checked_state(self._of_dict(as_arrays(given, self)), EXACT)

    def _tried(self, given: Any) -> Callable[[], None]:
        """Have a copy load it, whose errors say what is wrong with it before anything changes."""
        held = getattr(self, "_storage", None)  # of a writer: it is not copied
        try:
            trial = copy.deepcopy(self, {} if held is None else {id(held): held})
        except Exception:  # it cannot be copied: then it has to check by itself
            trial = None
        if trial is not None:
            try:
                trial.load_state_dict(copy.deepcopy(given))
            except CheckpointError:
                raise
            except Exception as error:
                raise CheckpointMismatch(
                    f"the state of a {type(self).__name__} is refused: {type(error).__name__}: {error}"
                ) from error
        return lambda: self.load_state_dict(given)


def is_users(component: Stateful) -> bool:
    """Whether a class of the user's saves its state; NotImplementedError where some of it would be lost."""
    missing = [name for name in ("state_dict", "load_state_dict") if not defined_outside(component, name)]
    lost = [] if not missing or _is_ours(type(component)) else _unsaved(component)
    if len(missing) == 1 or lost:
        what = f"attributes that nothing saves, {', '.join(lost)}" if lost else "one half of the pair that saves it"
        raise NotImplementedError(f"{class_of(component)} has {what}: define {' and '.join(missing)}")
    return not missing


def defined_outside(component: object, name: str) -> bool:
    """Whether a class of the user's defines this method."""
    return not _is_ours(next(kind for kind in type(component).__mro__ if name in vars(kind)))


def _is_ours(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == __name__.partition(".")[0]


def _unsaved(component: object) -> list[str]:
    """Attributes of an object that no class of this library declares, or sets in a method."""
    known: set[str] = set()
    for kind in filter(_is_ours, type(component).__mro__):
        known.update(vars(kind), inspect.get_annotations(kind))
        members = [each for member in vars(kind).values() for each in (member, getattr(member, "fset", None))]
        for function in filter(inspect.isfunction, members):
            known.update(each.argval for each in dis.get_instructions(function) if each.opname == "STORE_ATTR")
    return sorted(vars(component).keys() - known)


def _nothing() -> None:
    pass


def together(puts: Iterable[Callable[[], None]]) -> Callable[[], None]:
    """What puts in all of them."""
    every = list(puts)

    def put() -> None:
        for each in every:
            each()

    return put


# ------------------------------------------------------------------ tensors and arrays


def as_tensors(tree: Any) -> Any:
    """A copy of a tree with tensors in the place of arrays."""
    if isinstance(tree, np.ndarray):
        return torch.from_numpy(tree.copy())
    if isinstance(tree, dict):
        return {key: as_tensors(value) for key, value in tree.items()}
    return [as_tensors(value) for value in tree] if isinstance(tree, list | tuple) else tree


def as_arrays(tree: Any, component: Any) -> Any:
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
    met = np.zeros(count, np.bool_)
    met[values] = True
    if not met.all():
        raise fields.wrong(name, f"each number below {count} once", values)
    return values


def key_of(value: Any) -> Any:
    """A key, or several, as they are saved: texts and lists of them."""
    return [key_of(each) for each in value] if isinstance(value, tuple | list) else value


def a_key(fields: Fields, name: str) -> Any:
    """A saved key: a text, a tuple of texts for a list, or None."""
    return _key(fields, name, fields.any(name))


def _key(fields: Fields, name: str, value: Any) -> Any:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list | tuple) and value and all(isinstance(each, str) for each in value):
        return tuple(value)
    raise fields.wrong(name, "a key: a text, or a list of texts", value)


def some_keys(fields: Fields, name: str) -> list[Any] | None:
    """A saved list of keys, or None."""
    value = fields.any(name)
    return None if value is None else [_key(fields, name, each) for each in fields.items(name)]
