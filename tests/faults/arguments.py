"""Calls the public methods of buffers, storages, samplers and writers with bad and extreme arguments, one at a time (I1).

A call that raises must have changed nothing, bit for bit. After other calls, batches are of stored rows and weights finite.
"""

import contextlib
import inspect
import math
import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from interop import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    RandomSampler,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
)
from tests.faults.counts import Counts
from tests.faults.signatures import signature
from tests.faults.subjects import states_of

CAPACITY, FILLED = 10, 7
RIGHT = (TypeError, ValueError, RuntimeError, LookupError, NotImplementedError, AttributeError, OSError, OverflowError)


def rows(count: int, start: int = 0, **changes: Any) -> TensorDict:
    """Rows as they are stored."""
    ids = torch.arange(start, start + count)
    leaves = {"id": ids, "x": torch.ones(count, 3) * ids[:, None], "episode": ids // 3, "rank": ids.float()}
    return TensorDict(leaves | changes, [count])


def _ring(storage: Any, sampler: Any) -> tuple[Any, Any, Any]:
    return storage(CAPACITY), sampler, TensorDictRoundRobinWriter()


KINDS: dict[str, Callable[[], tuple[Any, Any, Any]]] = {
    "tensor, uniform": lambda: _ring(LazyTensorStorage, RandomSampler()),
    "tensor, epochs": lambda: _ring(LazyTensorStorage, SamplerWithoutReplacement()),
    "tensor, prioritized": lambda: _ring(LazyTensorStorage, PrioritizedSampler(CAPACITY, 0.7, 0.5)),
    "memmap, prioritized": lambda: _ring(LazyMemmapStorage, PrioritizedSampler(CAPACITY, 0.7, 0.5)),
    "tensor, slices": lambda: _ring(LazyTensorStorage, SliceSampler(slice_len=2, traj_key="episode")),
    "list, uniform": lambda: _ring(ListStorage, RandomSampler()),
    "tensor, best": lambda: (LazyTensorStorage(CAPACITY), RandomSampler(), TensorDictMaxValueWriter("rank")),
}


def _numbered(items: Any) -> TensorDict:
    """Goes for any items, which a list can hold."""
    return TensorDict({"n": torch.arange(len(items))}, [len(items)])


def made(kind: str) -> Any:
    """A buffer with some rows."""
    storage, sampler, writer = KINDS[kind]()
    buffer = TensorDictReplayBuffer(
        storage=storage,
        sampler=sampler,
        writer=writer,
        batch_size=4,
        generator=torch.Generator("cpu").manual_seed(0),
        collate_fn=_numbered if isinstance(storage, ListStorage) else None,
    )
    buffer.extend(rows(FILLED))
    return buffer


_PLAIN: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, FILLED, CAPACITY, 100, 10**6, 2**31, 2**63, 2**70, -(2**40), 1.5, -0.5, 1e300, 5e-324),
    *(math.nan, math.inf, -math.inf, 1j, "x", b"", (), [], {}, [1, 1.5], [[1], [2]], [-1], [FILLED], [0, 0], (0, 1)),
    *(len, int, slice(None), slice(5, 10**9, 3), slice(5, 0, -1), ...),
)
VALUES: dict[str, Callable[[], Any]] = {
    **{repr(each): (lambda each=each: each) for each in _PLAIN},
    "object": object,
    "nothing of ints": lambda: torch.zeros(0, dtype=torch.int64),
    "inf and nan": lambda: torch.tensor([1.0, math.inf, math.nan, -1.0]),
    "negative": lambda: torch.tensor([-1.0, 1.0]),
    "slots": lambda: torch.tensor([0, 1, 1]),
    "slots beyond": lambda: torch.tensor([0, FILLED]),
    "slots far beyond": lambda: torch.tensor([0, 2**62]),
    "slots of floats": lambda: torch.tensor([0.0, 1.5]),
    "slots of bools": lambda: torch.ones(FILLED, dtype=torch.bool),
    "too many bools": lambda: torch.ones(CAPACITY + 1, dtype=torch.bool),
    "many dims": lambda: torch.zeros(2, 3, 4, dtype=torch.int64),
    "complex": lambda: torch.ones(3, dtype=torch.complex64),
    "an array": lambda: np.array([0, 1]),
    "an array of objects": lambda: np.array([None, 1], object),
    "meta": lambda: torch.zeros(3, device="meta"),
    "rows": lambda: rows(3, 50),
    "one row": lambda: rows(1, 50)[0],
    "no rows": lambda: rows(0),
    "more rows than there is room for": lambda: rows(25, 50),
    "rows without a key": lambda: rows(3).exclude("x"),
    "rows with another key": lambda: rows(3, y=torch.zeros(3)),
    "rows of another dtype": lambda: rows(3, x=torch.zeros(3, 3, dtype=torch.float64)),
    "rows of another width": lambda: rows(3, x=torch.zeros(3, 4)),
    "rows with less dims": lambda: rows(3, x=torch.zeros(3)),
    "rows with nan": lambda: rows(3, rank=torch.tensor([math.nan, 1, 2])),
    "rows with priorities": lambda: rows(3, td_error=torch.tensor([1, math.nan, -1]), index=torch.tensor([0, 1, 99])),
    "rows on meta": lambda: rows(3, x=torch.zeros(3, 3, device="meta")),
    "an empty tensordict": lambda: TensorDict({}, []),
    "a list of rows": lambda: list(rows(3, 50)),
    "a dict": lambda: {"id": torch.arange(3)},
}
_STORAGE = object()  # stands for the storage of the buffer
GOOD: dict[str, Callable[[], Any]] = {
    "data": lambda: rows(2, 50),
    "storage": lambda: _STORAGE,
    "index": lambda: torch.tensor([0, 1]),
    "priority": lambda: torch.tensor([1.0, 2.0]),
    "cursor": lambda: 0,
    "batch_size": lambda: 4,
    "tensordicts": lambda: rows(2, 50),
    "input_dict_or_td": lambda: rows(FILLED, 50),
    "key": lambda: "x",
    "value": lambda: rows(1, 50)[0],
}
# What changes settings, goes to files, or only joins parts, is left out.
CALLED: dict[str, tuple[str, ...]] = {
    "": (
        *("__getitem__", "__setitem__", "add", "empty", "extend", "mark_update", "read_all_in_order", "sample", "set_"),
        *("set_at_", "update_", "update_if_present", "update_priority", "update_tensordict_priority", "write_all"),
    ),
    "storage": ("__contains__", "__getitem__", "__setitem__", "contains", "get", "set"),
    "sampler": ("add", "extend", "mark_update", "update_priority"),
    "writer": ("add", "extend"),
}


