"""Samplers and writers of the user's: what of them is saved, which writes they hear of, what they are refused for."""

import pytest
import torch
from tensordict import TensorDict

from interop import (
    ConsumingSampler,
    HERReplayBuffer,
    LazyMemmapStorage,
    LazyTensorStorage,
    LinearScheduler,
    ListStorage,
    PrioritizedReplayBuffer,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    RoundRobinWriter,
    Sampler,
    SamplerEnsemble,
    StorageEnsemble,
    Writer,
)
from tests.interop.rows import plain_tensor


class Uniform(Sampler):
    """Draws as RandomSampler does and notes the writes."""

    def sample(self, storage, batch_size):
        return storage.random_index(batch_size), {}

    def mark_update(self, index, *, storage=None):
        self.heard = [*getattr(self, "heard", []), torch.as_tensor(index).tolist()]

    def _empty(self):
        self.heard = [*getattr(self, "heard", []), "empty"]


class Down(Writer):
    """Writes from the last slot down."""

    cursor = None

    def add(self, data):
        return int(self.extend([data])[0])

    def extend(self, data):
        self.below = getattr(self, "below", self._storage.max_size) - len(data)
        index = torch.arange(self.below, self.below + len(data))
        self._storage.set(index, data)
        return index

    def _empty(self, empty_write_count=True):
        self.below = self._storage.max_size


def ways_to_save(component, tmp_path):
    name = "writer" if isinstance(component, Writer) else "sampler"
    buffer = ReplayBuffer(storage=LazyTensorStorage(4), **{name: component})
    buffer.extend(plain_tensor([1, 2, 3, 4]))
    return [buffer.state_dict, component.state_dict] + [
        lambda saves=saves: saves.dumps(tmp_path / "saved") for saves in (buffer, component)
    ]


def own(kind, **members):
    return type("Own", (kind,), members)()


# ------------------------------------------------------------------ what is saved


@pytest.mark.parametrize("kind", [Uniform, Down, RandomSampler, ConsumingSampler, RoundRobinWriter])
def test_attributes_that_would_not_be_saved_are_refused(kind, tmp_path):
    component = own(kind)
    component.mine = 3
    for save in ways_to_save(component, tmp_path):
        with pytest.raises(
            NotImplementedError, match=r"Own has attributes .*mine.*: define state_dict and load_state_dict"
        ):
            save()
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize("half", ["state_dict", "load_state_dict"])
@pytest.mark.parametrize("kind", [Uniform, Down, RandomSampler, RoundRobinWriter])
def test_a_class_that_defines_half_of_its_state_is_told_the_other_half(kind, half, tmp_path):
    component = own(kind, **{half: lambda self, *state: {}})
    other = "state_dict" if half == "load_state_dict" else "load_state_dict"
    for save in ways_to_save(component, tmp_path)[-2:]:
        with pytest.raises(NotImplementedError, match=f"Own has .*: define {other}$"):
            save()


def test_a_sampler_with_both_halves_goes_on_where_it_was(tmp_path):
    class InTurn(Sampler):
        def __init__(self):
            self.next = 0

        def sample(self, storage, batch_size):
            index = torch.arange(self.next, self.next + batch_size) % len(storage)
            self.next = int(index[-1]) + 1
            return index, {}

        def state_dict(self):
            return {"next": self.next}

        def load_state_dict(self, state_dict):
            self.next = state_dict["next"]

    one, two = (ReplayBuffer(storage=LazyTensorStorage(8), sampler=InTurn(), batch_size=3) for _ in range(2))
    one.extend(torch.arange(8))
    one.sample()
    one.dumps(tmp_path / "saved")
    two.loads(tmp_path / "saved")
    assert one.sample().tolist() == two.sample().tolist() == [3, 4, 5]


# ------------------------------------------------------------------ which writes are heard of


@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage, LazyMemmapStorage])
def test_a_sampler_hears_of_every_write_of_every_buffer(storage):
    sampler, storage = Uniform(), storage(8)
    buffer = ReplayBuffer(storage=storage, sampler=sampler, collate_fn=list)
    beside = ReplayBuffer(storage=storage, collate_fn=list)
    buffer.extend([torch.ones(2)] * 2)
    beside.add(torch.ones(2))
    beside.set_writer(buffer.writer)
    beside.extend([torch.ones(2)] * 2)
    beside.empty()
    assert sampler.heard == [[0, 1], 2, [3, 4], "empty"]  # the second writer goes on where the ring stands


