"""Many rows: where they go by the program and by the host, in memory of any kind; and how much memory flat rows need."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from interop import Flat2TED, Nested2TED, TED2Flat, TED2Nested
from interop.ted import places
from tests.interop.ted.model import Written, copied, differences

ROWS = places._BLOCK + 5000


def many(rows: int, lanes: tuple[int, ...] = (), shift: int = 0, full: bool = True, seed: int = 0) -> Written:
    """TED data of a ring, with short episodes."""
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, *lanes)
    obs = torch.rand((*shape, 3), generator=generator)
    done = torch.rand((*shape, 1), generator=generator) < 0.05
    after = obs.roll(-1, 0)
    cut = done.clone()
    cut[(shift - 1) % rows] = True
    after = torch.where(cut, -after, after)
    if not full:
        obs[shift:], after[shift:], done[shift:] = 0, 0, False
    data = {"obs": obs, "action": torch.rand(shape, generator=generator), "done": torch.zeros_like(done)}
    data["next"] = TensorDict(
        {"obs": after, "done": done, "reward": torch.rand((*shape, 1), generator=generator)}, shape
    )
    return Written(TensorDict(data, shape), shift, full, rows if full else shift)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 1.0])
def test_the_program_counts_as_the_host_does(share: float) -> None:
    for rows in (ROWS, places._BLOCK, 2 * places._BLOCK - 1):
        ends = np.random.default_rng(0).random(rows) < share
        found = places.places(ends)
        assert found.dtype == np.int64 and found.flags.writeable
        np.testing.assert_array_equal(found, places.counted(ends))
        np.testing.assert_array_equal(found, np.arange(rows) + np.cumsum(ends) - ends)


def test_all_numbers_of_rows_share_a_program() -> None:
    places._program.clear_cache()
    for rows in (places._BLOCK, places._BLOCK + 3, 3 * places._BLOCK):
        places.places(np.zeros(rows, np.bool_))
    assert places._program._cache_size() == 1


@pytest.mark.parametrize("may", [True, False])
@pytest.mark.parametrize(("shift", "full"), [(0, True), (1234, True), (60_000, False)])
def test_many_rows_come_back(may: bool, shift: int, full: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the program, and as in a forked child, where it may not run."""
    monkeypatch.setattr(places, "may_use_jax", lambda: may)
    written = many(ROWS, shift=shift, full=full)
    flat = written.told(TED2Flat())(written.data)
    assert not differences(Flat2TED()(flat), written.data)
    ends = int(written.data["next", "done"].sum())
    assert ends <= flat["obs"].shape[0] - ROWS <= ends + 1


def test_many_rows_of_lanes_come_back() -> None:
    for shift, full in ((700, True), (0, True), (1500, False)):
        written = many(places._BLOCK // 32, (8, 5), shift, full)
        assert not differences(Flat2TED()(written.told(TED2Flat())(written.data)), written.data)
        assert not differences(Nested2TED()(written.told(TED2Nested())(written.data)), written.data)


def test_rows_that_are_not_dense() -> None:
    """Data that is a view of something wider, and results that are put into such."""
    written = many(50, (2,), 20)
    wide = torch.stack([written.data["obs"], written.data["obs"] + 1], -1)
    after = torch.stack([written.data["next", "obs"], written.data["next", "obs"] + 1], -1)
    data = written.data.copy()
    data["obs"], data["next", "obs"] = wide[..., 0], after[..., 0]
    flat = written.told(TED2Flat())(data)
    assert not differences(Flat2TED()(flat), copied(written.data))
    out = written.data.clone()
    held = torch.zeros_like(wide)
    out["obs"] = held[..., 0]
    Flat2TED()(flat, out=out)
    assert torch.equal(held[..., 0], written.data["obs"])
    assert not held[..., 1].any()


def test_entries_without_bytes() -> None:
    written = many(6, shift=2)
    written.data["none"] = torch.zeros(6, 0)
    written.data["next", "none"] = torch.zeros(6, 0)
    written.data["empty"] = torch.zeros(6, 0, 3)
    flat = written.told(TED2Flat())(written.data)
    assert flat["none"].shape[1:] == (0,) and flat["empty"].shape == (6, 0, 3)
    assert not differences(Flat2TED()(flat), written.data)


@pytest.mark.parametrize("length", [20, 200])
def test_images_need_half_of_the_memory(length: int, tmp_path: Path) -> None:
    """At most 55 % of the bytes of TED data, in memory and on the disk."""
    rows = 200
    frames = torch.randint(0, 255, (rows + 1, 84, 84), dtype=torch.uint8)
    done = (torch.arange(1, rows + 1) % length == 0)[:, None]
    after = torch.where(done[..., None], 255 - frames[1:], frames[1:])
    flags = {name: torch.zeros_like(done) for name in ("done", "terminated", "truncated")}
    below = {**flags, "done": done, "truncated": done, "pixels": after, "reward": torch.rand(rows, 1)}
    data = TensorDict({"pixels": frames[:-1], "action": torch.rand(rows, 4), **flags, "next": below}, [rows])
    hook = TED2Flat()
    hook.shift, hook.is_full = rows, True
    flat, filed = hook(data), hook(data, tmp_path)
    assert bytes_of(flat) == bytes_of(filed) <= 0.55 * bytes_of(data)
    assert sum(file.stat().st_size for file in tmp_path.rglob("*.memmap")) <= 0.55 * bytes_of(data)
    assert not differences(Flat2TED()(filed), data)


def bytes_of(data: TensorDict) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in data.values(True, True) if isinstance(leaf, torch.Tensor))
