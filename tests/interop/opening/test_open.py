"""`open` gives the buffer that was saved, without reading its rows, and refuses to write them."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from tensordict import TensorDict

import interop
from fbuf.checkpoint import CheckpointCorrupt, CheckpointMismatch, Reading
from interop import (
    Compose,
    CompressedListStorage,
    ConsumingSampler,
    LazyFrameStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    PromptGroupSampler,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    Sampler,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    StalenessAwareSampler,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
    UnknownPathError,
)
from interop.transforms import DoubleToFloat
from tests.interop.looking.places import a_checkpoint, a_folder, an_ensemble
from tests.interop.opening.test_resize import SAMPLERS, STORAGES, steps

BATCH = 4


def saved(path: Path, sampler: Sampler, storage: object = None, **arguments: object) -> TensorDictReplayBuffer:
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(20) if storage is None else storage, sampler=sampler, batch_size=BATCH, **arguments
    )  # type: ignore[arg-type]
    buffer.extend(steps(0, 23))
    buffer.sample()
    buffer.dumps(path)
    return buffer


def test_sizes_of_opened_rows_are_those_in_the_files(tmp_path: Path) -> None:
    held = saved(tmp_path, RandomSampler())
    opened = interop.open(tmp_path)
    sizes = {column.key: column.bytes for column in opened.describe().columns}
    assert sizes == {column.key: column.bytes for column in held.describe().columns} and None not in sizes.values()
    shares = {share.key: share for share in opened.plan().shares}
    for share in held.plan().shares:
        assert shares[share.key].bytes == share.bytes and shares[share.key].place == str(tmp_path)


def batches(buffer: ReplayBuffer) -> list[list[int]]:
    buffer.set_rng(torch.Generator().manual_seed(3))
    return [buffer.sample()["t"].tolist() for _ in range(2)]


@pytest.mark.parametrize("name", SAMPLERS)
def test_every_sampler_goes_on(name: str, tmp_path: Path) -> None:
    buffer = saved(tmp_path, SAMPLERS[name](20))
    opened, copied = interop.open(tmp_path), interop.open(tmp_path, "r+")
    assert type(opened) is type(buffer) and type(opened.sampler) is type(buffer.sampler)
    assert (opened[:] == buffer[:]).all() and opened.write_count == 23
    assert repr(opened.sampler) == repr(buffer.sampler)
    assert batches(opened) == batches(copied) == batches(buffer)
    copied.extend(steps(30, 2))
    buffer.extend(steps(30, 2))
    assert batches(copied) == batches(buffer)


@pytest.mark.parametrize("name", STORAGES)
def test_every_storage_is_read_and_not_written(name: str, tmp_path: Path) -> None:
    pytest.importorskip("zstandard")
    buffer = saved(tmp_path, RandomSampler(), STORAGES[name](20))
    opened = interop.open(tmp_path)
    assert opened[:]["t"].tolist() == buffer[:]["t"].tolist()
    assert opened[[3, 1]]["t"].tolist() == buffer[[3, 1]]["t"].tolist()
    before = opened[:]["t"].tolist()
    writes: list[Callable[[], object]] = [
        lambda: opened.extend(steps(0, 2)),
        lambda: opened.add(steps(0, 1)[0]),
        lambda: opened.empty(),
    ]
    for write in writes:
        with pytest.raises(RuntimeError, match="mode='r'"):
            write()
    assert opened[:]["t"].tolist() == before and opened.storage.max_size == 20


def test_rows_are_mapped_and_outlive_the_next_checkpoint(tmp_path: Path) -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(3000, ndim=2), batch_size=8, dim_extend=0)
    buffer.extend(torch.arange(3000 * 500, dtype=torch.int32).reshape(1500, 2, 500))  # several files
    buffer.dumps(tmp_path)
    with mock.patch.object(Reading, "read_file", side_effect=AssertionError("rows were read")) as read:
        read.side_effect = lambda entry, pieces: pieces  # only the small file, whose content is not needed here
        opened = interop.open(tmp_path)
        assert {call.args[0].name for call in read.call_args_list} <= {"small"}
    assert (opened.storage[:] == buffer.storage[:]).all()
    index = (torch.tensor([0, 700, 1499, 3]), torch.tensor([0, 1, 1, 0]))
    assert (opened.storage.get(index) == buffer.storage.get(index)).all()
    before = buffer.storage[:].clone()
    buffer.extend(torch.zeros(1500, 2, 500, dtype=torch.int32))
    buffer.dumps(tmp_path)
    assert (opened.storage[:] == before).all()


def test_text_is_mapped_over_the_borders_of_files(tmp_path: Path) -> None:
    texts = [chr(97 + place % 26) * (20_011 + place) + "é" for place in range(40)]  # in parts of 256 KiB
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(50), batch_size=4)
    buffer.extend(TensorDict({"t": torch.arange(40), "empty": torch.zeros(40, 0), "text": texts}, [40]))
    buffer.dumps(tmp_path / "one")
    with mock.patch.object(Reading, "read_file", autospec=True, side_effect=Reading.read_file) as read:
        opened = interop.open(tmp_path / "one")
        assert {call.args[1].name for call in read.call_args_list} <= {"small"}
    assert list(opened[:]["text"]) == texts and opened[:]["empty"].shape == (40, 0)
    assert [texts[t] for t in opened.sample()["t"].tolist()] and opened[[39, 13]]["text"] == [texts[39], texts[13]]
    opened.dumps(tmp_path / "two")
    for again in (interop.open(tmp_path / "two"), copy.deepcopy(opened), pickle.loads(pickle.dumps(opened))):
        assert list(again[:]["text"]) == texts


def test_frames_and_writers(tmp_path: Path) -> None:
    pixels = torch.arange(13)[:, None, None].expand(13, 2, 2).to(torch.uint8)
    stacks = torch.stack((pixels[:-1], pixels[1:]), 1)
    behind = {"pixels": stacks[1:], "done": torch.zeros(11, 1, dtype=torch.bool)}
    frames = TensorDictReplayBuffer(storage=LazyFrameStorage(8, obs_key="pixels", stack=2, check=False), batch_size=2)
    frames.extend(TensorDict({"pixels": stacks[:-1], "next": TensorDict(behind, [11])}, [11]))
    frames.dumps(tmp_path / "frames")
    opened = interop.open(tmp_path / "frames")
    assert type(opened.storage) is LazyFrameStorage and (opened[:] == frames[:]).all()
    for place, writer in enumerate((TensorDictMaxValueWriter("t"), TensorDictRoundRobinWriter(track_generations=True))):
        buffer = saved(tmp_path / str(place), RandomSampler(), writer=writer)
        again = interop.open(tmp_path / str(place), "r+")
        assert type(again.writer) is type(writer)
        again.extend(steps(50, 1))
        buffer.extend(steps(50, 1))
        assert (again[:] == buffer[:]).all()


def test_classes_of_buffers_and_ensembles(tmp_path: Path) -> None:
    plain = PrioritizedReplayBuffer(alpha=0.7, beta=0.5, storage=LazyTensorStorage(9), batch_size=2)
    plain.extend(torch.arange(5))
    plain.update_priority(torch.arange(5), torch.arange(1.0, 6.0))
    plain.dumps(tmp_path / "plain")
    opened = interop.open(tmp_path / "plain", batch_size=3)
    assert type(opened) is PrioritizedReplayBuffer and opened.batch_size == 3
    assert opened.sampler.priorities.tolist() == [1, 2, 3, 4, 5]
    ensemble = interop.open(an_ensemble(tmp_path / "ensemble"))
    assert isinstance(ensemble, ReplayBufferEnsemble) and [len(each) for each in ensemble.members] == [30, 7]
    assert ensemble.sampler.p.tolist() == [0.25, 0.75] and ensemble.sample().shape == (2, 4)
    tensors = interop.open(a_checkpoint(tmp_path / "one"))
    assert tensors.priority_key == "td_error" and tensors[4]["note"] == "step 4"


class Own(RandomSampler):
    """A sampler of a user."""

    stateless = True


def test_what_a_checkpoint_does_not_have_is_passed(tmp_path: Path) -> None:
    saved(tmp_path / "own", Own())
    with pytest.raises(CheckpointMismatch, match=r"none of this library.*components=\{'sampler': Own"):
        interop.open(tmp_path / "own")
    assert type(interop.open(tmp_path / "own", components={"sampler": Own}).sampler) is Own
    saved(tmp_path / "weighed", StalenessAwareSampler(staleness_weight_fn=lambda age: 1.0 / (1 + age)))
    with pytest.raises(CheckpointMismatch, match="staleness_weight_fn"):
        interop.open(tmp_path / "weighed")
    saved(tmp_path / "changed", RandomSampler(), transform=Compose(DoubleToFloat()))
    with pytest.raises(CheckpointMismatch, match="DoubleToFloat"):
        interop.open(tmp_path / "changed")
    assert len(interop.open(tmp_path / "changed", components={"transform": None}).transform) == 0
    chain = Compose(DoubleToFloat())
    assert len(interop.open(tmp_path / "changed", components={"transform": chain}).transform) == 1
    with pytest.raises(ValueError, match="components has 'samplr'"):
        interop.open(tmp_path / "own", components={"samplr": Own})
    made = interop.open(tmp_path / "own", components={"sampler": Own, "buffer": ReplayBuffer})
    assert type(made) is ReplayBuffer


def test_a_checkpoint_of_an_earlier_version_opens_as_far_as_it_tells(tmp_path: Path) -> None:
    """Without the classes and arguments that are beside the states now."""
    from interop.buffers import checkpoints

    def bare(component: object, tree: dict[str, object]) -> dict[str, object]:
        return tree

    with mock.patch.object(checkpoints, "with_arguments", bare):
        for name in ("random", "prioritized", "without replacement", "consuming", "groups", "staleness", "slices"):
            saved(tmp_path / name, SAMPLERS[name](20))
        saved(tmp_path / "list", RandomSampler(), ListStorage(20))
        saved(tmp_path / "compressed", RandomSampler(), CompressedListStorage(20))
    for name in ("random", "prioritized", "without replacement", "consuming", "groups", "staleness", "list"):
        assert len(interop.open(tmp_path / name)[:]) == 20
    with pytest.raises(CheckpointMismatch, match="earlier version"):
        interop.open(tmp_path / "slices")
    assert len(interop.open(tmp_path / "slices", components={"sampler": SliceSampler(slice_len=2)})) == 20
    given = CompressedListStorage(20)
    assert len(interop.open(tmp_path / "compressed", components={"storage": given})) == 20


def test_folders_of_rows(tmp_path: Path) -> None:
    path = a_folder(tmp_path / "rows")
    opened = interop.open(path, batch_size=5, components={"sampler": SamplerWithoutReplacement()})
    assert opened.sample().shape == (5,) and type(opened.sampler) is SamplerWithoutReplacement
    with pytest.raises(RuntimeError, match="mode='r'"):
        opened.extend(opened[:2])
    writes = interop.open(path, "r+")
    writes.extend(writes[:2])
    with pytest.raises(RuntimeError, match="in use"):
        interop.open(path, "r+")
    writes.storage.close()


def test_files_of_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyarrow")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    source = interop.open(a_checkpoint(tmp_path / "saved"))
    interop.datasets.to_hub_folder(source, tmp_path / "hub")
    hub = interop.open(tmp_path / "hub", batch_size=4)
    assert len(hub) == 30 and hub.sample().shape == (4,)
    with pytest.raises(ValueError, match="only read"):
        interop.open(tmp_path / "hub", "r+")
    converted = interop.open(hub.data_path)
    assert len(converted) == 30
    with pytest.raises(RuntimeError):
        converted.extend(converted[:2])


def test_what_is_no_buffer_names_the_call_that_reads_it(tmp_path: Path) -> None:
    buffer = saved(tmp_path / "whole", PrioritizedSampler(20, 0.6, 0.4))
    buffer.storage.dumps(tmp_path / "storage")
    assert (interop.open(tmp_path / "storage")[:] == buffer[:]).all()
    assert (
        type(interop.open(tmp_path / "storage", "r+", components={"sampler": RandomSampler()}).sampler) is RandomSampler
    )
    buffer.sampler.dumps(tmp_path / "sampler")
    with pytest.raises(CheckpointMismatch, match=r"the state of a PrioritizedSampler.*loads\("):
        interop.open(tmp_path / "sampler")
    with pytest.raises(ValueError, match="only a checkpoint takes"):
        interop.open(a_folder(tmp_path / "rows"), components={"storage": LazyTensorStorage(3)})


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        interop.open(tmp_path / "nothing")
    with pytest.raises(ValueError, match="mode must be"):
        interop.open(tmp_path, "w")  # type: ignore[arg-type]
    with pytest.raises(UnknownPathError):
        interop.open(tmp_path)
    path = a_checkpoint(tmp_path / "saved")
    largest = max(path.rglob("0*"), key=lambda each: each.stat().st_size)
    largest.chmod(0o644)
    largest.write_bytes(largest.read_bytes()[:-1])
    with pytest.raises(CheckpointCorrupt, match=largest.name):
        interop.open(path)
    with pytest.raises(CheckpointCorrupt, match=largest.name):  # the only thing in this folder
        interop.open(tmp_path)
    a_checkpoint(tmp_path / "saved again")
    with pytest.raises(UnknownPathError, match="2 of these in it, open one: saved, saved again"):
        interop.open(tmp_path)
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    (tmp_path / "others").mkdir()
    parquet.write_table(pa.table({"x": [1.0]}), tmp_path / "others" / "a.parquet")
    with pytest.raises(UnknownPathError, match=r"Move a\.parquet into a folder named data"):
        interop.open(tmp_path / "others" / "a.parquet")
    for name in ("dataset_info.json", "data-00000-of-00001.arrow"):
        (tmp_path / "others" / name).touch()
    with pytest.raises(UnknownPathError, match=r"save_to_disk .* to_parquet"):
        interop.open(tmp_path / "others")


def test_every_sampler_of_the_library_has_its_arguments() -> None:
    from interop.buffers.recipes import arguments_of, called

    samplers: list[Sampler] = [
        PrioritizedSampler(9, 0.7, 0.5, 1e-3, torch.float64, "mean", True),
        SliceSampler(num_slices=3, end_key=("next", "end"), strict_length=False, pad_output=True, span=(0, 2)),
        SliceSampler(slice_len=3, end_keys=["a", ("b", "c")], traj_key="episode", only_named_keys=True),
        SliceSamplerWithoutReplacement(slice_len=3, drop_last=True, shuffle=False),
        PrioritizedSliceSampler(9, 0.7, 0.5, slice_len=3, span=(0, 1), truncated_key=None),
        SamplerWithoutReplacement(True, False),
        ConsumingSampler(3),
        StalenessAwareSampler(3, version_key=("a", "b")),
    ]
    for sampler in samplers:
        found = arguments_of(sampler)
        assert found is not None
        again = called(type(sampler), found, "here")
        assert arguments_of(again) == found and again.draws.settings == sampler.draws.settings
    assert arguments_of(PromptGroupSampler(2, staleness=StalenessAwareSampler(4))) == {
        "staleness": {"max_staleness": 4, "version_key": "policy_version"}
    }
