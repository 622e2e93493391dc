"""Seeds: every draw takes one from torch, so that `torch.manual_seed` and generators govern JAX's draws too."""

import numpy as np
import torch


def seed(generator: torch.Generator | None) -> int:
    """A fresh 64-bit seed from the generator, or from torch's global one."""
    if generator is not None and generator.device.type != "cpu":
        return int(torch.empty((), dtype=torch.int64, device=generator.device).random_(generator=generator).item())
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


def key(generator: torch.Generator | None) -> np.ndarray:
    """A fresh raw JAX key, [2] uint32."""
    if generator is not None and generator.device.type != "cpu":
        return np.array([seed(generator)], np.int64).view(np.uint32)
    return torch.empty(1, dtype=torch.int64).random_(generator=generator).numpy().view(np.uint32)
