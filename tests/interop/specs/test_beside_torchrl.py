"""Specs of this library as torchrl's: values of one are values of the other."""

import sys
import warnings

import pytest
import torch

from interop import specs
from interop.specs.beside_torchrl import to_torchrl

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("torchrl")
    from torchrl import data as other

pytestmark = pytest.mark.filterwarnings("ignore")

MASK = torch.tensor([True, False, True])
LEAVES = {
    "Bounded": specs.Bounded(torch.tensor([-1.0, 0.0]), torch.tensor([1.0, 5.0])),
    "Bounded of integers": specs.Bounded(-3, 3, (2,), dtype=torch.int32),
    "Unbounded": specs.Unbounded((2, 3), dtype=torch.float64),
    "Unbounded of integers": specs.Unbounded((2,), dtype=torch.int16),
    "Categorical": specs.Categorical(3, (2,), dtype=torch.int32, mask=MASK),
    "Categorical of bools": specs.Categorical(2, (1,), dtype=torch.bool),
    "OneHot": specs.OneHot(3, (2, 3), dtype=torch.int64, mask=MASK),
    "Binary": specs.Binary(4, (2, 4)),
    "MultiCategorical": specs.MultiCategorical(
        [2, 4], (3, 2), mask=torch.tensor([True, True, True, False, True, True])
    ),
    "MultiOneHot": specs.MultiOneHot([2, 3], mask=torch.tensor([True, True, True, False, True])),
    "NonTensor": specs.NonTensor((2,), example_data="a", batched=True),
    "Choice": specs.Choice([specs.Bounded(0.0, 1.0, (1,)), specs.Bounded(2.0, 3.0, (1,))]),
}
LEAVES["Composite"] = specs.Composite(
    {("deep", key.replace(" ", "_")): spec.expand(5, *spec.shape) for key, spec in LEAVES.items()}, shape=(5,)
)
LEAVES["Stacked"] = torch.stack([specs.Bounded(0.0, 1.0, (2,)), specs.Bounded(2.0, 3.0, (2,))], 0)
LEAVES["StackedComposite"] = torch.stack(
    [specs.Composite(a=specs.Bounded(0.0, high, (2,)), b=specs.Categorical(3)) for high in (1.0, 2.0)], 0
)


@pytest.mark.parametrize("spec", LEAVES.values(), ids=LEAVES)
def test_values_of_one_are_values_of_the_other(spec):
    torch.manual_seed(0)
    made = to_torchrl(spec)
    assert type(made).__module__.startswith("torchrl.") and type(made).__name__ == type(spec).__name__
    assert (made.shape, made.device) == (spec.shape, spec.device)
    for _ in range(20):
        assert made.is_in(spec.rand()) and spec.is_in(made.rand())
    assert to_torchrl(made) is made


def test_composites_keep_what_they_are():
    spec = specs.Composite(
        a=None, b=specs.Unbounded((2, 1)), shape=(2,), device="cpu", step_mdp_static=True, names=["t"]
    )
    made = to_torchrl(spec)
    assert (made.shape, made.device, made.names, made["a"]) == ((2,), torch.device("cpu"), ["t"], None)
    assert made.step_mdp_static and made["b"] == other.Unbounded((2, 1), device="cpu")


def test_torchrl_is_not_imported(monkeypatch):
    monkeypatch.delitem(sys.modules, "torchrl.data")
    with pytest.raises(ImportError, match="import it in your program first"):
        to_torchrl(specs.Unbounded())
