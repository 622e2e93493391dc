"""Calls of the processes of all shards: each has an answer, or an error, within a time limit."""

import time
from typing import Any

from interop.remote.cluster import Processes, ray_library
from interop.remote.errors import RemoteError, RemoteTimeoutError, ShardLostError
from interop.remote.wire import Wire

Call = tuple[str, tuple[Any, ...], dict[str, Any]]
_GROUPS = {"write": "write", "sample": "draw", "draw": "draw", "next": "draw"}
_GROUPS |= dict.fromkeys(
    ("hold", "release", "save", "look", "verify", "share", "commit", "stats", "__len__"), "control"
)


class Shards:
    """The processes as one client sees them. It can be pickled.

    A client knows each process by a name that changes with a restart. A call to a process that it does not know is not
    carried out there: the client gets a `ShardLostError` once, and works with the new process from then on.
    """

    def __init__(self, processes: Processes, timeout: float, copy: bool) -> None:
        self._processes, self.timeout, self._copy = processes, timeout, copy
        self.facts = list(processes.facts)
        self._reported: set[int] = set()  # shards whose loss was raised already, and whose new process is not known yet

    def client(self, timeout: float | None, copy: bool | None) -> "Shards":
        """The same processes as another client sees them."""
        made = Shards(self._processes, timeout or self.timeout, self._copy if copy is None else copy)
        made.facts = list(self.facts)
        return made

    def __len__(self) -> int:
        return len(self.facts)

    def one(self, shard: int, name: str, *args: Any, **kwargs: Any) -> Any:
        """What a method of one shard returns."""
        return self.some({shard: (name, args, kwargs)})[shard]

    def all(self, name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """What the same call returns from each shard."""
        found = self.some(dict.fromkeys(range(len(self)), (name, args, kwargs)))
        return [found[shard] for shard in range(len(self))]

    def some(self, calls: dict[int, Call], timeout: float | None = None) -> dict[int, Any]:
        """What a call of each of these shards returns. They run at once; the first error is raised when all have ended."""
        until = time.monotonic() + (self.timeout if timeout is None else timeout)
        sent = [(shard, call, self._sent(shard, call)) for shard, call in calls.items()]
        found, failed = dict[int, Any](), None
        for shard, call, answer in sent:
            try:
                found[shard] = self._received(shard, call, answer, until)
            except Exception as error:
                failed = failed or error
        if failed is not None:
            raise failed
        return found

    def changed(self, by: str) -> None:
        """Begin another epoch after a call of all shards and, after `set_*`, ask again how they are built."""
        self.coordinate("restart")
        if by in ("empty", "set_storage", "load_state_dict"):  # the rows of checkpoints and of durable writes are gone
            self.commit(None)
        if by == "set_storage":
            self.coordinate("forget_layout")
        if by.startswith("set_"):
            self.facts = self.all("facts")

    def commit(self, checkpoint: list[str] | None, cuts: dict[int, int] | None = None) -> None:
        """Have each shard restart from its folder and the durable writes after its cut, None for those after now."""
        self.coordinate("commit", checkpoint)
        folders = [None] * len(self) if checkpoint is None else checkpoint
        self.some({n: ("commit", (each, None if cuts is None else cuts[n]), {}) for n, each in enumerate(folders)})

    def coordinate(self, name: str, *args: Any) -> Any:
        """What a method of the coordinator returns."""
        ray = ray_library()
        try:
            return ray.get(getattr(self._processes.coordinator, name).remote(*args), timeout=self.timeout)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from error
        except ray.exceptions.RayError as error:
            raise RemoteError(f"the coordinator of the shards did not answer {name}(): {error}") from error

    def are_alive(self, timeout: float = 5.0) -> bool:
        """Whether every process answers."""
        ray = ray_library()
        try:
            asked = [each.facts.options(concurrency_group="control").remote() for each in self._processes.shards]
            ray.get(asked, timeout=timeout)
        except ray.exceptions.RayError:
            return False
        return True

    def kill(self) -> None:
        """End all processes."""
        self._processes.kill()

    def _sent(self, shard: int, call: Call) -> Any:
        name, args, kwargs = call
        method = self._processes.shards[shard].run.options(concurrency_group=_GROUPS.get(name, "write"))
        return method.remote(self.facts[shard].life, name, Wire.of((args, kwargs)))

    def _received(self, shard: int, call: Call, answer: Any, until: float) -> Any:
        ray = ray_library()
        from interop.remote.actor import RestartedError

        errors = ray.exceptions
        try:
            return ray.get(answer, timeout=max(0.0, until - time.monotonic())).value(self._copy)
        except errors.RayTaskError as error:
            if not isinstance(error.cause, RestartedError):
                raise error.cause from error
            self.facts[shard] = error.cause.facts
            reported = shard in self._reported
            self._reported.discard(shard)
            if reported and not error.cause.facts.is_empty:
                return self._received(shard, call, self._sent(shard, call), until)
            raise ShardLostError(
                f"shard {shard} was lost with its rows and has restarted: it goes on from {error.cause.facts.origin}; "
                f"{call[0]}() was not carried out there",
                shard,
            ) from None
        except errors.GetTimeoutError as error:
            raise RemoteTimeoutError(
                f"shard {shard} did not answer {call[0]}() within the time limit, {self.timeout} s"
            ) from error
        except errors.RayError as error:
            self._reported.add(shard)
            raise ShardLostError(
                f"shard {shard} was lost in {call[0]}(), which may have been carried out; it restarts from "
                f"{self._origin(shard)} ({str(error).splitlines()[0]})",
                shard,
            ) from error

    def _origin(self, shard: int) -> str:
        try:
            found = self.coordinate("latest")
        except RemoteError:
            return "its latest checkpoint, if there is one"
        return "nothing, for there is no checkpoint" if found is None else f"the checkpoint {found[shard]}"
