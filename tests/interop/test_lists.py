"""What holds for every storage that keeps items in a Python list."""

import copy
import multiprocessing
import pickle
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from interop import (
    CompressedListStorage,
    LazyStackStorage,
    ListStorage,
    ReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from tests.interop.rows import check_same, flat_td, nested_td, refused

KINDS = [ListStorage, LazyStackStorage, CompressedListStorage]
each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


def filled(kind, ids, buffer=ReplayBuffer, capacity=9, **kwargs):
    made = buffer(storage=kind(capacity), **kwargs)
    made.extend(flat_td(ids))
    return made


def ids_of(items):
    return [int(item["obs"][0]) for item in items]


@pytest.mark.parametrize(
    ("index", "wanted"),
    [
        (slice(1, 3), [1, 2]),
        (slice(None, None, 2), [0, 2]),
        ((slice(0, 2),), [0, 1]),
        ([3, 0], [3, 0]),
        ([-1, 0], [3, 0]),
        (range(2), [0, 1]),
        (np.array([2, 2]), [2, 2]),
        (torch.tensor([-1, 0]), [3, 0]),
        (torch.tensor([True, False, False, True]), [0, 3]),
    ],
    ids=str,
)
@each_kind
def test_every_kind_of_index(kind, index, wanted):
    buffer = filled(kind, [0, 1, 2, 3])
    assert ids_of(buffer.storage.get(index)) == wanted
    check_same(buffer[index].contiguous(), flat_td(wanted))
    for one in (wanted[0], wanted[0] - 4, np.int32(wanted[0]), torch.tensor(wanted[0]), (wanted[0],)):
        check_same(buffer[one], flat_td(wanted)[0])


@each_kind
def test_an_index_of_no_item_is_refused(kind):
    buffer = filled(kind, [0, 1])
    for index in (2, -3, [0, 2], torch.tensor([2]), torch.tensor([-3])):
        with refused(buffer, IndexError):
            buffer[index]
    with pytest.raises(RuntimeError):
        buffer[0, 1]
    with pytest.raises(TypeError):
        buffer[torch.tensor([0.5])]


@each_kind
def test_writes_that_do_not_fit_change_nothing(kind):
    buffer = filled(kind, [0, 1], capacity=3)
    for cursor, data, error, match in (
        (3, flat_td([7])[0], RuntimeError, "maximum capacity"),
        ([2, 3], flat_td([7, 8]), RuntimeError, "maximum capacity"),
        ([0, 1], flat_td([7, 8, 9]), ValueError, "2 places were given for 3 items"),
        (slice(0, 1), flat_td([5, 6, 7, 8]), RuntimeError, "maximum capacity"),
        (slice(None, None, -1), flat_td([5]), ValueError, "extended slice|places"),
    ):
        with refused(buffer, error, match):
            buffer.storage.set(cursor, data)
    wide = filled(kind, [0, 1])
    for cursor, data in ((3, flat_td([7])[0]), ([2, 4], flat_td([7, 8]))):
        with refused(wide, RuntimeError, "more than one item away"):
            wide.storage.set(cursor, data)
    for data in (flat_td([5]), flat_td([5, 6, 7])):
        with refused(wide, ValueError, "2 places were given for"):
            wide[0:2] = data
    for batch in ({"a": torch.zeros(2)}, "text", b"bytes", 3, None, torch.zeros(())):
        with refused(wide, TypeError):
            wide.extend(batch)
    with refused(wide, RuntimeError, "at least one element"):
        wide.extend([])


@each_kind
def test_places_are_assigned(kind):
    buffer = filled(kind, [0, 1, 2])
    buffer[1] = flat_td([9])[0]
    buffer[[2, 0]] = flat_td([5, 6])
    buffer[:1] = flat_td([7])
    assert ids_of(buffer.storage) == [7, 9, 5]
    assert (len(buffer), buffer.writer._cursor, buffer.write_count) == (3, 3, 3)
    buffer.storage.set(slice(1, 3), flat_td([3]))
    assert ids_of(buffer.storage) == [7, 3]
    buffer.storage.set([2, 0], flat_td([4, 8]))
    assert ids_of(buffer.storage) == [8, 3, 4]
    buffer.empty()
    assert len(buffer) == 0
    buffer.extend(flat_td([4]))
    check_same(buffer[0], flat_td([4])[0])


@each_kind
@given(writes=st.lists(st.one_of(st.integers(1, 99), st.lists(st.integers(1, 99), min_size=1, max_size=9)), max_size=8))
def test_it_holds_what_a_ring_of_items_holds(kind, writes):
    buffer, ring, written = ReplayBuffer(storage=kind(4)), {}, 0
    for write in writes:
        many = write if isinstance(write, list) else [write]
        index = buffer.extend(flat_td(write)) if many is write else [buffer.add(flat_td([write])[0])]
        for slot, each in zip(index, many, strict=True):
            assert int(slot) == written % 4
            ring[written % 4] = each
            written += 1
    assert len(buffer) == len(ring) and buffer.write_count == written
    assert ids_of(buffer.storage) == [ring[slot] for slot in range(len(ring))]
    if ring:
        got, info = buffer.sample(6, return_info=True)
        assert got["obs"][:, 0].tolist() == [ring[slot] for slot in info["index"].tolist()]


@each_kind
def test_what_was_given_is_not_what_is_stored(kind):
    given = flat_td([1, 2])
    buffer = filled(kind, [1])
    buffer.extend(given)
    given.zero_()
    assert ids_of(buffer.storage) == [1, 1, 2]
    buffer.extend((torch.ones(3, 2, requires_grad=True) * 2,))
    assert not buffer[3].requires_grad


@each_kind
def test_a_transform_does_not_reach_the_storage(kind):
    buffer = filled(kind, [1, 2, 3], transform=lambda data: data.zero_())
    for got in (buffer.sample(5), buffer[:], buffer[[0, 0]], buffer[1]):
        assert not got["obs"].any()
    assert ids_of(buffer.storage) == [1, 2, 3]


@each_kind
def test_a_buffer_of_tensordicts_marks_its_samples(kind):
    buffer = filled(kind, [0, 1, 2, 3, 4], TensorDictReplayBuffer, capacity=3, batch_size=4, prefetch=2)
    assert buffer[:]["index"].tolist() == [0, 1, 2] and buffer["obs"][:, 0].tolist() == [3.0, 4.0, 2.0]
    for _ in range(5):
        got = buffer.sample()
        check_same(got["obs"], buffer["obs"][got["index"]])
    assert buffer.next()["index"].shape == (4,)
    buffer.extend(buffer.sample())
    assert len(buffer) == 3 and buffer.write_count == 9


@each_kind
def test_a_prioritized_buffer_draws_by_priority(kind):
    buffer = TensorDictPrioritizedReplayBuffer(alpha=1.0, beta=1.0, eps=0.0, storage=kind(5), batch_size=16)
    buffer.extend(flat_td([0, 1, 2]).set("td_error", torch.tensor([0.0, 2.0, 1.0])))
    batch = buffer.sample()
    assert set(batch["index"].tolist()) == {1, 2}
    check_same(batch["obs"][:, 0], batch["index"].float())
    batch["td_error"] = torch.where(batch["index"] == 1, 0.0, 3.0)
    buffer.update_tensordict_priority(batch)
    assert set(buffer.sample()["index"].tolist()) == {2}


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda buffer: pickle.loads(pickle.dumps(buffer))])
@each_kind
def test_a_copy_goes_on_apart(kind, copier):
    buffer = filled(kind, [1, 2], TensorDictReplayBuffer)
    twin = copier(buffer)
    twin.extend(flat_td([5]))
    twin[0] = flat_td([8])[0]
    assert twin.storage.max_size == 9
    assert twin["obs"][:, 0].tolist() == [8.0, 2.0, 5.0] and buffer["obs"][:, 0].tolist() == [1.0, 2.0]


