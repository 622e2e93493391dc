"""Row hashes, maps from tensordict keys to tensordict values, and search trees built from rollouts."""

from interop.maps.binary import BinaryToDecimal
from interop.maps.forest import MCTSForest
from interop.maps.hash_to_int import HashToInt
from interop.maps.hashes import RandomProjectionHash, SipHash
from interop.maps.map import TensorDictMap, TensorMap
from interop.maps.query import QueryModule
from interop.maps.tree import Tree

__all__ = [
    "BinaryToDecimal",
    "HashToInt",
    "MCTSForest",
    "QueryModule",
    "RandomProjectionHash",
    "SipHash",
    "TensorDictMap",
    "TensorMap",
    "Tree",
]
