"""The names of the family: those of today, and the earlier ones, which warn and are the same classes."""

import pickle
import warnings

import pytest
import torch

import interop
from interop import specs
from tests.interop.specs.spec_kinds import ALL, make

NAMES = [
    "TensorSpec", "Binary", "Bounded", "BoundedContinuous", "BoundedDiscrete", "Categorical", "Choice", "Composite",
    "DEVICE_TYPING", "MultiCategorical", "MultiOneHot", "NonTensor", "OneHot", "Stacked", "StackedComposite",
    "Unbounded", "UnboundedContinuous", "UnboundedDiscrete", "check_no_exclusive_keys", "consolidate_spec",
    "contains_lazy_spec", "make_composite_from_td", "ContinuousBox", "CategoricalBox", "DiscreteBox", "BoxList",
    "BinaryBox",
]  # fmt: skip

OLD = {
    "BinaryDiscreteTensorSpec": ("Binary", (3,), {}),
    "BoundedTensorSpec": ("Bounded", (0, 1, (2,)), {}),
    "CompositeSpec": ("Composite", (), {"a": specs.Unbounded()}),
    "DiscreteTensorSpec": ("Categorical", (3,), {}),
    "LazyStackedCompositeSpec": ("StackedComposite", (specs.Composite(), specs.Composite()), {"dim": 0}),
    "LazyStackedTensorSpec": ("Stacked", (specs.OneHot(3), specs.OneHot(4)), {"dim": 0}),
    "MultiDiscreteTensorSpec": ("MultiCategorical", ([2, 3],), {}),
    "MultiOneHotDiscreteTensorSpec": ("MultiOneHot", ([2, 3],), {}),
    "NonTensorSpec": ("NonTensor", (), {}),
    "OneHotDiscreteTensorSpec": ("OneHot", (3,), {}),
    "UnboundedContinuousTensorSpec": ("UnboundedContinuous", ((2,),), {}),
    "UnboundedDiscreteTensorSpec": ("UnboundedDiscrete", ((2,),), {}),
}


def old_of(name):
    with pytest.warns(DeprecationWarning, match=f"{name} is deprecated: use {OLD[name][0]}$"):
        return getattr(specs, name)(*OLD[name][1], **OLD[name][2])


def test_all_names_are_there():
    assert {*NAMES, *OLD} <= {*specs.__all__} <= {*interop.__all__}
    assert all(getattr(interop, name) is getattr(specs, name) for name in specs.__all__)


@pytest.mark.parametrize("name", OLD)
def test_an_earlier_name_warns_and_makes_the_new_class(name):
    new, args, kwargs = OLD[name]
    made, today = old_of(name), getattr(specs, new)(*args, **kwargs)
    assert made == today
    assert type(made) is type(today)
    assert pickle.loads(pickle.dumps(made)) == today


@pytest.mark.parametrize("name", OLD)
def test_isinstance_holds_in_both_directions(name):
    old, new = getattr(specs, name), getattr(specs, OLD[name][0])
    assert isinstance(old_of(name), new)
    for kind in ALL:
        assert isinstance(make(kind), old) == isinstance(make(kind), new), kind
    assert not isinstance(3, old)
    assert issubclass(old, new)


@pytest.mark.parametrize("name", OLD)
def test_subclasses_of_earlier_names_are_classes_of_their_own(name):
    class Mine(getattr(specs, name)):
        pass

    _, args, kwargs = OLD[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = Mine(*args, **kwargs)
    assert type(made) is Mine
    assert isinstance(made, getattr(specs, name))
    assert not isinstance(old_of(name), Mine)
    assert type(made.clone()) is Mine
    if "Lazy" not in name:
        assert made.is_in(made.rand((2,)))
        assert type(made.expand(2, *made.shape)) is Mine


@pytest.mark.parametrize(("name", "domain"), [("Bounded", "Continuous"), ("Bounded", "Discrete"),
                                              ("Unbounded", "Continuous"), ("Unbounded", "Discrete")])  # fmt: skip
def test_the_class_follows_from_the_domain(name, domain):
    dtype = torch.float32 if domain == "Continuous" else torch.int64
    args = (0, 1, (2,)) if name == "Bounded" else ((2,),)
    family, kind = getattr(specs, name), getattr(specs, name + domain)
    made = family(*args, dtype=dtype)
    assert type(made) is kind
    assert kind(*args, dtype=dtype) == made
    assert made.domain == domain.lower()
    other = made.to(torch.int32 if domain == "Continuous" else torch.float64)
    assert type(other) is not kind
    assert isinstance(other, family)
    assert other.domain != made.domain
    assert type(family(*args, dtype=dtype, domain="discrete")).__name__ == name + "Discrete"


def test_earlier_names_of_bounds_warn():
    with pytest.warns(DeprecationWarning, match="minimum is deprecated: use low"):
        assert specs.Bounded(minimum=0, high=1, shape=(2,)) == specs.Bounded(0, 1, (2,))
