"""Datasets in Parquet files with fixed-shape columns, from the Hugging Face hub or `to_hub_folder`."""

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase
from tensordict.utils import NestedKey

from interop.checkpoint.checkpointer import StorageCheckpointerBase
from interop.data.keys import entries_below
from interop.data.layout import LeafSpec
from interop.datasets import parquet
from interop.datasets.arrow_columns import leaf_paths, may_vary, ragged_values, unsupported, values
from interop.datasets.errors import CorruptDatasetError
from interop.datasets.experience_replay import BaseDatasetExperienceReplay
from interop.datasets.hub import hub_download, hub_files, local_files
from interop.datasets.hub_features import features_of
from interop.datasets.rows import leaf
from interop.datasets.source import Part, Source
from interop.host.maps import file_names
from interop.sample_units import SampleUnit
from interop.samplers import Sampler
from interop.transforms import Transform
from interop.writers import Writer

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class HubFolderSource(Source):
    """All files `data/*.parquet` of a dataset repository or folder.

    Args:
        exclude: the names of columns that are left out, sorted; None for none.
    """

    family: ClassVar[str] = "hub"

    exclude: tuple[str, ...] | None = None

    def download(self, folder: Path) -> dict[str, str]:
        files = [file for file in hub_files(self.dataset_id, "data/") if file.path.endswith(".parquet")]
        return hub_download(self.dataset_id, files, folder)

    def metadata(self, folder: Path) -> dict[str, Any]:
        path = local_files(folder, "data/", ".parquet")[0]
        with parquet.opened(path) as file:
            features = features_of(file.schema, str(path))
        return {"features": features} if features else {}

    def parts(self, folder: Path) -> list[Part]:
        found = []
        ragged = _Lengths()
        for path in local_files(folder, "data/", ".parquet"):
            with parquet.opened(path) as file:
                schema = file.schema
                groups = file.rows()
            self._check_columns(schema, path)
            places = [place for place, rows in enumerate(groups) if rows]
            found += [(groups[place], path, place) for place in places]
            lists = [name for name in self._without_excluded(schema.names) if may_vary(schema.field(name).type)]
            if lists:
                with parquet.opened(path) as file:
                    for place in places:
                        ragged.see(file, place, lists)
        return [Part(rows, path, (place, ragged.differ)) for rows, path, place in found]

    def inputs(self, folder: Path) -> list[Path]:
        return local_files(folder, "data/", ".parquet")

    def read(self, part: Part) -> Iterator[TensorDictBase]:
        with parquet.opened(part.path) as file:
            schema = file.schema
            features = features_of(schema, str(part.path))
            names = self._without_excluded(schema.names)
            group, ragged = part.which
            table = file.read(group, names)
            rows = TensorDict({}, [len(table)])
            for name in names:
                column = table[name].combine_chunks()
                where = f"{part.path}, column {name}"
                if name in ragged:
                    rows[_key(name, schema.names)] = _ragged(*ragged_values(column, where, features.get(name)), where)
                    continue
                column_values = values(column, where, feature=features.get(name), missing_text=True)
                for path, entry in entries_below({_key(name, schema.names): column_values}):
                    rows[path] = _leaf(entry, f"{part.path}, column {name}")
            yield rows

    def _without_excluded(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if name not in (self.exclude or ())]

    def _check_columns(self, schema: "pa.Schema", path: Path) -> None:
        """Errors, before the first row is read, for columns that cannot be entries."""
        names: list[str] = schema.names
        if missing := set(self.exclude or ()) - set(names):
            raise ValueError(f"exclude has {sorted(missing)}, {path} has the columns {names}")
        if twice := sorted({name for name in self._without_excluded(names) if names.count(name) > 1}):
            raise CorruptDatasetError(f"{path} has several columns named {twice}: {_without(*twice)}")
        features = features_of(schema, str(path))
        for name in self._without_excluded(names):
            kind = schema.field(name).type
            why = unsupported(kind, features.get(name))
            if why is None:
                try:
                    file_names([LeafSpec((*_key(name, names), *below), (), torch.uint8) for below in leaf_paths(kind)])
                except ValueError as error:
                    why = f"makes no entry: {error}"
            if why is not None:
                raise CorruptDatasetError(
                    f"{path}, column {name} {why}. {_without(name)[0].upper()}{_without(name)[1:]}"
                )


class _Lengths:
    """Finds columns of lists whose lengths differ. Reads a column up to the first two lengths that do.

    Files do not say it: a list of any length is also how many programs write rows of one shape.
    """

    def __init__(self) -> None:
        self._length: dict[str, int] = {}
        self.differ: frozenset[str] = frozenset()
        """The names of these columns."""

    def see(self, file: "parquet.RowGroups", group: int, names: Sequence[str]) -> None:
        """Read the lengths of lists in a row group."""
        names = [name for name in names if name not in self.differ]
        table = file.read(group, names) if names else None
        for name in names:
            assert table is not None
            for length in table[name].combine_chunks().value_lengths().unique().to_pylist():
                if length is not None and self._length.setdefault(name, length) != length:
                    self.differ |= {name}


