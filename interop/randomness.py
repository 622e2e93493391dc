"""Seeds: every draw takes one from torch, so that `torch.manual_seed` and generators govern JAX's draws too."""

import threading

import numpy as np
import torch


class _Word(threading.local):
    """63 random bits of torch, and NumPy's view of them; made once a thread, a draw is short."""

    def __init__(self) -> None:
        with torch.inference_mode(False):  # it outlives the mode that a thread is in now
            self.bits = torch.empty(1, dtype=torch.int64, device="cpu")
        self.words = self.bits.numpy().view(np.uint32)


_word = _Word()


def key(generator: torch.Generator | None) -> np.ndarray:
    """A fresh raw JAX key, [2] uint32, from the generator, or from torch's global one."""
    if generator is not None and generator.device.type != "cpu":
        drawn = torch.empty(1, dtype=torch.int64, device=generator.device).random_(generator=generator)
        return drawn.cpu().numpy().view(np.uint32)
    _word.bits.random_(generator=generator)
    return _word.words.copy()
