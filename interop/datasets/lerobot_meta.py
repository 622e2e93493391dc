"""The metadata files of a LeRobot dataset (`meta/`): its features, tasks and episodes."""

import re
import string
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from interop.data.arguments import required
from interop.datasets import parquet
from interop.datasets.errors import CorruptDatasetError, DatasetError
from interop.datasets.lerobot_json import JsonEntries, read_json, read_table

if TYPE_CHECKING:
    import pyarrow as pa

VERSIONS = ("v2.0", "v2.1", "v3.0")
_NUMBERED = ("episode_index", "episode_chunk", "chunk_index", "file_index")  # numbers in the formats of paths
_FORMAT = re.compile(r"(0?[1-9]\d?)?d?")  # of these numbers: at most 99 digits
_LONGEST_PATH = 4096


@dataclass(frozen=True)
class Feature:
    """A column, or a video. `kind` is upstream's `dtype`."""

    kind: str
    shape: tuple[int, ...]
    is_depth: bool = False


@dataclass(frozen=True)
class LeRobotInfo:
    """The content of `meta/info.json`. Totals and `fps` are None where they are not stated."""

    version: str
    features: Mapping[str, Feature]
    fps: float | None
    data_path: str
    video_path: str
    chunks_size: int
    total_episodes: int | None
    total_frames: int | None

    @property
    def is_v2(self) -> bool:
        return self.version.startswith("v2")


@dataclass(frozen=True)
class Listed:
    """An episode as `meta/` lists it: the number of its rows, the file that should have them, and its videos.

    `videos` maps features to the file and the start of the episode in seconds.
    """

    number: int
    length: int
    data: Path
    videos: Mapping[str, tuple[Path, float]]


def info_of(folder: Path) -> LeRobotInfo:
    """Read `meta/info.json`. DatasetError for a format version outside of `VERSIONS`."""
    content = read_json(path := folder / "meta/info.json")
    version = content.get("codebase_version") if isinstance(content, dict) else None
    if version not in VERSIONS:
        raise DatasetError(
            f"{path}: codebase_version is {version!r}, this program reads {', '.join(VERSIONS)}. The lerobot package "
            "converts older datasets"
        )
    entries = JsonEntries(content, _where(folder, path))
    for name in ("data_path", "video_path"):
        if content.get(name) is not None:
            _check_format(entries, name)
    return LeRobotInfo(
        version,
        {name: _feature(feature) for name, feature in entries.objects("features").items()},
        fps=entries.number("fps", least=1e-6) if "fps" in content else None,
        data_path=content.get("data_path") or "",
        video_path=content.get("video_path") or "",
        chunks_size=entries.whole("chunks_size", least=1) if "chunks_size" in content else 1000,
        total_episodes=entries.whole("total_episodes") if "total_episodes" in content else None,
        total_frames=entries.whole("total_frames") if "total_frames" in content else None,
    )


def _where(folder: Path, path: Path) -> str:
    return f"{folder}/meta does not describe all features and episodes: {path.relative_to(folder)}"


def _feature(entries: JsonEntries) -> Feature:
    sizes = JsonEntries({str(dim): size for dim, size in enumerate(entries.items("shape"))}, f"{entries.where}, shape")
    infos = [entries.any(name) for name in ("info", "video_info") if name in entries]
    flags = [
        info.get(name) for info in infos if isinstance(info, dict) for name in ("is_depth_map", "video.is_depth_map")
    ]
    return Feature(
        # A size of -1 stands for lists of any length.
        entries.text("dtype"), tuple(sizes.whole(dim, least=-1) for dim in sizes), any(flags)
    )  # fmt: skip


def tasks_of(folder: Path, info: LeRobotInfo) -> dict[int, str]:
    """The text of each task."""
    path = folder / ("meta/tasks.jsonl" if info.is_v2 else "meta/tasks.parquet")
    where = _where(folder, path)
    tasks = dict[int, str]()
    for row in read_json(path) if info.is_v2 else _task_rows(path):
        task = JsonEntries(row, where)
        number = task.whole("task_index")
        text = task.text("task")
        if tasks.setdefault(number, text) != text:
            raise CorruptDatasetError(f"{where}: the task {number} has two texts, {tasks[number]!r} and {text!r}")
    return tasks


