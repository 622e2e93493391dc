"""Other processes: which may enter XLA, and when components are being handed to one."""

import os
from multiprocessing import context

_parent_used_jax = False


def _in_child() -> None:
    global _parent_used_jax
    _parent_used_jax = _parent_used_jax or jax_started()


def jax_started() -> bool:
    try:  # JAX has no public way to ask
        from jax._src.xla_bridge import backends_are_initialized
    except ImportError:
        return True
    return bool(backends_are_initialized())


def may_use_jax() -> bool:
    """False in a child that was forked from a process in which JAX had started: its threads are gone, it may hang."""
    return not _parent_used_jax


def starting_a_worker() -> bool:
    """Whether a component is being pickled for a process that is about to start."""
    return context.get_spawning_popen() is not None


class OneProcess:
    """Held by a component whose state other processes would not see: it is used in the process that made it.

    Pickling it for a worker raises. A copy belongs to the process that unpickles it.
    """

    def __init__(self, refusal: str) -> None:
        self._refusal = refusal
        self._pid = os.getpid()

    def check(self) -> None:
        """RuntimeError in a forked child."""
        if os.getpid() != self._pid:
            raise RuntimeError(self._refusal)

    def __getstate__(self) -> str:
        if starting_a_worker():
            raise RuntimeError(self._refusal)
        return self._refusal

    def __setstate__(self, refusal: str) -> None:
        self.__init__(refusal)  # type: ignore[misc]


os.register_at_fork(after_in_child=_in_child)
