"""Samplers, writers and storages that users write: when they are called, what is saved of them, what is refused."""

import copy
import pickle

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from fbuf.checkpoint import CheckpointMismatch
from interop import (
    ConsumingSampler,
    HERReplayBuffer,
    LazyFrameStorage,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    LinearScheduler,
    ListStorage,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    RoundRobinWriter,
    Sampler,
    SamplerEnsemble,
    Storage,
    StorageEnsemble,
    TensorDictReplayBuffer,
    Writer,
)
from interop.checkpoint.state import LoadOptions
from tests.interop.rows import KINDS, check_same, plain_tensor


class Newest(Sampler):
    """Draws the newest item. Notes the calls that it gets."""

    def __init__(self):
        self.calls = []

    def sample(self, storage, batch_size):
        return torch.full((batch_size,), len(storage) - 1), {"note": torch.arange(batch_size)}

    def add(self, index):
        self.calls.append(("add", index))

    def extend(self, index):
        self.calls.append(("extend", index.tolist()))

    def mark_update(self, index, *, storage=None):
        self.calls.append(("mark", torch.as_tensor(index).tolist()))

    def _empty(self):
        self.calls.append(("empty",))


class Column(Storage):
    """Floats in a dict."""

    def __init__(self, max_size):
        super().__init__(max_size)
        self.held = {}

    def set(self, cursor, data, *, set_cursor=True):
        slots = [cursor] if isinstance(cursor, int) else torch.as_tensor(cursor).tolist()
        for slot, value in zip(slots, [data] if isinstance(cursor, int) else data, strict=True):
            self.held[slot] = float(value)

    def get(self, index):
        if isinstance(index, slice):
            index = range(len(self))[index]
        return self.held[index] if isinstance(index, int) else [self.held[int(slot)] for slot in index]

    def __len__(self):
        return len(self.held)

    def _empty(self):
        self.held = {}


class Down(Writer):
    """Writes from the last slot down."""

    def add(self, data):
        return int(self.extend(data[None])[0])

    def extend(self, data):
        index = torch.arange(self._storage.max_size - 1, self._storage.max_size - 1 - len(data), -1)
        self._storage.set(index, data)
        return index

    def _empty(self, empty_write_count=True):
        pass


def own(kind, **members):
    return type("Own", (kind,), members)()


# ------------------------------------------------------------------ samplers


@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage, LazyMemmapStorage])
def test_a_sampler_draws_and_gets_the_writes_of_every_buffer(storage):
    sampler, storage = Newest(), storage(8)
    buffer = ReplayBuffer(storage=storage, sampler=sampler, batch_size=3)
    beside = ReplayBuffer(storage=storage)
    buffer.extend(list(plain_tensor([1, 2])))
    buffer.add(plain_tensor([3])[0])
    batch, info = buffer.sample(return_info=True)
    check_same(batch, plain_tensor([3, 3, 3]))
    assert set(info) == {"index", "note"}
    beside.add(plain_tensor([4])[0])
    buffer.mark_update(torch.tensor([1]))
    beside.empty()
    own_calls = [("mark", [0, 1]), ("extend", [0, 1]), ("mark", 2), ("add", 2)]
    assert sampler.calls == [*own_calls, ("mark", 3), ("mark", [1]), ("empty",)]


def test_a_sampler_may_return_a_list_range_or_tuple():
    sampler = own(Sampler, sample=lambda self, storage, batch_size: (self.index, {}))
    buffer = ReplayBuffer(storage=LazyTensorStorage(4), sampler=sampler)
    buffer.extend(plain_tensor([5, 6, 7]))
    for sampler.index in ([2, 0], torch.tensor([2, 0]), (torch.tensor([2, 0]),), range(2, -1, -2)):
        check_same(buffer.sample(2), plain_tensor([7, 5]))


@pytest.mark.parametrize("returned", [torch.zeros(2), [0, {}], (torch.zeros(2), {}, {}), (torch.zeros(2), None)])
@pytest.mark.parametrize("method", ["draw", "sample"])
@pytest.mark.parametrize("prefetch", [None, 2])
def test_the_error_names_a_sampler_that_returns_something_else(method, returned, prefetch):
    sampler = own(Sampler, **{method: lambda *_: returned})
    buffer = ReplayBuffer(storage=LazyTensorStorage(4), sampler=sampler, batch_size=2, prefetch=prefetch)
    buffer.extend(plain_tensor([1, 2]))
    with pytest.raises(
        TypeError, match=rf"Own\.{method}\(\) must return \(index, info\), of which info is a dict, got "
    ):
        buffer.sample()


