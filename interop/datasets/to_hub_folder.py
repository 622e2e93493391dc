"""Export of a replay buffer to Parquet files with a dataset card, in the layout of the Hugging Face hub."""

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tensordict.utils import NestedKey

from interop.buffers import ReplayBuffer
from interop.data.arguments import required
from interop.data.keys import entries_below
from interop.datasets.dataset_card import card, keys_in_words
from interop.datasets.export_formats import PARQUET, RaggedRows, refuse_names
from interop.datasets.hub_features import library_metadata
from interop.datasets.image_entries import ImageEntry, image_column, image_paths
from interop.datasets.progress import progress
from interop.datasets.stored_episodes import KeyPath, Kind, StoredEpisodes, stored_episodes
from interop.shared.published_folder import publish

if TYPE_CHECKING:
    import pyarrow as pa

_GROUP = 1 << 25  # bytes in memory per row group
_SHARD = 1 << 28


def to_hub_folder(
    rb: ReplayBuffer,
    path: str | os.PathLike[str],
    *,
    name: str | None = None,
    licence: str | None = None,
    description: str = "",
    traj_key: NestedKey | None = None,
    end_keys: Sequence[NestedKey] | None = None,
    only_named_keys: bool = False,
    image_keys: Collection[NestedKey] = (),
    exclude: Collection[NestedKey] = (),
    shard_bytes: int = _SHARD,
) -> Path:
    """Write the rows of a buffer to a folder for `datasets.load_dataset(path)` and `HubFolderExperienceReplay`.

    Writes the stored rows without transforms, trajectory by trajectory in the order of their ends, about 30 MB in memory at
    a time. The buffer is locked meanwhile. The folder appears atomically. Entries are checked before the first byte is
    written: by one row in a storage of tensors, by all rows in lists, and where there is text.

    A nested entry becomes a column with a dotted name, `next.observation`. Tensors become numbers or nested fixed-length
    lists, ragged rows become lists, text becomes strings, bytes become binary. Entries of `image_keys` become PNG images,
    the feature `Image` of the library `datasets`, which the loader reads back as [C, H, W]. The column `episode` has the
    trajectory ids of an entry, or else trajectory numbers; it replaces a stored entry "episode". `README.md` documents the
    layout.

    Args:
        rb: the buffer.
        path: a folder that does not exist.
        name: the title, by default the name of the folder.
        licence: a licence identifier of the hub, such as "mit" or "cc-by-4.0".
        description: Markdown, for the card.
        traj_key, end_keys, only_named_keys: the entries that mark trajectory ends, as for `SliceSampler`.
        image_keys: the keys of images, uint8 [C, H, W], [H, W, C] or [H, W].
        exclude: the keys of entries that are left out.
        shard_bytes: the size of a file before compression.

    Raises:
        FileExistsError: `path` exists; it is not modified.
        TypeError: an entry has no values in a row, or is neither text nor bytes nor a tensor that Parquet supports, or an
            entry of `image_keys` has no images; see also `stored_episodes`. The message names the entry.
        ValueError: rows differ in keys, shapes or dtypes, or a key contains a dot or cannot be read back. The message names
            the entry.
        KeyError: a key of `exclude` or `image_keys` is not stored.
        RuntimeError: the buffer is empty, or has no entry that marks trajectory ends.
    """
    parquet = required("pyarrow.parquet", "datasets")
    folder = Path(path).absolute()
    if os.path.lexists(folder):
        raise FileExistsError(f"{folder} is there already: remove it, or write to another folder")
    with stored_episodes(rb, traj_key, end_keys, only_named_keys, exclude) as stored:
        kinds = PARQUET.kinds(stored)
        _check_keys(kinds)
        images = {path: ImageEntry.of(path, kinds[path]) for path in image_paths(image_keys, kinds)}
        first = _columns(stored, 0, 1, images)
        row = _table(first)
        if images:
            row = row.replace_schema_metadata(library_metadata(_library_features(row.schema, images)))
        card_text = _card(name or folder.name, licence, description, stored, first)

        def make(scratch: Path) -> None:
            data = scratch / "data" / "data"
            data.mkdir(parents=True)
            tables = _tables(stored, row, images, min(shard_bytes, _GROUP), f"Writing {folder}")
            for shard, table in enumerate(tables):
                with parquet.ParquetWriter(
                    data / f"train-{shard:05}.parquet", row.schema, compression="zstd", write_page_checksum=True
                ) as writer:
                    writer.write_table(table)
                    size = table.nbytes
                    while size < shard_bytes and (more := next(tables, None)) is not None:
                        writer.write_table(more)
                        size += more.nbytes
            (scratch / "data" / "README.md").write_bytes(card_text)

        publish(folder, None, make)
    return folder


