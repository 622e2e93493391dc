"""Storages that are allocated from a spec: what they take, what fits, and environments that write to them."""

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict, tensorclass
from torch import Tensor

from fbuf import NotEnoughMemoryError
from interop import (
    LazyFrameStorage,
    LazyMemmapStorage,
    LazyTensorStorage,
    ReplayBuffer,
    TensorDictReplayBuffer,
    TensorStorage,
)
from interop.specs import Bounded, Categorical, Composite, NonTensor, Unbounded, from_gymnasium

STORAGES = {
    "tensors": lambda path, size, **options: LazyTensorStorage(size, **options),
    "consolidated": lambda path, size, **options: LazyTensorStorage(size, consolidated=True, **options),
    "shared": lambda path, size, **options: LazyTensorStorage(size, shared_init=True, **options),
    "anonymous": lambda path, size, **options: LazyMemmapStorage(size, **options),
    "files": lambda path, size, **options: LazyMemmapStorage(size, scratch_dir=path, **options),
}


@pytest.fixture(params=STORAGES)
def make(request, tmp_path) -> Any:
    return lambda *args, **options: STORAGES[request.param](tmp_path, *args, **options)


def memory_of(storage: Any) -> list[tuple[int, torch.Size]]:
    return [(each.data_ptr(), each.shape) for each in storage.table.rows.tensors]


class Arm(gymnasium.Env):
    """Nested observations and actions, a count that does not begin at 0."""

    observation_space = spaces.Dict(
        camera=spaces.Box(0, 255, (4, 4, 3), np.uint8),
        joints=spaces.Tuple([spaces.Box(-1, 1, (2,), np.float64), spaces.MultiBinary(3)]),
    )
    action_space = spaces.Dict(move=spaces.MultiDiscrete([3, 2]), gear=spaces.Discrete(3, start=-1))

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        self._left = 9
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        assert action in self.action_space
        self._left -= 1
        return self.observation_space.sample(), 1.0, self._left == 0, False, {}


def as_dict(value: Any) -> Any:
    """A member of a space with dicts in the place of tuples."""
    if isinstance(value, tuple):
        value = {str(place): each for place, each in enumerate(value)}
    return {key: as_dict(each) for key, each in value.items()} if isinstance(value, dict) else value


def spec_of(env: gymnasium.Env) -> Composite:
    obs, flag = from_gymnasium(env.observation_space), Categorical(2, (1,), dtype=torch.bool)
    step = Composite(obs=obs, reward=Unbounded((1,)), terminated=flag, truncated=flag)
    return Composite({"obs": obs, "action": from_gymnasium(env.action_space), "next": step})


@pytest.mark.parametrize("env", ["CartPole-v1", "FrozenLake-v1", Arm], ids=str)
def test_an_episode_is_stored_in_memory_that_was_there_before(env, make) -> None:
    env = gymnasium.make(env) if isinstance(env, str) else env()
    spec, storage = spec_of(env), make(50)
    buffer = TensorDictReplayBuffer(storage=storage, batch_size=8)
    planned = storage.plan(spec).total
    storage.allocate(spec)
    before = memory_of(storage)
    assert len(buffer) == 0 and storage.plan().total == planned
    (obs, _), ended, steps = env.reset(seed=0), False, []
    env.action_space.seed(0)
    while not ended:
        action = env.action_space.sample()
        after, reward, terminated, truncated, _ = env.step(action)
        ended, obs_before, obs = terminated or truncated, obs, after
        following = {"obs": as_dict(obs), "reward": [reward], "terminated": [terminated], "truncated": [truncated]}
        steps.append(spec.encode({"obs": as_dict(obs_before), "action": as_dict(action), "next": following}))
        buffer.add(steps[-1])
    assert memory_of(storage) == before and len(buffer) == len(steps) > 1
    assert (buffer[:] == torch.stack(steps)).all() and spec.is_in(buffer[:])
    assert spec.is_in(buffer.sample())


HUGE = Unbounded((2**50,), dtype=torch.float64)
ITEM = Composite(obs=Bounded(0, 1, (2, 3)), done=Categorical(2, (1,), dtype=torch.bool))


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda rows: rows.exclude("done"), KeyError),
        (lambda rows: rows.set("obs", torch.zeros(4, 3, 2)), RuntimeError),
        (lambda rows: rows["obs"], TypeError),
    ],
)
def test_writes_that_do_not_fit_are_those_that_do_not_fit_rows(change, error, make) -> None:
    storage = make(10)
    buffer = ReplayBuffer(storage=storage)
    storage.allocate(ITEM)
    before = memory_of(storage)
    for _ in range(2):  # empty, with rows, and emptied
        for filled in (0, 4):
            with pytest.raises(error):
                buffer.extend(change(ITEM.rand((4,))))
            assert len(buffer) == filled and memory_of(storage) == before
            buffer.extend(ITEM.rand((4 - filled,))) if not filled else buffer.empty()
    with pytest.raises(RuntimeError, match="fixed already"):
        storage.allocate(ITEM)


@tensorclass
class Item:
    obs: Tensor


