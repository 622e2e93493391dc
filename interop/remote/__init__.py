"""Replay buffers in other processes and on other machines."""

from interop.remote.rpc import RemoteTensorDictReplayBuffer

__all__ = ["RemoteTensorDictReplayBuffer"]
