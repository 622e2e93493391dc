"""Saving and loading of one component by itself."""

import contextlib
import os
from collections.abc import Callable
from typing import Any

from fbuf.checkpoint import CheckpointMismatch, Fields, Source, Verify, Writing, load
from interop.checkpoint.rule import EXACT, Rule
from interop.shared.interrupts import uninterrupted


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


class Component(Aliases):
    """What `dumps` and `loads` of a storage, sampler or writer do. A subclass gives `_saved` and `_restoring`."""

    def _saved(self) -> dict[str, Any]:
        """A saved tree of all that it needs to go on. It may hold views of memory: the caller keeps others from writing."""
        raise NotImplementedError(f"{type(self).__name__} cannot be saved: it defines no _saved()")

    def _restoring(self, saved: Any, rule: Rule = EXACT) -> Callable[[], None]:
        """Check a saved tree against this object; what is returned puts it in. Until then nothing has changed."""
        raise NotImplementedError(f"{type(self).__name__} cannot be loaded: it defines no _restoring()")

    def _still(self) -> Any:
        """A context in which nobody changes it."""
        return contextlib.nullcontext()

    def dumps(self, path: str | os.PathLike[str]) -> None:
        """Save it in a folder, which is made if it is missing.

        It is there, flushed to the disk, when this returns; killed before, it leaves what was there. OSError where the disk
        is full or fails.
        """
        with Writing(path) as out, self._still():
            out.write(described(self, self._saved()))

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
        rule = Rule(strict, cast, allow_pickle)

        def use(source: Source) -> Callable[[], None]:
            return self._restoring(state_for(self, source.tree, str(source.path)), rule)

        with self._still():
            put = load(path, use, verify)
            with uninterrupted():
                put()


def described(component: Any, state: Any) -> dict[str, Any]:
    """The state of a component with the name of its class."""
    return {"class": type(component).__name__, "state": state}


def state_for(component: Any, saved: Any, where: str) -> Any:
    """The state in a saved tree of `described`. CheckpointMismatch where it is of another class."""
    fields = Fields(saved, where)
    name = fields.text("class")
    if name != type(component).__name__:
        raise CheckpointMismatch(f"{where}: was saved from a {name}, to be loaded into a {type(component).__name__}")
    return fields.any("state")