@pytest.mark.parametrize(
    "spec",
    [
        Unbounded((3,), dtype=torch.bfloat16),
        Composite(obs=Unbounded((2,)), data_cls=Item),
        torch.stack([Composite(a=Bounded(0, 1, (2,))), Composite(a=Bounded(0, 2, (2,)))]),
        Composite(a=Composite(b=Unbounded((2, 3)), shape=(2,)), shape=()),
    ],
    ids=["a tensor", "a tensorclass", "a stack", "nested dims"],
)  # fmt: skip
def test_what_fits_a_spec_is_what_it_draws(spec, make) -> None:
    storage = make(5) if isinstance(spec, Composite) else LazyTensorStorage(5)
    storage.allocate(spec)
    before, rows = memory_of(storage), spec.rand((4,))
    buffer = ReplayBuffer(storage=storage)
    buffer.extend(rows)
    assert memory_of(storage) == before and (buffer[:] == rows).all()
    assert isinstance(spec, Unbounded) or isinstance(buffer[0], spec.data_cls or TensorDict)


@pytest.mark.parametrize("dim_extend", [0, 1])
def test_several_dims_of_items(dim_extend, make) -> None:
    row = ITEM.expand(4)
    storage = make(10, ndim=2)
    buffer = ReplayBuffer(storage=storage, dim_extend=dim_extend)
    plan = buffer.plan(row)
    with pytest.raises(ValueError, match=r"begins with 1 dims.*expand"):
        storage.allocate(ITEM)
    storage.allocate(row)
    before, rows = memory_of(storage), row.rand((3,))
    assert storage.max_size == 12 and plan.by_part["items"] == sum(t.nbytes for t in storage.table.rows.tensors)
    buffer.extend(rows.transpose(0, 1) if dim_extend else rows)
    assert memory_of(storage) == before and (storage[:] == rows).all()


def test_an_emptied_storage_is_allocated_anew(make) -> None:
    storage = make(10)
    buffer = ReplayBuffer(storage=storage)
    buffer.extend(TensorDict({"other": torch.zeros(3, 2)}, [3]))
    with pytest.raises(RuntimeError, match="fixed already"):
        storage.allocate(ITEM)
    buffer.empty()
    with pytest.raises((NotEnoughMemoryError, OSError), match="free"):
        storage.allocate(HUGE)
    storage.allocate(ITEM)
    rows = ITEM.rand((4,))
    buffer.extend(rows)
    assert (buffer[:] == rows).all()


def test_objects_of_a_spec_are_stored_as_text_and_the_like(tmp_path) -> None:
    for storage in (LazyTensorStorage(4), LazyMemmapStorage(4, scratch_dir=tmp_path)):
        storage.allocate(Composite(a=NonTensor(()), b=Unbounded(2)))
        buffer = ReplayBuffer(storage=storage)
        with pytest.raises(KeyError):
            buffer.extend(TensorDict({"b": torch.zeros(1, 2)}, [1]))
        buffer.extend(TensorDict({"a": ["text", "more"], "b": torch.zeros(2, 2)}, [2]))
        assert buffer[:]["a"] == ["text", "more"]


@pytest.mark.parametrize(
    ("spec", "error", "text"),
    [
        (Composite(a=Unbounded((2, -1))), ValueError, r"\['a'\] has a dynamic dim"),
        (Composite(a=None), TypeError, r"\['a'\] is NoneType"),
        (TensorDict(a=torch.zeros(2)), TypeError, "the spec is TensorDict"),
        (HUGE, (NotEnoughMemoryError, OSError), "free"),
    ],
)
def test_a_refused_spec_leaves_the_storage_as_it_was(spec, error, text, make) -> None:
    storage = make(10)
    with pytest.raises(error, match=text):
        storage.allocate(spec)
    buffer = ReplayBuffer(storage=storage)
    assert not storage.initialized
    buffer.extend(TensorDict({"other": torch.zeros(3, 2)}, [3]))
    assert len(buffer) == 3


def test_memory_of_the_user_is_not_allocated() -> None:
    with pytest.raises(RuntimeError, match="fixed already"):
        TensorStorage(TensorDict(a=torch.zeros(5, 2), batch_size=[5])).allocate(Composite(a=Unbounded((2,))))


def test_an_allocated_folder_is_opened_empty(tmp_path) -> None:
    storage = LazyMemmapStorage(10, scratch_dir=tmp_path)
    storage.allocate(ITEM)
    storage.close()
    with pytest.raises(RuntimeError, match="closed"):
        storage.allocate(ITEM)
    storage = LazyMemmapStorage.open(tmp_path)
    before, rows = memory_of(storage), ITEM.rand((4,))
    assert len(storage) == 0
    ReplayBuffer(storage=storage).extend(rows)
    assert memory_of(storage) == before and (storage[:] == rows).all()


def test_plans_of_other_storages() -> None:
    item = Composite(pixels=Unbounded((4, 2), dtype=torch.uint8), done=Categorical(2, (1,), dtype=torch.bool))
    spec = Composite({**dict(item.items()), "next": item})
    frames = LazyFrameStorage(10, stack_dim=-2)
    planned = frames.plan(spec).total
    frames.allocate(spec)
    assert frames.plan().total == planned and len(frames) == 0