def _tables(
    stored: StoredEpisodes, row: "pa.Table", images: Mapping[KeyPath, ImageEntry], size: int, title: str
) -> Iterator["pa.Table"]:
    """Yield all rows as row groups of about `size` bytes."""
    pixels = sum(image.height * image.width * image.channels for image in images.values())
    step = max(1, size // (row.nbytes + pixels))
    start = 0
    with progress(title, stored.rows, "row") as advance:
        while start < stored.rows:
            table = _table(_columns(stored, start, min(start + step, stored.rows), images))
            start += len(table)
            if not stored.is_uniform:  # rows are of any size: as many as the last ones say, twice as many at most
                step = max(1, min(2 * step, size * len(table) // max(table.nbytes + pixels * len(table), 1)))
            if table.schema != row.schema:
                raise ValueError(
                    f"rows from {start - len(table)} on differ from the first: {table.schema} is not {row.schema}"
                )
            yield table
            advance(len(table))


def _check_keys(kinds: Mapping[KeyPath, Kind]) -> None:
    """ValueError for a key that would not be read back."""
    for path in kinds:
        if any("." in step for step in path):
            raise ValueError(f"{path} has a dot in a name, which would be read as a nested entry: rename it")
    refuse_names({("episode",): ("episode",), **{path: path for path in kinds}}, "column")


def _columns(stored: StoredEpisodes, start: int, stop: int, images: Mapping[KeyPath, ImageEntry]) -> dict[str, Any]:
    """Arrays, ragged rows, lists of text and columns of images by column name."""
    columns: dict[str, Any] = {}
    for path, value in entries_below(stored.read(start, stop)):
        values: Any = PARQUET.values(value, path)
        columns[".".join(path)] = image_column(images[path].pixels(values)) if path in images else values
    if stored.id_path != ("episode",):
        number = stored.number(start, stop)
        columns["episode"] = number if stored.ids is None else stored.ids[number]
    return columns


def _table(columns: dict[str, Any]) -> "pa.Table":
    """Convert arrays to nested fixed-length lists, and ragged rows to lists of these."""
    pa = required("pyarrow", "datasets")
    arrow_columns = {}
    for name, values in columns.items():
        if isinstance(values, pa.Array):
            arrow_columns[name] = values
            continue
        if isinstance(values, RaggedRows):
            elements = _fixed_lists(values.values)
            # Offsets of 64 bits: the tokens of a row group may be more than 2 ** 31.
            arrow_columns[name] = pa.LargeListArray.from_arrays(pa.array(values.offsets), elements)
            continue
        if isinstance(values, list):
            arrow_columns[name] = pa.array(values, pa.binary() if isinstance(values[0], bytes) else pa.string())
            continue
        arrow_columns[name] = _fixed_lists(values)
    return pa.table(arrow_columns)


def _fixed_lists(values: np.ndarray) -> "pa.Array":
    pa = required("pyarrow", "datasets")
    column = pa.array(values.reshape(-1))
    for size in values.shape[:0:-1]:
        column = pa.FixedSizeListArray.from_arrays(column, size)
    return column


def _library_features(schema: "pa.Schema", images: Collection[KeyPath]) -> dict[str, Any]:
    """All columns as the library `datasets` describes them."""
    names = {".".join(path) for path in images}
    return {field.name: {"_type": "Image"} if field.name in names else _library_feature(field.type) for field in schema}


def _library_feature(kind: "pa.DataType") -> dict[str, Any]:
    types = required("pyarrow", "datasets").types
    if types.is_fixed_size_list(kind):
        return {"feature": _library_feature(kind.value_type), "length": kind.list_size, "_type": "Sequence"}
    if types.is_large_list(kind):
        return {"feature": _library_feature(kind.value_type), "_type": "LargeList"}
    names = {"float": "float32", "double": "float64", "halffloat": "float16"}
    return {"dtype": names.get(str(kind), str(kind)), "_type": "Value"}


def _kind_of(values: object) -> str:
    """The dtype and shape of a column, for the card."""
    if isinstance(values, list):
        return f"{'bytes' if isinstance(values[0], bytes) else 'text'} | one value"
    if isinstance(values, RaggedRows):
        return f"{values.values.dtype} | lists of {[*values.values.shape[1:]] or 'values'}"
    if isinstance(values, np.ndarray):
        return f"{values.dtype} | {[*values.shape[1:]] or 'one value'}"
    return "image | PNG"


def _card(name: str, licence: str | None, description: str, stored: StoredEpisodes, first: dict[str, Any]) -> bytes:
    """The dataset card. ValueError for text that UTF-8 cannot say."""
    front = {
        "pretty_name": name,
        "license": licence,
        "task_categories": ["reinforcement-learning"],
        "configs": [{"config_name": "default", "data_files": [{"split": "train", "path": "data/train-*.parquet"}]}],
    }
    kinds = {name: _kind_of(cells) for name, cells in first.items()}
    keys = keys_in_words(stored.marked_by)
    lines = [
        *([description, ""] if description else []),
        f"{stored.rows} steps of {len(stored)} episodes, written from a replay buffer.",
        "",
        "| column | dtype | shape |",
        "|---|---|---|",
        *(f"| `{name}` | {kind} |" for name, kind in kinds.items()),
        "",
        "`next.` is what came of the step. The rows of an episode have one `episode`, and follow each other in time.",
        f"An episode ends by {keys} of the buffer, with its newest row, and where a write began elsewhere. The first",
        "rows of the oldest one may have been written over.",
    ]
    try:
        return card(front, name, lines).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"name, licence and description make no text of the card: {error}") from error
