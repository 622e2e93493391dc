"""What a path holds: its kind, sizes, keys and components, from headers and manifests alone.

The answers are those of `h5ls` and of `reverb.Client.server_info`: the signature of each table, its size, and its sampler
and remover. Nothing is built, and no row is read.
"""

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fbuf.checkpoint import CheckpointCorrupt, CheckpointError, json_text
from fbuf.checkpoint.manifest import Manifest
from interop.looking.path_kinds import MEANINGS, Kind, below, kind_of, minari_data
from interop.looking.tables import size, table
from interop.shared.checksums import Sums
from interop.shared.folder_description import ACTIVE, LOCK, STATE, counters_of, description, words_of
from interop.shared.published_folder import RECORD

_BYTES = {"bool": 1, "complex32": 4, "complex64": 8, "complex128": 16, "bfloat16": 2}
_LONGEST_COMMAND = 120
_MANY = 64  # values of a list that are shown


@dataclass(frozen=True)
class Inspection:
    """What is at a path. `print` shows a table, `to_dict()` gives plain values.

    Attributes:
        path: the file or folder.
        kind: "checkpoint", "rows", "dataset", "minari", "lerobot", "hub", "h5", "torchrl" or "folder".
        bytes: the sizes of its files; holes of sparse files count.
        files: how many they are.
        about: named facts, such as "size", "capacity", "sampler".
        keys: of each entry of an item the name, dtype, shape of an item and bytes of all rows.
        notes: what an operator should know, such as an unfinished write.
        members: of an ensemble or a folder.
    """

    path: str
    kind: Kind
    bytes: int
    files: int
    about: dict[str, Any] = field(default_factory=dict)
    keys: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    members: list["Inspection"] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """The facts as plain values, for JSON."""
        own = {name: getattr(self, name) for name in ("path", "kind", "bytes", "files", "about", "keys", "notes")}
        return {**own, "members": [each.to_dict() for each in self.members]}

    def __str__(self) -> str:
        lines = [f"{self.path}: {MEANINGS[self.kind]}, {self.files} files of {size(self.bytes)}"]
        lines += [f"  {name}: {_shown(value)}" for name, value in self.about.items()]
        if self.keys:
            rows = [
                (each["key"], each["dtype"], list(each["shape"]), "" if each["bytes"] is None else size(each["bytes"]))
                for each in self.keys
            ]
            lines += ["", *(f"  {line}" for line in table(rows, ("key", "dtype", "shape", "bytes")).splitlines())]
        lines += [f"  note: {each}" for each in self.notes]
        for each in self.members:
            lines += ["", *(f"  {line}" for line in str(each).splitlines())]
        return "\n".join(lines)


def inspect(path: str | os.PathLike[str]) -> Inspection:
    """What is at a path, in milliseconds whatever its size: only headers and manifests are read.

    It imports neither torch nor JAX; Parquet and H5 files need pyarrow and h5py.

    FileNotFoundError where nothing is there, `UnknownPathError` for what this library does not read, `CheckpointCorrupt`
    where the manifest, the description or a header is damaged.
    """
    root = Path(path)
    kind = kind_of(root)
    return _READERS[kind](root)


# ------------------------------------------------------------------ checkpoints


def _checkpoint(root: Path) -> Inspection:
    found = Manifest.read(root)
    total = sum(each.size for each in found.files)
    tree = found.tree if isinstance(found.tree, Mapping) else {}
    folder = root / found.folder
    about: dict[str, Any] = {"saved": _time(root / "MANIFEST.json"), "versions": found.versions}
    facts = Inspection(str(root), "checkpoint", total, len(found.files), about)
    _of_tree(tree, facts)
    storage = tree.get("storage", tree)
    content = storage.get("content") if isinstance(storage, Mapping) else None
    if isinstance(content, Mapping) and isinstance(content.get("file"), str) and (folder / content["file"]).is_file():
        _of_h5(folder / content["file"], facts)
    missing = [each.name for each in found.files if not (folder / each.name).is_file()]
    if missing:
        facts.notes.append(f"{len(missing)} of its files are missing, as {missing[0]}: it is damaged")
    return facts


