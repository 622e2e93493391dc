"""The values that specs list, with masks of one dim and of batches; and specs all of whose dims are gone."""

import pytest
import torch

from interop.specs import Binary, Bounded, Categorical, MultiCategorical, MultiOneHot, OneHot, Unbounded
from tests.interop.specs.spec_kinds import same

MASKED = {
    "Categorical": lambda shape, mask: Categorical(3, shape, mask=mask),
    "Categorical, bool": lambda shape, mask: Categorical(2, shape, dtype=torch.bool, mask=mask[..., :2]),
    "OneHot": lambda shape, mask: OneHot(3, (*shape, 3), mask=mask),
    "OneHot, int32": lambda shape, mask: OneHot(3, (*shape, 3), dtype=torch.int32, mask=mask),
    "MultiOneHot": lambda shape, mask: MultiOneHot([1, 2], (*shape, 3), mask=mask),
    "MultiCategorical": lambda shape, mask: MultiCategorical([1, 2], (*shape, 2), mask=mask),
    "MultiCategorical, of one": lambda shape, mask: MultiCategorical(
        [3], (*shape, 1), mask=mask, remove_singleton=False
    ),
}
MASKS = {  # the shape of the batch, and a mask for three choices
    "no batch": ((), [True, False, True]),
    "one for all": ((2, 3), [True, False, True]),
    "equal rows": ((2,), [[True, True, False], [True, True, False]]),
    "other rows": ((2,), [[True, True, False], [True, True, True]]),
    "rows of one dim": ((2, 2), [[[True, True, True]], [[True, False, True]]]),
    "nothing in common": ((2,), [[True, True, False], [True, False, True]]),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", MASKED)
def test_allowed_values_are_the_members_among_all_values(name, mask):
    shape, allowed = MASKS[mask]
    spec = MASKED[name](shape, torch.tensor(allowed))
    every, found = spec.enumerate(), spec.enumerate(use_mask=True)
    wanted = [each for each in every if spec.is_in(each)]
    assert same(found, torch.stack(wanted) if wanted else every[:0])
    free = spec.clone()
    free.update_mask(None)
    assert same(free.enumerate(use_mask=True), every)
    if shape == ():
        drawn = {str(spec.rand().tolist()) for _ in range(60)}
        assert drawn == {str(each.tolist()) for each in found}


ONES = {
    "Bounded": lambda shape: Bounded(-2, 3, shape),
    "Bounded, int64": lambda shape: Bounded(-2, 3, shape, dtype=torch.int64),
    "Unbounded": lambda shape: Unbounded(shape),
    "Categorical": lambda shape: Categorical(3, shape, mask=[True, False, True]),
    "Binary": lambda shape: Binary(shape=shape),
}


@pytest.mark.parametrize("name", ONES)
def test_all_dims_may_go(name):
    wanted = ONES[name](())
    assert ONES[name]((1,)).squeeze(0) == wanted and ONES[name]((1, 1)).squeeze() == wanted
    for spec in (ONES[name]((1, 1)).reshape(()), ONES[name]((1,)).reshape(torch.Size([]))):
        assert spec == wanted and spec.is_in(spec.rand())
