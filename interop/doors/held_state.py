"""The functional state behind a stateful buffer: held, donated to programs, or out in a functional loop."""

import contextlib
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

import fbuf
from fbuf import NotEnoughMemoryError, Plan, memory_plan
from fbuf.free_memory import place_of
from interop.doors.given_state import check_arrays, refuse_other
from interop.interrupts import uninterrupted
from interop.storages.lock import Lock

_SMALL = 1 << 26  # bytes of a state below which free memory is not asked for


class Handle:
    """The state of a buffer while a functional loop has it. Assign `state` before the block ends."""

    def __init__(self, buffer: fbuf.Buffer | fbuf.Mixture, state: Any, like: Any) -> None:
        self.buffer, self._state, self._like, self._is_open = buffer, state, like, True

    @property
    def state(self) -> Any:
        """The state. Programs may have it donated. ValueError or TypeError for one that is not of this buffer."""
        if not self._is_open:
            raise RuntimeError("the block of functional() has ended, and the buffer has its state again")
        return self._state

    @state.setter
    def state(self, state: Any) -> None:
        assert self.state is not None
        check_arrays(state)
        refuse_other(self._like, state)
        self._state = state

    def close(self) -> Any:
        """The last state assigned. The handle ends."""
        self._is_open = False
        return self._state


class HeldState:
    """The leaves of a state, and whether there are any. All but `lend` is for holders of the lock.

    Args:
        state: arrays on one device.
        like: their shapes and dtypes.
    """

    def __init__(self, state: Any, like: Any) -> None:
        self.like, self.lock = like, Lock()
        self._structure = jax.tree.structure(like)
        self._leaves = tuple(jax.tree.leaves(state))
        self.device: jax.Device = next(iter(self._leaves[0].devices()))
        self._out = self._lost = ""  # where the state was taken to; why there is none

    @property
    def is_out(self) -> bool:
        """Whether a functional loop has the state."""
        return bool(self._out)

    @property
    def is_lost(self) -> bool:
        """Whether a program failed that had it donated, and there is no copy."""
        return bool(self._lost)

    @property
    def leaves(self) -> tuple[jax.Array, ...]:
        """The arrays. RuntimeError while the state is out, or where it was lost."""
        self.refuse_out()
        if self._lost:
            raise RuntimeError(self._lost)
        return self._leaves

    def refuse_out(self) -> None:
        """RuntimeError while the state is out."""
        if self._out:
            raise RuntimeError(
                f"the state of this buffer is out: functional() took it at {self._out}. End that block first"
            )

    def tree(self, leaves: Any) -> Any:
        """The state of these leaves."""
        return jax.tree.unflatten(self._structure, leaves)

    def replace(self, state: Any) -> None:
        """Hold another state of the same buffer."""
        self._leaves, self._lost = tuple(jax.tree.leaves(state)), ""

    def donate(self, program: Callable[..., Any], *given: Any) -> list[Any]:
        """Run a program that has the leaves donated and returns them first; what else it returns. Signals wait.

        Where it fails after it had them donated, the state is lost.
        """
        leaves = self.leaves
        try:
            with uninterrupted():
                self._leaves, *more = program(leaves, *given)
        except BaseException as error:
            if any(leaf.is_deleted() for leaf in self._leaves):
                self._lost = f"a program that had the state donated failed ({error!r}): call loads() or empty()"
            raise
        return more

    @contextlib.contextmanager
    def lend(self, buffer: fbuf.Buffer | fbuf.Mixture, backup: bool) -> Iterator[Handle]:
        """A block in which a functional loop has the state. See `FunctionalReplayBuffer.functional`."""
        with self.lock:
            leaves = self.leaves
            copy = self._copied(leaves) if backup else None
            frame = traceback.extract_stack(limit=3)[0]  # below are contextlib and this function
            self._out = f"{frame.filename}:{frame.lineno} in {frame.name}, thread {threading.current_thread().name}"
        handle, raised = Handle(buffer, self.tree(leaves), self.like), True
        try:
            yield handle
            raised = False
        finally:
            leaves = tuple(jax.tree.leaves(handle.close()))
            alive = is_alive(leaves)
            lost = "the state was donated in a block of functional(), and no live one was assigned to handle.state"
            with self.lock:
                self._leaves = leaves if alive or copy is None else copy
                self._lost = "" if alive or copy is not None else f"{lost}: call loads() or empty()"
                self._out = ""
            if not (alive or raised):
                raise RuntimeError(
                    lost + ("; the buffer has the copy from its entry again" if copy else ": it is lost")
                )

    def _copied(self, leaves: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        if sum(leaf.nbytes for leaf in leaves) > _SMALL:
            try:
                Plan.of(memory_plan.shares_of(self.like, place_of(self.device))).check()
            except NotEnoughMemoryError as error:
                raise NotEnoughMemoryError(
                    f"functional() copies the state, for a block that fails; pass backup=False to go without: {error}"
                ) from error
        return tuple(map(jnp.copy, leaves))


def is_alive(leaves: tuple[jax.Array, ...]) -> bool:
    """Whether all arrays have their values. Waits for them."""
    if any(leaf.is_deleted() for leaf in leaves):
        return False
    try:
        jax.block_until_ready(leaves)
    except Exception:  # the program that makes them failed
        return False
    return True
