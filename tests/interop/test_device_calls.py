"""What calls of buffers ask of an accelerator, counted on the CPU: nothing in them waits for the device."""

import collections
from collections.abc import Callable, Iterator
from typing import Any

import jax
import pytest
import torch
from tensordict import TensorDict
from torch.utils._python_dispatch import TorchDispatchMode

from interop import LazyTensorStorage, TensorDictPrioritizedReplayBuffer
from interop.samplers import prioritized
from interop.storages import lazy, tensors

CAPACITY, BATCH = 1024, 256


class Operations(TorchDispatchMode):
    """Counts operations of torch by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(function).removeprefix("aten.").split(".")[0]] += 1
        return function(*args, **(kwargs or {}))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[collections.Counter[str]]:
    """The values of JAX that the host reads, each of which waits for the device, by how; buffers take the path of a device."""
    found: collections.Counter[str] = collections.Counter()
    kind: Any = type(jax.numpy.zeros(1))

    def counted(name: str) -> Callable[..., Any]:
        original = getattr(kind, name)

        def read(*given: Any, **options: Any) -> Any:
            found[name] += 1
            return original(*given, **options)

        return read

    for name in ("__array__", "__bool__", "__float__", "__int__", "__index__", "item", "tolist"):
        monkeypatch.setattr(kind, name, counted(name))
    for module in (lazy, tensors):
        monkeypatch.setattr(module, "rows_in_jax", lambda device: True)
    monkeypatch.setattr(prioritized, "is_accelerator", lambda device: True)
    monkeypatch.setattr("interop.data.bridge.hand_over", handed_over)
    yield found


def handed_over(array: jax.Array, dtype: torch.dtype | None = None) -> torch.Tensor:
    """As on an accelerator."""
    tensor = torch.from_dlpack(array)
    return tensor if dtype is None else tensor.to(dtype)


def rows(count: int, first: int = 0) -> TensorDict:
    obs = torch.arange(first, first + count).float()[:, None].repeat(1, 4)
    after = {"obs": obs + 1, "reward": obs[:, :1], "done": torch.zeros(count, 1, dtype=torch.bool)}
    return TensorDict({"obs": obs, "action": torch.ones(count, dtype=torch.int64), "next": after}, [count])


def calls(with_error: bool) -> dict[str, Callable[[], Any]]:
    rb = TensorDictPrioritizedReplayBuffer(
        alpha=0.6, beta=0.4, storage=LazyTensorStorage(CAPACITY), priority_key="td_error", batch_size=BATCH
    )
    new, error = rows(BATCH), torch.rand(BATCH) + 1e-3
    if with_error:
        new["td_error"] = error
    for _ in range(CAPACITY // BATCH + 1):
        rb.extend(new)
    sample = rb.sample()
    rb.update_priority(sample["index"], error)
    sample["td_error"] = error
    return {
        "extend": lambda: rb.extend(new),
        "sample": rb.sample,
        "update_priority": lambda: rb.update_priority(sample["index"], error),
        "update_tensordict_priority": lambda: rb.update_tensordict_priority(sample),
    }


@pytest.mark.parametrize("with_error", [False, True])
def test_no_call_waits_for_the_device_or_clones_what_it_was_given(
    with_error: bool, reads: collections.Counter[str]
) -> None:
    for name, call in calls(with_error).items():
        call()
        reads.clear()
        with Operations() as operations:
            call()
        print(name, dict(reads), dict(operations.counts))
