"""`open`: the buffer that a checkpoint, a folder of rows, or a dataset is, with its components."""

from interop.opening.opening import open

__all__ = ["open"]
