"""Rows of every kind of data, where each leaf of a row tells the row's id; and what a buffer stands at."""

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, is_tensor_collection, tensorclass
from torch import Tensor

from interop import LazyMemmapStorage, LazyTensorStorage, ListStorage


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


@tensorclass
class Step:
    obs: Tensor
    reward: Tensor


def wide(ids: Tensor, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The ids, each repeated over `shape`."""
    return ids.reshape(-1, *(1 for _ in shape)).expand(ids.shape[0], *shape).to(dtype).clone()


def flat_td(ids: Any) -> TensorDict:
    ids = torch.as_tensor(ids)
    return TensorDict({"obs": wide(ids, 3), "done": wide(ids % 2, 1, dtype=torch.bool)}, [len(ids)])


def nested_td(ids: Any) -> TensorDict:
    ids = torch.as_tensor(ids)
    below = TensorDict({"pixels": wide(ids, 2, 2, dtype=torch.uint8), "reward": wide(ids)}, [len(ids)])
    return TensorDict({"obs": wide(ids, 3, dtype=torch.float64), "next": below}, [len(ids)])


def trajectories(ids: Any) -> TensorDict:
    """[B, T] rows."""
    ids = torch.as_tensor(ids)
    return TensorDict({"obs": wide(ids, 4, 2), "reward": wide(ids, 4)}, [len(ids), 4])


def plain_tensor(ids: Any) -> Tensor:
    return wide(torch.as_tensor(ids), 3)


def steps(ids: Any) -> Any:
    ids = torch.as_tensor(ids)
    return Step(obs=wide(ids, 3), reward=wide(ids, dtype=torch.bfloat16), batch_size=[len(ids)])


def dicts(ids: Any) -> dict[Any, Any]:
    ids = torch.as_tensor(ids)
    return {"x": wide(ids, 2, dtype=torch.int16), 7: (wide(ids), [wide(ids, 1, dtype=torch.float16)])}


def tuples(ids: Any) -> tuple[Any, ...]:
    ids = torch.as_tensor(ids)
    return wide(ids, 2), {"deep": wide(ids, dtype=torch.int64)}


def pairs(ids: Any) -> Pair:
    ids = torch.as_tensor(ids)
    return Pair(wide(ids, 2), wide(ids, dtype=torch.int32))


KINDS: dict[str, Callable[[Any], Any]] = {
    "tensor": plain_tensor,
    "tensordict": flat_td,
    "nested tensordict": nested_td,
    "trajectories": trajectories,
    "tensorclass": steps,
    "dict": dicts,
    "tuple": tuples,
    "namedtuple": pairs,
}

STORAGES: dict[str, Callable[[int], Any]] = {
    "memory": LazyTensorStorage,
    "memmap": LazyMemmapStorage,
}
ALL_STORAGES = {**STORAGES, "list": ListStorage}


def tensors_of(data: Any) -> list[Tensor]:
    """Every tensor in data."""
    if isinstance(data, Tensor):
        return [data]
    if is_tensor_collection(data):
        return [leaf for _, leaf in sorted(data.items(True, True), key=lambda item: str(item[0]))]
    values = data.values() if isinstance(data, dict) else data
    return [leaf for value in values for leaf in tensors_of(value)]


def first_of(data: Any) -> Any:
    """The first row of a batch, as one item."""
    if isinstance(data, Tensor) or is_tensor_collection(data):
        return data[0]
    if isinstance(data, dict):
        return {key: first_of(value) for key, value in data.items()}
    if hasattr(data, "_fields"):
        return type(data)(*map(first_of, data))
    return type(data)(map(first_of, data))


def check_same(got: Any, wanted: Any) -> None:
    """Same types, keys, batch sizes, dtypes, shapes and values."""
    if isinstance(wanted, Tensor):
        assert isinstance(got, Tensor)
        assert got.dtype == wanted.dtype
        assert got.shape == wanted.shape
        assert torch.equal(got.detach(), wanted.detach())
    elif is_tensor_collection(wanted):
        assert isinstance(got, TensorDictBase if isinstance(wanted, TensorDictBase) else type(wanted))
        assert got.batch_size == wanted.batch_size
        assert set(got.keys()) == set(wanted.keys())
        for key in wanted.keys():  # noqa: SIM118
            check_same(got.get(key), wanted.get(key))
    elif isinstance(wanted, dict):
        assert type(got) is dict and got.keys() == wanted.keys()
        for key in wanted:
            check_same(got[key], wanted[key])
    elif isinstance(wanted, tuple | list):
        assert type(got) is type(wanted) and len(got) == len(wanted)
        for one, other in zip(got, wanted, strict=True):
            check_same(one, other)
    else:
        assert got == wanted


def cloned(data: Any) -> Any:
    """A copy of the data that shares no memory with it."""
    if isinstance(data, Tensor) or is_tensor_collection(data):
        return data.clone()
    if isinstance(data, dict):
        return {key: cloned(value) for key, value in data.items()}
    if hasattr(data, "_fields"):
        return type(data)(*map(cloned, data))
    return type(data)(map(cloned, data)) if isinstance(data, tuple | list) else copy.deepcopy(data)


def state_of(buffer: Any) -> dict[str, Any]:
    """Everything that a call which raises must leave alone."""
    generator = buffer.generator
    sampler = buffer.sampler
    return {
        "length": len(buffer),
        "cursor": getattr(buffer.writer, "cursor", None),
        "write_count": buffer.write_count,
        "contents": cloned(buffer.storage[:]) if len(buffer) else None,
        "priorities": sampler.priorities.clone() if hasattr(sampler, "priorities") else None,
        "default": sampler.default_priority,
        "storage": id(buffer.storage),
        "sampler": id(buffer.sampler),
        "writer": id(buffer.writer),
        "generator": (generator.get_state() if generator is not None else torch.get_rng_state()).clone(),
        "max_size": buffer.storage.max_size,
    }


@contextlib.contextmanager
def refused(buffer: Any, error: Any, match: str | None = None) -> Iterator[None]:
    """The block raises `error`, and the buffer is as before."""
    before = state_of(buffer)
    with pytest.raises(error, match=match):
        yield
    check_same(state_of(buffer), before)