# ------------------------------------------------------------------ what a sampler returns


@pytest.mark.parametrize(
    "returned",
    [torch.zeros(2), None, [0, {}], (torch.zeros(2), {}, {}), (torch.zeros(2), None), (torch.zeros(2), torch.zeros(2))],
)
@pytest.mark.parametrize("method", ["draw", "sample"])
@pytest.mark.parametrize("prefetch", [None, 2])
def test_a_sampler_that_returns_something_else_is_named(method, returned, prefetch):
    sampler = own(Sampler, **{method: lambda *_: returned})
    buffer = ReplayBuffer(storage=LazyTensorStorage(4), sampler=sampler, batch_size=2, prefetch=prefetch)
    buffer.extend(plain_tensor([1, 2]))
    with pytest.raises(
        TypeError, match=rf"Own\.{method}\(\) must return \(index, info\), of which info is a dict, got "
    ):
        buffer.sample()


@pytest.mark.parametrize("kind", ["random_index", "_rand_given_ndim"])
def test_an_index_of_the_storage_is_the_same_when_it_is_drawn_ahead(kind):
    drawn = []
    for prefetch in (None, 3):
        sampler = own(Sampler, sample=lambda self, storage, batch_size: (getattr(storage, kind)(batch_size), {}))
        generator = torch.Generator().manual_seed(0)
        storage = LazyTensorStorage(64)
        buffer = ReplayBuffer(storage=storage, sampler=sampler, batch_size=8, prefetch=prefetch, generator=generator)
        buffer.extend(torch.arange(64))
        drawn.append(torch.stack([buffer.sample() for _ in range(6)]))
        assert storage.buffer_generator is generator
    assert torch.equal(*drawn) and len(drawn[0].unique()) > 16


class Heard:
    def __init__(self):
        self.rows = []

    def mark_update(self, index):
        self.rows += torch.as_tensor(index).reshape(-1).tolist()


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage, ListStorage])
def test_anything_with_mark_update_can_be_attached(storage, tmp_path):
    heard, tensors = Heard(), storage is not ListStorage
    buffer = PrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=storage(8), batch_size=2)
    buffer.storage.attach(heard)
    buffer.extend(TensorDict({"x": torch.arange(5.0)}, [5]) if tensors else [1, 2, 3, 4, 5])
    buffer.dumps(tmp_path / "saved")
    buffer.loads(tmp_path / "saved")
    buffer.writer.write_at([2], TensorDict({"x": torch.ones(1)}, [1]) if tensors else [1])
    if tensors:
        buffer.update_(TensorDict({"y": torch.ones(5)}, [5]))
    buffer.empty()
    assert heard.rows == [0, 1, 2, 3, 4, 2] and len(buffer) == 0


# ------------------------------------------------------------------ refusals of others' components


def theirs(name):
    return type(name, (), {"__module__": "torchrl.data.replay_buffers"})()


@pytest.mark.parametrize(
    "refused, name",
    [
        (lambda given: ReplayBuffer(storage=given), "ListStorage"),
        (lambda given: ReplayBuffer(sampler=given), "RandomSampler"),
        (lambda given: ReplayBuffer(writer=lambda: given), "RoundRobinWriter"),
        (lambda given: ReplayBuffer(sample_unit=given), "Transition"),
        (lambda given: ReplayBuffer(checkpointer=given), "TensorStorageCheckpointer"),
        (lambda given: ReplayBuffer(sampler=given, consume_after_n_samples=1), "ConsumingSampler"),
        (lambda given: PrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=given), "LazyTensorStorage"),
        (lambda given: HERReplayBuffer(lambda *_: 0, sampler=given), "SliceSampler"),
        (lambda given: ReplayBufferEnsemble(given), "ReplayBuffer"),
        (lambda given: StorageEnsemble(given), "LazyTensorStorage"),
        (lambda given: SamplerEnsemble(given), "RandomSampler"),
        (lambda given: LinearScheduler(given, "beta", 1.0, 4).step(), "PrioritizedSampler"),
        (lambda given: ReplayBuffer().set_sampler(given), "RandomSampler"),
    ],
)
def test_a_component_of_another_library_is_refused_with_its_full_name_and_ours(refused, name):
    with pytest.raises(TypeError, match=rf"torchrl\.data\.replay_buffers\.{name}; use interop\.{name}$"):
        refused(theirs(name))
