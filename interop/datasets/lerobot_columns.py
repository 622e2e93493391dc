"""Columns of a LeRobot dataset as arrays and text, of the kinds and shapes that `meta/info.json` states."""

from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from interop.data.arguments import required
from interop.datasets.errors import CorruptDatasetError
from interop.datasets.images import stacked
from interop.datasets.lerobot_meta import Feature
from interop.datasets.rows import channels_first

if TYPE_CHECKING:
    import pyarrow as pa

_NUMBERS = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64",
)  # fmt: skip


def unsupported(feature: Feature) -> str | None:
    """Why the column of a feature cannot become an entry of rows, or None."""
    if feature.kind == "video" and feature.is_depth:
        return "a video of depths, which is not decoded"
    if feature.kind in ("image", "video"):
        return None
    if feature.kind not in (*_NUMBERS, "string"):
        return f"of kind {feature.kind!r}"
    if -1 in feature.shape:
        return f"lists of any length, shape {[*feature.shape]}"
    if feature.kind == "string" and feature.shape not in ((), (1,)):
        return f"several texts a row, shape {[*feature.shape]}"
    return None


def values_of(column: "pa.ChunkedArray", feature: Feature, where: str) -> np.ndarray | list[str]:
    """Convert a column to an array [T, *shape] of the stated kind, or a list of text.

    CorruptDatasetError, prefixed by `where`, for gaps, rows of other shapes, and values that the stated kind does not have.
    """
    types = required("pyarrow", "datasets").types
    if feature.kind == "image":
        return channels_first(stacked(_encoded(column, where), where))
    if feature.kind == "string":
        texts = column.to_pylist()
        if not all(isinstance(text, str) for text in texts):
            raise CorruptDatasetError(f"{where}: is no column of string without gaps, but of {column.type}")
        return texts
    flat = column.combine_chunks()
    wrong = f"{where}: is no column of {feature.kind} of shape {[*feature.shape]} without gaps, but of {column.type}"
    if hasattr(flat, "to_numpy_ndarray"):  # pyarrow's tensors, whose dims may be permuted
        values = flat.to_numpy_ndarray()
        if flat.null_count or values.shape[1:] != feature.shape:
            raise CorruptDatasetError(wrong)
        flat = required("pyarrow", "datasets").array(values.reshape(-1))
    flat = getattr(flat, "storage", flat)  # a column with several dims, if `datasets` is imported
    sizes = [*feature.shape] if types.is_nested(flat.type) else []
    while types.is_list(flat.type) or types.is_large_list(flat.type) or types.is_fixed_size_list(flat.type):
        lengths = {*flat.value_lengths().unique().to_pylist()} if len(flat) else set()
        if flat.null_count or not sizes or not lengths <= {sizes[0]}:
            raise CorruptDatasetError(f"{wrong}, with lists of {', '.join(sorted(map(str, lengths)))}")
        flat = flat.flatten()
        sizes = sizes[1:]
    count = len(column) * int(np.prod(feature.shape))
    if flat.null_count or sizes or len(flat) != count or not (_is_number(types, flat.type) or not count):
        raise CorruptDatasetError(wrong)
    return _cast(flat, feature.kind, where).reshape(len(column), *feature.shape)


def _is_number(types: ModuleType, kind: "pa.DataType") -> bool:
    return types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)


def _cast(flat: "pa.Array", kind: str, where: str) -> np.ndarray:
    """Convert an array of numbers to the stated kind, as upstream does. Rounds floats, but no integers."""
    pyarrow = required("pyarrow", "datasets")
    try:
        return flat.cast(pyarrow.type_for_alias(kind)).to_numpy(zero_copy_only=False)
    except pyarrow.ArrowException as error:
        raise CorruptDatasetError(f"{where}: is no column of {kind}, but of {flat.type}: {error}") from error


def _encoded(column: "pa.ChunkedArray", where: str) -> list[bytes]:
    """The content of image files: bytes, or structs with "bytes" and "path". The files of a path are not read."""
    values = [cell.get("bytes") if isinstance(cell, dict) else cell for cell in column.to_pylist()]
    images = [cell for cell in values if isinstance(cell, bytes) and cell]
    if missing := len(values) - len(images):
        raise CorruptDatasetError(f"{where}: {missing} images are not in the file, whose column is {column.type}")
    return images
