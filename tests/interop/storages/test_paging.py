"""Rows in files: what is read is what was written, however it is read, and the disk is asked only while it is needed."""

import gc
import importlib
import os
import pathlib
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from interop import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ReplayBuffer,
    SliceSampler,
    TensorStorage,
)
from interop.host import paging
from tests.interop.rows import check_same, wide

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel is asked on Linux only")

PAGE = os.sysconf("SC_PAGE_SIZE")
DTYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64, torch.complex128,
)  # fmt: skip


def many_leaves(ids):
    """A leaf of each dtype, of items without dims, larger than a page, and empty."""
    ids = torch.as_tensor(ids)
    leaves = {str(dtype): wide(ids % 100, 3, dtype=dtype) for dtype in DTYPES}
    leaves |= {f"one {dtype}": wide(ids % 2, dtype=dtype) for dtype in DTYPES}
    leaves |= {"large": wide(ids, 3, 700), "empty": torch.empty(len(ids), 0)}
    return TensorDict(leaves, [len(ids)])


def steps_of_lanes(ids):
    """Rows of two lanes."""
    ids = torch.as_tensor(ids)
    both = torch.stack([ids, ids + 1000], 1)
    return TensorDict(
        {"obs": wide(both.reshape(-1), 5, dtype=torch.bfloat16).reshape(-1, 2, 5), "id": both}, both.shape
    )


class Disk:
    """Stands in for the disk: how often it was asked for something, and whether reads find rows missing."""

    def __init__(self, monkeypatch):
        self.asked, self.ranges, self.busy = 0, [], False
        self._count = 0
        self._request = paging.request
        monkeypatch.setattr(paging, "request", self._asking)
        monkeypatch.setattr(paging, "_disk_reads", self._reads)

    def _asking(self, ranges):
        self.asked += 1
        self.ranges.append(ranges)
        self._request(ranges)

    def _reads(self):
        self._count += self.busy
        return self._count


@pytest.fixture
def disk(monkeypatch):
    return Disk(monkeypatch)


def settle(buffer):
    """Read what is in memory until it is taken to be there."""
    for _ in range(paging._PATIENCE):
        buffer.storage.table.rows.read(torch.arange(3))
    assert not buffer.storage.table.rows._paging.cold


def maps_of(file):
    return sum(line.rstrip().endswith(str(file)) for line in pathlib.Path("/proc/self/maps").read_text().splitlines())


# ---------------------------------------------------------------------- values


@pytest.mark.parametrize("piece", [1, 5 * PAGE, 1 << 24])
@pytest.mark.parametrize("cold", [True, False])
def test_rows_are_read_as_they_were_written(tmp_path, disk, monkeypatch, cold, piece):
    monkeypatch.setattr(paging, "_PIECE", piece)
    buffer = ReplayBuffer(storage=LazyMemmapStorage(40, scratch_dir=tmp_path / "rows"), batch_size=64)
    rows = many_leaves(range(100, 140))
    buffer.extend(rows)
    disk.busy = cold
    if not cold:
        settle(buffer)
    for slots in ([3], [39, 0, 0, 17, 39], list(range(40)), [], [[1, 2], [2, 30]]):
        at = torch.tensor(slots, dtype=torch.int64)
        check_same(buffer[at], rows[at])
    asked = disk.asked
    batch, info = buffer.sample(return_info=True)
    check_same(batch, rows[info["index"]])
    assert (disk.asked > asked) == cold


@pytest.mark.parametrize("cold", [True, False])
def test_slices_and_lanes_are_read_as_they_were_written(tmp_path, disk, cold):
    buffer = ReplayBuffer(
        storage=LazyMemmapStorage(60, scratch_dir=tmp_path / "rows", ndim=2),
        sampler=SliceSampler(num_slices=4, traj_key="trajectory"),
        dim_extend=0,
        batch_size=20,
    )
    rows = steps_of_lanes(range(30))
    rows["trajectory"] = torch.tensor([[0, 1]]).repeat(30, 1)
    buffer.extend(rows)
    disk.busy = cold
    if not cold:
        settle(buffer)
    batch, info = buffer.sample(return_info=True)
    check_same(batch, rows[info["index"]])
    assert (batch["id"].reshape(4, 5).diff(dim=1) == 1).all()
    at = torch.tensor([4, 4, 29])
    check_same(buffer[at], rows[at])
    check_same(buffer[at, torch.tensor([0, 1, 1])], rows[at, torch.tensor([0, 1, 1])])


