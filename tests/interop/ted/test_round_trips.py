"""TED data flat, by trajectory and in parts, and back, against a model that goes row by row."""

import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import given
from tensordict import LazyStackedTensorDict, MemoryMappedTensor, TensorDict
from torch import Tensor

from interop import Flat2TED, H5Combine, H5Split, Nested2TED, TED2Flat, TED2Nested
from interop.ted import gathered
from interop.ted.refusals import bits
from tests.interop.ted.model import Written, copied, differences, laid_out, paths, rings, same, write


def entries(data):
    """Keys of tensors and their values."""
    return {key: data.get(key) for key in paths(data)}


@given(rings())
def test_flat_arrays_are_those_of_the_model(written: Written) -> None:
    flat = written.told(TED2Flat())(written.data)
    expected, _ = laid_out(written)
    assert flat.batch_size == torch.Size([])
    assert set(paths(flat)) == set(expected)
    for key, rows in expected.items():
        assert flat.get(key).dtype == written.data.get(("next", "reward") if key == "reward" else key).dtype
        assert torch.equal(bits(flat.get(key)), rows), key
    assert flat.get_non_tensor("shift") == written.shift
    assert flat.get_non_tensor("is_full") is written.is_full
    assert flat.get_non_tensor("_storage_shape") == tuple(written.data.shape)
    assert set(flat.keys()) - {"shift", "is_full", "_storage_shape"} == {
        key if isinstance(key, str) else key[0] for key in expected
    }


@given(rings())
def test_nested_rows_are_the_trajectories_of_the_model(written: Written) -> None:
    nested = written.told(TED2Nested())(written.data)
    expected, trajectories = laid_out(written)
    assert nested.batch_size == torch.Size([len(trajectories)])
    followed = {key for key, rows in expected.items() if rows.shape[0] > written.data.numel()}
    for key, rows in expected.items():
        lengths = [length + (end and key in followed) for length, end in trajectories]
        components = nested.get(key).unbind(0)
        assert [each.shape[0] for each in components] == lengths, key
        assert torch.equal(torch.cat([bits(each) for each in components]), rows), key


@given(rings())
def test_all_ways_lead_back(written: Written) -> None:
    data = written.data
    flat = written.told(TED2Flat())(data)
    nested = written.told(TED2Nested())(data)
    split = written.told(H5Split())(nested)
    for back in (Flat2TED()(flat), Nested2TED()(nested), Nested2TED()(H5Combine()(split))):
        assert not differences(back, data)


@given(rings())
def test_what_is_given_out_is_filled_in_place(written: Written) -> None:
    out = copied(written.data)
    places = {key: out.get(key).data_ptr() for key in paths(out)}
    for key in paths(out):
        out.get(key).fill_(1)
    assert Flat2TED()(written.told(TED2Flat())(written.data), out=out) is out
    assert not differences(out, written.data)
    assert {key: out.get(key).data_ptr() for key in paths(out)} == places


@given(rings())
def test_nothing_that_is_given_changes(written: Written) -> None:
    before = copied(written.data)
    flat = written.told(TED2Flat())(written.data)
    kept = copied(flat)
    Flat2TED()(flat)
    Nested2TED()(H5Combine()(written.told(H5Split())(written.told(TED2Nested())(written.data))))
    assert not differences(written.data, before)
    for key in paths(kept):
        assert same(flat.get(key), kept.get(key))


@pytest.mark.parametrize("count", range(1, 13))
def test_every_cursor_of_a_ring_with_lanes(count: int) -> None:
    for ends in ((), ((2, 0),), ((count - 1, 1),), tuple(itertools.product(range(count), range(2)))):
        written = write(4, (2,), count, ends, seed=count)
        assert not differences(Flat2TED()(written.told(TED2Flat())(written.data)), written.data)
        assert not differences(Nested2TED()(written.told(TED2Nested())(written.data)), written.data)


def test_the_worked_example() -> None:
    """Ten steps, obs t and then t + 1, but 4.5 where the episode ends at step 4."""
    seen = torch.arange(10.0)
    after = seen + 1
    after[4] = 4.5
    done = (seen == 4)[:, None]

    def rows(capacity: int) -> TensorDict:
        kept = torch.arange(10)[-capacity:]
        place = kept % capacity
        obs, following = torch.zeros(capacity), torch.zeros(capacity)
        over = torch.zeros(capacity, 1, dtype=torch.bool)
        obs[place], following[place], over[place] = seen[kept], after[kept], done[kept]
        below = {"obs": following, "done": over}
        return TensorDict({"obs": obs, "action": obs * 10, "done": torch.zeros_like(over), "next": below}, [capacity])

    hook = TED2Flat()
    hook.shift, hook.is_full = 10, False
    flat = hook(rows(12))
    assert flat["obs"].tolist() == [0, 1, 2, 3, 4, 4.5, 5, 6, 7, 8, 9, 10, 0, 0]
    assert flat["action"].shape == (12,)
    assert flat["done"].flatten().nonzero().tolist() == [[4]]
    hook.shift, hook.is_full = 2, True
    flat = hook(rows(8))
    assert flat["obs"].tolist() == [2, 3, 4, 4.5, 5, 6, 7, 8, 9, 10]
    assert flat["action"].tolist() == [20, 30, 40, 50, 60, 70, 80, 90]


# ---------------------------------------------------------------------- files


