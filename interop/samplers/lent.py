"""A state that programs take over and give back, which no signal can lose."""

from collections.abc import Callable, Hashable, Iterable
from typing import Any

import jax
import numpy as np

from interop.host import compiled
from interop.shared.interrupts import uninterrupted


class Lent:
    """A pytree of arrays whose memory programs take over: whoever breaks in finds the one before, or the one after.

    A signal's handler, which may raise, runs between two steps of Python. Between the start of a program and the place
    where its result is kept there is none here: the result is put into a list by `map`, as arrays in plain tuples. Within
    JAX there are some when it compiles: the first time signals wait.
    """

    def __init__(self, state: Any = None) -> None:
        self._returned: list[Any] = []  # of `to`, until it is the state
        self._parts: list[Any] = []  # of `part_to`
        self._known, self._structure = state, jax.tree.structure(state)
        self._ran: set[Hashable] = set()  # programs and the sizes of what they were given, which are compiled
        # What `part_to` gives to programs: leaves that change, and others. Where there is nothing else it is the state.
        self._halves: Any = None

    @property
    def state(self) -> Any:
        """The state. The next program takes its memory over."""
        if self._returned:
            self._known = jax.tree.unflatten(self._structure, self._returned[-1][0])
            self._halves = None
            self._returned.clear()
        if self._parts:
            self._take()
        if self._known is None and self._halves is not None:
            leaves = [b if a is None else a for a, b in zip(*self._halves, strict=True)]
            self._known = jax.tree.unflatten(self._structure, leaves)
        return self._known

    def to(self, program: Callable[..., Any], rule: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
        """Run program(rule, state, *given), which returns the leaves of the new state and more; what more that is."""
        arguments = ((each,) for each in (rule, self.state, *given))
        self._run(self._returned, program, arguments, (program, *map(np.shape, given)))
        more = tuple(self._returned[-1][1:])
        assert self.state is not None
        return more

    def part_to(self, program: Callable[..., Any], rule: Any, batch_size: int, words: Any) -> Any:
        """Run `compiled.assign_and_draw`; what it has drawn."""
        moved, still = self.halves
        given = (rule,), (self._structure,), (moved,), (still,), (batch_size,), (words,)
        self._run(self._parts, program, given, (batch_size, words.size))
        drawn = self._parts[-1][1]
        self._take()
        return drawn

    def _run(self, kept: list[Any], program: Callable[..., Any], arguments: Iterable[Any], sizes: Hashable) -> None:
        """Put into a list what a program returns; `sizes` tell whether it is compiled."""
        if sizes in self._ran:
            kept.extend(map(program, *arguments))
            return
        with uninterrupted():
            kept.extend(map(program, *arguments))
        self._ran.add(sizes)

    def shown_to(self, program: Callable[..., Any], rule: Any, batch_size: int, words: Any) -> Any:
        """Run `compiled.draw_weighed`, which leaves the state as it is; what it has drawn."""
        return program(rule, self._structure, *self.halves, batch_size, words)

    @property
    def halves(self) -> tuple[Any, Any]:
        """The leaves that `compiled.assign_and_draw` changes and, in their places, the others; None in between."""
        if self._parts:
            self._take()
        if self._halves is None or self._returned:
            leaves, moving = jax.tree.leaves(self.state), compiled.moving(self._structure)
            moved, still = (
                tuple(leaf if moves is wanted else None for leaf, moves in zip(leaves, moving, strict=True))
                for wanted in (True, False)
            )
            self._halves = moved, still
        halves: tuple[Any, Any] = self._halves
        return halves

    def _take(self) -> None:
        """Have what a program returned be the state."""
        self._halves = self._parts[-1][0], self._halves[1]
        self._known = None
        self._parts.clear()

    def __getstate__(self) -> Any:
        return (self.state,)

    def __setstate__(self, state: Any) -> None:
        self.__init__(*state)  # type: ignore[misc]
