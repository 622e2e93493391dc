"""A replay buffer as a folder of Parquet files with a dataset card, as the Hugging Face hub has them."""

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

_GROUP = 1 << 25  # bytes in memory: a row group
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
    shard_bytes: int = _SHARD,
) -> Path:
    """Write the rows of a buffer as a folder that `datasets.load_dataset(path)` reads, and `HubFolderExperienceReplay`.

    The stored rows are written, without the transforms of the buffer, trajectory by trajectory as they end; some 30 MB are
    in memory at a time. The buffer is locked meanwhile. The folder appears when it is complete.

    A nested entry is a column with a dotted name, `next.observation`. A tensor is a number, or nested lists of fixed
    lengths; text is a string. The column `episode` has the ids of trajectories, where an entry holds one for each, else
    their numbers; another entry "episode" is replaced. `README.md` tells all that.

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
    """All rows, a row group of some `size` bytes at a time."""
    step = max(1, size // row.nbytes)
    with progress(title, stored.rows, "row") as advance:
        for start in range(0, stored.rows, step):
            table = _table(_columns(stored, start, min(start + step, stored.rows)))
            if table.schema != row.schema:
                raise ValueError(f"rows from {start} on differ from the first: {table.schema} is not {row.schema}")
            yield table
            advance(len(table))


def _columns(stored: StoredEpisodes, start: int, stop: int) -> dict[str, Any]:
    """Arrays and lists of text by the names of their columns."""
    columns: dict[str, Any] = {}
    for path, value in entries_below(stored.read(start, stop)):
        if any("." in each for each in path):
            raise ValueError(f"{path} has a dot in a name, which would be read as a nested entry: rename it")
        columns[".".join(path)] = plain(value, path)
    if stored.ids is None or stored.marked_by != (("episode",),):
        number = stored.number(start, stop)
        columns["episode"] = number if stored.ids is None else stored.ids[number]
    return columns


def _table(columns: dict[str, Any]) -> "pa.Table":
    """Arrays as nested lists of fixed lengths."""
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
    """YAML, of which JSON is a part, and Markdown."""
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
