"""A safe reader of `.npz` archives: the sizes of their arrays are compared with the file before they are read."""

import math
import zipfile
import zlib
from pathlib import Path

import numpy as np

from interop.datasets import allowance
from interop.datasets.compressed import Stream
from interop.datasets.errors import CorruptDatasetError
from interop.datasets.object_arrays import array_header

_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # which NumPy writes
_FAULTS = (
    zipfile.BadZipFile,
    zlib.error,
    OSError,
    EOFError,
    LookupError,
    ValueError,
    RuntimeError,
    NotImplementedError,
)
_SUFFIX = ".npy"


def arrays_of(path: Path, *names: str) -> dict[str, np.ndarray]:
    """The arrays of an `.npz` file that have one of `names`, by default all.

    CorruptDatasetError names the file: for a damaged one, for arrays of objects, and for arrays that are larger than
    `interop.datasets.allowance` allows or than what is there.
    """
    where = f"{path} cannot be read as an .npz file"
    try:
        with zipfile.ZipFile(path) as archive:
            members = {member.filename.removesuffix(_SUFFIX): member for member in archive.infolist()}
            chosen = {name: member for name, member in members.items() if not names or name in names}
            size = sum(member.file_size for member in chosen.values())
            allowance.check(size, allowance.held(path.stat().st_size), where)
            return {name: _array(archive, member, f"{path}, {name}") for name, member in chosen.items()}
    except CorruptDatasetError:
        raise
    except _FAULTS as error:
        raise CorruptDatasetError(f"{where} ({error})") from error


def _array(archive: zipfile.ZipFile, member: zipfile.ZipInfo, where: str) -> np.ndarray:
    if member.compress_type not in _METHODS:
        raise CorruptDatasetError(f"{where}: is compressed by a method that NumPy does not use")
    with archive.open(member) as file:
        stream = Stream(file, where)
        shape, fortran, dtype = array_header(stream, where, any_order=True)
        size = math.prod(shape) * dtype.itemsize
        allowance.check(size, member.file_size, where)
        if dtype.kind not in "biufcSU":
            raise CorruptDatasetError(f"{where}: holds {dtype}, neither numbers nor text")
        content = stream.read(size) if size else b""
        if len(content) != size or stream.finish():
            raise CorruptDatasetError(f"{where}: has another size than its header says")
    return np.frombuffer(bytearray(content), dtype).reshape(shape, order="F" if fortran else "C")
