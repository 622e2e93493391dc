"""Seeds: every draw takes one from torch, so that `torch.manual_seed` and generators govern JAX's draws too."""

import sys
import threading
from typing import Any

import numpy as np
import torch


class _Word(threading.local):
    """63 random bits of torch, and NumPy's view of them, made once a thread."""

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
    """A generator of NumPy, made once a thread: to set its state is cheaper than to make one."""

    def __init__(self) -> None:
        self.bits = np.random.Philox(0)
        self.generator = np.random.Generator(self.bits)
        zeros = (0, 0, 0, 0)  # read faster than an array
        self.key: dict[str, Any] = {"counter": zeros, "key": (0, 0)}
        more = {"buffer": zeros, "buffer_pos": 4, "has_uint32": 0, "uinteger": 0}
        self.state: Any = {"bit_generator": "Philox", "state": self.key, **more}


_rekeyed = _Rekeyed()


def generator_of(key: np.ndarray) -> np.random.Generator:
    """The generator of a raw key, [2] uint32. It is valid until this thread asks for another one."""
    _rekeyed.key["key"] = (int.from_bytes(key.tobytes(), sys.byteorder), 0)
    _rekeyed.bits.state = _rekeyed.state
    return _rekeyed.generator


class Seeded:
    """A component that draws from the generator of its buffer."""

    _rng: torch.Generator | None = None

    @property
    def buffer_generator(self) -> torch.Generator | None:
        """The generator of the buffer; None for torch's global one."""
        return self._rng

    @buffer_generator.setter
    def buffer_generator(self, generator: torch.Generator | None) -> None:
        self._rng = generator


class Restored:
    """A block that restores generators if it raises."""

    __slots__ = ("_before",)

    def __init__(self, *generators: torch.Generator | None) -> None:
        used = [torch.default_generator if generator is None else generator for generator in generators]
        self._before = [(generator, generator.get_state()) for generator in used]

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is not None:
            for generator, state in self._before:
                generator.set_state(state)
