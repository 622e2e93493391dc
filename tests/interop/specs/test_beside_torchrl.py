"""Specs of this library as torchrl's: values of one are values of the other."""

import sys
import warnings

import pytest
import torch

from interop import LazyTensorStorage, TensorDictReplayBuffer, specs
from interop.specs import from_torchrl, to_torchrl
from tests.interop.specs.spec_kinds import KINDS, LEADS, STACKS, make

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


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("lead", LEADS, ids=str)
def test_conversion_and_back_gives_an_equal_spec(name, lead):
    spec = make(name, lead)
    made = to_torchrl(spec)
    back = from_torchrl(made)
    assert type(back) is type(spec) and back == spec and from_torchrl(spec) is spec
    assert isinstance(spec, type(made)) and not isinstance(made, type(spec))
    assert spec == made


@pytest.mark.parametrize("name", STACKS)
def test_lazy_stacks_are_converted_and_back(name):
    spec = STACKS[name](specs)
    back = from_torchrl(to_torchrl(spec))
    assert type(back) is type(spec) and back == spec and isinstance(spec, type(to_torchrl(spec)))


def test_an_unknown_number_of_choices_stays_unknown():
    back = from_torchrl(to_torchrl(specs.Categorical(-1)))
    with pytest.raises(RuntimeError, match="set_provisional_n"):
        back.rand()


def test_composites_take_specs_of_torchrl():
    inner = other.Composite(b=other.OneHot(4), c=other.Bounded(-1, 1, (2,)))
    for made in (
        specs.Composite(inner=inner, a=other.Categorical(3)),
        specs.Composite({"inner": inner, "a": other.Categorical(3)}),
        specs.Composite(other.Composite(inner=inner, a=other.Categorical(3))),
        specs.Composite().update(other.Composite(inner=inner, a=other.Categorical(3))),
        specs.Composite().set("inner", inner).set("a", other.Categorical(3)),
        from_torchrl(
            other.Composite(
                inner=specs.Composite(b=specs.OneHot(4), c=specs.Bounded(-1, 1, (2,))), a=other.Categorical(3)
            )
        ),
    ):
        assert all(type(each).__module__.startswith("interop.") for each in made.values(True))
        assert made == specs.Composite(
            inner=specs.Composite(b=specs.OneHot(4), c=specs.Bounded(-1, 1, (2,))), a=specs.Categorical(3)
        )


def test_composites_of_torchrl_are_freed_of_ours():
    mixed = other.Composite(a=specs.OneHot(4), inner=other.Composite(b=specs.Composite(c=specs.Unbounded(2))))
    made = to_torchrl(mixed)
    assert all(type(each).__module__.startswith("torchrl.") for each in made.values(True))
    assert made == other.Composite(a=other.OneHot(4), inner=other.Composite(b=other.Composite(c=other.Unbounded(2))))
    whole = other.Composite(a=other.OneHot(4))
    assert to_torchrl(whole) is whole


def test_specs_of_torchrl_allocate_and_describe():
    spec = other.Composite(obs=other.Bounded(0, 255, (3,), dtype=torch.uint8), mixed=specs.Unbounded(2))
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(10), batch_size=2)
    assert str(rb.plan(spec)) == str(rb.plan(from_torchrl(spec)))
    rb.storage.allocate(spec)
    rb.extend(spec.rand((4,)))
    assert rb.sample()["obs"].dtype == torch.uint8
    assert specs.to_jax(spec)["obs"].shape == (3,)
    assert specs.to_gymnasium(spec)["obs"].shape == (3,)


def test_classes_without_a_counterpart_are_refused():
    class Own(other.TensorSpec):
        pass

    Own.__abstractmethods__ = frozenset()
    spec = object.__new__(Own)
    with pytest.raises(TypeError, match="no class for a Own"):
        from_torchrl(spec)
    with pytest.raises(TypeError, match="no class for a Own"):
        specs.Composite(a=spec)
    assert specs.Unbounded() != spec
    with pytest.raises(TypeError, match="no class for a int"):
        from_torchrl(3)


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
