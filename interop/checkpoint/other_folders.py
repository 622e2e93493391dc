"""Recognizes folders that are no checkpoints, and names the call that reads them."""

import os

from fbuf.checkpoint import CheckpointMismatch, manifest
from interop.shared.folder_description import DESCRIPTION


def is_torchrl_folder(path: str | os.PathLike[str]) -> bool:
    """Whether torchrl wrote the folder: it has no manifest, and has files of torchrl's buffers."""
    top = os.fspath(path)
    if not os.path.isdir(top) or os.path.lexists(os.path.join(top, manifest.NAME)):
        return False
    if os.path.isfile(os.path.join(top, "buffer_metadata.json")):
        return True
    rows = os.path.join(top, "storage")  # this library may have written a folder of this name
    return os.path.isdir(rows) and not any(
        os.path.lexists(os.path.join(rows, name)) for name in (manifest.NAME, DESCRIPTION)
    )


def refuse_other_folder(path: str | os.PathLike[str]) -> None:
    """CheckpointMismatch for a folder that torchrl wrote, FileNotFoundError for the rows of a memory map."""
    top = os.fspath(path)
    if os.path.isfile(os.path.join(top, DESCRIPTION)) and not os.path.lexists(os.path.join(top, manifest.NAME)):
        raise FileNotFoundError(
            f"{top} holds the rows of a LazyMemmapStorage, not a checkpoint: LazyMemmapStorage.open({top!r}) continues with "
            "them"
        )
    if is_torchrl_folder(path):
        raise CheckpointMismatch(
            f"{os.fspath(path)}: was written by torchrl. Convert it once, and load the result: "
            f"interop.formats.convert_torchrl({os.fspath(path)!r}, new_folder)"
        )