def _methods(buffer: Any) -> Iterator[tuple[str, str, list[str]]]:
    """The public methods of a buffer and its parts, and the names of what they take."""
    for part, names in CALLED.items():
        held = getattr(buffer, part) if part else buffer
        for name in names:
            if not hasattr(held, name):
                continue
            parameters = inspect.signature(getattr(held, name)).parameters.values()
            named = [each for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
            yield part, name, [each.name for each in named if each.default is each.empty or each.name in GOOD] or [""]


def sane(buffer: Any) -> str:
    """An error in batches and rows, or nothing."""
    if not 0 <= len(buffer.storage) <= CAPACITY:
        return f"a length of {len(buffer.storage)}"
    if not len(buffer.storage):
        return ""
    for _ in range(20):
        try:
            batch, info = buffer.sample(4, return_info=True)
        except (RuntimeError, KeyError) as error:
            return "" if "nan" not in str(error).lower() else f"cannot be drawn from: {error}"
        index = info["index"]
        index = torch.as_tensor(index[0] if isinstance(index, tuple) else index)
        if int(index.min()) < 0 or int(index.max()) >= len(buffer.storage):
            return f"rows {index.tolist()} of {len(buffer.storage)} were drawn"
        weight = info.get("priority_weight")
        if weight is not None and not bool(torch.as_tensor(weight).isfinite().all()):
            return f"weights {weight}"
        if not len(batch):
            return "nothing was drawn"
    return ""


def call(kind: str, part: str, name: str, given: list[Any]) -> str:
    """Call it; "refused" and "taken" are right."""
    buffer = made(kind)
    target = getattr(buffer, part) if part else buffer
    given = [buffer.storage if each is _STORAGE else each for each in given]
    before = signature(states_of(buffer))
    try:
        getattr(target, name)(*given)
    except RIGHT as error:
        del error
        return "refused" if signature(states_of(buffer)) == before else "refused, but it has changed"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if wrong := sane(buffer):
        return f"taken, and then: {wrong}"
    return "taken"


def calls(size: int) -> Counts:
    """So many calls, evenly among all values of all arguments of all methods."""
    counts, found = Counts(), []
    for kind in KINDS:
        for part, name, parameters in _methods(made(kind)):
            for parameter in parameters:
                values = VALUES if parameter else [""]
                found += [
                    (kind, part, name, parameters, parameter, value) for value in values if parameter != "storage"
                ]
    chosen = found[:: max(1, len(found) // size)]
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for kind, part, name, parameters, parameter, value in chosen:
            given = [(VALUES[value] if each == parameter else GOOD.get(each, int))() for each in parameters if each]
            where = f"{kind}: {part or 'buffer'}.{name}({parameter}={value})"
            counts.note(call(kind, part, name, given), ("refused", "taken"), where)
    return counts
