"""Conversion of Arrow and Parquet columns to arrays and text."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from interop.data.arguments import required
from interop.datasets.errors import CorruptDatasetError


@contextlib.contextmanager
def faults(what: str) -> Iterator[None]:
    """Re-raise pyarrow errors as CorruptDatasetError with the prefix `what`."""
    try:
        yield
    except (required("pyarrow", "datasets").ArrowException, OSError, ValueError) as error:
        raise CorruptDatasetError(f"{what} cannot be read ({error})") from error


def values(column: Any, where: str, metadata: Mapping[bytes, bytes] | None = None) -> Any:
    """Convert a `pyarrow.Array` to an array [rows, ...], a list of text or bytes, or a mapping of these.

    Lists of equal length become dims of the array. Minari records further dims in the metadata of a field.
    CorruptDatasetError, prefixed by `where`, for missing values, lists of different lengths, and other types.
    """
    types, kind = required("pyarrow", "datasets").types, column.type
    if types.is_struct(kind):
        inner = zip(kind, column.flatten(), strict=True)
        return {field.name: values(each, f"{where}/{field.name}", field.metadata) for field, each in inner}
    if column.null_count:
        raise CorruptDatasetError(f"{where} has {column.null_count} missing values")
    if types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind):
        return column.to_pylist()
    is_fixed = types.is_fixed_size_list(kind)
    if is_fixed or types.is_list(kind):
        flat = values(column.flatten(), where)
        lengths = {kind.list_size} if is_fixed else set(column.value_lengths().to_pylist())
        if len(lengths) == 1 and isinstance(flat, np.ndarray):
            shape = [*lengths, *flat.shape[1:]]
            if metadata and b"shape" in metadata:
                shape = [int(size) for size in metadata[b"shape"].split(b",") if size]
            return flat.reshape(len(column), *shape)
    elif (array := column.to_numpy(zero_copy_only=False)).dtype.kind in "biufc":
        return array
    raise CorruptDatasetError(f"{where} is {kind}, which are no arrays of one shape and no text")
