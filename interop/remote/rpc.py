"""A `TensorDictReplayBuffer` for torch RPC, whose methods accept a remote reference as self."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

from torch.distributed import rpc

from interop.buffers.tensordict_buffer import TensorDictReplayBuffer
from interop.data.untraced import untraced

_SPECIAL = ("__getitem__", "__iter__", "__len__", "__setitem__")


class RemoteTensorDictReplayBuffer(TensorDictReplayBuffer):
    """A `TensorDictReplayBuffer` that other processes call by torch RPC.

    Every public method accepts an `RRef` of the buffer as self, and runs on the referenced buffer. In the owner process
    this is a local call. In another process it is one synchronous RPC to the owner, with RPC's default timeout; errors of
    the method are raised in the caller. For asynchronous calls:

    TypeError for a self that is neither a buffer nor an `RRef` of one. RuntimeError where RPC is not running in this
    process, or torch was built without it.

    Args:
        **kwargs: as for `TensorDictReplayBuffer`.
    """

    def sample(  # type: ignore[override]  # torchrl has the last two arguments in this order
        self, batch_size: int | None = None, include_info: bool | None = None, return_info: bool = False
    ) -> Any:
        """`TensorDictReplayBuffer.sample` with the last two arguments swapped."""
        return super().sample(batch_size, return_info=return_info, include_info=include_info)


def _taking_references(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Make a buffer method accept an `RRef` as self."""

    @wraps(method)
    def call(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self, RemoteTensorDictReplayBuffer):
            return method(self, *args, **kwargs)
        if _is_owned(self, name):
            return call(self.local_value(), *args, **kwargs)
        return rpc.rpc_sync(self.owner(), call, (self, *args), kwargs)

    call.__module__, call.__qualname__ = __name__, f"{RemoteTensorDictReplayBuffer.__name__}.{name}"  # pickled by name
    return call


def _is_owned(reference: Any, name: str) -> bool:
    """Whether this process owns an `RRef`. Raises the errors of `RemoteTensorDictReplayBuffer`."""
    if not rpc.is_available():
        raise RuntimeError("this build of torch has no RPC: install one for which torch.distributed.rpc.is_available()")
    if not isinstance(reference, rpc.PyRRef):
        kind = type(reference).__name__
        raise TypeError(f"{name}() needs a RemoteTensorDictReplayBuffer or an RRef of one as self, got {kind}")
    try:
        rpc.get_worker_info()
    except RuntimeError as error:
        raise RuntimeError(f"{name}() got an RRef, but RPC is not running here: call init_rpc() first") from error
    return bool(reference.is_owner())


for _name, _method in inspect.getmembers(RemoteTensorDictReplayBuffer, inspect.isfunction):
    if not _name.startswith("_") or _name in _SPECIAL:
        setattr(RemoteTensorDictReplayBuffer, _name, _taking_references(_name, _method))
untraced(RemoteTensorDictReplayBuffer)
