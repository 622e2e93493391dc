"""Recognizes folders that torchrl's `dumps` wrote, and names the call that converts them."""

import os

from fbuf.checkpoint import CheckpointMismatch, manifest


def is_torchrl_folder(path: str | os.PathLike[str]) -> bool:
    """Whether torchrl wrote the folder: it has no manifest, and has files of torchrl's buffers."""
    top = os.fspath(path)
    if not os.path.isdir(top) or os.path.lexists(os.path.join(top, manifest.NAME)):
        return False
    return os.path.isdir(os.path.join(top, "storage")) or os.path.isfile(os.path.join(top, "buffer_metadata.json"))


def refuse_torchrl_folder(path: str | os.PathLike[str]) -> None:
    """CheckpointMismatch for a folder that torchrl wrote."""
    if is_torchrl_folder(path):
        raise CheckpointMismatch(
            f"{os.fspath(path)}: was written by torchrl. Convert it once, and load the result: "
            f"interop.formats.convert_torchrl({os.fspath(path)!r}, new_folder)"
        )
