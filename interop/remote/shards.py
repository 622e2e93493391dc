"""Remote calls of all shards, with a time limit."""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from tensordict import is_tensor_collection
from torch import Tensor

from interop.data.arguments import required
from interop.data.pytrees import each_leaf
from interop.remote.errors import RemoteError, RemoteTimeoutError, ShardLostError
from interop.remote.wire import Wire

Call = tuple[str, tuple[Any, ...], dict[str, Any]]  # the name of a method, its args and kwargs
GROUPS = {"write": 1, "draw": 1, "control": 4}  # threads per group; a single write thread keeps the order
NOTHING = "nothing: it is empty"  # origin of a shard that lost all its rows
_GROUP_OF = dict.fromkeys(("sample", "next", "share", "draw"), "draw")
_GROUP_OF |= dict.fromkeys(
    ("facts", "save", "look", "verify", "commit", "written", "stats", "describe", "__len__"), "control"
)


class Facts(NamedTuple):
    """A client's knowledge of a shard: its process and its configuration."""

    life: str  # changes with each restart
    origin: str  # the source of its rows
    rows: int  # its capacity
    ndim: int  # number of dims of its storage
    slices: bool  # whether its sampler draws slices
    has_log: bool  # whether it logs durable writes
    batch_size: int | None
    dim_extend: int


class RestartedError(RemoteError):
    """The process is not the one known to the caller. The call was not carried out."""

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self.facts = facts


class ProcessLostError(RemoteError):
    """A process died or is unreachable. The outcome of the call is unknown."""


class ProcessEndedError(ProcessLostError):
    """A process ended permanently: it was shut down, or its parent has ended."""


def ray_library() -> Any:
    """The module `ray`. RuntimeError if it is not installed."""
    try:
        return required("ray", "ray")
    except ImportError as error:
        raise RuntimeError(f"RayReplayBuffer needs the library ray: {error}") from error


def answered(reference: Any, until: float, process: str, call: str) -> Any:
    """Wait for the result of a remote call. Raises the error of the call.

    RemoteTimeoutError after the monotonic time `until`. ProcessLostError if the process is lost; ProcessEndedError if
    that is permanent.
    """
    ray = ray_library()
    try:
        return ray.get(reference, timeout=max(0.0, until - time.monotonic()))
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error
    except ray.exceptions.GetTimeoutError as error:
        raise RemoteTimeoutError(f"{process} did not answer {call}() within the time limit") from error
    except ray.exceptions.ActorDiedError as error:
        raise ProcessEndedError(f"{process} has ended, {call}() was not answered") from error
    except ray.exceptions.RayError as error:
        raise ProcessLostError(f"{process} was lost in {call}(): {str(error).splitlines()[0].rstrip('.')}") from error


def coordinated(coordinator: Any, timeout: float, name: str, *args: Any) -> Any:
    """Call a method of the coordinator within `timeout` seconds. The errors of `answered`."""
    reference = getattr(coordinator, name).remote(*args)
    return answered(reference, time.monotonic() + timeout, "the coordinator of the shards", name)