@pytest.mark.parametrize("kind", ["opened to read", "of the user", "of the user, private"])
def test_other_maps_are_read_the_same_way(kind, tmp_path, disk, monkeypatch):
    rows = many_leaves(range(30)).exclude("empty")
    if kind == "opened to read":
        ReplayBuffer(storage=LazyMemmapStorage(30, scratch_dir=tmp_path / "rows")).extend(rows)
        storage = LazyMemmapStorage.open(tmp_path / "rows", mode="r")
    else:
        rows.memmap(tmp_path / "rows")
        if kind == "of the user, private":  # as files that cannot be written are mapped
            monkeypatch.setattr(importlib.import_module("tensordict.memmap"), "_is_writable", lambda name: False)
        storage = TensorStorage(TensorDict.load_memmap(tmp_path / "rows"))
    disk.busy = True
    at = torch.tensor([3, 3, 29, 0])
    for _ in range(2):
        check_same(ReplayBuffer(storage=storage)[at], rows[at])
    assert disk.asked


def test_writes_are_seen_by_the_next_read_and_all_maps_go_with_the_buffer(tmp_path, disk):
    buffer = ReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=tmp_path / "rows"))
    disk.busy = True
    at = torch.arange(10)
    for turn in range(3):
        rows = many_leaves(range(10 * turn, 10 * turn + 10))
        buffer.extend(rows)
        check_same(buffer[at], rows)
    buffer[:]["large"][4] = -1.0
    batch = buffer[at]
    assert (batch["large"][4] == -1).all() and maps_of(tmp_path / "rows" / "large.memmap") == 2
    del buffer
    gc.collect()
    assert maps_of(tmp_path / "rows" / "large.memmap") == 0
    assert (batch["large"][4] == -1).all()


# ---------------------------------------------------------------------- when the disk is asked


def test_the_disk_is_asked_until_reads_have_done_without_it(tmp_path, disk):
    buffer = ReplayBuffer(storage=LazyMemmapStorage(40, scratch_dir=tmp_path / "rows"), batch_size=4)
    buffer.extend(many_leaves(range(40)))
    disk.busy = True
    for number in range(1, 20):
        buffer.sample()
        assert disk.asked == number
    disk.busy = False
    for _ in range(3 * paging._PATIENCE):
        buffer.sample()
    assert disk.asked == 19 + paging._PATIENCE
    disk.busy = True
    for _ in range(paging._LOOKS + 1):
        buffer.sample()
    assert disk.asked > 19 + paging._PATIENCE


def test_rows_in_memory_are_not_requested(disk):
    disk.busy = True
    for storage in (LazyTensorStorage(40), LazyMemmapStorage(40), TensorStorage(many_leaves(range(40)))):
        buffer = ReplayBuffer(storage=storage, batch_size=4)
        buffer.extend(many_leaves(range(40)))
        buffer.sample()
    assert not disk.asked


# ---------------------------------------------------------------------- what is asked for


@given(
    items=st.lists(st.integers(0, 499), min_size=1, max_size=50),
    size=st.sampled_from([1, 3, 64, PAGE // 2, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE + 5]),
)
def test_exactly_the_pages_of_the_items_are_named_each_once(items, size):
    source = torch.empty(500, size, dtype=torch.uint8)
    named = paging._pages(source, np.unique(items))
    wanted = set()
    for item in items:
        start = source.data_ptr() + item * size
        wanted |= set(range(start // PAGE, (start + size - 1) // PAGE + 1))
    pages = [page for first, count in named.tolist() for page in range(first, first + count)]
    assert pages == sorted(wanted)
    assert (named[1:, 0] > named[:-1].sum(1)).all()  # what touches is one range
