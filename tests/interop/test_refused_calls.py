"""Calls that are refused: before anything is written or drawn, with what to do about it."""

import gc
import warnings
import weakref

import pytest
import torch
from tensordict import TensorDict

from interop import (
    Compose,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    TensorStorage,
    TensorStorageCheckpointer,
)
from tests.interop.rows import check_same, flat_td, plain_tensor, refused, state_of, steps
from tests.interop.test_threads_and_processes import in_a_fresh_interpreter


def tensordicts(storage=LazyTensorStorage, **kwargs):
    return TensorDictPrioritizedReplayBuffer(alpha=0.7, beta=0.5, storage=storage(8), **kwargs)


# ------------------------------------------------------------------ priorities


BAD = {
    "too large for the dtype": torch.tensor([1e300, 1.0], dtype=torch.float64),
    "bool": torch.tensor([True, False]),
    "complex": torch.tensor([1j, 1j]),
    "text": "text",
    "tensordict": TensorDict({"x": torch.ones(2)}, [2]),
    "too many": torch.ones(2, 3),
    "none": torch.ones(2, 0),
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
def test_priorities_that_cannot_be_used_refuse_the_rows(bad, storage):
    buffer = tensordicts(storage)
    rows = flat_td([0, 1]).set("td_error", BAD[bad])
    with refused(buffer, RuntimeError, "update_priority=False"):
        buffer.extend(rows)
    if bad != "too many":  # several values of one item are reduced
        with refused(buffer, RuntimeError, "cannot be used"):
            buffer.add(rows[0])
    if storage is ListStorage:
        buffer.extend(rows, update_priority=False)
        assert len(buffer) == 2


@pytest.mark.parametrize("reduction", ["max", "min", "mean", "median", "sum"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.float16])
def test_priorities_of_any_number_dtype_are_reduced(reduction, dtype):
    buffer = tensordicts(reduction=reduction)
    buffer.extend(flat_td([0, 1]))
    batch = buffer[:].clone().set("td_error", torch.tensor([[2, 4, 9], [1, 2, 6]], dtype=dtype))
    buffer.update_tensordict_priority(batch)
    wanted = {"max": [9, 6], "min": [2, 1], "mean": [5, 3], "median": [4, 2], "sum": [15, 9]}[reduction]
    check_same(buffer.sampler.priorities, torch.tensor(wanted, dtype=torch.float32))
    with refused(buffer, TypeError, "real numbers"):
        buffer.update_tensordict_priority(batch.set("td_error", torch.ones(2, 3, dtype=torch.bool)))


def test_a_sampler_of_ones_own_is_asked_for_its_priorities():
    calls = []

    class Own(RandomSampler):
        def update_priority(self, index, priority, *, storage=None):
            calls.append((torch.as_tensor(index).reshape(-1).tolist(), torch.as_tensor(priority).tolist()))

    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(8), sampler=Own())
    buffer.extend(flat_td([0, 1]).set("td_error", torch.tensor([3.0, 4.0])))
    buffer.add(flat_td([2])[0].set("td_error", torch.tensor(5.0)))
    buffer.update_tensordict_priority(buffer[1:3])
    assert calls == [([0, 1], [3.0, 4.0]), ([2], [5.0]), ([1, 2], [4.0, 5.0])]


def test_a_warning_that_is_an_error_comes_before_the_write():
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(8))
    with refused(buffer, UserWarning, "prioritized"):
        buffer.extend(flat_td([0, 1]).set("td_error", "text"))


@pytest.mark.parametrize("shape", [(24, 1), (24,), (2, 3, 4), (2, 3, 4, 1)])
def test_priorities_for_several_item_dims_come_in_any_of_their_shapes(shape):
    buffer = PrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=LazyTensorStorage(24, ndim=3))
    index = buffer.extend(torch.zeros(2, 3, 4))
    given = torch.arange(24.0)
    by_user = given.reshape(4, 3, 2).transpose(0, 2).reshape(shape) if len(shape) > 2 else given.reshape(shape)
    buffer.update_priority(index, by_user)
    check_same(buffer.sampler.priorities, given)


