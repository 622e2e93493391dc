"""Errors of remote buffers."""


class RemoteError(RuntimeError):
    """A call failed for a reason outside of the buffer: its process, machine or network."""


class ShardLostError(RemoteError):
    """The process of a shard died, or restarted without its rows.

    The call was not carried out, or its outcome is unknown. The message names the shard and its restart point. Later
    calls work as soon as the shard has restarted.
    """

    def __init__(self, message: str, shard: int | None = None) -> None:
        super().__init__(message)
        self.shard = shard


class RemoteTimeoutError(RemoteError, TimeoutError):
    """A shard did not answer within the time limit. The outcome of the call is unknown."""
