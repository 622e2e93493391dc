"""PromptGroupSampler: a model of plain lists, frequencies, staleness, state, and what is refused."""

import copy
import multiprocessing
import pickle
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from tensordict import TensorDict

from interop import (
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    PromptGroupSampler,
    Sequence,
    StalenessAwareSampler,
    TensorDictReplayBuffer,
)
from tests.faults.children import forked
from tests.interop.group_model import GroupModel
from tests.interop.rows import refused

CAPACITY = 10
STORAGES = {
    "tensors": LazyTensorStorage,
    "memmap": LazyMemmapStorage,
    "list": ListStorage,
    "stack": LazyStackStorage,
}


def rows(ids, versions=0, dtype=torch.int64):
    ids = torch.as_tensor(ids, dtype=dtype)
    return TensorDict(
        {"prompt_id": ids, "policy_version": torch.as_tensor(versions).expand(ids.shape).clone()}, ids.shape
    )


def made(size=2, capacity=CAPACITY, storage=LazyTensorStorage, batch_size=None, prefetch=None, seed=0, **choices):
    return TensorDictReplayBuffer(
        storage=storage(capacity),
        sampler=PromptGroupSampler(size, **choices),
        batch_size=batch_size,
        prefetch=prefetch,
        generator=torch.Generator().manual_seed(seed),
    )


# ------------------------------------------------------------------ the model

IDS = st.integers(0, 3)
STEPS = st.one_of(
    st.tuples(st.just("extend"), st.lists(IDS, min_size=1, max_size=CAPACITY + 4)),
    st.tuples(st.just("add"), IDS),
    st.tuples(st.just("edit"), st.integers(0, CAPACITY - 1), IDS),
    st.tuples(st.just("edit all"), st.lists(IDS, min_size=CAPACITY, max_size=CAPACITY)),
    st.tuples(st.just("sample"), st.integers(1, 3)),
    st.tuples(st.sampled_from(["empty", "reload", "copy", "pickle", "state"])),
)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize(("storage", "size", "most"), [("tensors", 2, None), ("stack", 3, 2), ("list", 1, 1)])
def test_random_histories_agree_with_lists(tmp_path_factory, storage, size, most, data):
    buffer, model = made(size, storage=STORAGES[storage], max_uses=most), GroupModel(size, most)
    held, cursor = [], 0
    for step, *arguments in data.draw(st.lists(STEPS, min_size=10, max_size=40)):
        if step in ("extend", "add"):
            new = arguments[0] if step == "extend" else [arguments[0]]
            slots = buffer.extend(rows(new)) if step == "extend" else [buffer.add(rows(new)[0])]
            for place, (slot, id_) in enumerate(zip(map(int, slots), new, strict=True)):
                assert slot == cursor
                held[slot : slot + 1] = [id_]
                if place >= len(new) - CAPACITY:  # the others are not stored
                    model.write(slot, id_)
                cursor = (cursor + 1) % CAPACITY
        elif step == "edit" and arguments[0] < len(held):
            buffer[arguments[0]] = rows([arguments[1]])[0]
            held[arguments[0]] = arguments[1]
            assert len(buffer) >= 0  # edits count when they are looked at
            model.edit(*arguments)
        elif step == "edit all" and held and storage == "tensors":
            held = arguments[0][: len(held)]
            buffer["prompt_id"] = torch.tensor(held)
            oldest = cursor if len(held) == CAPACITY else 0
            for slot in np.roll(np.arange(len(held)), -oldest).tolist():
                model.edit(slot, held[slot])
        elif step == "sample" and held:
            if len(model.ready()) < arguments[0]:
                with refused(buffer, RuntimeError, "groups"):
                    buffer.sample(size * arguments[0])
            else:
                batch, info = buffer.sample(size * arguments[0], return_info=True)
                assert batch["prompt_id"].tolist() == [held[slot] for slot in info["index"].tolist()]
                model.check(info["index"].tolist(), info)
        elif step == "empty":
            buffer.empty()
            held, cursor, model = [], 0, GroupModel(size, most)
        elif step in ("reload", "state") and held:
            other = made(size, storage=STORAGES[storage], max_uses=most, seed=9)
            if step == "state":
                other.load_state_dict(buffer.state_dict())
            else:
                buffer.dumps(path := tmp_path_factory.mktemp("saved") / "buffer")
                other.loads(path)
            buffer = other
        elif step in ("copy", "pickle"):
            buffer = copy.deepcopy(buffer) if step == "copy" else pickle.loads(pickle.dumps(buffer))
        assert len(buffer) == size * len(model.ready()) and buffer.sampler.num_ready == len(model.ready())


