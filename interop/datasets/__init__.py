"""Datasets of others as replay buffers: downloaded, verified and converted once, then memory-mapped."""

from interop.datasets.merged import merged
from interop.datasets.to_hub_folder import to_hub_folder
from interop.datasets.to_minari import to_minari

__all__ = ["merged", "to_hub_folder", "to_minari"]
