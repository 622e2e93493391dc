"""TED data flat, by trajectory and in parts, and back, against a model that goes row by row."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from tensordict import LazyStackedTensorDict, MemoryMappedTensor, TensorDict

from interop import Flat2TED, H5Combine, H5Split, Nested2TED, TED2Flat, TED2Nested
from tests.faults.failing import small_disk
from tests.interop.ted.model import Written, bits, copied, differences, laid_out, paths, rings, same, write


def back_by_all_ways(written: Written) -> list[Any]:
    """The data after each pair of hooks."""
    nested = written.told(TED2Nested())(written.data)
    parts = written.told(H5Split())(nested)
    flat = written.told(TED2Flat())(written.data)
    jagged = nested.copy()
    for key in paths(nested):
        jagged.set(key, torch.nested.nested_tensor(list(nested.get(key).unbind(0)), layout=torch.jagged))
    return [Flat2TED()(flat), *(Nested2TED()(each) for each in (nested, jagged, H5Combine()(parts)))]


@given(rings())
def test_arrays_are_those_of_the_model_and_lead_back(written: Written) -> None:
    data, before = written.data, copied(written.data)
    flat, nested = written.told(TED2Flat())(data), written.told(TED2Nested())(data)
    expected, trajectories = laid_out(written)
    assert flat.batch_size == torch.Size([]) and nested.batch_size == torch.Size([len(trajectories)])
    assert set(paths(flat)) == set(paths(nested)) == set(expected)
    info = {"shift": written.shift, "is_full": written.is_full, "_storage_shape": tuple(data.shape)}
    for key, value in info.items():
        assert flat.get_non_tensor(key) == nested.get_non_tensor(key) == value
    assert set(flat.keys()) - set(info) == {key if isinstance(key, str) else key[0] for key in expected}
    for key, rows in expected.items():
        assert flat.get(key).dtype == data.get(("next", "reward") if key == "reward" else key).dtype
        assert torch.equal(bits(flat.get(key)), rows), key
        components = nested.get(key).unbind(0)
        followed = len(rows) > data.numel()
        assert [len(each) for each in components] == [length + (end and followed) for length, end in trajectories]
        assert torch.equal(torch.cat([bits(each) for each in components]), rows), key
    kept = copied(flat)
    for back in back_by_all_ways(written):
        assert not differences(back, data)
    out = copied(data)
    places = {key: out.get(key).data_ptr() for key in paths(out)}
    for key in paths(out):
        out.get(key).fill_(1)
    assert Flat2TED()(flat, out=out) is out
    assert not differences(out, data) and places == {key: out.get(key).data_ptr() for key in paths(out)}
    assert not differences(data, before)  # no hook changes what it is given
    assert all(same(flat.get(key), kept.get(key)) for key in paths(kept))


# ---------------------------------------------------------------------- files


@pytest.mark.parametrize("count", [3, 8])
def test_files_hold_the_same(tmp_path: Path, count: int) -> None:
    written = write(5, (2,), count, {(1, 0), (4, 1)}, seed=7)
    for key in ("a/b", "..", "x y"):
        written.data[key] = torch.arange(10).reshape(5, 2)
    for _ in range(2):  # the second time over the first
        flat = written.told(TED2Flat())(written.data, tmp_path / "below" / "flat")
        nested = written.told(TED2Nested())(written.data, path=str(tmp_path / "nested"))
        assert flat.is_memmap() and nested.is_memmap()
        assert all(isinstance(flat.get(key), MemoryMappedTensor) for key in paths(flat))
        opened = TensorDict.load_memmap(tmp_path / "below" / "flat"), TensorDict.load_memmap(tmp_path / "nested")
        for one, other in ((flat, nested), opened, pickle.loads(pickle.dumps((flat, nested)))):
            assert not differences(Flat2TED()(one), written.data)
            assert not differences(Nested2TED()(other), written.data)
    assert {each.name for each in tmp_path.iterdir()} == {"below", "nested"}


@pytest.mark.parametrize(("save", "load"), [(TED2Flat, Flat2TED), (TED2Nested, Nested2TED)])
@pytest.mark.parametrize("size", [3000, 100_000])  # of a file that has no room at its end, or not at all
def test_a_full_disk_is_an_error(tmp_path: Path, save: Any, load: Any, size: int) -> None:
    written = write(5, (2,), 3, {(1, 0), (4, 1)}, seed=7)
    written.data["large"] = torch.ones(5, 2, size)
    with small_disk(tmp_path, "160k") as mounted:
        if not mounted:
            pytest.skip("nothing can be mounted here")
        with pytest.raises(OSError, match="No space left"):
            written.told(save())(written.data, tmp_path / "files")
        with pytest.raises(ValueError, match="_storage_shape"):
            load()(TensorDict.load_memmap(tmp_path / "files"))


# ---------------------------------------------------------------------- unusual data


def test_flags_and_rewards_on_one_side_alone() -> None:
    written = write(5, (), 7, {(4, 0)})
    data = written.data
    del data["terminated"], data["next", "truncated"], data["next", "reward"]
    data["reward"] = torch.rand(5, 1)
    data["truncated"] = torch.rand(5, 1) < 0.5
    flat = written.told(TED2Flat())(data)
    found = flat.get_non_tensor("_paths")
    assert ["reward"] in found and ["next", "terminated"] in found and ["terminated"] not in found
    assert all(not differences(back, data) for back in back_by_all_ways(written))


def test_other_names() -> None:
    names = {"done_keys": (("agents", "over"),), "reward_keys": (("agents", "gain"),)}
    written = write(6, (2,), 9, {(2, 0), (5, 1)})
    data = written.data
    flags = data["next", "done"].clone()
    for key in ("done", "terminated", "truncated"):
        del data[key], data["next", key]
    data["agents", "over"], data["next", "agents", "over"] = torch.zeros_like(flags), flags
    data["next", "agents", "gain"] = data["next"].pop("reward")
    data["shift"] = torch.arange(12).reshape(6, 2)
    hook = TED2Flat(done_key=("next", "agents", "over"), shift_key=("meta", "shift"), is_full_key="full", **names)
    flat = written.told(hook)(data)
    assert flat.get_non_tensor(("meta", "shift")) == written.shift
    back = Flat2TED(done_key=("agents", "over"), shift_key=("meta", "shift"), is_full_key="full", **names)(flat)
    assert not differences(back, data)


def test_lazy_stacks_and_inference_and_another_default_device() -> None:
    written = write(5, (), 8, {(3, 0)})
    lazy = LazyStackedTensorDict(*written.data.unbind(0), stack_dim=0)
    with torch.inference_mode():
        assert not differences(Flat2TED()(written.told(TED2Flat())(lazy)), written.data)
    torch.set_default_device("meta")
    try:
        made = back_by_all_ways(written)
    finally:
        torch.set_default_device(None)
    assert all(not differences(back, written.data) for back in made)


def test_rows_that_are_not_dense_and_entries_without_bytes() -> None:
    """Data that is a view of something wider, and results that are put into such; much of it, in threads."""
    written = write(3000, (2,), 4000, {(n * 7, n % 2) for n in range(500)}, observations={"obs": ((3,), torch.float32)})
    data = written.data
    for key in ("obs", ("next", "obs")):
        data[key] = torch.stack([data[key], data[key] + 1], -1)[..., 0]
        data[(*key[:-1], "none") if isinstance(key, tuple) else "none"] = torch.zeros(3000, 2, 0)
    flat = written.told(TED2Flat())(data)
    assert flat["none"].shape[1:] == (0,)
    assert not differences(Flat2TED()(flat), copied(data))
    out, held = copied(data), torch.zeros(3000, 2, 3, 2)
    out["obs"] = held[..., 0]
    Flat2TED()(flat, out=out)
    assert torch.equal(bits(held[..., 0]), bits(data["obs"].contiguous())) and not held[..., 1].any()
