"""A state that programs take over and give back, which no signal can lose."""

from collections.abc import Callable
from typing import Any

import jax


class Lent:
    """A pytree of arrays whose memory programs take over: whoever breaks in finds the one before, or the one after.

    A signal's handler, which may raise, runs between two steps of Python. Between the start of a program and the place
    where its result is kept there is none here: the result is put into a list by `map`, as arrays in plain tuples.
    """

    def __init__(self, state: Any = None) -> None:
        self._returned: list[Any] = []
        self._known, self._structure = state, jax.tree.structure(state)

    @property
    def state(self) -> Any:
        """The state. The next program takes its memory over."""
        if self._returned:
            self._known = jax.tree.unflatten(self._structure, self._returned[-1][0])
            self._returned.clear()
        return self._known

    def to(self, program: Callable[..., Any], rule: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
        """Run program(rule, state, *given), which returns the leaves of the new state and more; what more that is."""
        arguments = ((each,) for each in (rule, self.state, *given))
        self._returned.extend(map(program, *arguments))
        more = tuple(self._returned[-1][1:])
        assert self.state is not None
        return more

    def __getstate__(self) -> Any:
        return (self.state,)

    def __setstate__(self, state: Any) -> None:
        self.__init__(*state)  # type: ignore[misc]
