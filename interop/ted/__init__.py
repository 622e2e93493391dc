"""Hooks that save TED data with each observation once: flat, by trajectory, and in the groups of an H5 file."""

from interop.ted.by_trajectory import H5Combine, H5Split
from interop.ted.flat import Flat2TED, TED2Flat
from interop.ted.nested import Nested2TED, TED2Nested

__all__ = ["Flat2TED", "H5Combine", "H5Split", "Nested2TED", "TED2Flat", "TED2Nested"]
