"""What needs TorchRL says so where it is not imported."""

import sys

import pytest

from interop.transforms import Compose, Transform, as_torchrl


@pytest.mark.parametrize("transform", [Transform(), Compose(), lambda data: data])
def test_a_program_without_torchrl_is_told(monkeypatch, transform):
    monkeypatch.delitem(sys.modules, "torchrl.envs", raising=False)
    with pytest.raises(ImportError, match=r"torchrl\.envs.*import it in your program"):
        as_torchrl(transform)