@pytest.mark.parametrize("storage", STORAGES.values())
def test_texts_are_ids_by_their_value(storage, tmp_path):
    def texts(*values):
        return TensorDict({"prompt": list(values), "x": torch.arange(len(values))}, [len(values)])

    buffer, other = (made(2, storage=storage, group_key="prompt") for _ in range(2))
    buffer.extend(texts("Why?", "How?", "Why?", "", "7"))
    buffer.dumps(tmp_path / "saved")
    other.loads(tmp_path / "saved")
    other.extend(texts("", "How?"))
    assert buffer.sample(2)["x"].tolist() == [0, 2] and len(other) == 6
    other[2] = texts("7")[0]
    batch = other.sample(6)
    assert sorted(batch["prompt"][::2]) == ["", "7", "How?"] and batch["prompt"][::2] == batch["prompt"][1::2]


def test_lanes_are_written_row_by_row():
    buffer = made(2, storage=lambda size: LazyTensorStorage(size, ndim=2))
    buffer.extend(rows([[5, 5, 6], [6, 5, 5]]))  # [lanes, time]
    batch, info = buffer.sample(6, return_info=True)
    found = {tuple(part.reshape(-1).tolist()) for part in torch.stack(info["index"], -1).reshape(3, 2, 2)}
    assert found == {(0, 0, 1, 0), (0, 1, 2, 0), (1, 1, 2, 1)} and batch["prompt_id"].shape == (6,)
    changed = buffer.storage.get(2)
    changed["prompt_id"][:] = 9
    buffer.storage.set(2, changed, set_cursor=False)  # both lanes
    assert len(buffer) == 4 and 9 in buffer.sample(4)["prompt_id"]


# ------------------------------------------------------------------ draws


def test_groups_are_drawn_uniformly_and_each_once_a_batch():
    buffer = made(2, capacity=40)
    buffer.extend(rows(np.arange(20).repeat(2)))
    buffer.extend(rows([99]))  # breaks one group
    drawn = torch.stack([buffer.sample(8)["group_number"][::2] for _ in range(2000)])
    assert all(len(set(each)) == 4 for each in drawn.tolist())
    counts = torch.bincount(drawn.reshape(-1), minlength=20).numpy()
    assert counts[0] == 0 and stats.chisquare(counts[1:]).pvalue > 1e-4


@pytest.mark.parametrize("most", [1, 3])
def test_iterating_consumes_whole_batches_and_keeps_the_rest(most):
    buffer = made(2, batch_size=6, max_uses=most)
    buffer.extend(rows(np.arange(5).repeat(2)))
    uses = torch.cat([batch["group_number"][::2] for batch in buffer]).bincount(minlength=5)
    assert uses.max() <= most and len(buffer) == 2 * int((uses < most).sum()) < 6
    with refused(buffer, RuntimeError, "groups of 2 completions are ready"):
        buffer.sample()
    buffer.extend(rows(np.arange(5).repeat(2)))
    assert [len(batch) for batch in buffer] == [6] * (5 * most // 3)


def test_it_takes_over_a_full_ring_from_the_oldest_row_on():
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(4))
    buffer.extend(rows([1, 1, 1, 2])), buffer.extend(rows([1]))  # the oldest is row 1
    buffer.set_sampler(PromptGroupSampler(2))
    assert buffer.sample(2)["index"].tolist() == [1, 2]
    buffer.extend(rows([3, 1]))
    assert buffer.sample(2)["index"].tolist() == [0, 2]


# ------------------------------------------------------------------ staleness


