"""Specs as example items of `fbuf.Buffer`, and specs of items."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from fbuf import Buffer
from interop.data.bridge import DTYPES
from interop.specs import Categorical, Composite, OneHot, TensorSpec, Unbounded, from_jax, to_jax


class Pair(NamedTuple):
    obs: Any
    rest: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Step:
    obs: Any
    pair: Any


def signature(spec: TensorSpec) -> Any:
    """Keys, shapes and dtypes."""
    if isinstance(spec, Composite):
        return {key: signature(each) for key, each in spec.items()}
    return tuple(spec.shape), spec.dtype


EVERY = {str(place): Unbounded((place, 2), dtype=dtype) for place, dtype in enumerate(DTYPES)}
SPECS = [
    Unbounded(3),
    Composite(EVERY),
    Composite(obs=Composite(pixels=Unbounded((2, 4), dtype=torch.uint8)), done=Categorical(2, dtype=torch.bool)),
    Composite(action=OneHot(3, (5, 3)), shape=(5,)),
]


@pytest.mark.parametrize("spec", SPECS, ids=range(len(SPECS)))
def test_a_spec_is_there_again(spec) -> None:
    with jax.enable_x64(True):
        assert signature(from_jax(to_jax(spec))) == signature(spec)
        items = Buffer(capacity=7).init(to_jax(spec)).items
    made = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(items)}
    for path, leaf in jax.tree_util.tree_leaves_with_path(to_jax(spec)):
        held = made[jax.tree_util.keystr(path)]
        assert held.shape == (7, *leaf.shape) and held.dtype.kind == leaf.dtype.kind


@pytest.mark.parametrize(("dtype", "held"), [(torch.int64, torch.int32), (torch.float64, torch.float32)])
def test_64_bits_are_what_a_buffer_makes_of_them(dtype, held) -> None:
    spec = Composite(x=Unbounded(3, dtype=dtype))
    assert Buffer(capacity=2).init(to_jax(spec)).items["x"].dtype == DTYPES[held]
    assert from_jax({"x": np.zeros(3, DTYPES[dtype])})["x"].dtype == held


def test_containers_become_composites() -> None:
    item = Step(obs=[jnp.zeros(2), np.float32(1)], pair=Pair({"a": jnp.zeros((2, 1), bool)}, ()))
    spec = Composite(
        obs=Composite({"0": Unbounded(2), "1": Unbounded(())}),
        pair=Composite(obs=Composite(a=Categorical(2, (2, 1), dtype=torch.bool))),
    )
    assert from_jax(item) == spec
