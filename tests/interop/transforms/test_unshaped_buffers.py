"""Buffers that get their shape at the first use, of which torch makes no `state_dict`: modules are saved without them."""

import pytest
import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, is_lazy

from fbuf.checkpoint import CheckpointMismatch
from interop import Compose, LazyTensorStorage, ReplayBuffer


class Summed(nn.Module):
    """Adds up what is read, once that is asked for."""

    def __init__(self, factor=1.0):
        super().__init__()
        self.register_buffer("factor", torch.tensor(factor))
        self.register_buffer("total", UninitializedBuffer(device="cpu"))

    def forward(self, data):
        if not is_lazy(self.total):
            self.total += data.sum()
        return data * self.factor


def buffer(*modules):
    rb = ReplayBuffer(storage=LazyTensorStorage(4), transform=Compose(*modules))
    rb.extend(torch.ones(4))
    return rb


def chain(rb):
    """The modules in a function that the buffer calls."""
    return rb.transform[0].function


@pytest.mark.parametrize("way", ["dumps", "state_dict"])
def test_what_has_a_shape_is_saved_and_nothing_else(way, tmp_path):
    rb, other = (
        buffer(nn.Sequential(Summed(3.0), nn.PReLU(init=0.5))),
        buffer(nn.Sequential(Summed(), nn.PReLU(init=0.1))),
    )
    if way == "dumps":
        rb.dumps(tmp_path)
        other.loads(tmp_path)
    else:
        other.load_state_dict(rb.state_dict())
    assert chain(other)[0].factor == 3 and is_lazy(chain(other)[0].total)
    assert chain(other)[1].weight == 0.5
    chain(rb)[0].total.materialize(())
    chain(rb)[0].total.fill_(7.0)
    if way == "dumps":
        rb.dumps(tmp_path / "later")
    with pytest.raises(CheckpointMismatch, match=r"total is only in the checkpoint"):
        other.loads(tmp_path / "later") if way == "dumps" else other.load_state_dict(rb.state_dict())
    chain(other)[0].total.materialize(())
    other.loads(tmp_path / "later") if way == "dumps" else other.load_state_dict(rb.state_dict())
    assert chain(other)[0].total == 7
