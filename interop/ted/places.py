"""The places of rows that are laid out with their ends: `fbuf.ted.places`, compiled once for data of any size."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import Array

from fbuf import ted
from interop.data import bridge
from interop.host.compiled import _OPTIONS
from interop.shared.processes import may_use_jax

_BLOCK = 1 << 16  # rows
_CPU = torch.device("cpu")


def places(ends: np.ndarray) -> np.ndarray:
    """The place of each row as int64: one behind the row before, or two where that is an end.

    The program takes rows block by block, so that it is compiled once. Fewer rows are not worth its compilation, which takes
    longer than all of their copying, and a forked child must not run it: then the host counts, to the same places.
    """
    if ends.size < _BLOCK or not may_use_jax():
        return counted(ends)
    found = np.empty(ends.size, np.int64)
    first = 0
    with bridge.exact(_CPU):
        for start in range(0, ends.size, _BLOCK):
            block = ends[start : start + _BLOCK]
            count = len(block)
            if count < _BLOCK:
                block = np.zeros(_BLOCK, np.bool_)
                block[:count] = ends[start:]
            np.add(np.asarray(_program(block))[:count], first, out=found[start : start + count])
            first = int(found[start + count - 1]) + 1 + int(block[count - 1])
    return found


def counted(ends: np.ndarray) -> np.ndarray:
    """The same on the host."""
    stops = np.flatnonzero(ends)
    found = np.repeat(np.arange(stops.size + 1), np.diff(stops, prepend=-1, append=ends.size - 1))
    found += np.arange(ends.size)
    return found


@functools.partial(jax.jit, compiler_options=_OPTIONS)
def _program(ends: Array) -> Array:
    return ted.places(ends, jnp.int64)
