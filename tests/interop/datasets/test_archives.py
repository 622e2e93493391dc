"""Tar archives: their plain files in order, and an error for everything else, wherever they are cut or damaged."""

import gzip
import io
import lzma
import tarfile

import numpy as np
import pytest

from interop.datasets.archives import tar_members
from interop.datasets.compressed import decompressed
from interop.datasets.errors import CorruptDatasetError

FILES = {"game/a.npy": b"a" * 3000, "game/b.npy": b"", "c": bytes(range(256)) * 100, "x" * 150 + "/deep": b"d"}
MODES = {"tar": "w", "tar.gz": "w:gz", "tar.xz": "w:xz"}


def header(name, size=0, kind=tarfile.REGTYPE, link=""):
    info = tarfile.TarInfo(name)
    info.size, info.type, info.linkname = size, kind, link
    return info


def archive(path, *extra, mode="w", form=tarfile.PAX_FORMAT, files=FILES):
    with tarfile.open(path, mode, format=form) as tar:
        tar.addfile(header("game", kind=tarfile.DIRTYPE))
        for name, data in files.items():
            tar.addfile(header(name, len(data)), io.BytesIO(data))
        for info in extra:
            tar.addfile(info, io.BytesIO(b"e" * info.size))
    return path


def contents(path):
    return {name: file.read() for name, file in tar_members(path)}


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
@pytest.mark.parametrize("suffix", MODES)
def test_plain_files_in_order(tmp_path, suffix, form):
    path = archive(tmp_path / f"a.{suffix}", mode=MODES[suffix], form=form)
    found = contents(path)
    assert found == FILES and list(found) == list(FILES)
    assert [name for name, _ in tar_members(path)] == list(FILES)  # not read


REFUSED = {
    "absolute": header("/etc/passwd", 1),
    "above": header("game/../../x", 1),
    "of Windows": header("..\\x", 1),
    "symlink": header("link", kind=tarfile.SYMTYPE, link="/etc/passwd"),
    "device": header("device", kind=tarfile.CHRTYPE),
    "pipe": header("pipe", kind=tarfile.FIFOTYPE),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_plain_file_is_refused(tmp_path, name):
    path = archive(tmp_path / "a.tar", REFUSED[name])
    with pytest.raises(CorruptDatasetError, match=r"a\.tar: ") as error:
        contents(path)
    assert repr(REFUSED[name].name) in str(error.value)


def test_sparse_files_are_refused(tmp_path):
    info = header("sparse", 10)
    info.pax_headers = {
        "GNU.sparse.map": "0,1,1000000000,1",
        "GNU.sparse.size": "1000000001",
        "GNU.sparse.numblocks": "2",
    }
    with pytest.raises(CorruptDatasetError, match="sparse"):
        contents(archive(tmp_path / "a.tar", info))


@pytest.mark.parametrize("suffix", MODES)
def test_truncated_anywhere(tmp_path, suffix):
    path = archive(tmp_path / f"a.{suffix}", mode=MODES[suffix])
    whole = path.read_bytes()
    end = len(whole) if suffix != "tar" else whole.rfind(b"d") + 512 - 1  # the last block with data
    for cut in {0, 1, 3, 10, 511, 512, 1024, 1030, *range(0, end, max(end // 30, 1)), end - 1} - {end}:
        path.write_bytes(whole[: min(cut, end - 1)])
        with pytest.raises(CorruptDatasetError, match=path.name):
            contents(path)


@pytest.mark.parametrize("suffix", ["tar.gz", "tar.xz"])
def test_garbled_anywhere(tmp_path, suffix):
    path = archive(tmp_path / f"a.{suffix}", mode=MODES[suffix])
    whole, rng = path.read_bytes(), np.random.default_rng(0)
    for place in rng.integers(10, len(whole), 40):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << rng.integers(8)
        path.write_bytes(damaged)
        try:
            assert contents(path) == FILES  # the name or time of the file, which gzip does not check
        except CorruptDatasetError as error:
            assert path.name in str(error)


def test_a_damaged_header_is_not_the_end(tmp_path):
    path = archive(tmp_path / "a.tar")
    data = bytearray(path.read_bytes())
    data[data.index(b"c\0\0\0") + 100] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptDatasetError, match=r"a\.tar .*damaged"):
        contents(path)


@pytest.mark.parametrize("data", [b"<html>not found</html>" * 100, b"\x1f\x8bno", b"\xfd7zXZ\x00no", bytes(100)])
def test_what_is_no_archive(tmp_path, data):
    (tmp_path / "a.tar.gz").write_bytes(data)
    with pytest.raises(CorruptDatasetError, match=r"a\.tar\.gz"):
        contents(tmp_path / "a.tar.gz")


@pytest.mark.parametrize("compress", [bytes, gzip.compress, lzma.compress])
def test_a_stream_ends_where_the_file_does(tmp_path, compress):
    (tmp_path / "a").write_bytes(compress(b"abcdef"))
    with decompressed(tmp_path / "a") as stream:
        assert stream.read(4) == b"abcd" and stream.read(0) == b""
        assert stream.finish() == 2
        with pytest.raises(CorruptDatasetError, match="truncated"):
            stream.read(1)