def test_only_tensordicts_are_added_to_a_tensordict_buffer():
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(8))
    for item in (steps([1])[0], {"a": torch.zeros(3)}, torch.zeros(3)):
        with refused(buffer, ValueError, r"add\(\) takes a TensorDict"):
            buffer.add(item)


@pytest.mark.slow
def test_a_forked_child_that_cannot_keep_priorities_writes_nothing():
    out = in_a_fresh_interpreter("""
        import multiprocessing
        import torch
        from tensordict import TensorDict
        from interop import LazyMemmapStorage, ReplayBuffer, TensorDictPrioritizedReplayBuffer

        def worker():
            for write in (buffer.extend, other.extend, lambda data: buffer.add(data[0])):
                try:
                    write(TensorDict({"a": torch.ones(4)}, [4]))
                except RuntimeError as error:
                    assert "fork" in str(error), error
                else:
                    raise AssertionError

        storage = LazyMemmapStorage(64)
        buffer = TensorDictPrioritizedReplayBuffer(alpha=0.6, beta=0.4, storage=storage)
        other = ReplayBuffer(storage=storage)
        buffer.extend(TensorDict({"a": torch.zeros(4)}, [4]))
        buffer.sample(2)
        process = multiprocessing.get_context("fork").Process(target=worker)
        process.start()
        process.join(30)
        print(process.exitcode, len(buffer), buffer.write_count, buffer.writer._cursor)
    """)
    assert out == "0 4 4 4\n"


# ------------------------------------------------------------------ draws


@pytest.mark.parametrize("generator", [None, 3])
@pytest.mark.parametrize("prefetch", [None, 2])
@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
def test_a_refused_draw_leaves_the_generator_alone(generator, prefetch, storage):
    generator = None if generator is None else torch.Generator().manual_seed(generator)
    sampler = PrioritizedSampler(8, 0.6, 0.4, eps=0)
    buffer = ReplayBuffer(storage=storage(8), sampler=sampler, generator=generator, batch_size=2, prefetch=prefetch)
    with refused(buffer, RuntimeError, "empty"):
        buffer.sample()
    buffer.extend(plain_tensor([0, 1]))
    buffer.update_priority(torch.arange(2), 0.0)
    with refused(buffer, RuntimeError, "p_sum"):
        buffer.sample()
    buffer.update_priority(torch.arange(2), 1.0)
    assert buffer.sample().shape == (2, 3)


def test_a_sampler_that_names_what_is_not_stored_leaves_the_generator_alone():
    class Beyond(RandomSampler):
        def sample(self, storage, batch_size):
            return super().sample(storage, batch_size)[0] + 10, {}

    buffer = ReplayBuffer(storage=LazyTensorStorage(8), sampler=Beyond())
    buffer.extend(plain_tensor([0, 1]))
    with refused(buffer, IndexError):
        buffer.sample(3)


@pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictReplayBuffer])
def test_a_warning_about_the_batch_size_points_to_the_call(kind):
    buffer = kind(storage=LazyTensorStorage(8), batch_size=2)
    buffer.extend(flat_td([0, 1]))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        buffer.sample(3)
    assert [each.filename for each in caught] == [__file__]


# ------------------------------------------------------------------ components


@pytest.mark.parametrize(
    "bad",
    [{"generator": 42}, {"collate_fn": 3}, {"dim_extend": 1.5}, {"dim_extend": True}, {"generator": "seed"}],
    ids=repr,
)
def test_arguments_of_the_wrong_kind_are_refused(bad):
    with pytest.raises(TypeError, match=next(iter(bad))):
        ReplayBuffer(**bad)


def test_exchanges_for_the_wrong_kind_are_refused():
    buffer = ReplayBuffer(storage=LazyTensorStorage(8))
    with refused(buffer, TypeError, "generator"):
        buffer.set_rng(42)
    with refused(buffer, TypeError, "collate_fn"):
        buffer.set_storage(LazyTensorStorage(8), collate_fn=3)