def test_a_group_is_as_stale_as_its_stalest_row():
    staleness = StalenessAwareSampler(max_staleness=3)
    buffer = made(2, capacity=8, staleness=staleness)
    buffer.extend(rows([3, 3, 0, 0, 1, 1, 2, 2], torch.tensor([0, 9, 4, 4, 4, 3, 2, 4])))
    staleness.consumer_version = 4
    drawn = [buffer.sample(2) for _ in range(2000)]
    counts = torch.stack([each["prompt_id"][0] for each in drawn]).bincount(minlength=4).numpy()
    weights = 1 / np.array([1, 2, 3])
    assert counts[3] == 0 and stats.chisquare(counts[:3], weights / weights.sum() * 2000).pvalue > 1e-4
    assert all(torch.equal(each["staleness"], 4.0 - each["policy_version"]) for each in drawn)
    assert len(set(buffer.sample(6)["group_number"].tolist())) == 3
    with refused(buffer, RuntimeError, "3 of 4 have a weight above zero"):
        buffer.sample(8)
    staleness.consumer_version = 8
    with refused(buffer, RuntimeError, "all 4 groups are staler than max_staleness=3"):
        buffer.sample(2)
    assert len(buffer) == 8


def test_staleness_is_saved_and_its_uses_go_on_bit_for_bit(tmp_path):
    def build(seed):
        return made(2, max_uses=2, seed=seed, staleness=StalenessAwareSampler(2, version_key="policy_version"))

    buffer, other = build(0), build(1)
    buffer.extend(rows([0, 0, 1, 1, 2, 2, 3], torch.arange(7)))
    buffer.sampler.staleness.consumer_version = 5
    buffer.sample(2)
    buffer.dumps(tmp_path / "saved")
    other.loads(tmp_path / "saved")
    for each in (buffer, other):
        each.extend(rows([3, 4, 4], 5))
    for _ in range(4):
        assert (buffer.sample(2) == other.sample(2)).all()
    buffer.sampler.staleness.consumer_version = 0  # nothing is stale
    buffer.sample(2 * buffer.sampler.num_ready), buffer.sample(2 * buffer.sampler.num_ready)
    other.load_state_dict(buffer.state_dict())
    assert other.sampler.ran_out == buffer.sampler.ran_out is True and not len(other)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(RuntimeError, match="1 members were saved, there are 0"):
            made(2).loads(tmp_path / "saved")


# ------------------------------------------------------------------ bad input


def test_arguments_that_are_refused():
    for choices, words in [
        ({"batch_size": 6}, "multiple of group_size=4, got 6"),
        ({"batch_size": 8, "prefetch": 2, "max_uses": 1}, "prefetch and max_uses exclude each other"),
    ]:
        with pytest.raises(ValueError, match=words):
            made(4, **choices)
    with pytest.raises(ValueError, match="sample_unit"):
        TensorDictReplayBuffer(storage=LazyTensorStorage(4), sampler=PromptGroupSampler(2), sample_unit=Sequence(2))
    buffer = made(4)
    buffer.extend(rows([1, 1, 1, 1]))
    with refused(buffer, ValueError, "multiple of group_size=4, got 6"):
        buffer.sample(6)


@pytest.mark.parametrize(
    ("entry", "error", "words"),
    [
        ({"other": torch.zeros(4)}, KeyError, "prompt_id"),
        ({"prompt_id": torch.zeros(4) + 0.5}, TypeError, "float32"),
        ({"prompt_id": TensorDict({"id": torch.zeros(4)}, [4])}, KeyError, "'prompt_id' is not stored as a tensor"),
        ({"prompt_id": torch.zeros(4, 2, dtype=torch.int64)}, ValueError, r"one value an item, it has the shape \[2\]"),
    ],
)
@pytest.mark.parametrize("kind", ["tensors", "list"])
def test_what_can_be_no_id_is_refused_by_the_draw_until_it_is_gone(kind, entry, error, words):
    buffer = made(2, capacity=4, storage=STORAGES[kind])
    buffer.extend(TensorDict(entry, [4]))
    for _ in range(2):
        with refused(buffer, error, words):
            buffer.sample(2)
    if kind == "list":
        buffer.extend(rows([1, 2, 2, 1]))
        assert sorted(buffer.sample(4)["group_number"].tolist()) == [0, 0, 1, 1]


def _read_in_a_worker(buffer, told):
    told.put(len(buffer))
    told.close()


def test_what_is_consumed_is_known_in_one_process():
    buffer = made(2, max_uses=1)
    buffer.extend(rows([1, 1]))
    with pytest.raises(RuntimeError, match="max_uses"):
        multiprocessing.get_context("spawn").Process(target=_read_in_a_worker, args=(buffer, None)).start()
    ended, said = forked(lambda: buffer.sample(2))
    assert ended == "failed" and b"cannot be used in another process" in said
    assert len(buffer) == 2
