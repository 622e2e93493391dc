"""A plan of a buffer is what its first write takes; a write that does not fit is refused before anything is made."""

from pathlib import Path
from typing import Any

import jax
import pytest
import torch
from tensordict import TensorDict

from fbuf import Plan
from interop import (
    CompressedListStorage,
    ConsumingSampler,
    LazyFrameStorage,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    RoundRobinWriter,
    Sampler,
    SamplerWithoutReplacement,
    SliceSampler,
    StalenessAwareSampler,
    Storage,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
)
from interop.transforms import CatFrames, MultiStepTransform

CAPACITY = 1_000


def steps(count: int = 6, shape: tuple[int, ...] = ()) -> TensorDict:
    """Steps whose observations are frames."""
    lead = (*shape, count) if not shape else (count, *shape)
    frames = torch.zeros(*lead, 4, 8, 8, dtype=torch.uint8)
    done = torch.zeros(*lead, 1, dtype=torch.bool)
    following = TensorDict({"pixels": frames.clone(), "done": done, "reward": torch.zeros(*lead, 1)}, lead)
    ids = torch.zeros(lead, dtype=torch.int64)
    return TensorDict({"pixels": frames, "action": torch.zeros(*lead, 3), "id": ids, "next": following}, lead)


def nbytes(tensors: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def in_folder(folder: Path, *suffixes: str) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.suffix in suffixes)


# ------------------------------------------------------------------ equal to what there is


DATA = {
    "a tensordict": lambda: steps(),
    "a tensor": lambda: torch.zeros(5, 3, dtype=torch.bfloat16),
    "a tuple": lambda: (torch.zeros(5, 2), {"a": torch.zeros(5, dtype=torch.bool)}),
    "a list of items": lambda: [steps(1)[0] for _ in range(3)],
}


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("make", [LazyTensorStorage, LazyMemmapStorage], ids=lambda make: make.__name__)
def test_rows_in_memory(make, data) -> None:
    buffer, given = ReplayBuffer(storage=make(CAPACITY)), DATA[data]()
    plan = buffer.plan(given)
    assert not buffer.storage.initialized and len(buffer) == 0 and buffer.write_count == 0
    buffer.extend(given)
    rows = buffer.storage.table.rows.tensors
    assert plan.total == nbytes(rows) == plan.by_part["items"] and not plan.unknown
    assert [(share.shape, share.dtype) for share in plan.shares] == [
        (tuple(row.shape), str(row.dtype).removeprefix("torch.")) for row in rows
    ]
    assert buffer.plan().by_key == plan.by_key == buffer.plan(given).by_key


def test_files(tmp_path) -> None:
    for kept in (False, True):
        folder = tmp_path / str(kept)
        sampler: Any = PrioritizedSampler(CAPACITY, 0.6, 0.4) if kept else RandomSampler()
        buffer = TensorDictReplayBuffer(storage=LazyMemmapStorage(CAPACITY, scratch_dir=folder), sampler=sampler)
        plan = buffer.plan(steps())
        assert not folder.exists()
        buffer.extend(steps())
        assert plan.needed[str(folder)] == in_folder(folder, ".memmap", ".state", ".priorities")
        assert ("file storage.priorities" in plan.by_key) == kept
        assert buffer.plan().by_key == plan.by_key


def test_files_that_processes_agree_on(tmp_path) -> None:
    for make in (
        lambda: LazyMemmapStorage(CAPACITY, scratch_dir=tmp_path / "a", shared_init=True),
        lambda: LazyMemmapStorage(CAPACITY, shared_init=True),
        lambda: LazyTensorStorage(CAPACITY, shared_init=True),
    ):
        storage: Any = make()
        buffer = ReplayBuffer(storage=storage)
        plan = buffer.plan(steps())
        buffer.extend(steps())
        (place,) = plan.needed
        assert nbytes(storage.table.rows.tensors) == in_folder(Path(place), ".memmap")
        assert plan.total == in_folder(Path(place), ".memmap", ".state")


@pytest.mark.parametrize("finals", [None, 7])
@pytest.mark.parametrize("stack", [1, 4])
def test_frames(stack, finals) -> None:
    buffer = TensorDictReplayBuffer(
        storage=LazyFrameStorage(CAPACITY, stack=stack, stack_dim=0 if stack == 4 else -3, finals=finals, ndim=2),
        dim_extend=0,
    )
    plan = buffer.plan(steps(4, (2,)))
    buffer.extend(steps(4, (2,)))
    memory = buffer.storage.table.rows.tensors
    frame = 256 // stack
    assert plan.total == nbytes(memory) - frame * (CAPACITY if finals is None else finals)
    assert nbytes(memory) == sum(share.bytes or 0 for share in plan.shares)
    assert buffer.plan().by_key == plan.by_key


@pytest.mark.parametrize(
    "sampler",
    [
        PrioritizedSampler(CAPACITY, 0.6, 0.4),
        PrioritizedSampler(2 * CAPACITY, 0.6, 0.4, max_priority_within_buffer=True),
        PrioritizedSampler(CAPACITY, 0.6, 0.4, dtype=torch.float64),
        PrioritizedSliceSampler(CAPACITY, 0.6, 0.4, num_slices=2, end_key=("next", "done")),
    ],
    ids=lambda sampler: type(sampler).__name__,
)
def test_priorities(sampler) -> None:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(CAPACITY), sampler=sampler)
    plan = buffer.plan(steps())
    buffer.extend(steps())
    assert plan.by_part["sampler"] == nbytes(
        [*jax.tree.leaves(sampler.functional_state.tree), sampler.item_values._priorities._given]
    )
    assert buffer.plan().by_key == plan.by_key
    assert bool(plan.unknown) == isinstance(sampler, SliceSampler)


