"""List storages with items of every kind, and all that such a storage is."""

import pytest
import torch
from tensordict import NonTensorData, TensorDict, lazy_stack

from interop import CompressedListStorage, LazyStackStorage, ListStorage
from tests.interop.checkpoint.saved_values import Pair, Step, same

KINDS = [ListStorage, LazyStackStorage, CompressedListStorage]
each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


def tensordict_of(n):
    entries = {"obs": torch.full((n % 3 + 1, 2), float(n)), "name": f"n{n}", "n": torch.tensor(n)}
    return TensorDict({**entries, "next": TensorDict({"obs": torch.arange(n, dtype=torch.uint8)}, [])}, [])


def others(n):
    return [
        torch.arange(n, dtype=torch.bfloat16),
        TensorDict({"x": torch.full((2, 3), n), "s": NonTensorData({"k": n}, batch_size=[2])}, [2], names=["t"]),
        Step(obs=torch.full((2, 1), n), note=f"{n}", more=(n,), batch_size=[2]),
        lazy_stack([TensorDict({"x": torch.ones(2, n % 4 + 1)}, [2]), TensorDict({"x": torch.zeros(2, 1)}, [2])], 1),
        {"a": torch.ones(n), "b": [n, None, "é"]},
        Pair(n, (torch.tensor(n), {"k": b"b"})),
        f"text {n}",
        TensorDict({"x": torch.ones(3), "e": torch.zeros(3, 0)}, [3], device="cpu"),
    ][n % 8]  # fmt: skip


def filled(kind, items, capacity=20, **kwargs):
    storage = kind(capacity, **kwargs)
    for place, item in enumerate(items):
        storage.set(place % capacity, item)
    return storage


def fingerprint(storage):
    """All that a storage is."""
    state = storage._held(), None if isinstance(storage, CompressedListStorage) else list(storage._storage)
    return state, storage.ring.cursor, storage.ring.written, storage.ring.version


def unchanged(storage, before):
    after = fingerprint(storage)
    return same(after[0], before[0]) and after[1:] == before[1:]
