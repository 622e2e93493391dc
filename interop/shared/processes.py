"""Other processes: which may use JAX, when components are pickled for one, and state that stays in one."""

import os
from multiprocessing import context

from interop.data.settings import jax_started
from interop.host.threads import renew_in_children

_parent_used_jax = False


def _in_child() -> None:
    global _parent_used_jax
    _parent_used_jax = _parent_used_jax or jax_started()


os.register_at_fork(after_in_child=_in_child)


def may_use_jax() -> bool:
    """False in a child that was forked after JAX had started: its threads are gone, so JAX may hang."""
    return not _parent_used_jax


def starting_a_worker() -> bool:
    """Whether a component is being pickled for a process that is about to start."""
    return context.get_spawning_popen() is not None


class OneProcess:
    """Part of a component whose state other processes do not see. It works in the process that made or unpickled it.

    Pickling it for a process that is starting raises.

    Args:
        refusal: the text of the errors.
        uses_jax: whether the component also needs a process that may use JAX.
    """

    def __init__(self, refusal: str, uses_jax: bool = False) -> None:
        self._refusal, self._uses_jax = refusal, uses_jax
        self.is_here = not uses_jax or may_use_jax()
        renew_in_children(self.renew)

    def renew(self) -> None:
        self.is_here = False

    def check(self) -> None:
        """RuntimeError in another process."""
        if not self.is_here:
            raise RuntimeError(self._refusal)

    def __getstate__(self) -> tuple[str, bool]:
        if starting_a_worker():
            raise RuntimeError(self._refusal)
        return self._refusal, self._uses_jax

    def __setstate__(self, state: tuple[str, bool]) -> None:
        self.__init__(*state)  # type: ignore[misc]
