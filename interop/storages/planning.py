"""Rows made of specs, for storages that are asked for their memory before the first data."""

from typing import Any

import torch
from tensordict import NonTensorData, TensorDict

from interop.specs import torchrl_classes
from interop.specs.composite import Composite
from interop.specs.leaves import converted
from interop.specs.spec import TensorSpec


def row_of(spec: TensorSpec, ndim: int) -> Any:
    """A row of zeros of a spec, [1, *spec.shape], whose elements share memory; Python objects become text.

    TypeError for other entries than tensors. ValueError for a dynamic dim, or a Composite with fewer than ndim - 1 dims.
    """

    def leaf(spec: TensorSpec, _: str) -> torch.Tensor:
        return torch.zeros((), dtype=spec.dtype, device=spec.device).expand(1, *spec.shape)

    def node(spec: Composite, entries: dict[str, Any]) -> Any:
        names = [None, *spec.names] if any(spec.names) else None
        made = TensorDict(entries, (1, *spec.shape), device=spec.device, names=names)
        return made if spec.data_cls in (None, TensorDict) else spec.data_cls.from_tensordict(made)

    spec = torchrl_classes.converted(spec)
    if isinstance(spec, Composite) and spec.ndim < ndim - 1:
        raise ValueError(
            f"the storage has ndim={ndim}: the spec of a row begins with {ndim - 1} dims, such as [environments], got shape "
            f"{list(spec.shape)}. Use spec.expand(environments)"
        )
    return converted(spec, leaf, node, objects=lambda spec: NonTensorData("", batch_size=(1, *spec.shape)))


def example(data: Any, ndim: int) -> Any:
    """`row_of` a spec, of `interop.specs` or torchrl; other data as it is."""
    data = torchrl_classes.converted(data)
    return row_of(data, ndim) if isinstance(data, TensorSpec) else data
