"""Export of a replay buffer to Parquet files with a dataset card, in the layout of the Hugging Face hub."""

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensordict.utils import NestedKey

from interop.buffers import ReplayBuffer
from interop.data.arguments import required
from interop.data.keys import entries_below
from interop.datasets.progress import progress
from interop.datasets.stored_episodes import StoredEpisodes, plain, stored_episodes
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
    shard_bytes: int = _SHARD,
) -> Path:
    """Write the rows of a buffer to a folder for `datasets.load_dataset(path)` and `HubFolderExperienceReplay`.

    Writes the stored rows without transforms, trajectory by trajectory in the order of their ends, about 30 MB in memory at
    a time. The buffer is locked meanwhile. The folder appears atomically.

    A nested entry becomes a column with a dotted name, `next.observation`. Tensors become numbers or nested fixed-length
    lists, text becomes strings. The column `episode` has the trajectory ids of an entry, or else trajectory numbers; it
    replaces a stored entry "episode". `README.md` documents the layout.

    Args:
        rb: the buffer.
        path: a folder that does not exist.
        name: the title, by default the name of the folder.
        licence: a licence identifier of the hub, such as "mit" or "cc-by-4.0".
        description: Markdown, for the card.
        traj_key, end_keys, only_named_keys: the entries that mark trajectory ends, as for `SliceSampler`.
        shard_bytes: the size of a file before compression.

    Raises:
        FileExistsError: `path` exists; it is not modified.
        TypeError: an entry is neither text nor a tensor that Parquet supports; see also `stored_episodes`.
        ValueError: rows differ in keys, shapes or dtypes, or a key contains a dot.
        RuntimeError: the buffer is empty, or has no entry that marks trajectory ends.
    """
    parquet, folder = required("pyarrow.parquet", "datasets"), Path(path).absolute()
    if os.path.lexists(folder):
        raise FileExistsError(f"{folder} is there already: remove it, or write to another folder")
    with stored_episodes(rb, traj_key, end_keys, only_named_keys) as stored:
        first = _columns(stored, 0, 1)
        row = _table(first)

        def make(scratch: Path) -> None:
            data = scratch / "data" / "data"
            data.mkdir(parents=True)
            tables = _tables(stored, row, min(shard_bytes, _GROUP), f"Writing {folder}")
            for shard, table in enumerate(tables):
                with parquet.ParquetWriter(
                    data / f"train-{shard:05}.parquet", row.schema, compression="zstd"
                ) as writer:
                    writer.write_table(table)
                    size = table.nbytes
                    while size < shard_bytes and (more := next(tables, None)) is not None:
                        writer.write_table(more)
                        size += more.nbytes
            card = _card(name or folder.name, licence, description, stored, first)
            (scratch / "data" / "README.md").write_text(card, encoding="utf-8")

        publish(folder, None, make)
    return folder


def _tables(stored: StoredEpisodes, row: "pa.Table", size: int, title: str) -> Iterator["pa.Table"]:
    """Yield all rows as row groups of about `size` bytes."""
    step = max(1, size // row.nbytes)
    with progress(title, stored.rows, "row") as advance:
        for start in range(0, stored.rows, step):
            table = _table(_columns(stored, start, min(start + step, stored.rows)))
            if table.schema != row.schema:
                raise ValueError(f"rows from {start} on differ from the first: {table.schema} is not {row.schema}")
            yield table
            advance(len(table))


def _columns(stored: StoredEpisodes, start: int, stop: int) -> dict[str, Any]:
    """Arrays and lists of text by column name."""
    columns: dict[str, Any] = {}
    for path, value in entries_below(stored.read(start, stop)):
        if any("." in each for each in path):
            raise ValueError(f"{path} has a dot in a name, which would be read as a nested entry: rename it")
        columns[".".join(path)] = plain(value, path)
    if stored.id_path != ("episode",):
        number = stored.number(start, stop)
        columns["episode"] = number if stored.ids is None else stored.ids[number]
    return columns


def _table(columns: dict[str, Any]) -> "pa.Table":
    """Convert arrays to nested fixed-length lists."""
    pa, made = required("pyarrow", "datasets"), {}
    for name, values in columns.items():
        if isinstance(values, list):
            made[name] = pa.array(values, pa.string())
            continue
        try:
            made[name] = pa.array(values.reshape(-1))
            for size in values.shape[:0:-1]:
                made[name] = pa.FixedSizeListArray.from_arrays(made[name], size)
        except pa.ArrowException as error:
            kind = f"{values.dtype} {[*values.shape[1:]]}"
            raise TypeError(f"{name} is {kind}, which Parquet does not have: {error}") from error
    return pa.table(made)


def _card(name: str, licence: str | None, description: str, stored: StoredEpisodes, first: dict[str, Any]) -> str:
    """The dataset card: YAML, written as JSON, and Markdown."""
    front = {
        "pretty_name": name,
        "license": licence,
        "task_categories": ["reinforcement-learning"],
        "configs": [{"config_name": "default", "data_files": [{"split": "train", "path": "data/train-*.parquet"}]}],
    }
    kinds = {
        name: "text | one value" if isinstance(each, list) else f"{each.dtype} | {[*each.shape[1:]] or 'one value'}"
        for name, each in first.items()
    }
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
        *(f"| `{name}` | {kind} |" for name, kind in kinds.items()),
        "",
        "`next.` is what came of the step. The rows of an episode have one `episode`, and follow each other in time.",
        f"An episode ends by {keys} of the buffer, with its newest row, and where a write began elsewhere. The first",
        "rows of the oldest one may have been written over.",
        "",
    ])  # fmt: skip
