"""Parquet files of rows with columns of one shape, of the Hugging Face hub or as `to_hub_folder` writes them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensordict import TensorDict, TensorDictBase

from interop.datasets.errors import CorruptDatasetError
from interop.datasets.experience_replay import BaseDatasetExperienceReplay
from interop.datasets.hub import hub_download, hub_files
from interop.datasets.rows import leaf
from interop.datasets.source import Part, Source
from interop.datasets.to_hub_folder import kind_of
from interop.optional import required


@dataclass(frozen=True)
class HubFolderSource(Source):
    """Every `data/*.parquet` of a dataset repository, or of a folder."""

    dataset_id: str
    family = "hub"

    def download(self, folder: Path) -> dict[str, str]:
        files = [file for file in hub_files(self.dataset_id, "data") if file.path.endswith(".parquet")]
        return dict(hub_download(self.dataset_id, files, folder))

    def parts(self, folder: Path) -> Sequence[Part]:
        parquet, parts = required("pyarrow.parquet", "datasets"), []
        for path in sorted(folder.glob("data/*.parquet")):
            try:
                found = parquet.read_metadata(path)
            except (OSError, ValueError) as error:
                raise CorruptDatasetError(f"{path} is not a Parquet file: {error}") from error
            groups = range(found.num_row_groups)
            parts += [Part(found.row_group(place).num_rows, path, (place,)) for place in groups]
        if not parts:
            raise CorruptDatasetError(f"there are no files data/*.parquet in {folder}")
        return parts

    def read(self, part: Part) -> Iterator[TensorDictBase]:
        parquet = required("pyarrow.parquet", "datasets")
        try:
            with parquet.ParquetFile(part.path) as file:
                table = file.read_row_group(*part.which)
        except (OSError, ValueError) as error:
            raise CorruptDatasetError(f"{part.path}, row group {part.which[0]}: {error}") from error
        rows = TensorDict({}, [len(table)])
        for name, column in zip(table.column_names, table.columns, strict=True):
            rows[tuple(name.split("."))] = _values(column.combine_chunks(), f"{part.path}, column {name}")
        yield rows


def _values(column: Any, where: str) -> Any:
    """A column as it is stored."""
    pa, rows = required("pyarrow", "datasets"), len(column)
    dtype, shape = kind_of(column.type)
    for _ in shape:
        column = column.flatten()
    is_text = pa.types.is_string(dtype) and not shape
    if column.null_count or not (is_text or pa.types.is_primitive(dtype)):
        found = "missing values" if column.null_count else f"the type {dtype} {shape or ''}"
        raise CorruptDatasetError(f"{where} has {found}: numbers, lists of them of one length, and text can be read")
    return leaf(column.to_pylist() if is_text else column.to_numpy(zero_copy_only=False).reshape(rows, *shape))


class HubFolderExperienceReplay(BaseDatasetExperienceReplay):
    """A dataset of the Hugging Face hub whose rows are steps, as `to_hub_folder` writes them.

    Columns come as entries of the same dtype and shape, dotted names as nested ones. A dataset of `to_hub_folder` has
    "episode" [N] and the stored entries; "episode" changes where a trajectory ends, which its card tells more of.

    Args:
        dataset_id: `user/name` on the hub, or a name of one's own with `from_local`.
        batch_size: of samples.
        from_local: a folder that was written by `to_hub_folder`, in place of a download.
        more: of `BaseDatasetExperienceReplay`.

    Raises: see `BaseDatasetExperienceReplay`; CorruptDatasetError for columns that are not numbers, lists of them of one
    length, or text.
    """

    def __init__(self, dataset_id: str, batch_size: int | None = None, **more: Any) -> None:
        super().__init__(HubFolderSource(dataset_id), batch_size, **more)