@each_kind
def test_workers_are_refused(kind):
    buffer = filled(kind, [1, 2])
    with pytest.raises(RuntimeError, match=f"Cannot share a storage of type {kind.__name__}"):
        multiprocessing.get_context("spawn").Process(target=print, args=(buffer,)).start()


@each_kind
def test_threads_read_and_write_at_once(kind):
    def images(count):
        return TensorDict(
            obs=torch.arange(count, dtype=torch.uint8).reshape(-1, 1, 1).repeat(1, 8, 8), batch_size=count
        )

    buffer, failed = TensorDictReplayBuffer(storage=kind(9), batch_size=8), []
    buffer.extend(images(8))

    def use(write):
        try:
            for _ in range(15):
                if write:
                    buffer.extend(images(4))
                obs = buffer.sample()["obs"]
                assert (obs == obs[:, :1, :1]).all()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=use, args=(write,)) for write in (True, False, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


@each_kind
def test_another_default_device_makes_no_difference(kind):
    item, batch = nested_td([1])[0], nested_td([2, 3])
    with torch.device("meta"):
        buffer = TensorDictReplayBuffer(storage=kind(3), batch_size=5)
        buffer.add(item)
        buffer.extend(batch)
        got = buffer.sample()
    check_same(got["obs"][:, 0], got["index"].double() + 1)
    check_same(buffer[0].exclude("index"), item)


@each_kind
def test_the_representation_shows_the_first_item(kind):
    assert repr(kind(3)) == f"{kind.__name__}()"
    shown = repr(filled(kind, [1, 2]).storage)
    assert shown.startswith(f"{kind.__name__}(items=[TensorDict(") and shown.count("TensorDict(") == 1
