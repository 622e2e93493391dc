"""Datasets in Parquet files with fixed-shape columns, from the Hugging Face hub or `to_hub_folder`."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from tensordict import TensorDictBase

from interop.datasets import parquet
from interop.datasets.arrow_columns import values
from interop.datasets.experience_replay import BaseDatasetExperienceReplay
from interop.datasets.hub import hub_download, hub_files, local_files
from interop.datasets.rows import nested
from interop.datasets.source import Part, Source


@dataclass(frozen=True)
class HubFolderSource(Source):
    """All files `data/*.parquet` of a dataset repository or folder."""

    family: ClassVar[str] = "hub"

    def download(self, folder: Path) -> dict[str, str]:
        files = [file for file in hub_files(self.dataset_id, "data/") if file.path.endswith(".parquet")]
        return hub_download(self.dataset_id, files, folder)

    def parts(self, folder: Path) -> list[Part]:
        parts = []
        for path in local_files(folder, "data/", ".parquet"):
            with parquet.opened(path) as file:
                parts += [Part(rows, path, (place,)) for place, rows in enumerate(file.rows())]
        return parts

    def read(self, part: Part) -> Iterator[TensorDictBase]:
        where = f"{part.path}, row group {part.which[0]}"
        with parquet.opened(part.path) as file:
            table = file.read(*part.which)
            columns = {
                tuple(name.split(".")): values(column.combine_chunks(), f"{part.path}, column {name}")
                for name, column in zip(table.column_names, table.columns, strict=True)
            }
            yield nested(columns, len(table), where)


class HubFolderExperienceReplay(BaseDatasetExperienceReplay):
    """A dataset of the Hugging Face hub whose rows are steps, in the layout of `to_hub_folder`.

    Columns become entries of the same dtype and shape; structs and dotted names become nested entries. A dataset of
    `to_hub_folder` has the stored entries and "episode" [N], which changes between trajectories; see its card.

    Args:
        dataset_id: `user/name` on the hub, or any name with `from_local`.
        from_local: a folder written by `to_hub_folder`, instead of a download.
        **more: as for `BaseDatasetExperienceReplay`.

    Raises: as `BaseDatasetExperienceReplay`; CorruptDatasetError for columns with missing values, and columns other than
    numbers, fixed-length lists of numbers, and text.
    """

    def __init__(self, dataset_id: str, batch_size: int | None = None, **more: Any) -> None:
        super().__init__(HubFolderSource(dataset_id), batch_size, **more)
