"""Transforms that change nothing and refuse what is wrong."""

import torch
from tensordict import TensorDictBase

from interop.transforms.entries import tensors
from interop.transforms.setting import expect_tensordict
from interop.transforms.transform import Transform


class FiniteTensorDictCheck(Transform):
    """Refuses what is read where it has infinities or NaNs; appended with `invert=True`, what is written.

    ValueError that names the entries.
    """

    def __init__(self) -> None:
        super().__init__()

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """The tensordict as it is."""
        expect_tensordict(type(self).__name__, tensordict)
        found = [
            (key, value.isfinite().all())
            for _, _, key, value in tensors(tensordict)
            if value.is_floating_point() or value.is_complex()
        ]
        # One question to the device, not one for each entry.
        if found and not bool(torch.stack([finite.to(found[0][1].device) for _, finite in found]).all()):
            wrong = ", ".join(dict.fromkeys(repr(key) for key, finite in found if not finite))
            raise ValueError(f"non-finite values: infinities or NaNs in {wrong}")
        return tensordict

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        return self.forward(next_tensordict)
