"""The places of rows that are laid out with their ends: `fbuf.ted.places`, compiled once for data of any size."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import Array

from fbuf import ted
from interop import bridge
from interop.compiled import _OPTIONS
from interop.processes import may_use_jax

_LEAST = 1 << 16  # rows
_CPU = torch.device("cpu")


def places(ends: np.ndarray) -> np.ndarray:
    """The place of each row as int64: one behind the row before, or two where that is an end.

    Rows are padded to a power of two, so that no number of them is compiled for itself. Few are not worth a program, whose
    compilation takes longer than all of their copying, and a forked child must not run one: the host counts to the same.
    """
    if ends.size < _LEAST or not may_use_jax():
        return counted(ends)
    padded = np.zeros(1 << (ends.size - 1).bit_length(), np.bool_)
    padded[: ends.size] = ends
    with bridge.exact(_CPU):
        found = _program(padded)
    return bridge.hand_over(found).numpy()[: ends.size]


def counted(ends: np.ndarray) -> np.ndarray:
    """The same on the host."""
    stops = np.flatnonzero(ends)
    found = np.repeat(np.arange(stops.size + 1), np.diff(stops, prepend=-1, append=ends.size - 1))
    found += np.arange(ends.size)
    return found


@functools.partial(jax.jit, compiler_options=_OPTIONS)
def _program(ends: Array) -> Array:
    return ted.places(ends, jnp.int64)
