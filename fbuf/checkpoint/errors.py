"""Errors of checkpoints."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read. What it was to be loaded into is as it was."""


class CheckpointCorrupt(CheckpointError):  # noqa: N818  # reads as what it is
    """Files of a checkpoint are missing, damaged or not of this format; the message names the file."""


class CheckpointMismatch(CheckpointError):  # noqa: N818
    """A checkpoint is whole, but what it was to be loaded into is of another kind; the message lists the differences."""
