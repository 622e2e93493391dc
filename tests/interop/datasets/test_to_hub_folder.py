from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from interop import LazyMemmapStorage, LazyTensorStorage, TensorDictReplayBuffer
from interop.datasets import to_hub_folder
from interop.datasets.errors import CorruptDatasetError
from interop.datasets.hub_folder import HubFolderExperienceReplay
from tests.interop.datasets.recorded import (
    KINDS,
    STORAGES,
    Failing,
    broken_off,
    buffer,
    killed,
    texts,
    trajectories,
    trajectory,
    with_entries,
    wrapped,
)
from tests.interop.datasets.sources_hub_folder import make

datasets = pytest.importorskip("datasets")
pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def loaded(path: Path, **arguments) -> HubFolderExperienceReplay:
    return HubFolderExperienceReplay("mine", 4, from_local=path, root=path.parent / "root", **arguments)


def check(path: Path, held: list[TensorDict]) -> None:
    """Whether the dataset in a folder has these trajectories, bit for bit."""
    found, rows = loaded(path)[:], torch.cat(held)
    assert {*found.keys(True, True)} == {*rows.keys(True, True), "episode"}
    for key, value in rows.items(True, True):
        assert found[key].dtype == value.dtype
        torch.testing.assert_close(found[key], value, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", KINDS)
def test_trajectories_of_all_kinds(kind, rng, tmp_path):
    rb, held = KINDS[kind](rng)
    assert to_hub_folder(rb, tmp_path / "data") == tmp_path / "data"
    check(tmp_path / "data", held)
    changes = loaded(tmp_path / "data")[:]["episode"].diff().nonzero().flatten() + 1
    assert changes.tolist() == np.cumsum([*map(len, held)])[:-1].tolist()


@pytest.mark.parametrize("storage", STORAGES)
def test_all_storages(storage, rng, tmp_path):
    rb, held = wrapped(rng, storage)
    check(to_hub_folder(rb, tmp_path / "data"), held)


def test_rows_that_were_written_over_in_place_are_an_episode(rng, tmp_path):
    rb, held = broken_off(rng)
    check(to_hub_folder(rb, tmp_path / "data"), held)
    assert loaded(tmp_path / "data")[:]["episode"].tolist() == [0, 0, 1, 1, 1, 1]


def test_what_the_library_of_the_hub_reads(rng, tmp_path):
    held = with_entries(rng, 3, 2)
    rows = torch.cat(held)
    to_hub_folder(buffer(*held), tmp_path / "data")
    found = datasets.load_dataset(str(tmp_path / "data"), split="train", cache_dir=str(tmp_path / "cache"))
    features = {
        name: str(found.features[name]) for name in ("next.reward", "seen.bits", "seen.words", "action", "episode")
    }
    assert features == {
        "next.reward": "List(Value('float64'), length=1)",
        "seen.bits": "List(Value('bool'), length=2)",
        "seen.words": "Value('string')",
        "action": "Value('int64')",
        "episode": "Value('int64')",
    }
    assert found["episode"][:] == [0, 0, 0, 1, 1] and found["why"][:] == [*rows["why"]]
    assert found["next.seen.words"][:] == [*rows["next", "seen", "words"]]
    arrays = found.with_format("torch")[:]
    torch.testing.assert_close(arrays["observation"], rows["observation"], rtol=0, atol=0, equal_nan=True)
    assert (arrays["seen.image"] == rows["seen", "image"]).all()
    back = loaded(tmp_path / "data")[:]
    assert (back["seen", "image"] == rows["seen", "image"]).all() and [*back["seen", "words"]] == [
        *rows["seen", "words"]
    ]


def with_images_and_tokens(rng: np.random.Generator) -> TensorDict:
    rows = torch.cat(trajectories(rng, 4, 3))
    lengths = [3, 0, 700, 2, 1, 0, 5]
    rows["tokens"] = torch.nested.nested_tensor(
        [torch.from_numpy(rng.integers(50_000, size=length)) for length in lengths], layout=torch.jagged
    )
    rows["vectors"] = torch.nested.nested_tensor(
        [torch.from_numpy(rng.normal(size=(length, 2))) for length in lengths], layout=torch.jagged
    )
    for name, shape in (("seen", (3, 8, 6)), ("last", (8, 6, 3)), ("gray", (8, 6)), ("clear", (8, 6, 4))):
        rows["pixels", name] = torch.from_numpy(rng.integers(256, size=(7, *shape), dtype="uint8"))
    rows["raw"] = texts(*[b"\xff\0", b"", *[b"ab"] * 5])  # type: ignore[arg-type]
    return rows


IMAGES = [("pixels", name) for name in ("seen", "last", "gray", "clear")]


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
def test_images_tokens_and_bytes(storage, rng, tmp_path):
    rows = with_images_and_tokens(rng)
    folder = to_hub_folder(buffer(rows, storage=storage), tmp_path / "data", image_keys=IMAGES, shard_bytes=3000)
    back = loaded(folder)[:]
    for key in ("tokens", "vectors"):
        assert back[key].dtype == rows[key].dtype
        for found, wanted in zip(back[key].unbind(), rows[key].unbind(), strict=True):
            assert torch.equal(found, wanted)
    assert [*back["raw"]] == [*rows["raw"]] and (back["action"] == rows["action"]).all()
    assert (back["pixels", "seen"] == rows["pixels", "seen"]).all()
    assert (back["pixels", "last"] == rows["pixels", "last"].movedim(-1, 1)).all()
    assert (back["pixels", "gray"] == rows["pixels", "gray"].unsqueeze(1)).all()
    assert (back["pixels", "clear"] == rows["pixels", "clear"].movedim(-1, 1)).all()


def test_images_and_tokens_in_the_library_of_the_hub(rng, tmp_path):
    rows = with_images_and_tokens(rng)
    to_hub_folder(buffer(rows), tmp_path / "data", image_keys=IMAGES)
    found = datasets.load_dataset(str(tmp_path / "data"), split="train", cache_dir=str(tmp_path / "cache"))
    assert {str(found.features[".".join(key)]) for key in IMAGES} == {"Image(mode=None, decode=True)"}
    assert str(found.features["raw"]) == "Value('binary')" and str(found.features["observation"]).startswith("List(")
    for at, row in enumerate(found):
        assert row["tokens"] == rows["tokens"][at].tolist() and row["vectors"] == rows["vectors"][at].tolist()
        assert row["raw"] == rows["raw"][at] and row["action"] == rows["action"][at]
        assert (np.asarray(row["pixels.last"]) == rows["pixels", "last"][at].numpy()).all()
        assert (np.asarray(row["pixels.seen"]) == rows["pixels", "seen"][at].permute(1, 2, 0).numpy()).all()
        assert (np.asarray(row["pixels.gray"]) == rows["pixels", "gray"][at].numpy()).all()
    again = tmp_path / "again" / "data"
    again.mkdir(parents=True)
    found.to_parquet(again / "train.parquet")  # what the library writes of it
    back = HubFolderExperienceReplay("again", 4, from_local=tmp_path / "again", root=tmp_path / "root")[:]
    assert [row.tolist() for row in back["tokens"].unbind()] == [row.tolist() for row in rows["tokens"].unbind()]
    assert (back["pixels", "seen"] == rows["pixels", "seen"]).all() and [*back["raw"]] == [*rows["raw"]]


def test_images_that_are_none(rng, tmp_path):
    rb = buffer(with_images_and_tokens(rng))
    for error, match, keys in (
        (TypeError, "image_keys must be a list", "tokens"),
        (TypeError, "images are uint8", ["observation"]),
        (KeyError, "of image_keys is no stored entry", ["nothing"]),
    ):
        with pytest.raises(error, match=match):
            to_hub_folder(rb, tmp_path / "data", image_keys=keys)
    assert not [*tmp_path.iterdir()]


def test_files_of_a_size(rng, tmp_path):
    held = trajectories(rng, 4, 5, 6)
    folder = to_hub_folder(buffer(*held), tmp_path / "data", shard_bytes=200)
    groups = [parquet.read_metadata(path).num_rows for path in sorted(folder.glob("data/*"))]
    assert len(groups) > 2 and sum(groups) == 15 and len({*groups[:-1]}) == 1
    check(folder, held)


@pytest.mark.parametrize(("ids", "wanted"), [([9, 7, 8], [9, 9, 7, 7, 8, 8]), ([9, 7, 9], [0, 0, 1, 1, 2, 2])])
def test_ids_of_trajectories_are_kept_where_each_has_its_own(ids, wanted, rng, tmp_path):
    held = trajectories(rng, 2, 2, 2)
    for rows, each in zip(held, ids, strict=True):
        rows["episode"] = torch.full((len(rows),), each)
    assert loaded(to_hub_folder(buffer(*held), tmp_path / "data"))[:]["episode"].tolist() == wanted


@pytest.mark.parametrize(("error", "match", "key", "value"), [
    (RuntimeError, "where trajectories end", "next", None),
    (TypeError, "'action'.*bfloat16.*cast it", "action", torch.zeros(3).bfloat16()),
    (TypeError, r"action is complex64 \[\], which Parquet does not have", "action", torch.zeros(3, dtype=torch.complex64)),
    (TypeError, r"none is float32 \[2, 0\], which Parquet does not have", "none", torch.zeros(3, 2, 0)),
    (ValueError, "dot in a name", "a.b", torch.zeros(3)),
    (TypeError, "neither tensors nor text", "odd", texts("a", "b", 3)),
])  # fmt: skip
def test_rows_that_do_not_fit(error, match, key, value, rng, tmp_path):
    rows = trajectory(rng, 3)
    with pytest.raises(error, match=match):
        to_hub_folder(buffer(rows.exclude(key) if value is None else rows.set(key, value)), tmp_path / "data")
    assert not [*tmp_path.iterdir()]


def test_a_folder_that_exists_stays(rng, tmp_path):
    (tmp_path / "data").mkdir()
    with pytest.raises(FileExistsError, match="is there already: remove it"):
        to_hub_folder(wrapped(rng)[0], tmp_path / "data")
    with pytest.raises(RuntimeError, match="the buffer is empty"):
        to_hub_folder(TensorDictReplayBuffer(storage=LazyTensorStorage(3)), tmp_path / "other")
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_an_error_leaves_nothing_and_a_kill_nothing_that_is_seen(rng, tmp_path):
    held = trajectories(rng, 3, 2, 4)
    rb, folder = buffer(*held, storage=Failing), tmp_path / "data"
    with pytest.raises(OSError, match="the disk is gone"):
        to_hub_folder(rb, folder)
    assert not [*tmp_path.iterdir()]
    killed(lambda: to_hub_folder(rb, folder), rb)
    assert not folder.exists()
    check(to_hub_folder(buffer(*held), folder), held)
    assert {path.name for path in tmp_path.iterdir()} == {"data", "root"}
    assert {path.name for path in folder.iterdir()} == {"data", "README.md"}


@pytest.mark.parametrize(("column", "match"), [
    (pa.array([1, None, 3]), "column x has 1 missing values"),
    (pa.array([{"a": 1}, None, {"a": 3}]), "column x/a has 1 missing values"),
    (pa.array([{"a": [1]}, {"a": [2, 3]}]), "column x/a is list.*no arrays of one shape"),
    (pa.array([[1.0, 2.0], [1.0, None], [3.0, 4.0]], pa.list_(pa.float64(), 2)), "column x has 1 missing values"),
])  # fmt: skip
def test_columns_that_are_no_rows(column, match, tmp_path):
    (tmp_path / "data" / "data").mkdir(parents=True)
    parquet.write_table(pa.table({"x": column}), tmp_path / "data" / "data" / "train.parquet")
    with pytest.raises(CorruptDatasetError, match=match):
        loaded(tmp_path / "data")


def test_columns_of_others(tmp_path):
    held = {"x": [{"a": 1, "b": [[1.5, 2.5]]}, {"a": 2, "b": [[3.5, 4.5]]}], "y": pa.array([1, 2**40], pa.uint64())}
    (tmp_path / "data" / "data").mkdir(parents=True)
    parquet.write_table(pa.table(held), tmp_path / "data" / "data" / "train.parquet")
    rows = loaded(tmp_path / "data")[:]
    assert rows["x", "a"].tolist() == [1, 2] and rows["x", "b"].tolist() == [[[1.5, 2.5]], [[3.5, 4.5]]]
    assert rows["y"].tolist() == [1, 2**40] and rows["y"].dtype == torch.int64


def test_files_that_are_damaged(rng, tmp_path):
    with pytest.raises(CorruptDatasetError, match="no files data/"):
        loaded(tmp_path)
    file = to_hub_folder(wrapped(rng)[0], tmp_path / "data") / "data" / "train-00000.parquet"
    whole = file.read_bytes()
    file.write_bytes(whole[:-9])
    with pytest.raises(CorruptDatasetError, match=r"train-00000\.parquet is missing or not a Parquet file"):
        loaded(tmp_path / "data")
    file.write_bytes(whole[:40] + bytes(900) + whole[940:])
    with pytest.raises(CorruptDatasetError, match=r"train-00000\.parquet, row group 0"):
        loaded(tmp_path / "data")


def test_a_dataset_of_the_hub(hub, rng, tmp_path):
    rows = make(hub.folder / "datasets" / "me" / "moves", rng)
    found = HubFolderExperienceReplay("me/moves", root=tmp_path / "root")[:]
    assert (found["action"] == rows["action"]).all() and (found["episode"] == rows["episode"]).all()
