"""Classes of users keep their own attributes beside those of the library, and copies of samplers are their own."""

import copy

import pytest
import torch
from tensordict import TensorDict

from interop import (
    ConsumingSampler,
    LazyTensorStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    Sampler,
    SamplerWithoutReplacement,
    SliceSampler,
    StalenessAwareSampler,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
)


def rows(count=10):
    numbers = torch.arange(count)
    return TensorDict({"a": numbers, "done": numbers % 5 == 4, "ver": numbers}, [count])


def buffer(sampler, prefetch=None, **more):
    made = TensorDictReplayBuffer(
        storage=LazyTensorStorage(10),
        sampler=sampler,
        batch_size=4,
        prefetch=prefetch,
        generator=torch.Generator().manual_seed(0),
        **more,
    )
    made.extend(rows())
    return made


# ------------------------------------------------------------------ attributes named as methods


class CountingSampler(RandomSampler):
    """Has attributes with the names of methods of the library."""

    def __init__(self):
        super().__init__()
        self.state, self.with_state = 7, "seven"

    def state_dict(self):
        return {"state": self.state, "with_state": self.with_state}

    def load_state_dict(self, state):
        self.state, self.with_state = state["state"], state["with_state"]


class CountingWriter(TensorDictRoundRobinWriter):
    def __init__(self):
        super().__init__()
        self.state = 8

    def state_dict(self):
        return {"state": self.state}

    def load_state_dict(self, state):
        self.state = state["state"]


def test_attributes_called_state_are_saved_and_loaded(tmp_path):
    saved = buffer(CountingSampler(), writer=CountingWriter())
    saved.sampler.state, saved.writer.state = 1, 2
    saved.dumps(tmp_path / "c")
    for load in (lambda to: to.loads(tmp_path / "c"), lambda to: to.load_state_dict(saved.state_dict())):
        loaded = buffer(CountingSampler(), writer=CountingWriter())
        load(loaded)
        assert (loaded.sampler.state, loaded.writer.state, loaded.sampler.with_state) == (1, 2, "seven")


def test_an_attribute_that_shadows_a_method_is_not_lost_silently():
    class Lost(RandomSampler):
        def __init__(self):
            super().__init__()
            self.state = 7

    with pytest.raises(NotImplementedError, match="attributes that nothing saves, state"):
        buffer(Lost()).state_dict()


@pytest.mark.parametrize("name", ["draws", "item_values", "hooks"])
def test_names_that_a_sampler_has_for_itself_are_refused_at_once(name):
    with pytest.raises(TypeError, match=f"uses this name for itself, choose another one: {name}"):
        type("Own", (Sampler,), {name: 0, "draw": lambda self, storage, batch_size, key: None})

    class Own(RandomSampler):
        def __init__(self):
            super().__init__()
            setattr(self, name, 0)

    with pytest.raises(AttributeError, match=f"Own uses|of .*Own uses.*{name}"):
        Own()


# ------------------------------------------------------------------ copies

SAMPLERS = {
    "prioritized": lambda: PrioritizedSampler(10, 0.7, 0.5),
    "prioritized slices": lambda: PrioritizedSliceSampler(10, 0.7, 0.5, slice_len=2, end_key="done"),
    "slices": lambda: SliceSampler(slice_len=2, end_key="done"),
    "epochs": SamplerWithoutReplacement,
    "consuming": lambda: ConsumingSampler(2),
    "staleness": lambda: StalenessAwareSampler(version_key="ver"),
    "random": RandomSampler,
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_shallow_copy_of_a_sampler_is_its_own(name):
    sampler, expected = SAMPLERS[name](), SAMPLERS[name]()
    one, other = buffer(sampler), buffer(expected)
    twin = copy.copy(sampler)
    if hasattr(twin, "alpha"):
        twin.alpha = 0.1
        twin.update_priority(torch.arange(2), torch.tensor([5.0, 6.0]))
    for _ in range(2):
        twin.sample(one.storage, 4)
    for _ in range(3):
        assert torch.equal(one.sample()["a"], other.sample()["a"])
    assert repr(sampler) == repr(expected)


# ------------------------------------------------------------------ parameters that the library does not see


@pytest.mark.parametrize("is_users", [False, True])
@pytest.mark.parametrize("name", sorted(SAMPLERS.keys() - {"consuming"}))  # which does not prefetch
def test_batches_are_drawn_again_after_parameters_changed(name, is_users):
    sampler = SAMPLERS[name]()
    if is_users:
        sampler.__class__ = type("Own", (type(sampler),), {"stateless": True})
    drawn = buffer(sampler, prefetch=2)
    drawn.sample()
    ahead = drawn.prefetch_queue
    before = sampler.draws.changes, *sampler.draws.settings
    sampler.parameters_changed()
    assert (sampler.draws.changes, *sampler.draws.settings) != before
    assert len(drawn.sample()) == 4 and ahead is drawn.prefetch_queue


def test_weights_that_changed_count_in_the_next_batch():
    weights = {"new": 1.0}
    sampler = StalenessAwareSampler(
        version_key="ver", staleness_weight_fn=lambda stale: torch.where(stale > 4, 1.0, weights["new"])
    )
    drawn = buffer(sampler, prefetch=3)
    sampler.consumer_version = 9
    drawn.sample()
    weights["new"] = 0.0
    sampler.parameters_changed()
    for _ in range(5):
        assert (9 - drawn.sample()["ver"] > 4).all()


def test_a_draw_without_anything_to_undo_may_say_none():
    class Own(RandomSampler):
        stateless = True

        def before_draw(self):
            return None

        def put_back(self, before):
            raise AssertionError

        def draw(self, storage, batch_size, key):
            if len(storage) == 10:
                raise KeyboardInterrupt
            return super().draw(storage, batch_size, key)

    made = buffer(Own())
    with pytest.raises(KeyboardInterrupt):
        made.sample()
