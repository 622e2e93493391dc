"""One law for all readers: what a file announces takes no memory; what it holds takes memory by a factor of its bytes.

Each case is a file that announces much and holds little. The reader raises the documented error, or gives a result, within
the bound. Address space is limited meanwhile, so that memory that is reserved and not touched counts as well.
"""

import ast
import functools
import io
import json
import lzma
import pickle
import struct
import tarfile
import time
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from interop.datasets import allowance, npz, parquet
from interop.datasets.archives import tar_members
from interop.datasets.atari_dqn import AtariDQNSource
from interop.datasets.described import json_in
from interop.datasets.errors import CorruptDatasetError
from interop.datasets.gen_dgrl import GenDGRLSource
from interop.datasets.hdf5 import arrays, opened
from interop.datasets.hub_folder import HubFolderSource
from interop.datasets.images import stacked
from interop.datasets.lerobot import LeRobotSource
from interop.datasets.minari_data import MinariSource
from interop.datasets.object_arrays import load_object
from interop.datasets.openml import OpenMLSource
from interop.datasets.source import Source
from interop.datasets.vd4rl import VD4RLSource
from tests.interop.peaks import LIMITED, bounded

Read = Callable[[], object]
GIB = 1 << 30
SMALL = 200 << 20  # bytes of memory that any file may take
UNPACKED = ("hdf5", "png", "jpeg", "parquet")  # formats whose content may be compressed as well as deflate can


def header(shape: str, dtype: str = "|u1", version: int = 1) -> bytes:
    """The header of an `.npy` file."""
    text = f"{{'descr': {dtype!r}, 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY" + bytes([version, 0]) + len(text).to_bytes(2 if version == 1 else 4, "little") + text


