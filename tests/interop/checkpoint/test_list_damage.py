"""Saved list storages that were changed are refused, and change nothing."""

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from fbuf.checkpoint import CheckpointCorrupt, CheckpointError
from interop import CompressedListStorage, LazyStackStorage
from tests.interop.checkpoint.list_storages import KINDS, filled, fingerprint, others, tensordict_of, unchanged
from tests.interop.checkpoint.saved_values import Settings, through_json


def _metadata(storage, **changes):
    """What a compressed storage saves, with other metadata of its first item."""
    metadata = storage._metadata[0]
    storage._metadata[0] = {key: each for key, each in {**metadata, **changes}.items() if each is not ...}
    saved = through_json(storage._saved())
    storage._metadata[0] = metadata
    return saved


BOMB = torch.Size([2**40])


@pytest.mark.parametrize(
    ("item", "changes"),
    [
        *(
            (torch.ones(4), {name: each})
            for name in ("shape", "dtype", "device", "type")
            for each in (..., None, "float32")
        ),
        *((torch.ones(4), {"shape": each}) for each in (BOMB, torch.Size([5]), torch.Size([-1]), [4])),
        *((torch.ones(4), {"dtype": each}) for each in (torch.float64, torch.device("cpu"), torch.int8)),
        *((torch.ones(4), {"type": each}) for each in ("tensordict", "lazy_stack", "non_tensor", "x", ["tensor"])),
        *(
            (others(1), {"batch_size": each})
            for each in (torch.Size([3]), torch.Size([2, 9]), [2], ..., torch.Size([-1]))
        ),
        *((others(1), {"fields": each}) for each in ({}, [], {"x": {"type": "other"}, "s": {"type": "other"}}, ...)),
        *((others(1), {"names": each}) for each in (["t", "u"], "t", [3], {})),
        *((others(2), {"class": each}) for each in (Settings, "os:system", ...)),
        (others(2), {"attributes": {"new": 1}}),
        (others(2), {"attributes": [1]}),
        *((others(3), {"stack_dim": each}) for each in (-1, 9, None, True, "1")),
        *((others(3), {"items": each}) for each in ([], [{}], None, [{"type": "other"}] * 2)),
        ("text", {"more": 1}),
        ("text", {"type": "tensor", "shape": torch.Size([1]), "dtype": torch.int8, "device": torch.device("cpu")}),
    ],
    ids=lambda each: str(each)[:40].replace("\n", " "),
)
def test_metadata_that_does_not_agree_is_refused(item, changes):
    saved = _metadata(filled(CompressedListStorage, [item]), **changes)
    target = filled(CompressedListStorage, [others(5)])
    before = fingerprint(target)
    with pytest.raises(CheckpointCorrupt):
        target._restoring(saved)
    assert unchanged(target, before)


def test_bytes_that_are_no_frame_are_refused():
    for packed in (torch.zeros(20, dtype=torch.uint8), torch.ones(4), torch.zeros(0, dtype=torch.uint8)):
        storage = filled(CompressedListStorage, [torch.ones(4)])
        storage._storage[0] = packed
        with pytest.raises(CheckpointCorrupt):
            CompressedListStorage(20)._restoring(through_json(storage._saved()))


def test_entries_that_do_not_agree_are_refused():
    for kind in KINDS:
        saved = through_json(filled(kind, [tensordict_of(n) for n in range(4)])._saved())
        target = filled(kind, ["a"])
        before = fingerprint(target)
        for name in saved:
            for wrong in (..., None, -1, 2**63, "x", 1.5, [], {}, np.zeros(3), np.array([9]), True):
                if name == "cursor" and (wrong is None or str(wrong) == "-1"):
                    continue
                edited = {key: each for key, each in saved.items() if key != name}
                if wrong is not ...:
                    edited[name] = wrong
                with pytest.raises(CheckpointError):
                    target._restoring(edited)
                    pytest.fail(f"{name}={wrong!r} was taken")
        assert unchanged(target, before)
        for junk in (None, 3, [], {}, "x"):
            with pytest.raises(CheckpointError):
                target._restoring(junk)


def test_an_item_that_does_not_stack_is_refused():
    saved = through_json(filled(LazyStackStorage, [TensorDict({"x": torch.ones(2)}, [2])], stack_dim=1)._saved())
    flat = through_json(filled(LazyStackStorage, [TensorDict({"x": torch.ones(2)}, [])])._saved())
    with pytest.raises(CheckpointCorrupt, match="stack_dim=1"):
        LazyStackStorage(20, stack_dim=1)._restoring({**saved, "items": flat["items"]})
