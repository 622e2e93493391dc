"""Example rows: zeros in the shapes and dtypes of a spec, for buffers that plan or allocate memory for its items."""

from typing import Any

import torch
from tensordict import NonTensorData, TensorDict

from interop.specs import torchrl_classes
from interop.specs.composite import Composite
from interop.specs.leaves import converted
from interop.specs.spec import TensorSpec


def example_row(spec: object, ndim: int) -> object:
    """A row of zeros of a spec, [1, *spec.shape], whose elements share memory; Python objects become text.

    TypeError for other entries than tensors. ValueError for a dynamic dim, or a Composite with fewer than ndim - 1 dims.
    """
    spec = torchrl_classes.converted(spec)
    if isinstance(spec, Composite) and spec.ndim < ndim - 1:
        raise ValueError(
            f"the storage has ndim={ndim}: the spec of a row begins with {ndim - 1} dims, such as [environments], got shape "
            f"{list(spec.shape)}. Use spec.expand(environments)"
        )
    row: object = converted(spec, _leaf, _node, objects=lambda spec: NonTensorData("", batch_size=(1, *spec.shape)))
    return row


def _leaf(spec: TensorSpec, _: str) -> torch.Tensor:
    return torch.zeros((), dtype=spec.dtype, device=spec.device).expand(1, *spec.shape)


def _node(spec: Composite, entries: dict[str, Any]) -> Any:
    names = [None, *spec.names] if any(spec.names) else None
    made = TensorDict(entries, (1, *spec.shape), device=spec.device, names=names)
    return made if spec.data_cls in (None, TensorDict) else spec.data_cls.from_tensordict(made)