@functools.cache
def zeros(compress: Callable[[bytes], bytes], size: int) -> bytes:
    """Zeros, compressed as several streams."""
    block = 1 << 26
    return compress(bytes(block)) * (size // block)


def deflated_zeros(size: int) -> bytes:
    """As `zlib.compress(bytes(size), 9)`, in no time: a compressed block is repeated."""
    blocks, rest = divmod(size, 1 << 20)
    packer = zlib.compressobj(9, wbits=-zlib.MAX_WBITS)
    block = packer.compress(bytes(1 << 20)) + packer.flush(zlib.Z_FULL_FLUSH)
    packer = zlib.compressobj(9, wbits=-zlib.MAX_WBITS)
    end = packer.compress(bytes(rest)) + packer.flush()
    checksum = (size % 65_521) << 16 | 1  # Adler's, of zeros
    return b"\x78\xda" + block * blocks + end + struct.pack(">I", checksum)


def gzipped(data: bytes) -> bytes:
    packer = zlib.compressobj(1, zlib.DEFLATED, 31)
    return packer.compress(data) + packer.flush()


def xz(data: bytes) -> bytes:
    return lzma.compress(data, preset=1)


# ------------------------------------------------------------------ archives and pickles


def rows_of(source: Source, folder: Path) -> list[Any]:
    """All rows of a dataset in a folder."""
    return [rows for part in source.parts(folder) for rows in source.read(part)]


def tar_header(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.type = size, kind
    return info.tobuf(tarfile.USTAR_FORMAT)


def of_archive(kind: bytes, read: str = "read") -> Callable[[Path], Read]:
    """An archive of a member of 2 GiB of zeros."""

    def attack(folder: Path) -> Read:
        path = folder / "bigfish.tar.xz"
        path.write_bytes(xz(tar_header("bigfish/episode.npy", 2 * GIB, kind)) + zeros(xz, 2 * GIB) + xz(bytes(1024)))
        if read == "source":
            return lambda: rows_of(GenDGRLSource("bigfish-level_1_E"), folder)
        return lambda: [content.read() for _, content in tar_members(path)]

    return attack


def headers_without_end(folder: Path) -> Read:
    block = tar_header("x", 3, tarfile.XHDTYPE) + b"3 \n".ljust(512, b"\0")
    path = folder / "a.tar.xz"
    path.write_bytes(xz(block * 20_000 + bytes(1024)))
    return lambda: list(tar_members(path))


def sparse(folder: Path) -> Read:
    record = b"22 GNU.sparse.major=1\n"
    about = tar_header("x", len(record), tarfile.XHDTYPE) + record.ljust(512, b"\0")
    path = folder / "a.tar.xz"
    path.write_bytes(xz(about + tar_header("y", 2 * GIB)) + zeros(xz, 2 * GIB))
    return lambda: list(tar_members(path))


def of_xz_memory(folder: Path) -> Read:
    """An xz file that asks for a dictionary of 1.5 GiB."""
    filters = [{"id": lzma.FILTER_LZMA2, "dict_size": 4096}]
    data = bytearray(lzma.compress(bytes(10_000), filters=filters))
    place = data.index(bytes([0x21, 0x01, 0x00]))
    data[place + 2] = 39
    end = 12 + 4 * (data[12] + 1) - 4
    data[end : end + 4] = struct.pack("<I", zlib.crc32(bytes(data[12:end])))
    path = folder / "a.tar.xz"
    path.write_bytes(data)
    return lambda: list(tar_members(path))


def of_pickle(data: bytes) -> Callable[[Path], Read]:
    def attack(folder: Path) -> Read:
        (folder / "a.pickle").write_bytes(data)
        return lambda: load_object(io.BytesIO(data))

    return attack


PICKLES = {
    "remembered under a large number": b"Nr\xff\xff\xff\x0f.",
    "remembered by a line": b"Np99999999\n.",
    "bytes": b"\x8e" + struct.pack("<Q", 2 * GIB) + b"a.",
    "bytearray": b"\x96" + struct.pack("<Q", 2 * GIB) + b"a.",
    "text": b"\x8d" + struct.pack("<Q", 2 * GIB) + b"a.",
    "bytes of 4": b"B" + struct.pack("<I", 2**31) + b"a.",
    "number": b"\x8b" + struct.pack("<I", 2**31 - 1) + b"a.",
    "frame": b"\x80\x04\x95" + struct.pack("<Q", 2 * GIB) + b"N.",
    "lists": b"(" + b"]" * 900_000 + b"l.",
    "dicts": b"(" + b"}" * 900_000 + b"l.",
    "sets": b"(" + b"\x8f" * 900_000 + b"l.",
    "nested": b"N" + b"\x85" * 900_000 + b".",
    "npy of rows": header(f"({2**40},)") + bytes(100),
    "npy of a long header": b"\x93NUMPY\x02\x00" + struct.pack("<I", 2**31) + b"{" * 100,
    "npy of nested text": b"\x93NUMPY\x01\x00" + struct.pack("<H", 9_000) + b"(" * 9_000,
    "npy of objects": header(f"({2**40},)", "|O") + pickle.dumps(np.empty(0, object)),
}


def of_notes(folder: Path) -> Read:
    """A small array of metadata, of 2 GiB."""
    for name, shape, kind in (
        ("observation", "(4, 8, 8)", "|u1"), ("action", "(4,)", "<i4"), ("reward", "(4,)", "<f4"),
        ("terminal", "(4,)", "|u1"),
    ):  # fmt: skip
        size = int(np.prod(ast.literal_eval(shape))) * int(kind[-1])
        (folder / f"$store$_{name}_ckpt.0.gz").write_bytes(gzipped(header(shape, kind) + bytes(size)))
    (folder / "add_count_ckpt.0.gz").write_bytes(gzipped(header("()", "<i8")) + zeros(gzipped, GIB // 8))
    return lambda: rows_of(AtariDQNSource("Pong/5"), folder)


def of_rows(*shape: int) -> Callable[[Path], Read]:
    """Frames whose header announces so many, or such large ones."""

    def attack(folder: Path) -> Read:
        for name, kind in (("observation", "|u1"), ("action", "<i4"), ("reward", "<f4"), ("terminal", "|u1")):
            given = shape if name == "observation" else shape[:1]
            (folder / f"$store$_{name}_ckpt.0.gz").write_bytes(
                gzipped(header(f"({', '.join(map(str, given))},)", kind))
            )
        return lambda: rows_of(AtariDQNSource("Pong/5"), folder)

    return attack


# ------------------------------------------------------------------ `.npz` and HDF5


def of_npz(content: Callable[[zipfile.ZipFile], None]) -> Callable[[Path], Read]:
    def attack(folder: Path) -> Read:
        path = folder / "a.npz"
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            content(archive)
        return lambda: npz.arrays_of(path)

    return attack


def of_vd4rl(shape: str, size: int) -> Callable[[Path], Read]:
    """An episode with actions of this shape, and so many bytes of them; and a shard likewise."""

    def attack(folder: Path) -> Read:
        of_npz(lambda archive: archive.writestr("action.npy", header(f"({shape})") + bytes(size)))(folder)
        return lambda: rows_of(VD4RLSource("main/walker_walk/random/64px"), folder)

    return attack


def of_vd4rl_shard(folder: Path) -> Read:
    with h5py.File(folder / "a.hdf5", "w") as file:
        for name in ("action", "reward", "step_type"):
            file.create_dataset(name, (2**40, 0), "f4")
    return lambda: rows_of(VD4RLSource("main/walker_walk/random/84px"), folder)


def of_many_arrays(archive: zipfile.ZipFile) -> None:
    for number in range(30):
        archive.writestr(f"{number}.npy", header(f"({10 << 20},)") + bytes(10 << 20))


def of_hdf5(make: Callable[[h5py.File], None]) -> Callable[[Path], Read]:
    def attack(folder: Path) -> Read:
        path = folder / "a.hdf5"
        with h5py.File(path, "w") as file:
            make(file)
        return lambda: all_of(path)

    return attack


def all_of(path: Path) -> dict[str, Any]:
    with opened(path) as file:
        return arrays(file)


def twice_compressed(file: h5py.File) -> None:
    """Zeros through deflate two times: 16 KB for 1 GiB."""
    made = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    made.set_chunk((1 << 26,))
    made.set_deflate(9)
    made.set_deflate(9)
    it = h5py.h5d.create(file.id, b"x", h5py.h5t.STD_U8LE, h5py.h5s.create_simple((16 << 26,)), made)
    chunk = zlib.compress(zlib.compress(bytes(1 << 26), 9), 9)
    for number in range(16):
        it.write_direct_chunk((number << 26,), chunk)


def one_chunk_of_many(file: h5py.File) -> None:
    held = file.create_dataset("x", (GIB,), "u1", chunks=(1 << 16,), compression="gzip")
    held[: 1 << 22] = 1


def a_large_chunk(file: h5py.File) -> None:
    held = file.create_dataset("x", (1,), "u1", maxshape=(None,), chunks=(GIB,), compression="gzip")
    held.id.write_direct_chunk((0,), zlib.compress(bytes(100)))


def one_value_of_many(file: h5py.File) -> None:
    """Text of 100 kB, to which 20,000 entries lead."""
    held = file.create_dataset("x", (20_000,), h5py.string_dtype(), chunks=(20_000,))
    held[:] = ["a"] * 19_999 + ["b" * 100_000]
    raw = bytearray(held.id.read_direct_chunk((0,))[1])
    held.id.write_direct_chunk((0,), bytes(raw[-16:] * 20_000))


# ------------------------------------------------------------------ images


def png(width: int, height: int, size: int = 100) -> bytes:
    """A PNG file of this header, with so many bytes of compressed zeros."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = deflated_zeros(size)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def jpeg(width: int, height: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "JPEG")
    data = bytearray(file.getvalue())
    place = data.index(b"\xff\xc0") + 5
    data[place : place + 4] = struct.pack(">HH", height, width)
    return bytes(data)


def of_images(*images: bytes, times: int = 1) -> Callable[[Path], Read]:
    def attack(folder: Path) -> Read:
        for number, image in enumerate(images):
            (folder / str(number)).write_bytes(image)
        return lambda: stacked([*images] * times, "images")

    return attack


# ------------------------------------------------------------------ tables


def of_parquet(table: Callable[[], pa.Table], **options: Any) -> Callable[[Path], Read]:
    def attack(folder: Path) -> Read:
        path = folder / "a.parquet"
        pq.write_table(table(), path, **options)
        return lambda: groups_of(path)

    return attack


def of_hub_folder(table: Callable[[], pa.Table], **options: Any) -> Callable[[Path], Read]:
    def attack(folder: Path) -> Read:
        of_parquet(table, **options)(folder)
        return lambda: rows_of(HubFolderSource("me/mine"), folder)

    return attack


def of_lerobot(column: Callable[[], pa.Table], name: str, kind: str, **options: Any) -> Callable[[Path], Read]:
    """An episode with this column."""

    def attack(folder: Path) -> Read:
        table = column()
        for name_of_index in ("episode_index", "timestamp"):
            table = table.append_column(name_of_index, pa.array(np.zeros(len(table), np.int64)))
        (folder / "data").mkdir()
        pq.write_table(table, folder / "data/000.parquet", **options)
        (folder / "meta").mkdir()
        features = {key: {"dtype": "int64", "shape": [1]} for key in ("episode_index", "timestamp")}
        features[name] = {"dtype": kind, "shape": [1]}
        info = {"codebase_version": "v2.1", "features": features, "data_path": "data/{episode_index:03d}.parquet"}
        (folder / "meta/info.json").write_text(json.dumps(info))
        (folder / "meta/episodes.jsonl").write_text(json.dumps({"episode_index": 0, "length": len(table)}))
        (folder / "meta/tasks.jsonl").touch()
        return lambda: rows_of(LeRobotSource("me/mine"), folder)

    return attack


def groups_of(path: Path) -> None:
    with parquet.opened(path) as file:
        for number in range(len(file.rows())):
            file.read(number)


def one_text() -> pa.Table:
    """Rows that all have the same 100 kB of text."""
    return pa.table({"text": pa.DictionaryArray.from_arrays(np.zeros(30_000, np.int32), ["a" * 100_000])})


def lists_of_one_value() -> pa.Table:
    """A row with a list of 40 million zeros."""
    return pa.table({"x": pa.ListArray.from_arrays([0, 40_000_000], pa.array(np.zeros(40_000_000, np.uint8)))})


def of_classes(folder: Path) -> Read:
    """A table of 5,000 categories, each in a row and a column of its own."""
    lines = ["@RELATION mushroom", "@ATTRIBUTE 'a' {x}", "@ATTRIBUTE 'class' {e,p}", "@DATA"]
    lines += [f"c{number},{'ep'[number % 2]}" for number in range(5_000)]
    (folder / "mushroom.arff").write_text("\n".join(lines) + "\n")
    return lambda: OpenMLSource("mushroom_onehot").table(folder)


# ------------------------------------------------------------------ descriptions


def of_json(text: bytes) -> Callable[[Path], Read]:
    def attack(folder: Path) -> Read:
        (folder / "a.json").write_bytes(text)
        return lambda: json_in(folder / "a.json")

    return attack


def of_minari(space: str) -> Callable[[Path], Read]:
    """Metadata of a space."""

    def attack(folder: Path) -> Read:
        text = f'{{"observation_space": {space!r}, "action_space": "null", "data_format": "arrow"}}'.replace("'", '"')
        (folder / "metadata.json").write_text(text)
        (folder / "0").mkdir()
        (folder / "0" / "metadata.json").write_text('{"total_steps": 3}')
        return lambda: rows_of(MinariSource("toy/x-v0"), folder)

    return attack


def of_minari_infos(folder: Path) -> Read:
    """An info that has no bytes in the file, in an episode of three steps."""
    (folder / "metadata.json").write_text('{"data_format": "hdf5"}')
    with h5py.File(folder / "main_data.hdf5", "w") as file:
        episode = file.create_group("episode_0")
        for name in ("rewards", "terminations", "truncations", "actions"):
            episode[name] = np.zeros(3)
        episode["observations"] = np.zeros(4)
        episode.create_dataset("infos/large", (4, 2**40), "f8")
    return lambda: rows_of(MinariSource("toy/x-v0"), folder)


CASES: dict[str, Callable[[Path], Read]] = {
    "tar, a member": of_archive(tarfile.REGTYPE),
    "tar, a member of a dataset": of_archive(tarfile.REGTYPE, "source"),
    "tar, records": of_archive(tarfile.XHDTYPE),
    "tar, a long name": of_archive(tarfile.GNUTYPE_LONGNAME),
    "tar, a long link": of_archive(tarfile.GNUTYPE_LONGLINK),
    "tar, records of all members": of_archive(tarfile.XGLTYPE),
    "tar, headers without end": headers_without_end,
    "tar, sparse": sparse,
    "xz, its dictionary": of_xz_memory,
    **{f"pickle, {name}": of_pickle(data) for name, data in PICKLES.items()},
    "atari, notes": of_notes,
    "atari, rows": of_rows(2**40, 84, 84),
    "atari, a row": of_rows(4, 2**20, 2**12),
    "npz, an array": of_npz(lambda archive: archive.writestr("action.npy", header(f"({2**33},)") + bytes(100))),
    "npz, a shape of nothing": of_npz(lambda archive: archive.writestr("action.npy", header(f"({2**40}, 0)"))),
    "npz, zeros": of_npz(lambda archive: archive.writestr("action.npy", header(f"({GIB // 8},)") + bytes(GIB // 8))),
    "npz, many arrays": of_npz(of_many_arrays),
    "vd4rl, an array": of_vd4rl(f"{2**33},", 100),
    "vd4rl, zeros": of_vd4rl(f"{GIB // 8},", GIB // 8),
    "vd4rl, actions of nothing": of_vd4rl(f"{2**40}, 0", 0),
    "vd4rl, a shard of nothing": of_vd4rl_shard,
    "hdf5, one chunk of many": of_hdf5(one_chunk_of_many),
    "hdf5, twice compressed": of_hdf5(twice_compressed),
    "hdf5, a large chunk": of_hdf5(a_large_chunk),
    "hdf5, text": of_hdf5(one_value_of_many),
    "hdf5, nothing": of_hdf5(lambda file: file.create_dataset("x", (GIB,), "f8")),
    "png, pixels": of_images(png(60_000, 60_000)),
    "png, fewer pixels": of_images(png(5_700, 5_700)),
    "png, zeros": of_images(png(13_000, 13_000, 500 << 20)),
    "png, one of many": of_images(png(1_000, 1_000, 3_001_000), times=3_000),
    "jpeg, pixels": of_images(jpeg(65_000, 65_000)),
    "jpeg, fewer pixels": of_images(jpeg(5_700, 5_700)),
    "parquet, text": of_parquet(one_text),
    "parquet, zeros": of_parquet(lists_of_one_value, compression="zstd", row_group_size=1),
    "parquet, deltas": of_parquet(
        lambda: pa.table({"x": ["a" * 100_000] * 2_000}), column_encoding="DELTA_BYTE_ARRAY", use_dictionary=False
    ),
    "parquet, text of a hub folder": of_hub_folder(one_text),
    "parquet, zeros of a hub folder": of_hub_folder(lists_of_one_value, compression="zstd", row_group_size=1),
    "parquet, text of lerobot": of_lerobot(one_text, "text", "string"),
    "parquet, zeros of lerobot": of_lerobot(lists_of_one_value, "x", "uint8", compression="zstd", row_group_size=1),
    "openml, categories": of_classes,
    "json, lists": of_json(b"[" + b"[]," * 300_000 + b"[]]"),
    "json, deep": of_json(b"[" * 900_000),
    "json, deep objects": of_json(b'{"a":' * 150_000 + b"1" + b"}" * 150_000),
    "json, text without end": of_json(b'"' + b'\\"' * 450_000),
    "json, a number": of_json(b"1" * 900_000),
    "minari, a space": of_minari(f'{{\\"type\\": \\"Box\\", \\"shape\\": [{2**40}], \\"dtype\\": \\"float64\\"}}'),
    "minari, an info": of_minari_infos,
    "minari, a small space": of_minari(f'{{\\"type\\": \\"MultiBinary\\", \\"n\\": {10**400}}}'),
}
RESULTS = {"json, lists", "npz, a shape of nothing"}  # what is there, and small


@LIMITED
@pytest.mark.filterwarnings("ignore:Image size:PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("name", CASES)
def test_memory_is_bounded_by_what_is_there(name: str, tmp_path: Path) -> None:
    read = CASES[name](tmp_path)
    size = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert size < 1_000_000
    begun, factor = time.process_time(), 2 * (allowance.UNPACKED if name.startswith(UNPACKED) else allowance.HELD)
    with bounded(SMALL + factor * size):
        if name in RESULTS:
            read()
        else:
            with pytest.raises(CorruptDatasetError):
                read()
    assert time.process_time() - begun < 60
