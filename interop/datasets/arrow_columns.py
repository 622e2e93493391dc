"""Conversion of Arrow and Parquet columns to arrays, text and bytes."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from interop.data.arguments import required
from interop.datasets.errors import CorruptDatasetError
from interop.datasets.hub_features import Feature, element_of, field_of, is_image, other_kind
from interop.datasets.images import stacked
from interop.datasets.rows import channels_first

if TYPE_CHECKING:
    import pyarrow as pa

_TENSORS = "arrow.fixed_shape_tensor"
_FLAGS = "arrow.bool8"


@contextlib.contextmanager
def faults(column_name: str) -> Iterator[None]:
    """Re-raise pyarrow errors as CorruptDatasetError with the prefix `what`."""
    try:
        yield
    except CorruptDatasetError:
        raise
    except (required("pyarrow", "datasets").ArrowException, OSError, ValueError) as error:
        raise CorruptDatasetError(f"{column_name} cannot be read ({error})") from error


def unsupported(kind: "pa.DataType", feature: Feature = None, *, in_list: bool = False) -> str | None:
    """Why columns of an Arrow type are not read by `values`; None where they are.

    Args:
        kind: the `pyarrow.DataType`.
        feature: what `datasets` says of the column.
        in_list: whether these are elements of lists.
    """
    types = required("pyarrow", "datasets").types
    if is_image(feature):
        return None if _has_bytes(kind) else f"is {kind}, but images are binary or structs with binary 'bytes'"
    if (name := other_kind(feature)) is not None:
        return f"has the feature {name}, which is not read"
    if getattr(kind, "extension_name", None) == _TENSORS:
        return None
    if isinstance(kind, required("pyarrow", "datasets").BaseExtensionType):
        return unsupported(kind.storage_type, feature, in_list=in_list)
    if types.is_dictionary(kind):
        return unsupported(kind.value_type, feature, in_list=in_list)
    if types.is_struct(kind):
        names = [field.name for field in kind]
        if twice := {name for name in names if names.count(name) > 1}:
            return f"has several fields named {sorted(twice)}"
        inner = (
            (field.name, unsupported(field.type, field_of(feature, field.name), in_list=in_list)) for field in kind
        )
        return next((f"has a field {name!r} that {why}" for name, why in inner if why), None)
    if _is_text(kind) or _is_binary(kind):
        return f"has lists of {kind}, which are no arrays" if in_list else None
    if _is_list(kind):
        return unsupported(kind.value_type, element_of(feature), in_list=True)
    if types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind):
        return None
    return f"is {kind}, which are no arrays of one shape and no text"


def leaf_paths(kind: "pa.DataType") -> Iterator[tuple[str, ...]]:
    """The paths of the fields of structs, also of those in lists; one empty path for a type without structs."""
    pyarrow = required("pyarrow", "datasets")
    if isinstance(kind, pyarrow.BaseExtensionType):
        yield from leaf_paths(kind.storage_type)
    elif pyarrow.types.is_struct(kind):
        for field in kind:
            yield from ((field.name, *path) for path in leaf_paths(field.type))
    elif _is_list(kind):
        yield from leaf_paths(kind.value_type)
    else:
        yield ()


def may_vary(kind: "pa.DataType") -> bool:
    """Whether rows of an Arrow type are lists, each of its own length, of elements that can be arrays."""
    if isinstance(kind, required("pyarrow", "datasets").BaseExtensionType):
        return False
    return _is_list(kind) and not hasattr(kind, "list_size") and unsupported(kind) is None


def ragged_values(column: "pa.Array", where: str, feature: Feature = None) -> tuple[np.ndarray, np.ndarray]:
    """The elements of lists of any length as one array [n, ...], and the offsets [rows + 1] where each row starts.

    CorruptDatasetError, prefixed by `where`, for missing values, and elements that are no arrays of one shape.
    """
    with faults(where):
        _refuse_missing(column, where)
        flat = values(column.flatten(), where, feature=element_of(feature))
        if not isinstance(flat, np.ndarray):
            raise CorruptDatasetError(f"{where} is {column.type}, whose lists have different lengths")
        lengths = column.value_lengths().to_numpy(zero_copy_only=False)
        return flat, np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def values(
    column: "pa.ChunkedArray | pa.Array",
    where: str,
    metadata: Mapping[bytes, bytes] | None = None,
    feature: Feature = None,
    *,
    missing_text: bool = False,
) -> Any:
    """Convert a `pyarrow.Array` to an array [rows, ...], a list of text or bytes, or a mapping of these.

    Lists of equal length become dims of the array, also where they hold structs. Dictionaries are decoded. Minari records
    further dims in the metadata of a field. Where `feature` says that a column has images, they are decoded to
    [rows, channels, height, width]. With `missing_text`, missing text and bytes become None.

    CorruptDatasetError, prefixed by `where`, for missing values, lists of different lengths, and other types.
    """
    with faults(where):
        return _values(column, where, metadata, feature, missing_text=missing_text)


def _values(
    column: "pa.ChunkedArray | pa.Array",
    where: str,
    metadata: Mapping[bytes, bytes] | None,
    feature: Feature,
    *,
    missing_text: bool,
) -> Any:
    pyarrow = required("pyarrow", "datasets")
    types = pyarrow.types
    if getattr(column.type, "extension_name", None) == _TENSORS:
        _refuse_missing(column, where)
        _refuse_missing(column.storage.flatten(), where)
        return np.ascontiguousarray(column.to_numpy_ndarray())
    if getattr(column.type, "extension_name", None) == _FLAGS:
        column = column.storage.cast(pyarrow.bool_())
    elif isinstance(column.type, pyarrow.BaseExtensionType):
        column = column.storage
    if types.is_dictionary(column.type):
        column = column.dictionary_decode()
    kind = column.type
    if is_image(feature):
        return _images(column, where)
    if types.is_struct(kind):
        if (why := unsupported(kind, feature)) is not None and "several fields" in why:
            raise CorruptDatasetError(f"{where} {why}")
        missing_text = missing_text and not column.null_count  # a struct that is missing has no fields to be None
        inner = zip(kind, column.flatten(), strict=True)
        return {
            field.name: values(
                child, f"{where}/{field.name}", field.metadata, field_of(feature, field.name), missing_text=missing_text
            )
            for field, child in inner
        }
    if missing_text and (_is_text(kind) or _is_binary(kind)):
        return column.to_pylist()
    _refuse_missing(column, where)
    if _is_text(kind) or _is_binary(kind):
        return column.to_pylist()
    if _is_list(kind):
        flat = values(column.flatten(), where, feature=element_of(feature))
        is_fixed = types.is_fixed_size_list(kind)
        lengths = {kind.list_size} if is_fixed else set(column.value_lengths().to_pylist())
        if len(lengths) == 1 and not _has_text(flat):
            return _in_lists(flat, len(column), lengths.pop(), metadata)
    elif (array := column.to_numpy(zero_copy_only=False)).dtype.kind in "biufc":
        return array
    raise CorruptDatasetError(f"{where} is {kind}, which are no arrays of one shape and no text")


def _refuse_missing(column: "pa.ChunkedArray | pa.Array", where: str) -> None:
    if column.null_count:
        raise CorruptDatasetError(f"{where} has {column.null_count} missing values")


def _in_lists(flat: "pa.Array", rows: int, length: int, metadata: Mapping[bytes, bytes] | None) -> Any:
    """The elements of lists of one length by row: arrays [rows, length, ...]."""
    if isinstance(flat, dict):
        return {name: _in_lists(column, rows, length, None) for name, column in flat.items()}
    shape = [length, *flat.shape[1:]]
    if metadata and b"shape" in metadata:
        shape = [int(size) for size in metadata[b"shape"].split(b",") if size]
    return flat.reshape(rows, *shape)


def _has_text(flat: "pa.Array") -> bool:
    """Whether elements of lists are other than arrays."""
    return any(map(_has_text, flat.values())) if isinstance(flat, dict) else not isinstance(flat, np.ndarray)


def _images(column: "pa.ChunkedArray | pa.Array", where: str) -> np.ndarray:
    """Decode images: binary, or structs of "bytes" and "path"."""
    if required("pyarrow", "datasets").types.is_struct(column.type):
        _refuse_missing(column, where)
        column = column.field("bytes")
    if column.null_count:
        raise CorruptDatasetError(f"{where}: {column.null_count} images are not in the file")
    return channels_first(stacked(column.to_pylist(), where))


def _has_bytes(kind: "pa.DataType") -> bool:
    """Whether a type is that of encoded images."""
    if required("pyarrow", "datasets").types.is_struct(kind):
        return any(field.name == "bytes" and _is_binary(field.type) for field in kind)
    return _is_binary(kind)


def _is_text(kind: "pa.DataType") -> bool:
    types = required("pyarrow", "datasets").types
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def _is_binary(kind: "pa.DataType") -> bool:
    types = required("pyarrow", "datasets").types
    is_binary = types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind)
    return bool(is_binary or (types.is_fixed_size_binary(kind) and not types.is_decimal(kind)))


def _is_list(kind: "pa.DataType") -> bool:
    types = required("pyarrow", "datasets").types
    plain = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    return bool(plain or types.is_list_view(kind) or types.is_large_list_view(kind))
