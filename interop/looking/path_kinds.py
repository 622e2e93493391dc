"""What kind of thing is at a path: a checkpoint, a folder of rows, or a dataset of one of the formats that are read here."""

import os
from pathlib import Path
from typing import Literal

from fbuf.checkpoint import manifest
from interop.checkpoint.other_folders import is_torchrl_folder
from interop.shared.folder_description import DESCRIPTION
from interop.shared.published_folder import RECORD

Kind = Literal["checkpoint", "rows", "dataset", "minari", "lerobot", "hub", "h5", "torchrl", "folder"]
MEANINGS: dict[Kind, str] = {
    "checkpoint": "a checkpoint",
    "rows": "a folder of rows (LazyMemmapStorage)",
    "dataset": "a dataset that was converted to rows",
    "minari": "a Minari dataset",
    "lerobot": "a LeRobot dataset",
    "hub": "a folder of Parquet files for the Hugging Face hub",
    "h5": "an H5 file",
    "torchrl": "a folder that torchrl wrote",
    "folder": "a folder with these below it",
}
_H5 = b"\x89HDF\r\n\x1a\n"
_MOST_BELOW = 1000  # entries of a folder that are looked at
_DEEPEST = 3


class UnknownPathError(ValueError):
    """A path is there, and nothing that this library reads or writes."""


def kind_of(path: str | os.PathLike[str]) -> Kind:
    """The kind of a path. FileNotFoundError where nothing is there, UnknownPathError for anything else."""
    root = Path(path)
    if not os.path.lexists(root):
        raise FileNotFoundError(f"there is nothing at {root}")
    found = _kind_itself(root)
    if found is not None:
        return found
    if root.is_dir() and below(root):
        return "folder"
    what = "an empty folder" if root.is_dir() and not any(root.iterdir()) else "nothing that can be read"
    raise UnknownPathError(
        f"{root} is {what}: expected {', '.join(MEANINGS[kind] for kind in list(MEANINGS)[:-1])}, or a folder of these"
        f"{_hint(root)}"
    )


def _hint(root: Path) -> str:
    """How a path is made one that is read, for what others write often."""
    if root.suffix == ".parquet" and root.is_file():
        return f". Move {root.name} into a folder named data, and name the folder that has it"
    if root.is_dir() and (root / "dataset_info.json").is_file() and next(root.glob("*.arrow"), None) is not None:
        return ". save_to_disk of the package `datasets` wrote it: write it by to_parquet('FOLDER/data/train.parquet')"
    return ""


def below(root: Path, depth: int = _DEEPEST) -> list[Path]:
    """The paths of a known kind in a folder and its subfolders. Nothing is looked for inside of them."""
    found: list[Path] = []
    for each in sorted(root.iterdir())[:_MOST_BELOW]:
        if each.is_symlink() or each.name.startswith("."):
            continue
        if _kind_itself(each) is not None:
            found.append(each)
        elif each.is_dir() and depth > 1:
            found += below(each, depth - 1)
    return found


def _kind_itself(root: Path) -> Kind | None:
    if not root.is_dir():
        return "h5" if root.is_file() and (root.suffix in (".h5", ".hdf5") or _begins_as_h5(root)) else None
    if os.path.lexists(root / manifest.NAME):
        return "checkpoint"
    if os.path.lexists(root / DESCRIPTION):
        return "dataset" if os.path.lexists(root / RECORD) else "rows"
    if (root / "meta" / "info.json").is_file():
        return "lerobot"
    if minari_data(root) is not None:
        return "minari"
    if (root / "data").is_dir() and next((root / "data").rglob("*.parquet"), None) is not None:
        return "hub"
    return "torchrl" if is_torchrl_folder(root) else None


def _begins_as_h5(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(len(_H5)) == _H5
    except OSError:
        return False


def minari_data(root: Path) -> Path | None:
    """The folder with the episodes of a Minari dataset, if this is one."""
    data = root / "data"
    if (data / "metadata.json").is_file() or (data / "main_data.hdf5").is_file():
        return data
    return None
