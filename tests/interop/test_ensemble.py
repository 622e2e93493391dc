"""Batches of an ensemble: every row is what its member has in its slot, of members drawn by their law."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from tensordict import LazyStackedTensorDict, TensorDict

from interop import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSliceSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    Sequence,
    SliceSampler,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from tests.interop.rows import ALL_STORAGES, KINDS, check_same, flat_td, nested_td, tensors_of, trajectories


def buffer_of(rows, storage=LazyTensorStorage, kind=TensorDictReplayBuffer, **kwargs):
    buffer = kind(storage=storage(16), **kwargs)
    buffer.extend(rows)
    return buffer


def member(first=0, count=10, **kwargs):
    """A buffer of tensordicts with ids from `first` on."""
    return buffer_of(flat_td(range(first, first + count)), **kwargs)


def chi_square(counts, chances):
    """The counts follow the chances; what has none does not occur."""
    counts, chances = np.asarray(counts), np.asarray(chances, dtype=float)
    assert counts[chances == 0].sum() == 0
    kept = chances > 0
    assert stats.chisquare(counts[kept], counts.sum() * chances[kept] / chances.sum()).pvalue > 1e-4


def ids_of(ensemble, batch_size):
    return ensemble.sample(batch_size)["index", "buffer_ids"]


@given(data=st.data())
def test_every_row_is_what_its_member_has_in_its_slot(data):
    """Of any kind of data, in any mix of storages, however many members are drawn."""
    kind = data.draw(st.sampled_from(sorted(KINDS)))
    storages = data.draw(st.lists(st.sampled_from(sorted(ALL_STORAGES)), min_size=1, max_size=4))
    if kind in ("dict", "tuple", "namedtuple") and "list" in storages:
        storages = ["memory" if each == "list" else each for each in storages]  # a list takes no pytrees
    parts, each = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4))
    capacities = [data.draw(st.integers(1, 7)) for _ in storages]
    written = [data.draw(st.integers(1, 12)) for _ in storages]
    members = []
    for place, (storage, capacity, count) in enumerate(zip(storages, capacities, written, strict=True)):
        members.append(ReplayBuffer(storage=ALL_STORAGES[storage](capacity)))
        members[-1].extend(KINDS[kind](torch.arange(count) + 20 * place))
    ensemble = ReplayBufferEnsemble(*members, num_buffer_sampled=parts)
    sample, info = ensemble.sample(parts * each, return_info=True)
    ids, slots = info["index", "buffer_ids"], info["index", "index"]
    assert slots.shape == (parts, each)
    ids = ids if ids.ndim == 2 else ids[:, None].expand(parts, each)
    for leaf in tensors_of(sample.exclude("index") if isinstance(sample, TensorDict) else sample):
        for part in range(parts):
            for item in range(each):
                place, slot = int(ids[part, item]), int(slots[part, item])
                newest = (written[place] - 1 - slot) // capacities[place] * capacities[place] + slot
                wanted = torch.tensor(20 * place + newest).to(leaf.dtype)
                if leaf.dtype == torch.bool:
                    wanted = torch.tensor(bool((20 * place + newest) % 2))
                assert bool((leaf[part, item] == wanted).all())
    if isinstance(sample, TensorDict):
        nested = sample["index"]
        assert nested.batch_size == sample.batch_size and sample.batch_size[:2] == (parts, each)
        flat = nested["index"].reshape(parts, each, -1)
        assert bool((flat == slots[..., None]).all())
        assert bool((nested["buffer_ids"].reshape(parts, each, -1) == ids[..., None]).all())


@pytest.mark.parametrize("make", sorted(ALL_STORAGES))
def test_a_batch_is_a_copy_with_the_index_nested_and_its_members(make):
    members = [member(100 * place, storage=ALL_STORAGES[make]) for place in range(3)]
    stored = [each[:].clone() for each in members]
    sample, info = ReplayBufferEnsemble(*members).sample(12, return_info=True)
    assert type(sample) is TensorDict and sample.batch_size == (3, 4) and set(sample.keys()) == {"obs", "done", "index"}
    index = sample["index"]
    assert index.batch_size == (3, 4) and set(index.keys()) == {"index", "buffer_ids"}
    assert index["index"].dtype == index["buffer_ids"].dtype == torch.int64
    assert torch.equal(sample["obs"][..., 0], (100 * index["buffer_ids"] + index["index"]).float())
    assert isinstance(info, TensorDict) and info.batch_size == (3, 4) and set(info.keys()) == {"index"}
    check_same(info["index"], index)
    before = sample.clone()
    info["index", "index"].zero_()
    check_same(sample, before)  # the info has memory of its own
    for leaf in tensors_of(sample):
        leaf.fill_(7)
    for each, rows in zip(members, stored, strict=True):
        check_same(each[:], rows)


def test_rows_that_are_trajectories_have_their_index_at_each_step():
    members = [buffer_of(trajectories(range(10))), buffer_of(trajectories(range(10)))]
    sample, info = ReplayBufferEnsemble(*members).sample(6, return_info=True)
    assert sample.batch_size == sample["index"].batch_size == (2, 3, 4) and info.batch_size == (2, 3)
    assert torch.equal(sample["index", "index"].float(), sample["reward"])
    assert torch.equal(sample["index", "index"][..., 0], info["index", "index"])


# ---------------------------------------------------------------------- members that are not alike


def test_unlike_shapes_and_keys_are_stacked_lazily():
    one = TensorDict({"a": torch.zeros(5), "b": torch.zeros(5, 3)}, [5])
    two = TensorDict({"a": torch.ones(5), "b": torch.ones(5, 4)}, [5])
    ensemble = ReplayBufferEnsemble(buffer_of(one), buffer_of(two), sample_from_all=True)
    sample = ensemble.sample(6)
    assert isinstance(sample, LazyStackedTensorDict) and sample.batch_size == (2, 3)
    assert sample["a"].tolist() == [[0] * 3, [1] * 3] and sample["index", "buffer_ids"].tolist() == [[0] * 3, [1] * 3]
    assert sample[0]["b"].shape == (3, 3) and sample[1]["b"].shape == (3, 4)
    unlike = ReplayBufferEnsemble(member(), buffer_of(nested_td(range(5))), sample_from_all=True).sample(6)
    assert isinstance(unlike, LazyStackedTensorDict) and set(unlike.keys()) == {"obs", "index"}
    assert set(unlike[0].keys()) == {"obs", "done", "index"} and set(unlike[1].keys()) == {"obs", "next", "index"}


def test_parts_of_unlike_length_are_stacked_lazily():
    members = [member(count=count, sampler=SamplerWithoutReplacement()) for count in (10, 9)]
    ensemble = ReplayBufferEnsemble(*members, sample_from_all=True)
    first, (second, info) = ensemble.sample(12), ensemble.sample(12, return_info=True)
    assert first.batch_size == (2, 6) and second.batch_size == info.batch_size == (2, -1)
    for place, left in enumerate((4, 3)):
        row = second[place]
        assert row.batch_size == (left,) and torch.equal(row["index", "index"].float(), row["obs"][:, 0])
        assert row["index", "buffer_ids"].tolist() == [place] * left == info[place]["index", "buffer_ids"].tolist()
        assert sorted(torch.cat([first[place]["obs"][:, 0], row["obs"][:, 0]]).tolist()) == list(range(6 + left))
        assert members[place].sampler.ran_out


def test_objects_are_collated_as_asked_for():
    def texts(items):
        buffer = ReplayBuffer(storage=ListStorage(10), collate_fn=lambda items: items)
        buffer.extend(list(items))
        return buffer

    ensemble = ReplayBufferEnsemble(texts("abcd"), texts("efg"), collate_fn=lambda parts: "|".join(map("".join, parts)))
    sample, info = ensemble.sample(6, return_info=True)
    slots, ids = info["index", "index"], info["index", "buffer_ids"]
    assert info.batch_size == (2,) and slots.shape == (2, 3) and ids.shape == (2,)
    assert sample == "|".join("".join(("abcd", "efg")[i][j] for j in row) for i, row in zip(ids, slots, strict=True))


# ---------------------------------------------------------------------- which members


def test_members_are_drawn_equally_often_with_replacement():
    ids = ids_of(ReplayBufferEnsemble(*(member() for _ in range(3)), num_buffer_sampled=3_000), 3_000)
    assert ids.shape == (3_000, 1)
    chi_square(torch.bincount(ids[:, 0]), [1, 1, 1])
    pairs = torch.bincount(ids[::2, 0] * 3 + ids[1::2, 0])
    chi_square(pairs, np.ones(9))  # each part anew


@pytest.mark.parametrize("p", [[1, 3, 0, 2], torch.tensor([0.0, 5.0, 0.05, 0.5]), np.array([1e308, 1e308, 1e307, 0])])
def test_members_are_drawn_in_proportion_to_p(p):
    ensemble = ReplayBufferEnsemble(*(member() for _ in range(4)), p=p, num_buffer_sampled=3_000)
    chances = torch.as_tensor(p, dtype=torch.float64).numpy().copy()
    chances /= chances.max()
    counts = torch.bincount(ids_of(ensemble, 3_000)[:, 0], minlength=4)
    chi_square(counts, chances)
    assert torch.allclose(ensemble.sampler.p, torch.as_tensor(chances / chances.sum()).float())


def test_all_members_in_order():
    members = [member() for _ in range(3)]
    for parts in (None, 1, 7):
        ensemble = ReplayBufferEnsemble(*members, sample_from_all=True, num_buffer_sampled=parts)
        assert ensemble.sampler.num_buffer_sampled == 3
        assert ids_of(ensemble, 6).tolist() == [[0, 0], [1, 1], [2, 2]]


def test_the_number_of_parts_can_be_set():
    ensemble = ReplayBufferEnsemble(member(), member(), num_buffer_sampled=4)
    assert ensemble.sample(8).batch_size == (4, 2)
    ensemble.sampler.num_buffer_sampled = 1
    assert ensemble.sample(8).batch_size == (1, 8)
    with pytest.raises(ValueError, match="at least 1"):
        ensemble.sampler.num_buffer_sampled = 0
    with pytest.raises(TypeError, match="int"):
        ensemble.sampler.num_buffer_sampled = 1.5
    ensemble.sampler.num_buffer_sampled = None
    assert ensemble.sample(8).batch_size == (2, 4)


def test_an_empty_member_is_refused_unless_it_is_never_drawn():
    members = [member(), TensorDictReplayBuffer(storage=LazyTensorStorage(4)), member()]
    for options in ({}, {"p": [1, 1e-9, 1]}, {"sample_from_all": True}):
        state = torch.get_rng_state()
        with pytest.raises(RuntimeError, match="member 1 of the ensemble has no items"):
            ReplayBufferEnsemble(*members, **options).sample(6)
        assert torch.equal(torch.get_rng_state(), state)
    assert set(ids_of(ReplayBufferEnsemble(*members, p=[1, 0, 1]), 300).unique().tolist()) <= {0, 2}


def test_batch_size_and_iterating():
    ensemble = ReplayBufferEnsemble(member(), member(), batch_size=4)
    assert [batch.batch_size for batch, _ in zip(ensemble, range(3), strict=False)] == [(2, 2)] * 3
    assert ensemble.next().batch_size == (2, 2)
    with pytest.warns(UserWarning, match="argument counts"):
        assert ensemble.sample(6).batch_size == (2, 3)
    without = ReplayBufferEnsemble(member(), member())
    with pytest.raises(RuntimeError, match="batch_size not specified"):
        without.sample()
    with pytest.raises(RuntimeError, match="batch_size not specified"):
        next(iter(without))


# ---------------------------------------------------------------------- transforms, collate functions, infos


def test_transforms_of_members_see_their_rows_and_that_of_the_ensemble_the_batch():
    seen = []

    def note(name):
        def transform(data):
            seen.append((name, data.batch_size, isinstance(data["index"], TensorDict)))
            return data.set(name, data["obs"][..., 0] + 1)

        return transform

    members = [
        member(100 * i, storage=s, transform=note("own")) for i, s in enumerate((LazyTensorStorage, ListStorage))
    ]
    ensemble = ReplayBufferEnsemble(*members, transform=note("all"), sample_from_all=True)
    sample = ensemble.sample(6)
    assert seen == [("own", (3,), False), ("own", (3,), False), ("all", (2, 3), True)]
    assert torch.equal(sample["own"], sample["obs"][..., 0] + 1) and torch.equal(sample["all"], sample["own"])
    assert "own" not in members[0].storage[:] and "own" not in members[1].storage[0]
    ensemble[0].append_transform(lambda data: data.set("own", data["own"] * 0))  # members stay what they are
    assert ensemble.sample(6)["own"][0].tolist() == [0] * 3


def test_a_transform_that_edits_in_place_leaves_the_storages_alone():
    def edit(data):
        for row in data.unbind(0):
            row["obs"].add_(1)
        return data

    def stored(member):
        return torch.stack([member.storage[i].clone() for i in range(len(member))])

    members = [member(storage=each, transform=edit) for each in (LazyTensorStorage, ListStorage, LazyMemmapStorage)]
    before = [stored(each) for each in members]
    ReplayBufferEnsemble(*members, collate_fns=[None, LazyStackedTensorDict.lazy_stack, None], transform=edit).sample(
        30
    )
    for each, rows in zip(members, before, strict=True):
        check_same(stored(each), rows)


def test_collate_functions_of_members_and_of_the_ensemble():
    seen = []

    def own(items):
        seen.append(type(items).__name__)
        return torch.stack(items)

    members = [member(storage=ListStorage, collate_fn=own), member(storage=ListStorage)]
    ReplayBufferEnsemble(*members, sample_from_all=True).sample(4)
    assert seen == ["list"]
    other = ReplayBufferEnsemble(*members, sample_from_all=True, collate_fns=[None, own], collate_fn=torch.cat)
    sample = other.sample(4)
    assert seen == ["list"] * 3 and sample.batch_size == (4,)
    assert torch.equal(sample["index", "index"].float(), sample["obs"][:, 0])
    assert sample["index", "buffer_ids"].tolist() == [0, 0, 1, 1]


def test_marking_a_batch_does_not_mark_the_stored_items():
    """A collate function may hand on the very items of a list."""
    rows = [TensorDict({"a": torch.tensor(float(i))}) for i in range(4)]
    members = [ReplayBuffer(storage=ListStorage(4), collate_fn=LazyStackedTensorDict.lazy_stack) for _ in range(2)]
    for each in members:
        each.extend(rows)
    sample = ReplayBufferEnsemble(*members).sample(8)
    assert "index" in sample and all(set(row.keys()) == {"a"} for row in rows)


def test_a_member_whose_transform_changes_the_rows_says_so():
    members = [member(transform=lambda data: data.reshape(2, -1)), member()]
    with pytest.raises(RuntimeError, match="Failed to set the metadata"):
        ReplayBufferEnsemble(*members, sample_from_all=True).sample(8)


def episodes(first=0, sampler=None):
    """12 steps of three episodes."""
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(12), sampler=sampler)
    rows = TensorDict({"a": first + torch.arange(12), "episode": torch.arange(12) // 4}, [12])
    rows["next", "done"] = torch.zeros(12, 1, dtype=torch.bool)
    buffer.extend(rows)
    return buffer


def test_slices_of_each_member():
    members = [episodes(100 * i, SliceSampler(slice_len=2, traj_key="episode")) for i in range(2)]
    sample, info = ReplayBufferEnsemble(*members).sample(8, return_info=True)
    assert sample.batch_size == info.batch_size == (2, 4) and sample["index", "index"].shape == (2, 4, 1)
    assert torch.equal(sample["a"], 100 * sample["index", "buffer_ids"] + sample["index", "index"][..., 0])
    starts, stops = sample["a"][:, 0::2], sample["a"][:, 1::2]
    assert torch.equal(stops, starts + 1) and torch.equal(sample["episode"][:, 0::2], sample["episode"][:, 1::2])
    for data in (sample, info):
        assert data["next", "truncated"].squeeze(-1).tolist() == [[False, True] * 2] * 2
        assert torch.equal(data["next", "done"], data["next", "truncated"])


def test_priorities_of_slices():
    members = [episodes(0, PrioritizedSliceSampler(12, 1.0, 1.0, slice_len=2, traj_key="episode")) for _ in range(2)]
    ensemble = ReplayBufferEnsemble(*members, sample_from_all=True)
    sample, info = ensemble.sample(8, return_info=True)
    assert sample["priority_weight"].shape == (2, 4)
    ensemble.update_tensordict_priority(sample.set("td_error", sample["a"] + 5.0))
    for part, each in enumerate(members):
        slots = sample["index", "index"][part, :, 0]
        assert torch.equal(each.sampler.priorities[slots], slots + 5.0)
    ensemble.update_priority(info["index"], sample["a"] + 7.0)
    for part, each in enumerate(members):
        slots = sample["index", "index"][part, :, 0]
        assert torch.equal(each.sampler.priorities[slots], slots + 7.0)


def test_windows_around_items():
    def windows():
        buffer = TensorDictPrioritizedReplayBuffer(
            alpha=1.0, beta=1.0, storage=LazyTensorStorage(12), sample_unit=Sequence(3, done_key=None)
        )
        buffer.extend(TensorDict({"a": torch.arange(12)}, [12]))
        return buffer

    ensemble = ReplayBufferEnsemble(windows(), windows(), sample_from_all=True)
    sample = ensemble.sample(4)
    assert sample.batch_size == (2, 6) and torch.equal(sample["a"], sample["index", "index"])
    assert sample["step_in_sequence"].tolist() == [[0, 1, 2] * 2] * 2
    ensemble.update_tensordict_priority(sample.set("td_error", sample["a"] + 10.0))
    for part in range(2):
        wanted = torch.ones(12)
        for anchor in sample["anchor_index"][part, ::3].tolist():
            wanted[anchor] = min(anchor + 2, 11) + 10.0
        assert torch.equal(ensemble[part].sampler.priorities, wanted)
