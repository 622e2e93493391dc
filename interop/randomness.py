"""Seeds: every draw takes one from torch, so that `torch.manual_seed` and generators govern JAX's draws too."""

import threading
from typing import Any

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


class _Rekeyed(threading.local):
    """A generator of NumPy, made once a thread: to set its state for a draw is cheaper than a new one."""

    def __init__(self) -> None:
        self.bits = np.random.Philox(0)
        self.generator = np.random.Generator(self.bits)
        self.words: np.ndarray = np.zeros(2, np.uint64)
        zeros: np.ndarray = np.zeros(4, np.uint64)
        self.state: Any = {
            "bit_generator": "Philox",
            "state": {"counter": zeros, "key": self.words},
            "buffer": zeros,
            "buffer_pos": 4,
            "has_uint32": 0,
            "uinteger": 0,
        }


_rekeyed = _Rekeyed()


def generator_of(key: np.ndarray) -> np.random.Generator:
    """The generator of a raw key, [2] uint32, until this thread asks for another one."""
    _rekeyed.words[0] = key.view(np.uint64)[0]
    _rekeyed.bits.state = _rekeyed.state
    return _rekeyed.generator


class _Shares(threading.local):
    """Memory for uniform numbers, made once a thread."""

    size = 0

    def of(self, count: int) -> None:
        with torch.inference_mode(False):
            self.tensor = torch.empty(count, dtype=torch.float64, device="cpu")
        self.numbers, self.size = self.tensor.numpy(), count


_shares = _Shares()


def uniforms(count: int, generator: torch.Generator | None, given: np.ndarray | None = None) -> np.ndarray:
    """`count` numbers of [0, 1), float64 of 53 bits, from the generator, or torch's global one, or of a given key.

    In memory that the next call in this thread takes over.
    """
    if given is not None:
        return generator_of(given).random(count)
    if generator is not None and generator.device.type != "cpu":
        drawn = torch.empty(count, dtype=torch.float64, device=generator.device).uniform_(generator=generator)
        return drawn.cpu().numpy()
    if _shares.size != count:
        _shares.of(count)
    _shares.tensor.uniform_(generator=generator)
    return _shares.numbers
