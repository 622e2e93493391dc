"""A digest of everything that a value holds: two are equal if and only if they hold the same, bit for bit."""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
import torch
from tensordict import TensorDictBase


def signature(value: Any) -> str:
    """The digest of plain values, arrays, tensors, tensordicts and whatever holds them."""
    digest = hashlib.sha256()
    for each in _pieces(value):
        digest.update(each)
    return digest.hexdigest()[:16]


def _pieces(value: Any) -> Iterator[bytes]:
    yield type(value).__name__.encode()
    if isinstance(value, torch.Tensor):
        plain = value.detach().resolve_conj().contiguous()
        yield f"{value.dtype}{list(value.shape)}".encode()
        if plain.numel():
            yield plain.reshape(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(value, TensorDictBase):
        yield str(list(value.batch_size)).encode()
        yield from _pieces(dict(value.items()))
    elif isinstance(value, np.ndarray | np.generic | jax.Array):
        array = np.asarray(value)
        yield f"{array.dtype}{array.shape}".encode()
        yield array.tobytes()
    elif isinstance(value, Mapping):
        for key in sorted(value, key=repr):
            yield repr(key).encode()
            yield from _pieces(value[key])
    elif isinstance(value, list | tuple):
        yield str(len(value)).encode()
        for each in value:
            yield from _pieces(each)
    elif isinstance(value, float):
        yield value.hex().encode()
    elif hasattr(value, "__dict__") and not isinstance(value, type) and not callable(value):
        yield from _pieces(vars(value))
    else:
        yield repr(value).encode()
