"""A replay buffer as a folder of Parquet files with a dataset card, as the Hugging Face hub has them."""

import json
import os
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING

import numpy as np
from tensordict.utils import NestedKey

from interop.buffers import ReplayBuffer
from interop.datasets.progress import progress
from interop.datasets.stored_episodes import StoredEpisodes, plain, stored_episodes
from interop.keys import entries_below
from interop.optional import required
from interop.published import publish

if TYPE_CHECKING:
    import pyarrow as pa

_GROUP = 1 << 25  # bytes in memory: a row group
_SHARD = 1 << 28
_NAMES = {"double": "float64", "float": "float32", "halffloat": "float16"}  # Arrow's names of dtypes


def to_hub_folder(
    rb: ReplayBuffer,
    path: str | os.PathLike[str],
    *,
    name: str | None = None,
    licence: str | None = None,
    description: str = "",
    traj_key: NestedKey | None = None,
    end_keys: Sequence[NestedKey] | None = None,
    shard_bytes: int = _SHARD,
) -> Path:
    """Write the rows of a buffer as a folder that `datasets.load_dataset(path)` reads, and `HubFolderExperienceReplay`.

    The stored rows are written, without the transforms of the buffer, trajectory by trajectory as they end; some 30 MB are
    in memory at a time. The buffer is locked meanwhile. The folder appears when it is complete; an error or a kill leaves
    none.

    A nested entry is a column with a dotted name, `next.observation`. A tensor is a number, or nested lists of fixed
    lengths, whose features tell its shape and dtype; text is a string. The column `episode` has the ids of trajectories,
    where an entry holds one for each, else their numbers; another entry "episode" is replaced. `README.md` tells all that.

    Args:
        rb: the buffer.
        path: a folder that is not there yet.
        name: a title. The name of the folder by default.
        licence: an identifier of the hub, such as "mit" or "cc-by-4.0".
        description: Markdown, for the card.
        traj_key, end_keys: what tells where trajectories end, as for `SliceSampler`.
        shard_bytes: what a file has, before compression.

    Raises:
        FileExistsError: there is something at `path`, which stays as it is.
        TypeError: an entry is neither a tensor that Parquet knows nor text; and see `stored_episodes`.
        ValueError: rows differ in keys, shapes or dtypes; a key has a dot in it.
        RuntimeError: the buffer is empty, or has nothing that tells where trajectories end.
    """
    parquet, folder = required("pyarrow.parquet", "datasets"), Path(path).absolute()
    if os.path.lexists(folder):
        raise FileExistsError(f"{folder} is there already: remove it, or write to another folder")
    with stored_episodes(rb, traj_key, end_keys) as stored:
        schema = _table(stored, 0, 1).schema

        def make(scratch: Path) -> None:
            data = scratch / "data" / "data"
            data.mkdir(parents=True)
            tables = _tables(stored, schema, min(shard_bytes, _GROUP), f"Writing {folder}")
            for shard, first in enumerate(tables):
                with parquet.ParquetWriter(data / f"train-{shard:05}.parquet", schema, compression="zstd") as writer:
                    writer.write_table(first)
                    size = first.nbytes
                    while size < shard_bytes and (table := next(tables, None)) is not None:
                        writer.write_table(table)
                        size += table.nbytes
            card = _card(name or folder.name, licence, description, stored, schema)
            (scratch / "data" / "README.md").write_text(card, encoding="utf-8")

        publish(folder, {"name": name, "written": token_hex(8)}, make)
    return folder


def _tables(stored: StoredEpisodes, schema: "pa.Schema", size: int, title: str) -> Iterator["pa.Table"]:
    """All rows, a row group of some `size` bytes at a time."""
    step = max(1, size // _table(stored, 0, 1).nbytes)
    with progress(title, stored.rows, "row") as advance:
        for start in range(0, stored.rows, step):
            table = _table(stored, start, min(start + step, stored.rows))
            if table.schema != schema:
                raise ValueError(f"rows from {start} on differ from the first: {table.schema} is not {schema}")
            yield table
            advance(len(table))


def _table(stored: StoredEpisodes, start: int, stop: int) -> "pa.Table":
    pa, rows, number = required("pyarrow", "datasets"), stored.read(start, stop), stored.number(start, stop)
    columns = {}
    for path, value in entries_below(rows):
        name = ".".join(path)
        if name.count(".") >= len(path):
            raise ValueError(f"{path} has a dot in a name, which would be read as a nested entry: rename it")
        columns[name] = _column(plain(value, path), name)
    if stored.ids is None or stored.marked_by != (("episode",),):
        columns["episode"] = pa.array(number if stored.ids is None else stored.ids[number])
    return pa.table(columns)


def _column(values: np.ndarray | list[str], name: str) -> "pa.Array":
    """Text, or nested lists of fixed lengths."""
    pa = required("pyarrow", "datasets")
    if isinstance(values, list):
        return pa.array(values, pa.string())
    try:
        column = pa.array(values.reshape(-1))
        for place in range(values.ndim - 1, 0, -1):
            column = pa.FixedSizeListArray.from_arrays(column, values.shape[place])
    except pa.ArrowException as error:
        raise TypeError(
            f"{name} is {values.dtype} {[*values.shape[1:]]}, which Parquet does not have: {error}"
        ) from error
    return column


def kind_of(column: "pa.DataType") -> tuple["pa.DataType", list[int]]:
    """The type of the numbers or text in a column, and the shape that they have in a row."""
    shape = []
    while required("pyarrow", "datasets").types.is_fixed_size_list(column):
        shape.append(column.list_size)
        column = column.value_type
    return column, shape


def _card(name: str, licence: str | None, description: str, stored: StoredEpisodes, schema: "pa.Schema") -> str:
    """YAML, of which JSON is a part, and Markdown."""
    front = {
        "pretty_name": name,
        "license": licence,
        "task_categories": ["reinforcement-learning"],
        "size_categories": [_size(stored.rows)],
        "configs": [{"config_name": "default", "data_files": [{"split": "train", "path": "data/train-*.parquet"}]}],
    }
    columns = ((field.name, *kind_of(field.type)) for field in schema)
    keys = " or ".join(f"`{'.'.join(path)}`" for path in stored.marked_by)
    return "\n".join([
        "---",
        *(f"{key}: {json.dumps(value)}" for key, value in front.items() if value is not None),
        "---",
        f"# {name}",
        "",
        *([description, ""] if description else []),
        f"{stored.rows} steps of {len(stored)} episodes, written from a replay buffer.",
        "",
        "| column | dtype | shape |",
        "|---|---|---|",
        *(f"| `{name}` | {_NAMES.get(str(dtype), dtype)} | {shape or 'one value'} |" for name, dtype, shape in columns),
        "",
        "`next.` is what came of the step. The rows of an episode have one `episode`, and follow each other in time.",
        f"An episode ends by {keys} of the buffer, with its newest row, and where a write began elsewhere. The first",
        "rows of the oldest one may have been written over.",
        "",
    ])  # fmt: skip


def _size(rows: int) -> str:
    """The hub's name of a number of rows."""
    bounds = ["1K", "10K", "100K", "1M", "10M", "100M", "1B", "10B", "100B", "1T"]
    names = ["n<1K", *(f"{low}<n<{high}" for low, high in pairwise(bounds)), "n>1T"]
    return names[min(max(len(str(rows)) - 3, 0), len(names) - 1)]
