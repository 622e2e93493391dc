"""The table of rows of bytes, against a dict; hashes in other processes."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from interop.maps import table as tables
from interop.maps.table import KeyTable, hash_rows, row_bytes

STEPS = st.lists(
    st.tuples(st.sampled_from(["find", "insert", "insert", "truncate"]), st.integers(0, 60), st.integers(0, 2**32 - 1)),
    max_size=8,
)


@pytest.mark.parametrize("hashed", ["as it is", "one of two values"])
@given(width=st.sampled_from([0, 1, 3, 8, 13]), limit=st.integers(0, 80), steps=STEPS)
def test_a_table_is_a_dict_that_counts(hashed, width, limit, steps):
    with pytest.MonkeyPatch.context() as patch:
        if hashed != "as it is":  # then only the bytes tell rows apart
            patch.setattr(tables, "_hash_words", lambda words, _: (words[:, 0] % 2).astype(np.int64) << 33)
        table, model = KeyTable(), {}
        for what, count, seed in steps:
            keys = np.random.default_rng(seed).integers(0, 3 if width > 2 else 30, (count, width)).astype(np.uint8)
            rows = [row.tobytes() for row in keys]
            if what == "find":
                assert table.find(keys).tolist() == [model.get(row, len(model)) for row in rows]
            elif what == "truncate":
                table.truncate(count)
                model = dict(list(model.items())[:count])
            else:
                after = dict(model)
                numbers = [after.setdefault(row, len(after)) for row in rows]
                if len(after) > max(limit, len(model)):
                    with pytest.raises(IndexError, match="there is room for"):
                        table.insert(keys, limit)
                else:
                    assert table.insert(keys, limit).tolist() == numbers
                    model = after
            assert [row.tobytes() for row in table.keys] == list(model)
            assert len(table) == len(model)


def test_a_table_of_many_rows_finds_all_after_growing():
    keys = np.random.default_rng(0).integers(0, 256, (20_000, 12), dtype=np.uint8)
    table = KeyTable()
    for some in np.split(keys, [1, 3, 500, 9000]):
        table.insert(some)
    assert (table.find(keys) == np.arange(len(keys))).all()
    with pytest.raises(IndexError, match="1 new keys do not fit beside the 20000"):
        table.insert(np.zeros((1, 12), np.uint8), len(keys))
    with pytest.raises(ValueError, match="12 bytes each, got keys of 4"):
        table.find(np.zeros((1, 4), np.uint8))
    with pytest.raises(TypeError, match="rows of bytes"):
        table.find(np.zeros((1, 12), np.int8))
    assert not table.keys.flags.writeable
    table.truncate(0)
    assert table.insert(np.zeros((2, 4), np.uint8)).tolist() == [0, 0]
    table.truncate(0)
    rows = np.arange(40, dtype=np.uint8).reshape(2, 20)
    assert table.insert(rows).tolist() == [0, 1] and (table.keys == rows).all()


def test_hashes_are_the_same_in_every_process_and_differ_between_near_rows():
    code = (
        f"import runpy, numpy as np; print(runpy.run_path({tables.__file__!r})['hash_rows'](np.eye(9, dtype=np.uint8)))"
    )
    environment = os.environ | {"PYTHONHASHSEED": "12345"}
    told = subprocess.run(
        [sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True
    ).stdout
    assert told.strip() == str(hash_rows(np.eye(9, dtype=np.uint8)))
    signs = np.array([[(-1.0) ** (row >> bit & 1) for bit in range(12)] for row in range(4096)], np.float32)
    near = [*signs.view(np.uint8), *np.arange(2000, dtype=np.float32).repeat(12).reshape(-1, 12).view(np.uint8)]
    found = hash_rows(np.stack(near)[1:])  # the row of ones is in both
    assert len(np.unique(found)) == len(found)
    for bits in (found & 0xFFFF, found >> 48 & 0xFFFF):  # of random ones 5,820 would differ
        assert len(np.unique(bits)) > 5700
    assert len({hash_rows(np.zeros((1, width), np.uint8))[0] for width in range(20)}) == 20


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16, torch.float64, torch.complex64])
def test_the_bytes_of_a_row_are_those_of_its_tensors_side_by_side(dtype):
    tensor = torch.randn(2, 6, 3).to(dtype)[:, ::2].mT.requires_grad_(dtype.is_floating_point)  # not contiguous
    rows = row_bytes([tensor, torch.arange(6).reshape(2, 3)], torch.Size([2, 3]))
    assert rows.shape == (6, 3 * dtype.itemsize + 8)
    for place, row in enumerate(rows):
        values = tensor.detach()[divmod(place, 3)].contiguous().view(torch.uint8).tolist()
        assert row.tolist() == [*values, place, *[0] * 7]
    assert row_bytes([tensor[0, 0]], torch.Size([])).shape == (1, 3 * dtype.itemsize)
    assert row_bytes([tensor[:0]], torch.Size([0, 3])).shape == (0, 3 * dtype.itemsize)
    with pytest.raises(ValueError, match="batch dims"):
        row_bytes([tensor], torch.Size([3]))
