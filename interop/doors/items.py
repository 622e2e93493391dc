"""Items of a functional buffer as TensorDicts, or as other pytrees of tensors."""

from typing import Any

import jax
import ml_dtypes
import numpy as np
import torch
from tensordict import TensorDict, is_tensor_collection
from torch import Tensor

from interop import bridge
from interop.codec import Layout


class Items:
    """How items cross: nested dicts of arrays with text keys come as TensorDict, all else as the same pytree of tensors.

    Args:
        spec: an item, as a pytree of `jax.ShapeDtypeStruct`. TypeError for a leaf of a dtype that torch does not have.
        device: where the tensors of batches are.
    """

    def __init__(self, spec: Any, device: torch.device) -> None:
        self.spec, self.structure, self.device = spec, jax.tree.structure(spec), device
        self.is_dict = isinstance(spec, dict) and _is_dict(spec)
        tensors = jax.tree_util.tree_map_with_path(lambda path, leaf: example(jax.tree_util.keystr(path), leaf), spec)
        self._layout = Layout.of(self.as_tensordict(tensors) if self.is_dict else _named(tensors), 0)
        self.paths = [leaf.path for leaf in self._layout.leaves]

    def with_entries(self, entries: dict[Any, Any]) -> Layout:
        """The layout of TensorDicts that have these entries, specs by path, too."""
        data = self.as_tensordict(jax.tree.map(lambda leaf: example("", leaf), self.spec))
        for path, leaf in entries.items():
            data.set(path, example(str(path), leaf))
        return Layout.of(data, 0)

    def as_tensordict(self, data: Any) -> Any:
        """Nested dicts as TensorDict, in JAX's order of keys."""
        held = (
            {key: self.as_tensordict(value) for key, value in sorted(data.items())} if isinstance(data, dict) else data
        )
        return TensorDict(held, []) if isinstance(data, dict) else data

    def arrays(self, data: Any, dims: int) -> list[Any]:
        """Copies of the leaves of a batch, for a program on the device of the state, in JAX's order.

        A program may read its arguments after its call has returned. KeyError, TypeError or RuntimeError where data does
        not have the keys, the structure, the shapes after `dims` leading dims, or the dtypes of the stored items.
        """
        if not self.is_dict:
            given: Any = jax.tree.structure(data)
            if given != self.structure:
                raise TypeError(f"items are {self.structure}, got {given}; nothing was written")
            data = _named(data)
        elif isinstance(data, dict):
            data = self.as_tensordict(data)
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


def example(name: str, leaf: Any) -> Tensor:
    """A tensor of the shape and dtype of a spec."""
    dtype = bridge.FROM_NUMPY.get(leaf.dtype)
    if dtype is None:
        raise TypeError(f"item{name}: torch has no dtype for {leaf.dtype}")
    return torch.empty(leaf.shape, dtype=dtype, device="cpu")


def _is_dict(spec: Any) -> bool:
    """Whether nodes are dicts with text keys only."""
    if not isinstance(spec, dict):
        return jax.tree_util.all_leaves([spec])
    return all(isinstance(key, str) and _is_dict(value) for key, value in spec.items())


def _named(data: Any) -> dict[str, Any]:
    return {jax.tree_util.keystr(path) or "item": leaf for path, leaf in jax.tree_util.tree_leaves_with_path(data)}


def _copy(tensor: Tensor, device: torch.device) -> np.ndarray | jax.Array:
    if device.type != "cpu":
        return bridge.to_jax(tensor.to(device))
    held = bridge.plain(tensor).to("cpu", copy=True)
    view = bridge.numpy_view(held)
    return view.view(ml_dtypes.bfloat16) if held.dtype == torch.bfloat16 else view
