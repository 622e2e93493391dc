"""The functional state behind a stateful buffer: donated to programs, or lent to a loop of the user."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from interop.host.threads import Lock, uninterrupted


class HeldState:
    """The leaves of a state, and whether a loop of the user has them. Hold `lock` for all calls but `lend`.

    Args:
        state, like: arrays, and their shapes and dtypes. The errors of `device_of`.
    """

    def __init__(self, state: Any, like: Any) -> None:
        self.like = like
        self.lock = Lock()
        self.device = device_of(state, like)
        self.is_out = False
        self.replace(state)

    @property
    def is_lost(self) -> bool:
        """Whether the state was donated to a program that did not return it."""
        return any(leaf.is_deleted() for leaf in self._leaves)

    @property
    def leaves(self) -> tuple[jax.Array, ...]:
        """The arrays. RuntimeError while the state is out, or where it was lost."""
        self.refuse_out()
        if self.is_lost:
            raise RuntimeError("the state was donated to a program that did not give it back: call loads() or empty()")
        return self._leaves

    def refuse_out(self) -> None:
        """RuntimeError while the state is out."""
        if self.is_out:
            raise RuntimeError("the state of this buffer is out: end the block of functional() first")

    def tree(self, leaves: Iterable[Any]) -> Any:
        """The state of these leaves."""
        return jax.tree.unflatten(jax.tree.structure(self.like), leaves)

    def replace(self, state: Any) -> None:
        """Hold another state of the same buffer. It is committed: programs do not move it to JAX's default device."""
        with jax.ensure_compile_time_eval():  # arrays also where a program is being traced
            self._leaves = tuple(jax.device_put(jax.tree.leaves(state), self.device))

    def donate(self, program: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Run a program on the donated leaves, which it returns first. Returns its other results. Signals wait."""
        leaves = self.leaves
        with uninterrupted():
            self._leaves, *more = program(leaves, *arguments)
        return more

    @contextlib.contextmanager
    def lend(self, backup: bool) -> Iterator["Handle"]:
        """A block in which a loop has the state. See `FunctionalReplayBuffer.functional`."""
        with self.lock:
            leaves = self.leaves
            with jax.ensure_compile_time_eval():
                copy = tuple(map(jnp.copy, leaves)) if backup else None
            self.is_out = True
        handle = Handle(self, self.tree(leaves))
        failure = None
        try:
            yield handle
        finally:
            with uninterrupted():
                failure = self._take_back(handle.close(), copy)
        if failure is not None:
            rest = "the state is lost" if self.is_lost else "the buffer has the state from the entry again"
            raise RuntimeError(f"no state that is alive was assigned to handle.state; {rest}") from failure

    def _take_back(self, state: Any, copy: Any) -> Exception | None:
        """Hold the state that a block leaves, or the copy. Returns the error of a state without values."""
        failure = None
        try:
            jax.block_until_ready(state)
        except Exception as error:  # arrays are deleted, or the program that makes them failed
            failure = error
        with self.lock:
            if failure is None:
                self.replace(state)
            elif copy is not None and self.is_lost:
                self.replace(copy)
            self.is_out = False
        return failure


class Handle:
    """The state of a buffer while a loop has it. Assign `state` before the block ends."""

    def __init__(self, holder: HeldState, state: Any) -> None:
        self._holder = holder
        self._state = state
        self._is_open = True

    @property
    def state(self) -> Any:
        """The state, which may be donated. Setting it raises for a state of another buffer or device."""
        self._refuse_closed()
        return self._state

    @state.setter
    def state(self, state: Any) -> None:
        self._refuse_closed()
        here = self._holder.device
        if (device := device_of(state, self._holder.like)) != here:
            raise ValueError(f"the state is on {device}, that of the buffer on {here}: use jax.device_put")
        self._state = state

    def close(self) -> Any:
        """End the handle. Returns the last state assigned."""
        self._is_open = False
        return self._state

    def _refuse_closed(self) -> None:
        if not self._is_open:
            raise RuntimeError("the block of functional() has ended, and the buffer has its state again")


def device_of(state: Any, like: Any) -> jax.Device:
    """The device of a state that can be donated.

    TypeError for traced arrays and other leaves, RuntimeError for deleted arrays, ValueError for another structure, shape or
    dtype, for several devices, and for an array that is there twice.
    """
    leaves = _named(state)
    for name, leaf in leaves.items():
        if isinstance(leaf, jax.core.Tracer):
            raise TypeError(f"state{name} is traced: give what the program returned, outside of it")
        if not isinstance(leaf, jax.Array):
            raise TypeError(f"state{name} must be a jax.Array, got {type(leaf).__name__}")
        if leaf.is_deleted():
            raise RuntimeError(f"state{name} was deleted: a program had it donated. Give the state that it returned")
    leaf_types, like_types = (
        {name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in _named(t).items()} for t in (state, like)
    )
    structures: list[Any] = [jax.tree.structure(tree) for tree in (state, like)]
    if leaf_types != like_types or structures[0] != structures[1]:
        names = sorted(name for name in leaf_types | like_types if leaf_types.get(name) != like_types.get(name))
        found_there = [
            f"{name}: {leaf_types.get(name, 'missing')} instead of {like_types.get(name, 'nothing')}" for name in names
        ]
        raise ValueError("the state is of another buffer: " + ("; ".join(found_there) or f"{state}"[:200]))
    devices = {device for leaf in leaves.values() for device in leaf.devices()}
    if len(devices) > 1:
        raise ValueError(f"the state is on {len(devices)} devices: gather it on one first (jax.device_put)")
    if len(set(map(id, leaves.values()))) < len(leaves):
        raise ValueError("an array of the state is there twice, and cannot be donated twice: copy it (jnp.copy)")
    return devices.pop()


def _named(tree: Any) -> dict[str, Any]:
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
