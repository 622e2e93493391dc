"""States that users give, looked at before they are used; and the one that a functional loop has taken over."""

from typing import Any

import jax
import torch

import fbuf
from interop import bridge


def specs_of(buffer: fbuf.Buffer | fbuf.Mixture, state: Any) -> tuple[Any, Any]:
    """The shapes and dtypes of an item and of all arrays of a state.

    TypeError for traced arrays and other leaves, RuntimeError for deleted arrays, ValueError for arrays on several devices
    and for a state of another buffer.
    """
    check_arrays(state)
    mixture = isinstance(buffer, fbuf.Mixture)
    member = buffer.buffers[0] if isinstance(buffer, fbuf.Mixture) else buffer
    first = state[0] if mixture and isinstance(state, tuple) and state else state
    if not isinstance(first, fbuf.BufferState):
        raise ValueError(f"the state must be what {type(buffer).__name__}.init returns, got {type(first).__name__}")
    rows = jax.eval_shape(lambda held: member.read(held, jax.numpy.zeros(1, jax.numpy.int32)), first)
    item = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), rows)
    like = jax.eval_shape(lambda: buffer.init(item))
    refuse_other(like, state)
    return item, like


def check_arrays(state: Any) -> None:
    """Raise for leaves that are no arrays of one device, or were deleted."""
    devices = set()
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        name = f"state{jax.tree_util.keystr(path)}"
        if isinstance(leaf, jax.core.Tracer):
            raise TypeError(f"{name} is traced: inside jax.jit there is no array yet, give what the program returned")
        if not isinstance(leaf, jax.Array):
            raise TypeError(f"{name} must be a jax.Array, got {type(leaf).__name__}")
        if leaf.is_deleted():
            raise RuntimeError(
                f"{name} was deleted: a program had it donated. Give the state that the program returned"
            )
        devices |= leaf.devices()
    if len(devices) > 1:
        raise ValueError(f"the state is on {len(devices)} devices: gather it on one first (jax.device_put)")


def refuse_other(like: Any, state: Any) -> None:
    """ValueError for a state of another structure, shape or dtype; the differences are named."""
    found, wanted = _described(state), _described(like)
    differences = [
        f"{name}: {found.get(name, 'missing')} instead of {wanted.get(name, 'nothing')}"
        for name in sorted(found.keys() | wanted.keys())
        if found.get(name) != wanted.get(name)
    ]
    structures: list[Any] = [jax.tree.structure(each) for each in (state, like)]
    if differences or structures[0] != structures[1]:
        raise ValueError("the state is of another buffer: " + ("; ".join(differences) or f"{state}"[:200]))


def _described(state: Any) -> dict[str, str]:
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path): f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves}


def torch_device(device: jax.Device) -> torch.device:
    """Torch's name of a JAX device. RuntimeError for one that torch does not see."""
    kind = {"cpu": "cpu", "gpu": "cuda"}.get(device.platform)
    if kind is None or (kind == "cuda" and not device.local_hardware_id < torch.cuda.device_count()):
        raise RuntimeError(
            f"the state is on {device}, which torch does not see ({torch.cuda.device_count()} CUDA devices)"
        )
    found = torch.device("cpu") if kind == "cpu" else torch.device(kind, device.local_hardware_id)
    assert bridge.jax_device(found) is not None
    return found
