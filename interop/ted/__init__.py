"""TED data: a check of all its rules, and hooks that save each observation once: flat, by trajectory, in H5 groups."""

from interop.ted.checking import TEDError, Violation, check_ted
from interop.ted.hooks import Flat2TED, H5Combine, H5Split, Nested2TED, TED2Flat, TED2Nested

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