def test_other_samplers_and_writers() -> None:
    def at_most(sampler: Sampler) -> int:
        buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(CAPACITY), sampler=sampler)
        plan = buffer.plan(steps())
        assert "sampler" not in plan.by_part and not plan.unknown
        return sum(share.bytes or 0 for share in plan.shares if share.counts == "at most")

    assert at_most(RandomSampler()) == 0
    assert at_most(SamplerWithoutReplacement()) == 8 * CAPACITY
    assert at_most(SamplerWithoutReplacement(shuffle=False)) == 0
    assert at_most(ConsumingSampler()) == 24 * CAPACITY
    assert at_most(StalenessAwareSampler(version_key="id")) == 40 * CAPACITY

    class Own(Sampler):
        def sample(self, storage: Any, batch_size: int) -> Any:
            return torch.zeros(batch_size, dtype=torch.int64), {}

    assert ReplayBuffer(storage=LazyTensorStorage(9), sampler=Own()).plan(steps()).unknown == ("sampler of a Own",)
    slices = ReplayBuffer(storage=LazyTensorStorage(9), sampler=SliceSampler(num_slices=1))
    assert slices.plan(steps()).unknown == ("sampler where trajectories start and stop",)
    counting = ReplayBuffer(storage=LazyTensorStorage(CAPACITY), writer=RoundRobinWriter(track_generations=True))
    assert counting.plan(steps()).by_part["writer"] == 8 * CAPACITY
    ranking = TensorDictReplayBuffer(
        storage=LazyTensorStorage(CAPACITY), writer=TensorDictMaxValueWriter(rank_key="id")
    )
    plan = ranking.plan(steps())
    ranking.extend(steps())
    assert plan.by_part["items"] == nbytes(ranking.storage.table.rows.tensors)


# ------------------------------------------------------------------ what cannot be told


def test_lists() -> None:
    buffer = ReplayBuffer(storage=ListStorage(CAPACITY))
    plan = buffer.plan([steps(1)[0]] * 3)
    assert plan.total == 0 and plan.unknown == ("items the objects of the list",)
    assert sum(share.bytes or 0 for share in plan.shares if share.counts == "at most") == 537 * CAPACITY
    buffer.extend([steps(1)[0]] * 3)
    assert buffer.plan().shares == plan.shares
    assert ReplayBuffer(storage=ListStorage(CAPACITY)).plan(["a", object()]).unknown == plan.unknown
    assert [share.bytes for share in ListStorage().plan([torch.zeros(3)]).shares] == [None]
    assert LazyStackStorage(5).plan(steps()).unknown == plan.unknown
    packed = ReplayBuffer(storage=CompressedListStorage(CAPACITY)).plan([torch.zeros(5)])
    assert packed.unknown == ("items compressed tensors", *plan.unknown)

    class Own(Storage):
        def __len__(self) -> int:
            return 0

    assert Own(3).plan().unknown == ("items of a Own",)


# ------------------------------------------------------------------ transforms and members


def test_what_transforms_make_is_planned_and_what_they_keep_stays() -> None:
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(CAPACITY), transform=MultiStepTransform(3, 0.9), batch_size=2
    )
    other = TensorDictReplayBuffer(storage=LazyTensorStorage(CAPACITY), transform=MultiStepTransform(3, 0.9))
    for turn in range(3):
        plan = buffer.plan(steps(8))
        assert turn == 0 or plan.total == nbytes(buffer.storage.table.rows.tensors)
        rows = buffer.extend(steps(8)), other.extend(steps(8))
        assert torch.equal(*rows) and len(buffer) == len(other)
    assert plan.by_part == other.plan().by_part
    with pytest.raises(RuntimeError, match="more rows"):
        TensorDictReplayBuffer(storage=LazyTensorStorage(3), transform=MultiStepTransform(3, 0.9)).plan(steps(2))
    stacked = TensorDictReplayBuffer(
        storage=LazyTensorStorage(CAPACITY), transform=CatFrames(2, -1, in_keys=["action"])
    )
    assert stacked.plan(steps()).by_key["items 'action'"] == 12 * CAPACITY  # it stacks what is read


def test_the_plan_of_a_buffer_is_a_table_of_its_keys() -> None:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(CAPACITY), batch_size=3)
    plan = buffer.plan(steps())
    assert isinstance(plan, Plan) and plan.needed.keys() == {"cpu"}
    assert plan.by_key == {
        "items 'pixels'": 256 * CAPACITY,
        "items 'action'": 12 * CAPACITY,
        "items 'id'": 8 * CAPACITY,
        "items ('next', 'pixels')": 256 * CAPACITY,
        "items ('next', 'done')": CAPACITY,
        "items ('next', 'reward')": 4 * CAPACITY,
        "items 'index'": 8 * CAPACITY,
    }
    lines = str(plan).splitlines()
    assert len(lines) == 2 + len(plan.shares) and lines[-1].startswith(f"cpu: {plan.total} bytes, 5")