def _of_tree(tree: Mapping[str, Any], facts: Inspection) -> None:
    """Add what a saved tree says."""
    about = facts.about
    if tree.get("kind") == "pytree":
        about["holds"] = "a pytree of arrays, for fbuf.load_state"
        for entry in tree.get("leaves", []):
            if isinstance(entry, list) and len(entry) == 3:
                dtype, shape = _described(entry[2])
                facts.keys.append({"key": entry[0], "dtype": dtype, "shape": shape, "bytes": _bytes(dtype, shape)})
        return
    if "kind" in tree:
        about["holds"] = f"a {tree['kind']}"
    for name in ("class", "batch_size", "shards"):
        if tree.get(name) is not None:
            about[name] = tree[name]
    if isinstance(content := tree.get("storage", tree if "checkpointer" in tree else None), Mapping):
        _of_storage(content, facts)
    for name in ("sampler", "writer"):
        if isinstance(part := tree.get(name), Mapping):
            about[name] = _component(part)
    if transforms := tree.get("transform_classes"):
        about["transforms"] = transforms
    if "class" in tree and isinstance(tree.get("state"), Mapping):  # a component by itself
        about |= {name: value for name, value in _plain(tree["state"]).items() if name not in about}
    for place, member in enumerate(tree.get("members", []) if isinstance(tree.get("members"), list) else []):
        if isinstance(member, Mapping):
            part = Inspection(f"member {place}", "checkpoint", 0, 0)
            _of_tree(member, part)
            facts.members.append(part)


def _of_storage(saved: Mapping[str, Any], facts: Inspection) -> None:
    about, content = facts.about, saved.get("content")
    if "arguments" in saved:
        about["storage"] = _component(saved)
    about["checkpointer"] = saved.get("checkpointer")
    if not isinstance(content, Mapping):
        return
    rows = content.get("rows", content)
    if not isinstance(rows, Mapping):
        return
    _of_rows(rows, facts)


def _of_rows(rows: Mapping[str, Any], facts: Inspection) -> None:
    """Add what is saved of rows: ring, or list, and the layout of items."""
    about = facts.about
    if isinstance(ring := rows.get("ring"), Mapping):
        per_row = math.prod(ring.get("lanes", []))
        about |= {"size": ring.get("filled", 0) * per_row, "capacity": ring.get("capacity", 0) * per_row}
        about |= {"written": ring.get("written"), "cursor": ring.get("end")}
        if per_row > 1:
            about["lanes"] = ring["lanes"]
    elif "capacity" in rows:
        about |= {"capacity": rows["capacity"], "written": rows.get("written"), "cursor": rows.get("end")}
        items = rows.get("items")
        if isinstance(items, Mapping):
            about["size"] = (_described(items.get("order"))[1] or [0])[0]
    if isinstance(layout := rows.get("layout"), Mapping):
        count = about.get("size", 0)
        facts.keys.extend(_keys(layout, count))


def _component(part: Mapping[str, Any]) -> str:
    state = part.get("arguments") or part.get("state")
    inside = ", ".join(f"{name}={value!r}" for name, value in _plain(state).items()) if state else ""
    return f"{part.get('class')}({inside})"


def _plain(state: object) -> dict[str, Any]:
    """The plain entries of a saved state, without arrays."""
    if not isinstance(state, Mapping):
        return {}
    kinds = (str, int, float, bool)
    return {name: value for name, value in state.items() if isinstance(value, kinds) and not name.startswith("_")}


def _described(value: object) -> tuple[str, list[int]]:
    """The dtype and shape of an array in a manifest."""
    if isinstance(value, Mapping) and len(value) == 1:
        (mark, held), *_ = value.items()
        if mark == "$array":
            return held[0], held[1]
        if mark in ("$column", "$columns") and held[3]:
            return held[3][0][0], [held[0], *held[3][0][1]]
    return "", []


# ------------------------------------------------------------------ folders of rows


def _rows(root: Path) -> Inspection:
    saved = description(root)
    files = saved.fields("files")
    sizes = {name: files.whole(name) for name in files}
    facts = Inspection(str(root), kind_of(root), sum(sizes.values()), len(sizes))
    lanes = saved.wholes("lanes")
    per_row = math.prod(lanes)
    state = root / STATE
    if not state.is_file():
        facts.notes.append(f"{STATE} is missing: it is damaged")
        return facts
    counters = counters_of(state)
    count = counters["size"] * per_row
    facts.about.update(
        {
            "size": count,
            "capacity": saved.whole("rows") * per_row,
            "written": counters["count"],
            "cursor": counters["cursor"],
        }
    )
    if per_row > 1:
        facts.about["lanes"] = list(lanes)
    facts.about["changed"] = _time(state)
    facts.keys.extend(_keys(saved.any("layout"), saved.whole("rows") * per_row))
    facts.about["checksums"] = _checksums(root, facts.notes)
    holder = _locked_by(root / LOCK)
    if holder is not None:
        facts.about["open for writing by process"] = f"{holder}{_command_of(holder)}"
    if words_of(state)[ACTIVE] and holder is None:
        facts.notes.append("a write was cut off: the next open(mode='r+') rolls it back")
    if (root / RECORD).is_file():
        record = _json(root / RECORD)
        facts.about["made from"] = {name: value for name, value in record.items() if name not in ("files", "sha256")}
    return facts