def test_a_sampler_needs_draw_or_sample():
    with pytest.raises(TypeError, match="define draw"):
        own(Sampler)


@pytest.mark.parametrize("kind", [RandomSampler, PrioritizedSampler])
def test_a_subclass_that_draws_differently_is_called(kind):
    class First(kind):
        def sample(self, storage, batch_size):
            index, info = super().sample(storage, batch_size)
            return torch.zeros_like(index), {**info, "mine": index}

    sampler = First() if kind is RandomSampler else First(8, 1.0, 1.0)
    buffer = ReplayBuffer(storage=LazyTensorStorage(8), sampler=sampler)
    buffer.extend(plain_tensor(list(range(8))))
    batch, info = buffer.sample(16, return_info=True)
    check_same(batch, plain_tensor([0] * 16))
    assert "mine" in info and ("priority_weight" in info) == (kind is PrioritizedSampler)


@pytest.mark.parametrize("method", ["random_index", "_rand_given_ndim"])
def test_random_indices_of_the_storage_are_the_same_with_prefetch(method):
    drawn = []
    for prefetch in (None, 3):
        sampler = own(Sampler, sample=lambda self, storage, batch_size: (getattr(storage, method)(batch_size), {}))
        generator = torch.Generator().manual_seed(0)
        storage = LazyTensorStorage(64)
        buffer = ReplayBuffer(storage=storage, sampler=sampler, batch_size=8, prefetch=prefetch, generator=generator)
        buffer.extend(torch.arange(64))
        drawn.append(torch.stack([buffer.sample() for _ in range(6)]))
        assert storage.buffer_generator is generator
    assert torch.equal(*drawn) and len(drawn[0].unique()) > 16


class Marks:
    def __init__(self):
        self.rows = []

    def mark_update(self, index):
        self.rows += torch.as_tensor(index).reshape(-1).tolist()


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage, ListStorage])
def test_anything_with_mark_update_can_be_attached(storage, tmp_path):
    marks, tensors = Marks(), storage is not ListStorage
    buffer = PrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=storage(8), batch_size=2)
    buffer.storage.attach(marks)
    buffer.extend(TensorDict({"x": torch.arange(5.0)}, [5]) if tensors else [1, 2, 3, 4, 5])
    buffer.dumps(tmp_path / "saved")
    buffer.loads(tmp_path / "saved")
    buffer.writer.write_at([2], TensorDict({"x": torch.ones(1)}, [1]) if tensors else [1])
    if tensors:
        buffer.update_(TensorDict({"y": torch.ones(5)}, [5]))
    buffer.empty()
    assert marks.rows == [0, 1, 2, 3, 4, 2] and len(buffer) == 0


# ------------------------------------------------------------------ storages and writers


@pytest.mark.parametrize("base", [LazyTensorStorage, LazyMemmapStorage])
def test_a_subclass_that_reads_differently_is_called(base):
    class Doubled(base):
        def get(self, index):
            return super().get(index) * 2

    buffer = ReplayBuffer(storage=Doubled(4))
    buffer.extend(plain_tensor([1, 1]))
    check_same(buffer.sample(3), plain_tensor([2, 2, 2]))
    check_same(buffer[:], plain_tensor([2, 2]))


def test_edits_by_key_reach_a_storage_that_returns_copies():
    class Half(LazyTensorStorage):
        def set(self, cursor, data, *, set_cursor=True):
            super().set(cursor, data.half(), set_cursor=set_cursor)

        def get(self, index):
            return super().get(index).float()

    buffer = ReplayBuffer(storage=Half(8))
    buffer.extend(TensorDict({"x": torch.arange(4.0)}, [4]))
    for edit in (
        lambda: buffer.update_({"x": buffer[:]["x"] + 1}),
        lambda: buffer.set_("x", buffer[:]["x"] + 1),
        lambda: buffer.__setitem__("x", buffer[:]["x"] + 1),
    ):
        wanted = buffer[:]["x"] + 1
        edit()
        check_same(buffer[:]["x"], wanted)
    lanes = ReplayBuffer(storage=Half(12, ndim=2))
    lanes.extend(TensorDict({"x": torch.arange(6.0).reshape(2, 3)}, [2, 3]))
    lanes["x"] = lanes[:]["x"] + 1
    check_same(lanes[:]["x"], torch.arange(6.0).reshape(2, 3) + 1)


