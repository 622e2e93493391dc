"""HDF5 files of others: what is in them is read, what leads out of them is refused."""

import os
from pathlib import Path

import h5py
import numpy as np
import pytest

from interop.datasets.errors import CorruptDatasetError
from interop.datasets.hdf5 import arrays, datasets, opened


def read(path: Path, rows: slice = slice(None)) -> dict:
    with opened(path) as file:
        return arrays(file, rows)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "some.hdf5"


def test_values_of_every_kind(path):
    images = [np.arange(3, dtype=np.uint8), np.arange(5, dtype=np.uint8)]
    with h5py.File(path, "w") as file:
        file["a/b/ints"] = np.arange(6, dtype=">i4").reshape(2, 3)
        file["bools"] = np.array([True, False])
        file.create_dataset("text", data=["grün", ""], dtype=h5py.string_dtype())
        file["bytes"] = np.array([b"ab", b"c"])
        file.create_dataset("images", data=np.array(images, object), dtype=h5py.vlen_dtype(np.uint8))
        file["none"] = np.zeros((0, 4))
        file.create_dataset("packed", data=np.zeros((3000, 4)), compression="gzip")
        file.create_group("empty")
    found = read(path)
    np.testing.assert_array_equal(found["a"]["b"]["ints"], np.arange(6).reshape(2, 3))
    assert found["bools"].dtype == bool and found["bools"].tolist() == [True, False]
    assert found["text"] == ["grün", ""] and found["bytes"] == ["ab", "c"]
    assert [image.tolist() for image in found["images"]] == [[0, 1, 2], [0, 1, 2, 3, 4]]
    assert found["none"].shape == (0, 4) and found["packed"].shape == (3000, 4) and found["empty"] == {}


def test_datasets_by_their_paths(path):
    with h5py.File(path, "w") as file:
        file["a/b/x"], file["y"] = np.zeros((2, 3)), "text"
        file.create_group("empty")
    with opened(path) as file:
        assert {name: each.shape for name, each in datasets(file).items()} == {"a/b/x": (2, 3), "y": ()}
        assert {*datasets(file["a"])} == {"b/x"}


def _soft(file, folder):
    file["in/evil"] = h5py.SoftLink("/x")


def _external(file, folder):
    with h5py.File(folder / "secret.h5", "w") as other:
        other["x"] = np.arange(3)
    file["in/evil"] = h5py.ExternalLink("secret.h5", "/x")


def _loop(file, folder):
    file["in/evil"] = file["/"]


def _two_names(file, folder):
    file["in/beside"] = np.arange(3)
    file["in/evil"] = file["in/beside"]


def _virtual(file, folder):
    _external(file, folder)
    del file["in/evil"]
    layout = h5py.VirtualLayout((3,), "i8")
    layout[:] = h5py.VirtualSource(folder / "secret.h5", "x", (3,))
    file.create_virtual_dataset("in/evil", layout)


def _outside(file, folder):
    (folder / "secret.txt").write_text("secrets!")
    file.create_dataset("in/evil", (8,), "u1", external=[(folder / "secret.txt", 0, 8)])


def _records(file, folder):
    file["in/evil"] = np.zeros(2, [("a", "i4"), ("b", "f8")])


def _unwritten(file, folder):
    file.create_dataset("in/evil", (10**15,), "f8", chunks=(1000,))


def _no_text(file, folder):
    file.create_dataset("in/evil", data=[b"\xff\xfe"], dtype=h5py.string_dtype())


EVIL = [_soft, _external, _loop, _two_names, _virtual, _outside, _records, _unwritten]


@pytest.mark.parametrize("evil", [*EVIL, _no_text], ids=lambda evil: evil.__name__)
def test_what_is_no_value_of_the_file_is_refused_by_name(path, evil):
    with h5py.File(path, "w") as file:
        file["x"] = np.arange(3)
        file.create_group("in")
        evil(file, path.parent)
    with pytest.raises(CorruptDatasetError) as caught:
        read(path)
    assert str(path) in str(caught.value) and "in/evil" in str(caught.value)
    if evil is not _no_text:  # which only its values show
        with pytest.raises(CorruptDatasetError, match="in/evil"), opened(path) as file:
            datasets(file)


def test_groups_nested_without_end_are_refused(path):
    with h5py.File(path, "w") as file:
        group = file["/"]
        for _ in range(5_000):
            group = group.create_group("a")
    with pytest.raises(CorruptDatasetError, match="nested too deeply"):
        read(path)


@pytest.mark.parametrize("left", [0, 5, 100, 700, -1])
def test_truncated_files_are_refused(path, left):
    with h5py.File(path, "w") as file:
        file["x"], file["group/y"] = np.arange(100), np.arange(3)
    os.truncate(path, left % path.stat().st_size)
    with pytest.raises(CorruptDatasetError, match=r"some\.hdf5"):
        read(path)


def test_other_files_are_refused_and_missing_ones_named(path):
    with pytest.raises(FileNotFoundError, match=r"some\.hdf5"):
        read(path)
    path.write_text("<html>Not found</html>" * 100)
    with pytest.raises(CorruptDatasetError, match=r"some\.hdf5"):
        read(path)


def test_damaged_bytes_never_raise_anything_else(path):
    with h5py.File(path, "w", track_order=True) as file:
        for episode in range(3):
            file[f"{episode}/x"] = np.arange(12.0).reshape(4, 3)
            file.create_dataset(f"{episode}/y", data=np.arange(100), compression="gzip")
    whole, random, refused = path.read_bytes(), np.random.default_rng(0), 0
    for _ in range(200):
        damaged = np.frombuffer(whole, np.uint8).copy()
        damaged[random.integers(len(whole), size=8)] = random.integers(256, size=8)
        path.write_bytes(damaged.tobytes())
        try:
            read(path)
        except CorruptDatasetError:
            refused += 1
    assert refused > 20


def test_a_file_that_was_replaced_is_checked_again(path):
    for evil in (False, True):
        with h5py.File(path, "w") as file:
            file["x"] = np.arange(3)
            if evil:
                file["evil"] = h5py.SoftLink("/x")
        if not evil:
            read(path), read(path)
    with pytest.raises(CorruptDatasetError, match="evil"):
        read(path)
