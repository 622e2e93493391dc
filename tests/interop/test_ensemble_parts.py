"""What the parts of an ensemble's batch go through, and members that draw and read in ways of their own."""

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict

from interop import (
    CompressedListStorage,
    HERReplayBuffer,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerEnsemble,
    SamplerWithoutReplacement,
    Sequence,
    SliceSampler,
    StorageEnsemble,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
    WriterEnsemble,
)
from interop.storages import copyable, lazy
from tests.interop.rows import check_same, flat_td


def member(first=0, count=10, storage=LazyTensorStorage, **kwargs):
    """A buffer of tensordicts with ids from `first` on."""
    buffer = TensorDictReplayBuffer(storage=storage(16), **kwargs)
    buffer.extend(flat_td(range(first, first + count)))
    return buffer


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


def test_what_samplers_say_is_in_the_batch():
    class Slices(RandomSampler):
        """Names items as slices do, and says where they end."""

        def sample(self, storage, batch_size):
            index, _ = super().sample(storage, batch_size)
            ends = torch.zeros(batch_size, 1, dtype=torch.bool)
            ends[-1] = True
            return (index,), {("next", "truncated"): ends, "weight": torch.arange(batch_size)}

    members = [member(sampler=Slices()), member(sampler=Slices())]
    sample, info = ReplayBufferEnsemble(*members).sample(6, return_info=True)
    assert sample["index", "index"].shape == info["index", "index"].shape == (2, 3, 1)
    assert sample["index", "buffer_ids"].shape == (2, 3)
    assert sample["next", "truncated"].tolist() == [[[False], [False], [True]]] * 2
    assert info["weight"].tolist() == sample["weight"].tolist() == [[0, 1, 2]] * 2
    mixed = ReplayBufferEnsemble(members[0], member(), sample_from_all=True).sample(6)
    assert mixed[0]["index", "index"].shape == (3, 1) and mixed[1]["index", "index"].shape == (3,)
    assert "weight" in mixed[0] and "weight" not in mixed[1]


def test_samplers_and_storages_of_ones_own_are_asked():
    class Last(SamplerEnsemble):
        def sample(self, storage, batch_size):
            index, info = super().sample(storage, batch_size)
            index["buffer_ids"].fill_(len(self) - 1)
            return index, info

    class Doubled(StorageEnsemble):
        def get(self, index):
            found = super().get(index)
            drawn = found if isinstance(found, list) else []
            return [(place, data.set("twice", data["obs"] * 2)) for place, data in drawn] or found

    members = [member(), member()]
    parts = [[getattr(each, name) for each in members] for name in ("storage", "sampler", "writer")]
    ensemble = ReplayBufferEnsemble(
        storages=Doubled(*parts[0]),
        samplers=Last(*parts[1]),
        writers=WriterEnsemble(*parts[2]),
        batch_size=6,
        prefetch=2,
    )
    for _ in range(4):
        sample, info = ensemble.sample(return_info=True)
        assert (sample["index", "buffer_ids"] == 1).all() and torch.equal(sample["twice"], sample["obs"] * 2)
        assert torch.equal(sample["index", "index"].float(), sample["obs"][..., 0])
        check_same(info["index"], sample["index"])
    assert type(ensemble[:1].sampler) is Last


# ---------------------------------------------------------------------- members of other kinds


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


def test_a_member_that_relabels_its_items():
    def reached(first):
        buffer = HERReplayBuffer(
            lambda data: (data["desired_goal"] == data["next", "achieved_goal"]).float(),
            her_ratio=1.0,
            strategy="final",
            storage=LazyTensorStorage(4),
        )
        steps = torch.arange(first, first + 4.0)[:, None]
        rows = TensorDict({"desired_goal": steps * 0 - 1, "next": {"achieved_goal": steps, "reward": steps * 0}}, [4])
        rows["next", "done"] = steps == first + 3
        buffer.extend(rows)
        return buffer

    sample = ReplayBufferEnsemble(reached(0), reached(10), sample_from_all=True).sample(8)
    assert (sample["desired_goal"][0] == 3).all() and (sample["desired_goal"][1] == 13).all()


def test_the_generations_of_items_are_told():
    members = [member(writer=TensorDictRoundRobinWriter(track_generations=True)) for _ in range(2)]
    members[1].extend(flat_td(range(16)))
    sample, info = ReplayBufferEnsemble(*members, sample_from_all=True).sample(8, return_info=True)
    for part, each in enumerate(members):
        wanted = each.writer.generations_of(info["index", "index"][part])
        assert torch.equal(info["index_generation"][part], wanted) and torch.equal(
            sample["index_generation"][part], wanted
        )


@pytest.mark.parametrize("storage", [LazyStackStorage, CompressedListStorage])
def test_storages_that_give_lazy_stacks(storage):
    members = [member(100 * i, storage=storage) for i in range(2)]
    sample = ReplayBufferEnsemble(*members).sample(8)
    index = sample["index"]
    assert torch.equal(sample["obs"][..., 0], (100 * index["buffer_ids"] + index["index"]).float())
    sample["obs"].fill_(-1)
    assert members[0][3]["obs"][0] == 3 and "buffer_ids" not in str(members[0][3])


def test_rows_that_belong_to_jax(monkeypatch):
    """As on a GPU: the program that draws has read them."""
    for module in (lazy, copyable):
        monkeypatch.setattr(module, "rows_in_jax", lambda device: True)
    one, two = member(), member(100)
    monkeypatch.undo()
    for members in ([one, two], [one, member(100)]):  # all of them, or some
        sample, info = ReplayBufferEnsemble(*members, sample_from_all=True).sample(8, return_info=True)
        assert type(sample) is TensorDict and sample.batch_size == (2, 4)
        assert torch.equal(sample["obs"][..., 0], (100 * torch.tensor([[0], [1]]) + sample["index", "index"]).float())
        check_same(info["index"], sample["index"])


@pytest.mark.parametrize("counts", [(6, 6), (6, 7)])
def test_what_is_left_of_an_epoch_is_a_batch_of_its_size(counts):
    members = [member(100 * place, count, sampler=SamplerWithoutReplacement()) for place, count in enumerate(counts)]
    ensemble = ReplayBufferEnsemble(*members, sample_from_all=True)
    assert ensemble.sample(8).batch_size == (2, 4)
    rest = ensemble.sample(8)
    assert [row.batch_size for row in rest.unbind(0)] == [(count - 4,) for count in counts]
    for place, row in enumerate(rest.unbind(0)):
        check_same(row.select("obs"), members[place][row["index", "index"]].select("obs"))
