"""Hashes of rows, and maps from rows of keys to tensordicts."""

from interop.maps.binary import BinaryToDecimal
from interop.maps.hash_to_int import HashToInt
from interop.maps.hashes import RandomProjectionHash, SipHash
from interop.maps.map import TensorDictMap, TensorMap
from interop.maps.query import QueryModule

__all__ = [
    "BinaryToDecimal",
    "HashToInt",
    "QueryModule",
    "RandomProjectionHash",
    "SipHash",
    "TensorDictMap",
    "TensorMap",
]