@pytest.mark.parametrize("count", [3, 5, 8])
def test_files_hold_the_same(tmp_path: Path, count: int) -> None:
    written = write(5, (2,), count, {(1, 0), (4, 1)}, seed=7)
    for number in (1, 2):  # the second time over the first
        flat = written.told(TED2Flat())(written.data, tmp_path / "below" / "flat")
        nested = written.told(TED2Nested())(written.data, path=str(tmp_path / "nested"))
        assert flat.is_memmap() and nested.is_memmap(), number
        assert all(isinstance(each, MemoryMappedTensor) for each in entries(flat).values())
        opened = TensorDict.load_memmap(tmp_path / "below" / "flat"), TensorDict.load_memmap(tmp_path / "nested")
        for one, other in ((flat, nested), opened):
            assert not differences(Flat2TED()(one), written.data)
            assert not differences(Nested2TED()(other), written.data)
    assert {each.name for each in tmp_path.iterdir()} == {"below", "nested"}
    assert (tmp_path / "nested" / "obs.shape.memmap").exists()


def test_files_in_the_place_of_those_the_data_is_in(tmp_path: Path) -> None:
    written = write(5, (), 8, {(3, 0)})
    data = written.data.memmap(tmp_path)
    before = copied(data)
    flat = written.told(TED2Flat())(data, tmp_path)
    assert not differences(data, before)
    assert not differences(Flat2TED()(flat), before)


def test_keys_that_are_no_file_names(tmp_path: Path) -> None:
    written = write(3, (), 3, ())
    for key in ("a/b", "..", "x y"):
        written.data[key] = torch.arange(3)
    assert not differences(Flat2TED()(written.told(TED2Flat())(written.data, tmp_path)), written.data)


@pytest.mark.parametrize("spare", [0, 1 << 20])
def test_a_disk_without_room_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spare: int) -> None:
    """Arrays that are made in their files, and those that are written."""

    def full(*given: object) -> None:
        raise OSError(28, "No space left on device")

    written = write(3, (), 3, ())
    monkeypatch.setattr(gathered, "_SPARE", spare)
    monkeypatch.setattr("interop.ted.gathered._write" if spare else "os.posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        written.told(TED2Flat())(written.data, tmp_path / "flat")
    assert not list(tmp_path.iterdir())


def test_large_arrays_are_made_in_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = write(5, (2,), 7, {(1, 0), (4, 1)})
    monkeypatch.setattr(gathered, "_SPARE", 16)
    flat = written.told(TED2Flat())(written.data, tmp_path / "flat")
    nested = written.told(TED2Nested())(written.data, tmp_path / "nested")
    assert not differences(Flat2TED()(flat), written.data)
    assert not differences(Nested2TED()(nested), written.data)


# ---------------------------------------------------------------------- unusual data


def test_flags_and_rewards_on_one_side_alone() -> None:
    written = write(5, (), 7, {(4, 0)})
    data = written.data
    del data["terminated"], data["next", "truncated"], data["next", "reward"]
    data["reward"] = torch.rand(5, 1)
    data["truncated"] = torch.rand(5, 1) < 0.5
    flat = written.told(TED2Flat())(data)
    assert flat.get_non_tensor("_root_only") == [["reward"], ["truncated"]] or flat.get_non_tensor("_root_only") == [
        ["truncated"],
        ["reward"],
    ]
    assert flat.get_non_tensor("_next_only") == [["terminated"]]
    assert not differences(Flat2TED()(flat), data)
    nested = written.told(TED2Nested())(data)
    assert not differences(Nested2TED()(H5Combine()(written.told(H5Split())(nested))), data)


def test_a_writer_that_began_anew() -> None:
    old, new = write(8, (), 6, {(2, 0)}, seed=1), write(8, (), 3, (), seed=2)
    data = copied(old.data)
    data[:3] = new.data[:3]
    with pytest.raises(ValueError, match="row 5"):  # it cannot be told from those that were never written
        Written(data, 3, False, 6).told(TED2Flat())(data)
    rows = data[:6]
    written = Written(rows, 3, False, 6)
    flat = written.told(TED2Flat())(rows)
    assert flat.get_non_tensor("_closed")
    assert not differences(Flat2TED()(flat), rows)
    assert not differences(Nested2TED()(written.told(TED2Nested())(rows)), rows)


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
        nested = written.told(TED2Nested())(written.data)
        back = Nested2TED()(H5Combine()(written.told(H5Split())(nested)))
    finally:
        torch.set_default_device(None)
    assert not differences(back, written.data)


def test_memory_is_shared_between_parts_and_the_whole() -> None:
    written = write(5, (), 8, {(3, 0)})
    nested = written.told(TED2Nested())(written.data)
    split = written.told(H5Split())(nested)
    assert isinstance(split["traj_0", "obs"], Tensor)
    assert split["traj_0", "obs"].data_ptr() == nested["obs"].data_ptr()


@pytest.mark.parametrize(
    ("count", "names"), [(1, "0"), (10, "0123456789"), (11, ["00", "01", "10"]), (101, ["000", "100"])]
)
def test_numbers_have_as_many_digits_as_the_last(count: int, names: str) -> None:
    written = write(count, (), count, {(step, 0) for step in range(count)}, observations={"obs": ((), torch.float32)})
    split = written.told(H5Split())(written.told(TED2Nested())(written.data))
    found = [key for key in split.keys() if key.startswith("traj")]  # noqa: SIM118
    assert len(found) == count
    assert {f"traj_{name}" for name in names} <= set(found)
    assert not differences(Nested2TED()(H5Combine()(split)), written.data)
