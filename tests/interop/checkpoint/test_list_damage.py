"""Saved list storages that were changed are refused, and change nothing."""

import json

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from fbuf.checkpoint import CheckpointError
from interop import CompressedListStorage
from tests.interop.checkpoint.list_storages import KINDS, filled, fingerprint, others, tensordict_of, unchanged
from tests.interop.checkpoint.saved_values import through_json


def _saved(item, **changes):
    """What a compressed storage saves of an item, with another description of it."""
    saved = filled(CompressedListStorage, [item]).state()
    (column,) = (each for each in saved["items"]["columns"] if each["kind"] == "plain")
    (described,) = json.loads(column["json"])
    column["json"] = json.dumps([{key: each for key, each in {**described, **changes}.items() if each is not ...}])
    return through_json(saved)


def _leaf(**changes):
    return {"kind": "tensor", "dtype": "float32", "dims": 1, **changes}


def _td(**changes):
    common = {"kind": "tensordict", "keys": ["x", "s"], "children": [_leaf(dims=2), None], "batch": [2], "names": ["t"]}
    return {key: each for key, each in {**common, **changes}.items() if each is not ...}


TD = TensorDict({"x": torch.full((2, 3), 1.0), "s": torch.zeros(2, 1)}, [2], names=["t"])


@pytest.mark.parametrize(
    ("item", "changes"),
    [
        *((torch.ones(4), {"shapes": each}) for each in (..., [], [4], [[5]], [[-1]], [[2**40]], [["4"]])),
        *((torch.ones(4), {"layout": each}) for each in (..., [], _leaf(dtype="float64"), _leaf(dtype="x"), _td())),
        *((torch.ones(4), {"layout": _leaf(kind=each)}) for each in ("array", "pickled", 3)),
        *((TD, {"layout": _td(batch=each)}) for each in ([3], [2, 9], ..., [-1], 2)),
        *((TD, {"layout": _td(names=each)}) for each in (["t", "u"], "t", [3], {})),
        *((TD, {"layout": _td(children=each)}) for each in ([], [None, None], [_leaf(dims=2)], [_leaf(dims=2)] * 3)),
        *((TD, {"layout": _td(kind=each)}) for each in ("os:system", "list", "lazy", "tests.interop.steps:Step")),
        (TD, {"shapes": [[1, 6], [2, 1]]}),
    ],
    ids=lambda each: str(each)[:40].replace("\n", " "),
)
def test_a_structure_that_does_not_agree_is_refused(item, changes):
    target = filled(CompressedListStorage, [others(5)])
    before = fingerprint(target)
    with pytest.raises(CheckpointError):
        target.with_state(_saved(item, **changes))
    assert unchanged(target, before)


def test_entries_that_do_not_agree_are_refused():
    for kind in KINDS:
        saved = through_json(filled(kind, [tensordict_of(n) for n in range(4)]).state())
        target = filled(kind, ["a"])
        before = fingerprint(target)
        for name in saved:
            for wrong in (..., None, -1, 2**63, "x", [], np.array([9]), True):
                edited = {key: each for key, each in saved.items() if key != name}
                if wrong is not ...:
                    edited[name] = wrong
                with pytest.raises(CheckpointError):
                    target.with_state(edited)
                    pytest.fail(f"{name}={wrong!r} was taken")
        assert unchanged(target, before)
        for junk in (None, 3, [], {}, "x"):
            with pytest.raises(CheckpointError):
                target.with_state(junk)
