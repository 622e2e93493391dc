"""TED data: what is wrong with some, and hooks that save each observation once: flat, by trajectory, in H5 groups."""

from interop.ted.by_trajectory import H5Combine, H5Split
from interop.ted.checking import TEDError, Violation, check_ted
from interop.ted.flat import Flat2TED, TED2Flat
from interop.ted.nested import Nested2TED, TED2Nested

__all__ = [
    "Flat2TED",
    "H5Combine",
    "H5Split",
    "Nested2TED",
    "TED2Flat",
    "TED2Nested",
    "TEDError",
    "Violation",
    "check_ted",
]