@pytest.mark.parametrize("kind", ["tensor", "tensordict", "dict", "tuple", "namedtuple"])
@pytest.mark.parametrize("count", [3, 11])
def test_a_subclass_that_writes_differently_is_called(kind, count):
    class Noting(LazyTensorStorage):
        def set(self, cursor, data, *, set_cursor=True):
            self.noted = [*getattr(self, "noted", []), cursor]
            super().set(cursor, data, set_cursor=set_cursor)

    buffer = ReplayBuffer(storage=Noting(4))
    buffer.extend(KINDS[kind](list(range(count))))
    assert buffer.storage.noted and buffer.write_count == count and len(buffer) == min(count, 4)
    check_same(buffer[:], KINDS[kind]([0, 1, 2] if count == 3 else [8, 9, 10, 7]))


def test_a_storage_written_from_scratch():
    with pytest.raises(NotImplementedError):
        ReplayBuffer(storage=Column(3))  # needs a collate_fn
    buffer = ReplayBuffer(storage=Column(3), collate_fn=torch.tensor)
    assert buffer.add(5) == 0
    check_same(buffer.extend([6, 7, 8]), torch.tensor([1, 2, 0]))
    check_same(buffer[:], torch.tensor([8.0, 6.0, 7.0]))
    assert set(buffer.sample(30).tolist()) == {6.0, 7.0, 8.0} and len(buffer) == 3 and buffer.write_count == 4
    buffer[1] = 9
    assert buffer[1] == 9.0
    buffer.empty()
    assert len(buffer) == 0


def test_a_writer_chooses_the_slots():
    buffer = ReplayBuffer(storage=LazyTensorStorage(4), writer=Down())
    check_same(buffer.extend(plain_tensor([1, 2, 3, 4])), torch.tensor([3, 2, 1, 0]))
    check_same(buffer[:], plain_tensor([4, 3, 2, 1]))
    assert buffer.add(plain_tensor([9])[0]) == 3
    assert set(buffer.sample(64)[:, 0].tolist()) == {9.0, 3.0, 2.0, 4.0}


def test_a_writer_returns_minus_one_for_items_that_it_does_not_store():
    class Even(RoundRobinWriter):
        def extend(self, data):
            kept = data[:, 0] % 2 == 0
            index = torch.full((len(data),), -1)
            if kept.any():
                index[kept] = super().extend(data[kept])
            return index

    buffer = ReplayBuffer(storage=LazyTensorStorage(8), sampler=PrioritizedSampler(8, 1.0, 1.0), writer=Even())
    check_same(buffer.extend(plain_tensor([1, 2, 3, 4])), torch.tensor([-1, 0, -1, 1]))
    assert len(buffer) == 2 and buffer.write_count == 2
    check_same(buffer.sampler.priorities, torch.ones(2))
    assert set(buffer.sample(64)[:, 0].tolist()) == {2.0, 4.0}


# ------------------------------------------------------------------ checkpoints


def ways_to_save(component, tmp_path):
    name = "writer" if isinstance(component, Writer) else "sampler"
    buffer = ReplayBuffer(storage=LazyTensorStorage(4), **{name: component})
    buffer.extend(plain_tensor([1, 2, 3, 4]))
    return [buffer.state_dict, component.state_dict] + [
        lambda saves=saves: saves.dumps(tmp_path / "saved") for saves in (buffer, component)
    ]


@pytest.mark.parametrize("kind", [Newest, Down, RandomSampler, ConsumingSampler, RoundRobinWriter])
def test_attributes_that_would_not_be_saved_are_refused(kind, tmp_path):
    component = own(kind)
    component.mine = 3
    for save in ways_to_save(component, tmp_path):
        with pytest.raises(
            NotImplementedError,
            match=r"Own has attributes .*mine.*: define state_dict and load_state_dict, or stateless = True",
        ):
            save()
    assert not (tmp_path / "saved").exists()
    type(component).stateless = True
    for save in ways_to_save(component, tmp_path):
        save()


@pytest.mark.parametrize("half", ["state_dict", "load_state_dict"])
@pytest.mark.parametrize("kind", [Newest, Down, RandomSampler, RoundRobinWriter])
def test_a_class_with_one_of_the_two_methods_needs_the_other(kind, half, tmp_path):
    component = own(kind, **{half: lambda self, *state: {}})
    other = "state_dict" if half == "load_state_dict" else "load_state_dict"
    for save in ways_to_save(component, tmp_path)[-2:]:
        with pytest.raises(NotImplementedError, match=f"Own has .*: define {other}$"):
            save()