def _checksums(root: Path, notes: list[str]) -> str:
    try:
        sums = Sums.read(root)
    except CheckpointCorrupt as error:
        notes.append(str(error))
        return "damaged"
    if sums is None:
        return (
            "none: interop.seal writes them" if not (root / "storage.sums").exists() else "outdated: not closed since"
        )
    return "outdated" if sums.is_outdated(root) else "of all blocks"


def _locked_by(path: Path) -> int | None:
    """The process that has a file locked, from /proc/locks; None where none has, or the system does not tell.

    To try the lock instead would refuse it to a storage that is opened at this moment.
    """
    try:
        inode = os.stat(path).st_ino
        with open("/proc/locks") as file:
            for line in file:
                words = line.split()
                if "FLOCK" in words and words[words.index("FLOCK") + 4].rpartition(":")[2] == str(inode):
                    return int(words[words.index("FLOCK") + 3])
    except (OSError, ValueError, IndexError):
        pass
    return None


def _command_of(process: int) -> str:
    """How a process was started, in brackets; nothing where the system does not tell."""
    try:
        words = Path(f"/proc/{process}/cmdline").read_bytes().decode("utf-8", "replace").rstrip("\0").split("\0")
    except OSError:
        return ""
    line = " ".join(words)
    return f" ({line if len(line) <= _LONGEST_COMMAND else line[:_LONGEST_COMMAND] + '...'})" if line else ""


def _keys(layout: Mapping[str, Any], items: int) -> list[dict[str, Any]]:
    """The entries of an item, with the bytes of so many items."""
    varied = dict(_varied(layout.get("root"), ()))
    found = []
    for path, shape, dtype in layout.get("leaves", []):
        each = _bytes(dtype, shape)
        kind = varied.get(tuple(path), dtype)
        shown = [] if tuple(path) in varied else shape
        found.append(
            {
                "key": ".".join(map(str, path)),
                "dtype": kind,
                "shape": shown,
                "bytes": None if each is None else each * items,
            }
        )
    return found


def _varied(node: object, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], str]]:
    """The entries with rows of any length: their paths, and what they hold."""
    if isinstance(node, Mapping) and "varied" in node:
        yield path, "text" if node["varied"] is None else f"ragged {node['varied']}"
    elif isinstance(node, Mapping) and "pieces" in node:
        yield path, f"ragged {node['pieces']}, prefixes shared"
    elif isinstance(node, Mapping) and "children" in node:
        for key, child in zip(node["keys"], node["children"], strict=True):
            yield from _varied(child, (*path, key))