def test_a_refused_constructor_leaves_the_storage_alone():
    storage = LazyTensorStorage(10)
    storage.checkpointer = mine = TensorStorageCheckpointer()
    for bad in ({"sampler": PrioritizedSampler(5, 1.0, 1.0)}, {"writer": 5}, {"transform": 5}):
        with pytest.raises((ValueError, TypeError, RuntimeError)):
            ReplayBuffer(storage=storage, **bad)
        assert storage.checkpointer is mine and storage.attached() == []


def test_making_components_late_is_tried_again():
    tries = []

    def flaky():
        tries.append(1)
        if len(tries) == 1:
            raise OSError("disk")
        return LazyTensorStorage(4)

    buffer = ReplayBuffer(storage=flaky, delayed_init=True)
    with pytest.raises(OSError, match="disk"):
        len(buffer)
    assert not buffer.initialized
    buffer.extend(plain_tensor([1]))
    assert len(buffer) == 1 and buffer.initialized and len(tries) == 2


@pytest.mark.parametrize("use", [lambda buffer: buffer.transform, len, lambda buffer: buffer.sample(2)])
def test_an_attribute_error_of_a_factory_is_told(use):
    def wrong():
        return None.typo

    buffer = ReplayBuffer(transform_factory=wrong)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="typo") as caught:
            use(buffer)
        assert isinstance(caught.value.__cause__, AttributeError)
    assert not hasattr(buffer, "missing")


def test_a_list_without_a_bound_needs_one_for_priorities():
    for make in (
        lambda: ReplayBuffer(storage=ListStorage(), sampler=PrioritizedSampler(1000, 1.0, 1.0)),
        lambda: PrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=ListStorage()),
        lambda: TensorDictPrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=ListStorage),
    ):
        with pytest.raises(ValueError, match=r"give .* a max_size"):
            make()


def test_counters_local_to_the_process_are_passed_on():
    for compilable in (True, False):
        buffer = TensorDictReplayBuffer(compilable=compilable)
        assert (buffer.writer.compilable, buffer.storage._compilable) == (compilable, compilable)
    assert not ReplayBuffer(compilable=True).writer.compilable


def test_a_chain_that_is_given_is_put_in_eval_mode():
    chain = Compose(torch.nn.Dropout()).train()
    assert not any(module.training for module in ReplayBuffer(transform=chain).transform.modules())


def test_another_storage_gets_the_generator():
    generator = torch.Generator()
    buffer = ReplayBuffer(storage=LazyTensorStorage(8), generator=generator)
    other = LazyTensorStorage(8)
    buffer.set_storage(other)
    assert other._rng is generator


# ------------------------------------------------------------------ one storage, several buffers


def test_emptying_sends_every_writer_back_to_the_start():
    storage = LazyTensorStorage(10)
    one, two = ReplayBuffer(storage=storage), ReplayBuffer(storage=storage)
    two.extend(plain_tensor([1, 2, 3]))
    one.empty()
    two.extend(plain_tensor([7, 8]))
    assert len(two) == 2 and two.writer._cursor == 2 and two.write_count == 2
    check_same(one[:], plain_tensor([7, 8]))


@pytest.mark.parametrize("storage", [LazyTensorStorage(4), LazyMemmapStorage(4), TensorStorage(torch.zeros(4))])
def test_a_storage_keeps_no_buffer_alive(storage):
    buffer = ReplayBuffer(storage=storage, prefetch=1, batch_size=1)
    gone = weakref.ref(buffer)
    assert storage.attached() == [buffer]
    del buffer
    gc.collect()
    assert gone() is None and storage.attached() == []


def test_the_state_of_a_buffer_is_seen_by_these_tests():
    """`refused` compares what it should: a write in between is noticed."""
    buffer = tensordicts()
    before = state_of(buffer)
    buffer.extend(flat_td([0]))
    assert state_of(buffer)["length"] != before["length"]