@pytest.mark.parametrize(
    "base", [LazyTensorStorage, LazyMemmapStorage, ListStorage, LazyStackStorage, LazyFrameStorage]
)
def test_a_storage_extends_its_state(base, tmp_path):
    class Named(base):
        name = "none"
        numbers = np.zeros(0)

        def state(self):
            return {**super().state(), "name": self.name, "numbers": self.numbers}

        def with_state(self, tree, options):
            put_items = super().with_state(tree, options)
            name, numbers = tree["name"], np.asarray(tree["numbers"])
            if name == "refused":
                raise CheckpointMismatch("another name")

            def put():
                put_items()
                self.name, self.numbers = name, numbers

            return put

    def made():
        arguments = {"obs_key": "observation", "stack": 1, "stack_dim": 0} if base is LazyFrameStorage else {}
        return TensorDictReplayBuffer(storage=Named(8, **arguments), batch_size=2)

    one = made()
    data = TensorDict({"observation": torch.zeros(4, 1, 3, dtype=torch.uint8), "episode": torch.arange(4)}, [4])
    one.extend(data.set("next", data.select("observation").set("done", torch.ones(4, 1, dtype=torch.bool))))
    one.storage.name, one.storage.numbers = "one", np.arange(3.0)
    one.dumps(tmp_path / "saved")
    saved = one.state_dict()
    for load in (
        lambda other: other.loads(tmp_path / "saved"),
        lambda other: other.load_state_dict(saved),
        lambda other: other.storage.load_state_dict(saved["_storage"]),
        lambda other: other.storage.with_state(one.storage.state(), LoadOptions())(),
    ):
        other = made()
        load(other)
        assert len(other) == 4 and other.storage.name == "one" and other.storage.numbers.tolist() == [0, 1, 2]
    saved["_storage"]["name"] = "refused"
    with pytest.raises(CheckpointMismatch, match="another name"):
        other.load_state_dict(saved)
    assert other.storage.name == "one"


# ------------------------------------------------------------------ components of another library


@pytest.mark.parametrize(
    "use, name",
    [
        (lambda theirs: ReplayBuffer(storage=theirs), "ListStorage"),
        (lambda theirs: ReplayBuffer(writer=lambda: theirs), "RoundRobinWriter"),
        (lambda theirs: ReplayBuffer(sample_unit=theirs), "Transition"),
        (lambda theirs: ReplayBuffer(checkpointer=theirs), "TensorStorageCheckpointer"),
        (lambda theirs: ReplayBuffer(sampler=theirs, consume_after_n_samples=1), "ConsumingSampler"),
        (lambda theirs: PrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=theirs), "LazyTensorStorage"),
        (lambda theirs: HERReplayBuffer(lambda *_: 0, sampler=theirs), "SliceSampler"),
        (lambda theirs: ReplayBufferEnsemble(theirs), "ReplayBuffer"),
        (lambda theirs: StorageEnsemble(theirs), "LazyTensorStorage"),
        (lambda theirs: SamplerEnsemble(theirs), "RandomSampler"),
        (lambda theirs: LinearScheduler(theirs, "beta", 1.0, 4).step(), "PrioritizedSampler"),
        (lambda theirs: ReplayBuffer().set_sampler(theirs), "RandomSampler"),
    ],
)
def test_the_error_for_a_component_of_another_library_names_ours(use, name):
    theirs = type(name, (), {"__module__": "torchrl.data.replay_buffers"})()
    with pytest.raises(TypeError, match=rf"torchrl\.data\.replay_buffers\.{name}; use interop\.{name}$"):
        use(theirs)


class Marking(PrioritizedSampler):
    """Notes how many items it is told of."""

    seen: tuple[int, ...] = ()

    def mark_update(self, index, *, storage=None):
        self.seen = (*self.seen, torch.as_tensor(index).numel())
        super().mark_update(index, storage=storage)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda buffer: pickle.loads(pickle.dumps(buffer))])
def test_stored_items_are_marked_by_the_method_of_the_user(copied):
    """When a prioritized sampler joins a buffer, and in its copies by their own method."""
    storage = LazyTensorStorage(20)
    ReplayBuffer(storage=storage).extend(torch.arange(7))
    buffer = ReplayBuffer(storage=storage, sampler=Marking(20, 0.6, 0.4), batch_size=4)
    assert buffer.sampler.seen == (7,)
    other = copied(buffer)
    other.extend(torch.arange(3))
    other.set_storage(storage)
    assert buffer.sampler.seen == (7,) and other.sampler.seen == (7, 3, 7)
