"""Columns of Parquet files of others: read as pyarrow and the library `datasets` read them, or refused by name."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from interop.data.keys import entries_below
from interop.datasets.errors import CorruptDatasetError
from interop.datasets.hub_folder import HubFolderExperienceReplay

datasets = pytest.importorskip("datasets")
pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
images = pytest.importorskip("PIL.Image")


def written(folder: Path, table: Any, **options: Any) -> Path:
    (folder / "up" / "data").mkdir(parents=True, exist_ok=True)
    parquet.write_table(table, folder / "up" / "data" / "train.parquet", **options)
    return folder


def loaded(folder: Path, **more: Any) -> HubFolderExperienceReplay:
    return HubFolderExperienceReplay("x", root=folder / "root", from_local=folder / "up", **more)


def image(seed: int, mode: str = "RGB", size: tuple[int, int] = (5, 4)) -> Any:
    shape = (*size, len(mode)) if len(mode) > 1 else size
    return images.fromarray(np.random.default_rng(seed).integers(256, size=shape, dtype=np.uint8), mode or None)


def png(picture: Any) -> bytes:
    out = io.BytesIO()
    picture.save(out, "PNG")
    return out.getvalue()


F = datasets.Features
FEATURES = F({
    "img": datasets.Image(), "gray": datasets.Image(), "alpha": datasets.Image(),
    "label": datasets.ClassLabel(names=["left", "right"]),
    "two": datasets.Array2D((2, 3), "float32"), "three": datasets.Array3D((1, 2, 2), "int16"),
    "seq": datasets.Sequence({"x": datasets.Value("int32"), "img": datasets.Image()}),
    "dicts": datasets.List({"x": datasets.Value("float64"), "y": datasets.List(datasets.Value("uint8"))}),
    "imgs": datasets.List(datasets.Image()),
    "inside": {"img": datasets.Image(), "label": datasets.ClassLabel(num_classes=3)},
    "large": datasets.LargeList(datasets.Value("float32")), "words": datasets.Value("large_string"),
    "raw": datasets.Value("binary"), "flag": datasets.Value("bool"), "half": datasets.Value("float16"),
    "fixed": datasets.List(datasets.Value("int8"), length=2),
})  # fmt: skip


def row(n: int) -> dict[str, Any]:
    return {
        "img": image(n), "gray": image(n + 10, "L"), "alpha": image(n + 20, "RGBA"), "label": ["left", "right"][n % 2],
        "two": np.full((2, 3), n, np.float32), "three": np.full((1, 2, 2), n, np.int16),
        "seq": {"x": [n, n + 1], "img": [image(n + 30), image(n + 40)]},
        "dicts": [{"x": n / 2, "y": [n, 1]}, {"x": 0.5, "y": [2, 3]}, {"x": 0.0, "y": [4, 5]}],
        "imgs": [image(n + 50), image(n + 60)], "inside": {"img": image(n + 70), "label": n % 3},
        "large": [n, 2.5], "words": "ü" * n, "raw": bytes([255, n]), "flag": n % 2 == 0, "half": n / 4, "fixed": [n, -n],
    }  # fmt: skip


def test_what_the_library_of_the_hub_wrote(tmp_path: Path) -> None:
    held = datasets.Dataset.from_dict({name: [row(n)[name] for n in range(3)] for name in FEATURES}, features=FEATURES)
    (tmp_path / "up" / "data").mkdir(parents=True)
    held.to_parquet(tmp_path / "up" / "data" / "train.parquet")
    found = loaded(tmp_path)
    rows, theirs = found[:], held.with_format("torch")[:]
    wanted: dict[Any, Any] = {
        **{(name,): theirs[name] for name in ("label", "two", "three", "large", "flag", "half", "fixed")},
        **{(name,): torch.stack([*theirs[name]]) for name in ("img", "alpha", "gray")},
        ("inside", "label"): torch.stack([each["label"] for each in theirs["inside"]]),
        ("inside", "img"): torch.stack([each["img"] for each in theirs["inside"]]),
        ("imgs",): torch.stack([torch.stack([*each]) for each in theirs["imgs"]]),
        ("dicts", "x"): torch.tensor([[each["x"] for each in row(n)["dicts"]] for n in range(3)]),
        ("dicts", "y"): torch.tensor([[each["y"] for each in row(n)["dicts"]] for n in range(3)]),
        ("seq", "x"): torch.tensor([row(n)["seq"]["x"] for n in range(3)]),
        ("seq", "img"): torch.stack(
            [
                torch.stack([torch.tensor(np.asarray(each)).permute(2, 0, 1) for each in row(n)["seq"]["img"]])
                for n in range(3)
            ]
        ),
    }
    assert {path for path, _ in entries_below(rows)} == {*wanted, ("words",), ("raw",)}
    for path, value in wanted.items():
        assert rows[path].shape == value.shape, path
        assert torch.equal(rows[path].to(value.dtype), value), path
    dtypes = {"img": "uint8", "two": "float32", "three": "int16", "half": "float16", "fixed": "int8", "label": "int64"}
    assert {name: str(rows[name].dtype) for name in dtypes} == {
        name: f"torch.{dtype}" for name, dtype in dtypes.items()
    }
    assert [*rows["words"]] == held["words"][:] and [*rows["raw"]] == held["raw"][:]
    assert found.metadata["features"]["label"]["names"] == ["left", "right"]


def test_arrays_of_the_library_read_without_it(tmp_path: Path) -> None:
    """Its extension types have other types of Arrow where it is not imported."""
    features = F({"two": datasets.Array2D((2, 3), "float32"), "img": datasets.Image()})
    values = {"two": [np.ones((2, 3), np.float32)] * 2, "img": [image(0)] * 2}
    (tmp_path / "up" / "data").mkdir(parents=True)
    datasets.Dataset.from_dict(values, features=features).to_parquet(tmp_path / "up" / "data" / "train.parquet")
    kind = datasets.features.features.Array2DExtensionType((2, 3), "float32")
    pa.unregister_extension_type(kind.extension_name)
    try:
        assert not isinstance(
            parquet.read_schema(tmp_path / "up" / "data" / "train.parquet").field("two").type, type(kind)
        )
        rows = loaded(tmp_path)[:]
    finally:
        pa.register_extension_type(kind)
    assert rows["two"].shape == (2, 2, 3) and rows["two"].sum() == 12 and rows["img"].shape == (2, 3, 5, 4)


def tensors(permutation: list[int] | None = None) -> Any:
    kind = pa.fixed_shape_tensor(pa.int32(), [2, 3], permutation=permutation)
    return pa.ExtensionArray.from_storage(kind, pa.array([[*range(6)], [*range(6, 12)]], pa.list_(pa.int32(), 6)))


GOOD: dict[str, tuple[Any, Any]] = {
    "large_list": (pa.array([[1, 2], [3, 4]], pa.large_list(pa.int16())), torch.tensor([[1, 2], [3, 4]]).short()),
    "list_view": (pa.array([[1, 2], [3, 4]], pa.list_view(pa.int32())), torch.tensor([[1, 2], [3, 4]]).int()),
    "lists of lists": (pa.array([[[1], [2]], [[3], [4]]], pa.large_list(pa.list_(pa.int8(), 1))),
                       torch.tensor([[[1], [2]], [[3], [4]]]).char()),
    "empty lists": (pa.array([[], []], pa.list_(pa.float32())), torch.zeros(2, 0)),
    "dictionary": (pa.array(["a", "b"]).dictionary_encode(), ["a", "b"]),
    "dictionary of numbers": (pa.array([1.5, 2.5]).dictionary_encode(), torch.tensor([1.5, 2.5]).double()),
    "lists of a dictionary": (pa.DictionaryArray.from_arrays(pa.array([0, 1, 1, 0]), pa.array([5, 7])), None),
    "large_string": (pa.array(["a", "ü"], pa.large_string()), ["a", "ü"]),
    "string_view": (pa.array(["a", "b" * 50], pa.string_view()), ["a", "b" * 50]),
    "binary": (pa.array([b"\xff", b""]), [b"\xff", b""]),
    "text as binary": (pa.array([b"a", b"b"], pa.large_binary()), [b"a", b"b"]),
    "fixed_size_binary": (pa.array([b"ab", b"\xff\x00"], pa.binary(2)), [b"ab", b"\xff\x00"]),
    "binary_view": (pa.array([b"ab", b"\xff\x00"], pa.binary_view()), [b"ab", b"\xff\x00"]),
    "half": (pa.array(np.float16([1, 2])), torch.tensor([1, 2]).half()),
    "bool8": (pa.ExtensionArray.from_storage(pa.bool8(), pa.array([1, 0], pa.int8())), torch.tensor([True, False])),
    "json": (pa.ExtensionArray.from_storage(pa.json_(), pa.array(['{"a": 1}', "2"])), ['{"a": 1}', "2"]),
    "tensors": (tensors(), torch.arange(12).reshape(2, 2, 3).int()),
    "permuted tensors": (tensors([1, 0]), torch.arange(12).reshape(2, 2, 3).permute(0, 2, 1).int()),
    "structs in lists": (pa.array([[{"a": 1}, {"a": 2}]] * 2), {"a": torch.tensor([[1, 2]] * 2)}),
    "bits": (pa.array([[True, False]] * 2, pa.list_(pa.bool_(), 2)), torch.tensor([[True, False]] * 2)),
    "uint32": (pa.array([1, 2**32 - 1], pa.uint32()), torch.tensor([1, 2**32 - 1])),
}  # fmt: skip
GOOD["lists of a dictionary"] = (
    pa.ListArray.from_arrays([0, 2, 4], GOOD["lists of a dictionary"][0]), torch.tensor([[5, 7], [7, 5]]),
)  # fmt: skip


def test_types_of_arrow(tmp_path: Path) -> None:
    arrays = {name: array for name, (array, _) in GOOD.items()}
    views = {name for name, array in arrays.items() if "view" in str(array.type)}  # Parquet has none of lists
    written(tmp_path, pa.table({name: array for name, array in arrays.items() if name != "list_view"}))
    rows = loaded(tmp_path)[:]
    assert views
    for name, (_, value) in GOOD.items():
        if name == "list_view":
            continue
        for below, each in value.items() if isinstance(value, dict) else [((), value)]:
            found = rows[(name, below) if below else name]
            if isinstance(each, torch.Tensor):
                assert (found.dtype, found.shape) == (each.dtype, each.shape) and torch.equal(found, each), name
            else:
                assert [*found] == each, name


MISSING_TEXT = {
    "text": pa.array(["a", None, "c"]),
    "views": pa.array([None, "b" * 50, None], pa.string_view()),
    "dictionary": pa.DictionaryArray.from_arrays(pa.array([0, None, 1]), pa.array(["a", "b"])),
    "binary": pa.array([b"\xff", None, b""]),
    "large_binary": pa.array([None, None, b"a"], pa.large_binary()),
    "none": pa.array([None, None, None], pa.string()),
    "struct": pa.array([{"a": "b"}, {"a": None}, {"a": ""}]),
}


def test_missing_text_and_bytes_are_none(tmp_path: Path) -> None:
    written(tmp_path, pa.table(MISSING_TEXT), row_group_size=2)
    rows = loaded(tmp_path)[:]
    for name, column in MISSING_TEXT.items():
        found = rows["struct", "a"] if name == "struct" else rows[name]
        wanted = [cell["a"] if isinstance(cell, dict) else cell for cell in column.to_pylist()]
        assert [getattr(cell, "data", cell) for cell in found] == wanted, name


RAGGED: dict[str, Any] = {
    "list": pa.array([[1, 2], [3], [], [4, 5, 6], [7]]),
    "large_list": pa.array([[0.5], [], [1.5, 2.5], [], [3.5]], pa.large_list(pa.float32())),
    "lists of dictionaries": pa.ListArray.from_arrays([0, 0, 1, 3, 3, 4], pa.array([5, 6, 5, 7]).dictionary_encode()),
    "rows of two": pa.array([[[1, 2]], [], [[3, 4], [5, 6]], [], []], pa.list_(pa.list_(pa.int16(), 2))),
    "equal at first": pa.array([[1], [2], [3], [4], [5, 6]]),
    "uint32": pa.array([[1], [], [], [], [2**32 - 1]], pa.list_(pa.uint32())),
}


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])  # they start Python anew
def test_lists_of_any_length_are_ragged_rows(workers: int, tmp_path: Path) -> None:
    written(tmp_path, pa.table({**RAGGED, "same": [[1, 2]] * 5}), row_group_size=2)
    data = loaded(tmp_path, num_workers=workers)
    rows = data[:]
    assert rows["same"].shape == (5, 2)
    for name, column in RAGGED.items():
        assert [row.tolist() for row in rows[name].unbind()] == column.to_pylist(), name
    assert rows["list"].dtype == rows["uint32"].dtype == torch.int64 and rows["large_list"].dtype == torch.float32
    assert data.sample(4)["list"].is_nested


def test_sliced_columns_of_several_row_groups(tmp_path: Path) -> None:
    table = pa.table({"a": pa.array([[n, -n] for n in range(9)]), "b": pa.array([{"c": str(n)} for n in range(9)])})
    written(tmp_path, table.slice(2), row_group_size=3)
    rows = loaded(tmp_path)[:]
    assert rows["a"].tolist() == [[n, -n] for n in range(2, 9)] and [*rows["b", "c"]] == [*map(str, range(2, 9))]


def test_row_groups_and_files_without_rows(tmp_path: Path) -> None:
    written(tmp_path, pa.table({"a": pa.array([[1, 2]])}))
    parquet.write_table(
        pa.table({"a": pa.array([], pa.list_(pa.int64()))}), tmp_path / "up" / "data" / "a-empty.parquet"
    )
    assert loaded(tmp_path)[:]["a"].tolist() == [[1, 2]]


@pytest.mark.parametrize(
    ("names", "keys"),
    [
        (["a", "a.b"], ["a", "a.b"]),
        (["a.b", "a"], ["a.b", "a"]),
        (["a.b", "a.b.c", "a.d"], [("a", "b"), ("a", "b.c"), ("a", "d")]),
        (["a", "a.b", "a.b.c"], ["a", "a.b", "a.b.c"]),
        (["a", "b.a", "ab.c"], ["a", ("b", "a"), ("ab", "c")]),
    ],
)
def test_a_name_beside_one_that_it_begins_with(names: list[str], keys: list[Any], tmp_path: Path) -> None:
    written(tmp_path, pa.table({name: pa.array([n]) for n, name in enumerate(names)}))
    rows = loaded(tmp_path)[:]
    assert {path for path, _ in entries_below(rows)} == {key if isinstance(key, tuple) else (key,) for key in keys}
    assert [rows[key].item() for key in keys] == [*range(len(names))]


def test_a_struct_beside_its_dotted_name(tmp_path: Path) -> None:
    written(tmp_path, pa.table({"a": pa.array([{"b": 1, "c": 2}]), "a.b": pa.array([3])}))
    rows = loaded(tmp_path)[:]
    assert (rows["a", "b"].item(), rows["a", "c"].item(), rows["a.b"].item()) == (1, 2, 3)


MISSING, UNLIKE = "1 missing value", "no arrays of one shape"
BAD: dict[str, tuple[Any, str]] = {
    "null": (pa.array([None, None]), "is null"),
    "missing": (pa.array([1, None]), MISSING),
    "missing struct": (pa.array([{"a": 1}, None]), MISSING),
    "missing list": (pa.array([[1], None]), MISSING),
    "missing in lists": (pa.array([[1, 2], [3, None]]), MISSING),
    "unlike lists in lists": (pa.array([[[1]], [[2, 3]]]), UNLIKE),
    "unlike lists in structs": (pa.array([{"a": [1]}, {"a": [2, 3]}]), UNLIKE),
    "missing in unlike lists": (pa.array([[1], None, [2, 3]]).slice(1), MISSING),
    "missing text in a missing struct": (pa.array([{"a": "b"}, None]), MISSING),
    "lists of text": (pa.array([["a"], ["b"]]), "lists of string"),
    "lists of bytes": (pa.array([[b"a"], [b"b"]]), "lists of binary"),
    "lists of structs of text": (pa.array([[{"a": "x"}], [{"a": "y"}]]), "'a' that has lists of string"),
    "timestamp": (pa.array([0, 1], pa.timestamp("us", "UTC")), r"timestamp\[us"),
    "date": (pa.array([0, 1], pa.date32()), "date32"),
    "time": (pa.array([0, 1], pa.time64("us")), "time64"),
    "duration": (pa.array([0, 1], pa.duration("s")), "duration"),
    "decimal": (pa.array([1, 2], pa.decimal128(9, 2)), "decimal128"),
    "map": (pa.array([[("a", 1)], [("b", 2)]], pa.map_(pa.string(), pa.int64())), "map<"),
    "time in a struct": (pa.array([{"t": 0}, {"t": 1}], pa.struct([("t", pa.timestamp("s"))])), "a field 't' that"),
    "large integers": (pa.array([1, 2**64 - 1], pa.uint64()), "is no int64"),
    "missing in tensors": (
        pa.ExtensionArray.from_storage(
            pa.fixed_shape_tensor(pa.int32(), [2]), pa.array([[1, None], [2, 3]], pa.list_(pa.int32(), 2))
        ),
        MISSING,
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_other_columns_are_refused_by_name_and_left_out_by_it(name: str, tmp_path: Path) -> None:
    column, match = BAD[name]
    written(tmp_path, pa.table({"good": pa.array([1, 2]), "the odd one": column}))
    with pytest.raises(CorruptDatasetError, match=f"column the odd one.*{match}"):
        loaded(tmp_path)
    assert not (tmp_path / "root" / "x").exists()
    rows = loaded(tmp_path, exclude=["the odd one"])[:]
    assert {*rows.keys()} == {"good"} and rows["good"].tolist() == [1, 2]


@pytest.mark.parametrize("name", ["", "/", "a/b", ".", "a..b", "a.", "x" * 201])
def test_names_that_are_no_keys(name: str, tmp_path: Path) -> None:
    written(tmp_path, pa.table({"good": pa.array([1]), name: pa.array([2])}))
    with pytest.raises(CorruptDatasetError, match=r"makes no entry: the key .*Leave it out by exclude="):
        loaded(tmp_path)
    assert {*loaded(tmp_path, exclude=[name])[:].keys()} == {"good"}


def test_two_columns_of_one_name(tmp_path: Path) -> None:
    two = pa.Table.from_arrays([pa.array([1]), pa.array([2]), pa.array([3])], names=["a", "b", "a"])
    written(tmp_path, two)
    with pytest.raises(CorruptDatasetError, match=r"several columns named \['a'\]: leave it out by exclude=\['a'\]"):
        loaded(tmp_path)
    assert {*loaded(tmp_path, exclude=["a"])[:].keys()} == {"b"}
    fields = [pa.field("f", pa.int64()), pa.field("f", pa.int64())]
    struct = pa.StructArray.from_arrays([pa.array([1]), pa.array([2])], fields=fields)
    written(tmp_path, pa.table({"s": struct, "b": pa.array([1])}))
    with pytest.raises(CorruptDatasetError, match=r"column s has several fields named \['f'\]"):
        HubFolderExperienceReplay("y", root=tmp_path / "root", from_local=tmp_path / "up")


def with_features(table: Any, features: Any) -> Any:
    text = features if isinstance(features, bytes) else json.dumps({"info": {"features": features}}).encode()
    return table.replace_schema_metadata({b"huggingface": text})


@pytest.mark.parametrize(("column", "feature", "match"), [
    (pa.array([{"bytes": None, "path": "a.png"}]), {"_type": "Image"}, "is struct|images are not in the file"),
    (pa.array([{"bytes": png(image(0)), "path": None}, {"bytes": None, "path": "b"}]), {"_type": "Image"}, "1 images are"),
    (pa.array([{"bytes": png(image(0)), "path": None}, None]), {"_type": "Image"}, MISSING),
    (pa.array([{"bytes": b"no image", "path": None}]), {"_type": "Image"}, "image 0: "),
    (pa.array([png(image(0)), png(image(0, size=(4, 4)))]), {"_type": "Image"}, r"image 1: it is uint8 \[4, 4, 3\]"),
    (pa.array(["a.png"]), {"_type": "Image"}, "images are binary"),
    (pa.array([{"bytes": b"x", "path": None}]), {"_type": "Audio"}, "feature Audio"),
    (pa.array([{"bytes": b"x", "path": None}]), {"_type": "Video"}, "feature Video"),
    (pa.array([[{"bytes": b"x"}]]), [{"_type": "Pdf"}], "feature Pdf"),
])  # fmt: skip
def test_features_that_are_not_read(column: Any, feature: Any, match: str, tmp_path: Path) -> None:
    table = pa.table({"odd": column, "good": pa.array([*range(len(column))])})
    written(tmp_path, with_features(table, {"odd": feature}))
    with pytest.raises(CorruptDatasetError, match=f"column odd.*({match})"):
        loaded(tmp_path)
    assert {*loaded(tmp_path, exclude=["odd"])[:].keys()} == {"good"}


def test_images_without_structs_and_other_descriptions(tmp_path: Path) -> None:
    table = pa.table({"img": pa.array([png(image(0)), png(image(1))])})
    written(tmp_path, with_features(table, {"img": {"_type": "Image"}}))
    assert loaded(tmp_path)[:]["img"].shape == (2, 3, 5, 4)
    for number, features in enumerate(
        [{}, [], 3, {"img": None}, {"img": {"_type": 7}}, {"img": {"dtype": "binary", "_type": "Value"}}]
    ):
        written(tmp_path / str(number), with_features(table, features))
        assert [*loaded(tmp_path / str(number))[:]["img"]] == table["img"].to_pylist()
    written(tmp_path / "broken", with_features(table, b"{"))
    with pytest.raises(CorruptDatasetError, match="huggingface"):
        loaded(tmp_path / "broken")


def test_names_of_exclude(tmp_path: Path) -> None:
    written(tmp_path, pa.table({"a": pa.array([1]), "b": pa.array([2])}))
    with pytest.raises(ValueError, match=r"exclude has \['c'\], .* has the columns \['a', 'b'\]"):
        loaded(tmp_path, exclude=["a", "c"])
    with pytest.raises(TypeError, match="a list of names of columns"):
        loaded(tmp_path, exclude="a")
    assert {*loaded(tmp_path, exclude=["a"])[:].keys()} == {"b"}
    with pytest.raises(ValueError, match="exclude"):  # the folder has the dataset with other arguments
        loaded(tmp_path)
