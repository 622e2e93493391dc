"""`open`: the buffer that a checkpoint, a folder of rows, or a dataset is, with its components."""

from interop.opening.opening import open, open_as_stored

__all__ = ["open", "open_as_stored"]