def _bytes(dtype: str, shape: list[int]) -> int | None:
    digits = "".join(filter(str.isdigit, dtype.partition("_")[0]))
    width = _BYTES.get(dtype) or (int(digits) // 8 if digits else 0)
    return width * math.prod(shape) if width else None


# ------------------------------------------------------------------ datasets and files of other programs


def _tree_of_files(root: Path) -> tuple[int, int]:
    """The bytes and the number of the files in a folder."""
    sizes = [each.stat().st_size for each in root.rglob("*") if each.is_file() and not each.is_symlink()]
    return sum(sizes), len(sizes)


def _minari(root: Path) -> Inspection:
    facts = Inspection(str(root), "minari", *_tree_of_files(root))
    data = minari_data(root)
    assert data is not None
    if (data / "metadata.json").is_file():
        facts.about.update(_short(_json(data / "metadata.json")))
    if (data / "main_data.hdf5").is_file():
        facts.keys.extend(_in_h5(data / "main_data.hdf5", only_first=True))
        return facts
    try:
        from pyarrow import ipc, parquet
    except ImportError:
        facts.notes.append("columns are shown where pyarrow is installed: pip install 'fbuf[datasets]'")
        return facts
    for pattern, schema_of in (
        ("*.parquet", parquet.read_schema),
        ("*.arrow", lambda file: ipc.open_file(file).schema),
    ):
        for path in sorted(data.rglob(pattern))[:1]:
            with _read(path):
                facts.keys.extend(_columns(schema_of(path)))
    return facts


def _columns(schema: Iterable[Any]) -> list[dict[str, Any]]:
    """The columns of a schema of Arrow."""
    return [{"key": each.name, "dtype": str(each.type), "shape": [], "bytes": None} for each in schema]


def _lerobot(root: Path) -> Inspection:
    facts = Inspection(str(root), "lerobot", *_tree_of_files(root))
    info = _json(root / "meta" / "info.json")
    facts.about.update(_short({name: value for name, value in info.items() if name != "features"}))
    rows = info.get("total_frames")
    features = info.get("features") or {}
    if not isinstance(features, Mapping) or not all(isinstance(each, Mapping) for each in features.values()):
        raise CheckpointCorrupt(
            f"{root / 'meta' / 'info.json'}: 'features' should describe each feature by named entries"
        )
    for name, described in features.items():
        shape, dtype = list(described.get("shape") or []), str(described.get("dtype"))
        each = _bytes(dtype, shape)
        size_ = None if each is None or not isinstance(rows, int) else each * rows
        facts.keys.append({"key": name, "dtype": dtype, "shape": shape, "bytes": size_})
    return facts


def _hub(root: Path) -> Inspection:
    facts = Inspection(str(root), "hub", *_tree_of_files(root))
    try:
        from pyarrow import parquet
    except ImportError:
        facts.notes.append("columns and rows are shown where pyarrow is installed: pip install 'fbuf[datasets]'")
        return facts
    rows = 0
    for place, path in enumerate(sorted((root / "data").rglob("*.parquet"))):
        with _read(path), parquet.ParquetFile(path) as file:
            rows += file.metadata.num_rows
            if place == 0:
                facts.keys.extend(_columns(file.schema_arrow))
    facts.about["size"] = rows
    return facts


def _h5(path: Path) -> Inspection:
    facts = Inspection(str(path), "h5", path.stat().st_size, 1)
    _of_h5(path, facts)
    return facts


def _of_h5(path: Path, facts: Inspection) -> None:
    """Add what a file of `H5StorageCheckpointer` says of its rows; of another H5 file, its datasets."""
    import h5py

    with _read(path), h5py.File(path, "r", locking=False) as file:
        described = file.get("_description")
        text = described[()].tobytes() if isinstance(described, h5py.Dataset) and described.dtype == "uint8" else None
    if text is None:
        facts.keys.extend(_in_h5(path))
        return
    rows = json_text.parsed(text, str(path), CheckpointCorrupt)
    _of_rows(rows if isinstance(rows, Mapping) else {}, facts)


def _in_h5(path: Path, only_first: bool = False) -> list[dict[str, Any]]:
    """The datasets of an H5 file, or of the first group in it."""
    import h5py

    found: list[dict[str, Any]] = []

    def visit(name: str, node: object) -> None:
        if isinstance(node, h5py.Dataset):
            shape = list(node.shape or [])
            found.append({"key": name, "dtype": str(node.dtype), "shape": shape, "bytes": int(node.nbytes)})

    with _read(path), h5py.File(path, "r") as file:
        top = file[next(iter(file))] if only_first and len(file) else file
        top.visititems(visit) if isinstance(top, h5py.Group) else visit(top.name, top)
    return found


def _torchrl(root: Path) -> Inspection:
    facts = Inspection(str(root), "torchrl", *_tree_of_files(root))
    facts.notes.append(f"convert it once: fbuf convert {root} TARGET, or interop.convert_torchrl")
    for name in ("buffer_metadata.json", "storage/storage_metadata.json"):
        if (root / name).is_file():
            facts.about.update(_short(_json(root / name)))
    return facts


def _folder(root: Path) -> Inspection:
    members = []
    notes = []
    for each in below(root):
        try:
            members.append(inspect(each))
        except (CheckpointError, OSError) as error:
            notes.append(f"{each}: {error}")
    total, files = sum(each.bytes for each in members), sum(each.files for each in members)
    return Inspection(str(root), "folder", total, files, notes=notes, members=members)


_READERS: dict[Kind, Callable[[Path], Inspection]] = {
    "checkpoint": _checkpoint,
    "rows": _rows,
    "dataset": _rows,
    "minari": _minari,
    "lerobot": _lerobot,
    "hub": _hub,
    "h5": _h5,
    "torchrl": _torchrl,
    "folder": _folder,
}


@contextlib.contextmanager
def _read(path: Path) -> Iterator[None]:
    """h5py and pyarrow say what is wrong with a damaged file by many errors, and not which file it is."""
    try:
        yield
    except (FileNotFoundError, PermissionError, CheckpointError):
        raise
    except (OSError, EOFError, ValueError, LookupError, RuntimeError) as error:
        raise CheckpointCorrupt(f"{path} cannot be read: {error}") from error


def _json(path: Path) -> dict[str, Any]:
    found = json_text.parsed(path.read_bytes(), str(path), CheckpointCorrupt)
    return found if isinstance(found, dict) else {}


def _short(entries: Mapping[str, Any]) -> dict[str, Any]:
    """The entries that fit into a line."""
    return {name: value for name, value in entries.items() if value is not None and len(json.dumps(value)) <= 200}


def _time(path: Path) -> str:
    import time

    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(os.path.getmtime(path)))


def _shown(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={each}" for name, each in value.items())
    if isinstance(value, list) and len(value) > _MANY:
        return f"{value[:_MANY]} and {len(value) - _MANY} more"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