def _ragged(flat: np.ndarray, offsets: np.ndarray, where: str) -> torch.Tensor:
    return torch.nested.nested_tensor_from_jagged(_leaf(flat, where), torch.from_numpy(offsets))


def _without(*names: str) -> str:
    """The advice to leave columns out."""
    return f"leave it out by exclude={[*names]!r}"


def _key(name: str, names: Collection[str]) -> tuple[str, ...]:
    """Split the name of a column at its dots, but not behind the name of another one: "a.b" beside "a" is one name."""
    key: list[str] = []
    parts = name.split(".")
    for part, before in zip(parts, ["", *accumulate(parts, "{}.{}".format)], strict=False):
        if key and before in names:
            key[-1] += f".{part}"
        else:
            key.append(part)
    return tuple(key)


def _leaf(value: Any, where: str) -> Any:
    """An array as a tensor; text and bytes as they are. CorruptDatasetError, prefixed by `where`, for integers too large."""
    if isinstance(value, list):
        return NonTensorStack(*map(NonTensorData, value))
    try:
        return leaf(value)
    except CorruptDatasetError as error:
        raise CorruptDatasetError(f"{where}: {error}. {_without(where.rpartition('column ')[2])}") from error


class HubFolderExperienceReplay(BaseDatasetExperienceReplay):
    """A dataset of the Hugging Face hub whose rows are steps, in the layout of `to_hub_folder`.

    Columns become entries of the same shape and dtype; uint32 and uint64 become int64. Structs and dotted names become
    nested entries; a column `a.b` beside a column `a` keeps its name. Lists of one length become dims, a column of lists of
    other lengths ragged rows. Missing text and bytes are None. Images of the library
    `datasets` are decoded to [channels, H, W], class labels are integers, and their names are in
    `metadata["features"]`. Text stays text, and binary columns bytes. A dataset of `to_hub_folder` has the stored
    entries and "episode" [N], which changes between trajectories; see its card.

    Args:
        dataset_id: `user/name` on the hub, or any name with `from_local`.
        exclude: the names of columns to leave out.
        from_local: a folder written by `to_hub_folder`, instead of a download.

    The other arguments are those of `BaseDatasetExperienceReplay`.

    Raises: as `BaseDatasetExperienceReplay`; ValueError for columns of `exclude` that are not there; CorruptDatasetError,
    before the first row is read, for two columns of one name, names that cannot be keys, and columns other than numbers,
    lists of numbers, images, text and bytes, such as timestamps and decimals; and while reading for missing numbers and
    lists, and lists in lists or structs that have different lengths. The message names the column, for `exclude`.
    """

    def __init__(
        self,
        dataset_id: str,
        batch_size: int | None = None,
        *,
        exclude: Collection[str] = (),
        root: str | os.PathLike[str] | None = None,
        download: bool | Literal["force"] = True,
        from_local: str | os.PathLike[str] | None = None,
        split_trajs: bool = False,
        num_workers: int = 0,
        sampler: Sampler | Callable[[], Sampler] | None = None,
        writer: Writer | Callable[[], Writer] | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        prefetch: int | None = None,
        transform: Transform | Callable[[Any], Any] | None = None,
        transform_factory: Callable[[], Transform | Callable[[Any], Any]] | None = None,
        dim_extend: int | None = None,
        checkpointer: StorageCheckpointerBase | type[StorageCheckpointerBase] | None = None,
        generator: torch.Generator | None = None,
        shared: bool = False,
        compilable: bool | None = None,
        delayed_init: bool | None = None,
        sample_unit: SampleUnit | None = None,
        consume_after_n_samples: int | None = None,
        priority_key: NestedKey | None = "td_error",
    ) -> None:
        if isinstance(exclude, str) or not all(isinstance(name, str) for name in exclude):
            raise TypeError(f"exclude must be a list of names of columns, got {exclude!r}")
        super().__init__(
            HubFolderSource(dataset_id, tuple(sorted({*exclude})) or None),
            batch_size,
            root=root,
            download=download,
            from_local=from_local,
            split_trajs=split_trajs,
            num_workers=num_workers,
            sampler=sampler,
            writer=writer,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            prefetch=prefetch,
            transform=transform,
            transform_factory=transform_factory,
            dim_extend=dim_extend,
            checkpointer=checkpointer,
            generator=generator,
            shared=shared,
            compilable=compilable,
            delayed_init=delayed_init,
            sample_unit=sample_unit,
            consume_after_n_samples=consume_after_n_samples,
            priority_key=priority_key,
        )
