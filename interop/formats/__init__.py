"""Formats of other programs and of episodes: TED data, H5 files, folders of torchrl."""

from interop.formats.h5 import H5StorageCheckpointer
from interop.formats.ted_formats import FlatStorageCheckpointer, NestedStorageCheckpointer
from interop.formats.torchrl_folder import convert_torchrl

__all__ = ["FlatStorageCheckpointer", "H5StorageCheckpointer", "NestedStorageCheckpointer", "convert_torchrl"]
