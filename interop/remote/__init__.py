"""Replay buffers in other processes and on other machines."""

from interop.remote.errors import RemoteError, RemoteTimeoutError, ShardLostError
from interop.remote.ray_buffer import RayReplayBuffer
from interop.remote.rpc import RemoteTensorDictReplayBuffer

__all__ = ["RayReplayBuffer", "RemoteError", "RemoteTensorDictReplayBuffer", "RemoteTimeoutError", "ShardLostError"]