def _task_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of `tasks.parquet`. Upstream writes a pandas frame with the texts as its index, in a column of any name."""
    table = read_table(path)
    try:
        described = table.schema.pandas_metadata or {}
        index = [name for name in described.get("index_columns", ()) if isinstance(name, str)]
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        raise CorruptDatasetError(f"{path}: its description of a pandas frame is damaged: {error}") from error
    types = required("pyarrow", "datasets").types
    column_names = [name for name in table.column_names if name != "task_index"]
    texts = [name for name in column_names if _is_text(types, table.schema.field(name).type)]
    for chosen in ([name for name in index if name in column_names], [name for name in texts if name == "task"], texts):
        if len(chosen) == 1 and "task_index" in table.column_names:
            rows = zip(table["task_index"].to_pylist(), table[chosen[0]].to_pylist(), strict=True)
            return [{"task_index": number, "task": text} for number, text in rows]
    raise CorruptDatasetError(
        f"{path} must have a column task_index, and one of texts as the index of a pandas frame, it has "
        f"{table.column_names}"
    )


def _is_text(types: ModuleType, kind: "pa.DataType") -> bool:
    return types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)


def episodes_of(
    folder: Path, info: LeRobotInfo, video_keys: Sequence[str], chosen: Collection[int] | None
) -> dict[int, Listed]:
    """The listed episodes by their numbers: all, or the chosen ones. CorruptDatasetError for one that is listed twice."""
    by_number: dict[int, Listed] = {}
    for where, row in _episode_rows(folder, info):
        entries = JsonEntries(row, where)
        number = entries.whole("episode_index")
        if chosen is not None and number not in chosen:
            continue
        if number in by_number:
            raise CorruptDatasetError(f"{where}: episode {number} is listed twice")
        by_number[number] = _listed(folder, info, video_keys, JsonEntries(row, f"{where}, episode {number}"), number)
    if not by_number and chosen is None:
        raise CorruptDatasetError(f"{folder}/meta has no episodes.jsonl, and no episodes/*/*.parquet with rows")
    return by_number


def _episode_rows(folder: Path, info: LeRobotInfo) -> Iterable[tuple[str, Any]]:
    if info.is_v2:
        path = folder / "meta/episodes.jsonl"
        if path.exists():
            yield from ((_where(folder, path), row) for row in read_json(path))
        return
    for path in sorted((folder / "meta/episodes").glob("*/*.parquet")):
        with parquet.opened(path) as file:
            names = file.schema.names
        columns = [name for name in dict.fromkeys(names) if not name.startswith("stats/")]
        yield from ((_where(folder, path), row) for row in read_table(path, columns).to_pylist())


def _listed(folder: Path, info: LeRobotInfo, video_keys: Sequence[str], row: JsonEntries, number: int) -> Listed:
    of_episode = {"episode_index": number, "episode_chunk": number // info.chunks_size}
    if video_keys and not info.video_path:
        raise CorruptDatasetError(f"{folder}/meta/info.json: there is no video_path for the videos of {video_keys[0]}")

    def file(path: str, group: str, video_key: str | None = None) -> Path:
        names: dict[str, str | int] = {**of_episode}
        if video_key is not None:
            names["video_key"] = video_key
        if not info.is_v2:
            names |= {name: row.whole(f"{group}/{name}") for name in ("chunk_index", "file_index")}
        return folder / _path(path, names, row.where)

    videos = {}
    for key in video_keys:
        start = 0.0 if info.is_v2 else row.number(f"videos/{key}/from_timestamp")
        videos[key] = (file(info.video_path, f"videos/{key}", video_key=key), start)
    return Listed(number, row.whole("length", least=1), file(info.data_path, "data"), videos)


def _check_format(entries: JsonEntries, name: str) -> None:
    """CorruptDatasetError for a format of paths that is not upstream's: other names, or numbers of unbounded width."""
    text = entries.text(name)
    needed = f"a path with {{{'}, {'.join(_NUMBERED)}}} or {{video_key}}"
    try:
        parts = [*string.Formatter().parse(text)]
    except ValueError:
        raise entries.wrong(name, needed, text) from None
    for _, field, form, conversion in parts:
        is_number = field in _NUMBERED and _FORMAT.fullmatch(form or "")
        is_text = field == "video_key" and not form
        if field is not None and not ((is_number or is_text) and conversion is None):
            raise entries.wrong(name, needed, text)
    if len(text) > _LONGEST_PATH or "\0" in text:
        raise entries.wrong(name, needed, text)
    if Path(text).is_absolute() or ".." in Path(text).parts:
        raise CorruptDatasetError(f"{entries.where}: {name} {text!r} leads out of the folder")


def _path(form: str, values: Mapping[str, str | int], where: str) -> Path:
    """The path of a file, of a format that `_check_format` has admitted."""
    try:
        path = Path(form.format(**values))
    except KeyError as error:
        raise CorruptDatasetError(f"{where}: {error} is needed for the path {form}") from error
    if path.is_absolute() or ".." in path.parts or "\0" in str(path):
        raise CorruptDatasetError(f"{where}: {path} leads out of the folder")
    return path
