"""A module that numbers the keys of a tensordict."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn

from interop.data.arguments import whole
from interop.maps.hash_to_int import HashToInt
from interop.maps.hashes import SipHash
from interop.maps.kinds import Kinds, kinds_of
from interop.maps.table import KeyTable, row_bytes

HashModule = Callable[[Tensor], Tensor]


class QueryModule(TensorDictModuleBase):
    """Writes an index and a hash of the key entries into a tensordict of any batch size, such as [] or [B, T].

    Equal rows of keys get equal indices in all calls; new rows get the next index, from 0. A row is identified by the
    bytes of its keys, so hash collisions never merge rows. The first rows fix shapes and dtypes of the keys.

    Args:
        in_keys: the key entries, which are tensors.
        index_key: the entry for the index, int64 of the batch size.
        hash_key: the entry for the hash.
        hash_module: hashes [B, ...] to [B]. A single module is copied for each key; a list has one module per key.
            Default `SipHash`.
        hash_to_int: a module called as `hash_to_int(hash, extend=...)` that returns the index, so that it decides which
            rows are equal. For unknown rows it returns its number of rows, or more. Default: compare the bytes.
        aggregator: combines the hashes of several keys, stacked on the last dim, into one. Default: a copy of the single
            `hash_module`, or `SipHash`.
        clone: write into a shallow copy, and return it.
    """

    def __init__(
        self,
        in_keys: Sequence[NestedKey],
        index_key: NestedKey = "_index",
        hash_key: NestedKey = "_hash",
        *,
        hash_module: HashModule | Sequence[HashModule] | None = None,
        hash_to_int: nn.Module | None = None,
        aggregator: HashModule | None = None,
        clone: bool = False,
    ) -> None:
        super().__init__()
        if isinstance(in_keys, str) or not len(in_keys):
            raise ValueError(f"in_keys must be a list of at least one key, got {in_keys!r}")
        if hash_to_int is not None and not isinstance(hash_to_int, nn.Module):
            raise TypeError(f"hash_to_int must be an nn.Module, whose state is saved, got {type(hash_to_int).__name__}")
        self.in_keys = [unravel_key(key) for key in in_keys]
        self.index_key, self.hash_key = unravel_key(index_key), unravel_key(hash_key)
        self.out_keys = [self.index_key, self.hash_key]
        default: HashModule = SipHash()
        if isinstance(hash_module, Sequence | nn.ModuleList):
            modules = list(hash_module)
        else:
            default = default if hash_module is None else hash_module
            modules = [copy.deepcopy(default) for _ in self.in_keys]
        if len(modules) != len(self.in_keys):
            raise ValueError(f"hash_module has {len(modules)} modules for {len(self.in_keys)} in_keys")
        self.hash_module = dict(zip(self.in_keys, modules, strict=True))
        self.aggregator = copy.deepcopy(default) if aggregator is None else aggregator
        self.hash_to_int = hash_to_int
        self.clone = clone
        self._modules_of_keys = nn.ModuleList(each for each in modules if isinstance(each, nn.Module))
        self._table = KeyTable()
        self._kinds: Kinds | None = None

    def forward(
        self, tensordict: TensorDictBase, *, extend: bool = True, write_hash: bool = True, clone: bool | None = None
    ) -> TensorDictBase:
        """Write index and hash. With `extend`, new rows are stored; otherwise their index is `size` or more.

        RuntimeError for a locked tensordict, and the errors of `indices`. After an error no row is stored.
        """
        out = tensordict.copy() if (self.clone if clone is None else clone) else tensordict
        if out.is_locked:
            raise RuntimeError("the tensordict is locked: unlock it, or pass clone=True")
        hashes = self.hashes(tensordict) if write_hash else None
        out.set(self.index_key, self.indices(tensordict, extend=extend))
        if hashes is not None:
            out.set(self.hash_key, hashes)
        return out

    def hashes(self, tensordict: TensorDictBase) -> Tensor:
        """The hash of each row, in the batch size. Nothing is stored."""
        batch = tensordict.batch_size
        rows = [tensor.reshape(batch.numel(), *tensor.shape[len(batch) :]) for tensor in self._keys_of(tensordict)]
        hashes = [_checked(module, row) for module, row in zip(self.hash_module.values(), rows, strict=True)]
        found = hashes[0] if len(hashes) == 1 else _checked(self.aggregator, torch.stack(hashes, -1))
        return found.reshape((*batch, *found.shape[1:]))

    def indices(self, tensordict: TensorDictBase, *, extend: bool = False, limit: int | None = None) -> Tensor:
        """The index of each row: int64 in the batch size, on the CPU. O(batch).

        KeyError for a missing key, TypeError for a non-tensor, ValueError if shape or dtype differ from stored rows.
        IndexError if more than `limit` rows would be stored. After an error no row is stored.
        """
        batch, keys = tensordict.batch_size, self._keys_of(tensordict)
        if self.hash_to_int is not None:
            found: Tensor = self.hash_to_int(self.hashes(tensordict), extend=extend)
            return found
        rows = row_bytes(keys, batch)
        index = torch.from_numpy(self._table.insert(rows, limit) if extend else self._table.find(rows))
        if extend and self._kinds is None and len(rows):
            self._kinds = kinds_of(self.in_keys, tensordict)
        return index.reshape(batch)

    @property
    def size(self) -> int:
        """The number of stored rows; 0 with a user's `hash_to_int`."""
        return len(self._table)

    def truncate(self, size: int) -> None:
        """Remove the rows from index `size` on; at size 0 also the values of a `HashToInt`. O(size)."""
        self._table.truncate(whole("size", size, least=0))
        if not len(self._table):
            self._kinds = None
        if isinstance(self.hash_to_int, HashToInt) and not size:
            self.hash_to_int.clear()

    def get_extra_state(self) -> dict[str, Any]:
        return {"kinds": copy.deepcopy(self._kinds), "keys": torch.tensor(self._table.keys)}

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        kinds = state["kinds"] and [(dtype, shape) for dtype, shape in state["kinds"]]
        self._table, self._kinds = KeyTable.of(state["keys"].numpy(force=True)), kinds

    def _keys_of(self, tensordict: TensorDictBase) -> list[Tensor]:
        """The validated key tensors."""
        kinds_of(self.in_keys, tensordict, self._kinds)
        return [tensordict.get(key) for key in self.in_keys]


def _checked(module: HashModule, rows: Tensor) -> Tensor:
    """Hash rows. TypeError or ValueError unless the module returns one hash per row."""
    hashes = module(rows)
    if not isinstance(hashes, Tensor):
        raise TypeError(f"{type(module).__name__} must return a tensor of hashes, got {type(hashes).__name__}")
    if hashes.shape[:1] != rows.shape[:1]:
        raise ValueError(
            f"{type(module).__name__} must return a hash for each of {len(rows)} rows, got {list(hashes.shape)}"
        )
    return hashes
