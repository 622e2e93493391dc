"""What the files of an export can hold. Entries are checked by name, before an export writes its first byte."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from interop.data.keys import entries_below
from interop.data.layout import LeafSpec
from interop.data.values import is_written
from interop.datasets.stored_episodes import KeyPath, Kind, StoredEpisodes, kind_of, shown_kind
from interop.host.maps import file_names

_AT_ONCE = 512  # rows that are checked together
_AS_INT64 = (torch.uint32, torch.uint64)  # storages of tensors lack them
_NUMBERS = frozenset({
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.int64,
    torch.float16, torch.float32, torch.float64,
})  # fmt: skip


@dataclass(frozen=True)
class RaggedRows:
    """Rows of any length: row `i` is `values[offsets[i] : offsets[i + 1]]`."""

    values: np.ndarray
    offsets: np.ndarray


@dataclass(frozen=True)
class FileFormat:
    """A kind of files: what upstream and the loaders of this library read back from them.

    Args:
        name: for messages.
        dtypes: of tensors.
        has_empty: whether tensors without values, such as rows of shape [0], can be written.
        has_nul: whether text may have the character NUL.
        has_bytes: whether entries of bytes can be written.
        has_ragged: whether tensors whose rows have any length can be written.
    """

    name: str
    dtypes: frozenset[torch.dtype] = _NUMBERS
    has_empty: bool = False
    has_nul: bool = True
    has_bytes: bool = False
    has_ragged: bool = False

    def kinds(self, stored: StoredEpisodes) -> dict[KeyPath, Kind]:
        """The kind of each entry, after a check of all rows, or of one row where a storage has rows of one layout.

        Raises:
            TypeError: an entry is of a dtype that does not come back, without values, ragged, or neither tensors nor text.
            ValueError: rows differ in keys, shapes or dtypes, or a text cannot be written.
        """
        first: dict[KeyPath, Kind] = {}
        for start in range(0, 1 if stored.is_uniform else stored.rows, _AT_ONCE):
            rows = stored.read(start, 1 if stored.is_uniform else min(start + _AT_ONCE, stored.rows))
            kinds = {path: kind_of(value, 1) for path, value in entries_below(rows)}
            first = first or kinds
            for path in first.keys() | kinds.keys():
                if first.get(path) != kinds.get(path):
                    there, here = (shown_kind(by_path.get(path)) for by_path in (first, kinds))
                    raise ValueError(
                        f"{path} is {here} in row {start} of the export, {there} in the first one: rows of one kind are "
                        f"needed, or {_without(path)}"
                    )
            for path, value in entries_below(rows):
                self.values(value, path)
        return first

    def values(self, value: Any, path: KeyPath) -> np.ndarray | list[Any] | RaggedRows:
        """An entry of rows as an array, ragged rows, or a list of text or bytes. The errors of `kinds`."""
        if not isinstance(value, Tensor):
            return self._texts(value.tolist(), path)
        name = ".".join(map(str, path))
        if value.is_nested and self.has_ragged:
            components: Any = value.contiguous()
            flat = self.values(components.values(), path)
            assert isinstance(flat, np.ndarray)
            return RaggedRows(flat, components.offsets().numpy())
        if value.is_nested:
            raise TypeError(f"{path}: {name} is ragged rows, which {self.name} does not have: {_without(path)}")
        kind = f"{str(value.dtype).removeprefix('torch.')} {[*value.shape[1:]]}"
        if value.dtype in _AS_INT64:
            raise TypeError(f"{path}: {name} is {kind}, which is read as int64: cast it to int64, or {_without(path)}")
        if value.dtype not in self.dtypes:
            raise TypeError(f"{path}: {name} is {kind}, which {self.name} does not have: cast it, or {_without(path)}")
        if not self.has_empty and 0 in value.shape[1:]:
            raise TypeError(
                f"{path}: {name} is {kind}, which {self.name} does not have, as it has no values: {_without(path)}"
            )
        array: np.ndarray = value.resolve_conj().resolve_neg().numpy()
        return array

    def _texts(self, values: Any, path: KeyPath) -> list[Any]:
        kinds = {type(element) for element in values} if isinstance(values, list) else set()
        if kinds == {bytes} and self.has_bytes:
            return list(values)
        if not isinstance(values, list) or kinds - {str}:
            other_types = sorted(kind.__name__ for kind in kinds - {str}) or [type(values).__name__]
            raise TypeError(
                f"{path} holds neither tensors nor text, but values of type {', '.join(other_types)}: {_without(path)}"
            )
        text = "".join(values)
        if not is_written(text) or ("\0" in text and not self.has_nul):
            fault = "the character NUL" if is_written(text) else "half of a pair of surrogates"
            raise ValueError(
                f"{path}: a text has {fault}, which {self.name} does not have: replace it, or {_without(path)}"
            )
        return values


PARQUET = FileFormat("Parquet", has_bytes=True, has_ragged=True)
MINARI = {
    "hdf5": FileFormat("HDF5", _NUMBERS | {torch.complex64, torch.complex128}, has_empty=True, has_nul=False),
    "arrow": FileFormat("Arrow", has_nul=False),  # Minari reads text as arrays of NumPy, which drop it at the end
    "parquet": FileFormat("Parquet", has_nul=False),
}
"""The formats of Minari, by name."""


def refuse_names(places: Mapping[KeyPath, KeyPath], noun: str) -> None:
    """ValueError, naming the entry, for places that a loader of this library cannot have as keys.

    Args:
        places: the entries by their place in the files.
        what: a place is, for messages.
    """
    for place, entry in places.items():
        _as_files([place], entry)
        for end in range(1, len(place)):
            if place[:end] in places:
                raise ValueError(
                    f"{entry} and {places[place[:end]]} have one {noun}, {'/'.join(map(str, place[:end]))}, which cannot be "
                    f"nested and not nested: rename one, or {_without(entry)}"
                )
    _as_files(places, ())


def _as_files(places: Collection[KeyPath], entry: KeyPath) -> None:
    try:
        file_names([LeafSpec(place, (), torch.uint8) for place in places])
    except ValueError as error:
        way = f", or {_without(entry)}" if entry else ""
        raise ValueError(f"{entry or 'the entries'} could not be read back: {error}. Rename it{way}") from error


def _without(path: KeyPath) -> str:
    """The advice to leave an entry out."""
    key = path[0] if len(path) == 1 else path
    return f"leave it out by exclude=[{key!r}]"
