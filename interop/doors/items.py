"""Items of a functional buffer as TensorDicts, or as other pytrees of tensors."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import torch
from tensordict import TensorDict, is_tensor_collection
from torch import Tensor

import fbuf
from interop.data import bridge
from interop.data.layout import Layout, Path


class Items:
    """How items cross: nested dicts of arrays with text keys come as TensorDict, all else as the same pytree of tensors.

    Args:
        spec: an item, as a pytree of `jax.ShapeDtypeStruct`. TypeError for a leaf of a dtype that torch does not have.
        device: where the tensors of batches are.
    """

    def __init__(self, spec: Any, device: torch.device) -> None:
        self.spec, self.structure, self.device = spec, jax.tree.structure(spec), device
        self.is_dict = type(spec) is dict and _has_text_keys(spec)
        self._specs: dict[Path, Any] = {
            tuple(entry.key for entry in path) if self.is_dict else (jax.tree_util.keystr(path) or "item",): leaf
            for path, leaf in jax.tree_util.tree_leaves_with_path(spec)
        }
        self.paths = tuple(self._specs)
        self._layout = self.with_entries({})

    def with_entries(self, entries: dict[Path, Any]) -> Layout:
        """The layout of TensorDicts that have these entries, specs by path, too."""
        data = TensorDict()
        for path, leaf in (self._specs | entries).items():
            if (dtype := bridge.FROM_NUMPY.get(leaf.dtype)) is None:
                raise TypeError(f"item {path}: torch has no dtype for {leaf.dtype}")
            data.set(path, torch.empty(leaf.shape, dtype=dtype, device="cpu"))
        return Layout.of(data, 0)

    def arrays(self, data: Any, dims: int) -> list[Any]:
        """Copies of the leaves of a batch, for a program on the device of the state, in JAX's order.

        A program may read its arguments after its call has returned. KeyError, TypeError or RuntimeError where data does
        not have the keys, the structure, the shapes after `dims` leading dims, or the dtypes of the stored items.
        """
        if not self.is_dict:
            given: Any = jax.tree.structure(data)
            if given != self.structure:
                raise TypeError(f"items are {self.structure}, got {given}; nothing was written")
            data = {path[0]: leaf for path, leaf in zip(self.paths, jax.tree.leaves(data), strict=True)}
        if isinstance(data, dict):
            data = TensorDict(data)
        elif is_tensor_collection(data) and not isinstance(data, TensorDict):
            data = data.to_tensordict()
        try:
            leaves = self._layout.flatten(data, dims)
        except KeyError:
            found, known = {leaf.path for leaf in Layout.of(data, dims).leaves}, set(self.paths)
            raise KeyError(
                f"the keys differ from those of the state; missing: {sorted(known - found)}, unknown: "
                f"{sorted(found - known)}; nothing was written"
            ) from None
        return [_copy(leaf, self.device) for leaf in leaves]

    def build(self, tensors: list[Tensor], lead: tuple[int, ...]) -> Any:
        """Stored items of tensors, with these batch dims."""
        if self.is_dict:
            return self._layout.build(tensors, lead, self.device)
        return jax.tree.unflatten(self.structure, tensors)


def item_of(member: fbuf.Buffer, state: Any) -> Any:
    """The shapes and dtypes of an item of a state. ValueError for what is no state of this buffer."""
    if not isinstance(state, fbuf.BufferState):
        raise ValueError(f"the state must be what {type(member).__name__}.init returns, got {type(state).__name__}")
    specs = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), jnp.result_type(leaf)), state)
    rows = jax.eval_shape(member.read, specs, jax.ShapeDtypeStruct((1,), jnp.int32))
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), rows)


@functools.lru_cache(maxsize=64)
def _shared(structure: Any, leaves: tuple[Any, ...], device: torch.device) -> Items:
    return Items(jax.tree.unflatten(structure, leaves), device)


def items_of(spec: Any, device: torch.device) -> Items:
    """The same `Items` for equal specs, so that buffers share their programs."""
    leaves, structure = jax.tree.flatten(spec)
    return _shared(structure, tuple(leaves), device)


def _has_text_keys(spec: Any) -> bool:
    """Whether all nodes are dicts with text keys. JAX sorts the keys of no other kind of dict."""
    if type(spec) is not dict:
        return jax.tree_util.all_leaves([spec])
    return all(isinstance(key, str) and _has_text_keys(value) for key, value in spec.items())


def _copy(tensor: Tensor, device: torch.device) -> np.ndarray | jax.Array:
    if device.type != "cpu":
        return bridge.to_jax(tensor.to(device))
    held = bridge.plain(tensor).to("cpu", copy=True)
    view = bridge.numpy_view(held)
    return view.view(ml_dtypes.bfloat16) if held.dtype == torch.bfloat16 else view
