"""Errors of remote buffers: a shard or the connection to it has failed."""


class RemoteError(RuntimeError):
    """A call of a remote buffer failed for a reason outside of the buffer: its process, its machine or the network."""


class ShardLostError(RemoteError):
    """The process of a shard died, or came back without the rows that it had.

    The call was not carried out, or it is not known whether it was. The message names the shard and what it goes on from;
    later calls work as soon as the shard has restarted.
    """

    def __init__(self, message: str, shard: int | None = None) -> None:
        super().__init__(message)
        self.shard = shard


class RemoteTimeoutError(RemoteError, TimeoutError):
    """A shard did not answer within the time limit of the buffer. It is not known whether the call was carried out."""