class Shards:
    """A client's connection to the processes of a remote buffer. Picklable.

    Each process has an identity that changes with a restart. A restarted process rejects calls for its predecessor: the
    client gets one `ShardLostError`, and then uses the new process.

    Args:
        processes: the actor handles of the shards.
        coordinator: the actor handle of the coordinator.
        facts: the facts of each shard.
        on_cpu: move tensors to the CPU before sending.
    """

    def __init__(self, processes: list[Any], coordinator: Any, facts: list[Facts], on_cpu: bool) -> None:
        self._processes, self._coordinator, self._on_cpu = processes, coordinator, on_cpu
        self.facts = facts
        self.is_limited = False  # whether the coordinator counts writes and draws
        self.timeout, self.copy = 60.0, False  # seconds per call; whether returned tensors are copied
        self.highest: float | None = None  # the highest priority in any reply
        self._reported = set[int]()  # lost shards, already reported, with an unknown new process

    def client(self, timeout: float, copy: bool) -> "Shards":
        """The same shards for another client."""
        made = Shards(self._processes, self._coordinator, list(self.facts), self._on_cpu)
        made.timeout, made.copy, made.is_limited = timeout, copy, self.is_limited
        return made

    def one(self, shard: int, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of one shard."""
        return self.some({shard: (name, args, kwargs)})[shard]

    def all(self, name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Make the same call in each shard. Returns all results."""
        return list(self.some(dict.fromkeys(range(len(self.facts)), (name, args, kwargs))).values())

    def some(self, calls: dict[int, Call], is_long: bool = False) -> dict[int, Any]:
        """Call several shards concurrently. Waits for all, then raises the first error.

        A long call, which reads or writes files, has no time limit while its process answers other calls.
        """
        until = time.monotonic() + self.timeout
        sent = [(shard, call, self._sent(shard, call)) for shard, call in calls.items()]
        found, failed = dict[int, Any](), None
        for shard, call, answer in sent:
            try:
                if is_long:
                    until = self._wait_while_alive(shard, answer)
                found[shard] = self._received(shard, call, answer, until)
            except Exception as error:
                failed = failed or error
        if failed is not None:
            raise failed
        return found

    def change(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Change the configuration of each shard, and record the call for restarting shards."""
        try:
            self.all(name, *args, **kwargs)
        except Exception as error:
            error.add_note(f"{name}() may have been carried out in other shards: call it again")
            raise
        self.coordinate("change", name, self._packed(name, (args, kwargs)))
        self.facts = self.all("facts")

    def restart_from(self, checkpoint: Sequence[str | None] | None, cuts: dict[int, int] | None = None) -> None:
        """Set the restart points: a folder and a cut per shard; durable writes after the cut (None: now) are replayed."""
        folders = checkpoint or [None] * len(self.facts)
        self.coordinate("commit", folders)
        self.some({n: ("commit", (each, None if cuts is None else cuts[n]), {}) for n, each in enumerate(folders)})

    def coordinate(self, name: str, *args: Any) -> Any:
        """Call a method of the coordinator."""
        return coordinated(self._coordinator, self.timeout, name, *args)

    def begin_rates(self, sampled: int | None) -> None:
        """Set the counters of the limiter: what the shards have written, and so many draws; None for those in balance."""
        self.coordinate("set_rates", self.all("written"), sampled, [fact.rows for fact in self.facts])

    def are_alive(self, timeout: float = 5.0) -> bool:
        """Whether every process answers."""
        until = time.monotonic() + timeout
        try:
            for each in [each.facts.options(concurrency_group="control").remote() for each in self._processes]:
                answered(each, until, "a shard", "facts")
        except RemoteError:
            return False
        return True

    def kill(self) -> None:
        """End all processes. Does nothing if the cluster was shut down."""
        ray = ray_library()
        for each in [*self._processes, self._coordinator] if ray.is_initialized() else ():
            ray.kill(each)

    def _packed(self, name: str, given: Any) -> Wire:
        """Pack arguments, moved to the CPU for shards without a GPU. TypeError if they cannot be pickled."""

        def moved(leaf: Any) -> Any:
            return leaf.cpu() if isinstance(leaf, Tensor) or is_tensor_collection(leaf) else leaf

        try:
            return Wire.of(each_leaf(given, moved) if self._on_cpu else given)
        except Exception as error:
            raise TypeError(
                f"an argument of {given[0][0] if name == 'write' else name}() cannot be sent to the shards: {error}"
            ) from error

    def _sent(self, shard: int, call: Call) -> Any:
        name, *given = call
        method = self._processes[shard].run.options(concurrency_group=_GROUP_OF.get(name, "write"))
        highest = self.highest if len(self.facts) > 1 else None
        return method.remote(self.facts[shard].life, name, highest, self._packed(name, given))

    def _wait_while_alive(self, shard: int, answer: Any) -> float:
        """Wait for a long call while its process answers other calls. Returns the next deadline."""
        ray = ray_library()
        while not ray.wait([answer], timeout=self.timeout / 2)[0]:
            asked = self._processes[shard].facts.options(concurrency_group="control").remote()
            answered(asked, time.monotonic() + self.timeout, f"shard {shard}", "facts")
        return time.monotonic() + self.timeout

    def _received(self, shard: int, call: Call, answer: Any, until: float) -> Any:
        try:
            content, highest = answered(answer, until, f"shard {shard}", call[0])
            self.highest = max(filter(None, (self.highest, highest)), default=None)
            return content.value(self.copy)
        except RestartedError as error:
            self.facts[shard] = facts = error.facts
            reported = shard in self._reported
            self._reported.discard(shard)
            if reported and not facts.origin.startswith(NOTHING):
                return self._received(shard, call, self._sent(shard, call), until)
            raise ShardLostError(
                f"shard {shard} was lost with its rows and has restarted: it goes on from {facts.origin}; {call[0]}() was "
                "not carried out there",
                shard,
            ) from None
        except ProcessEndedError as error:
            raise ShardLostError(
                f"{error}. It does not restart: the buffer was shut down, or the driver that built it has ended", shard
            ) from error
        except ProcessLostError as error:
            self._reported.add(shard)
            raise ShardLostError(f"{error}. It restarts from {self._origin(shard)}", shard) from error

    def _origin(self, shard: int) -> str:
        if self.facts[shard].has_log:
            return "the checkpoint and the durable writes in its recovery_dir"
        try:
            found = self.coordinate("latest", shard)
        except RemoteError:
            return "its latest checkpoint, if there is one"
        return "nothing, for there is no checkpoint" if found is None else f"the checkpoint {found}"
