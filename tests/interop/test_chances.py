"""The law of the next draw: against every choice written down, and against real draws, over random histories."""

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import fbuf
from interop import LazyTensorStorage, RandomSampler, ReplayBuffer, SamplerEnsemble, TensorDictReplayBuffer
from tests.interop.law_model import MANY, ONE_DIM, SAMPLERS, LawModel, ensemble_of, play


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("kind", SAMPLERS)
def test_the_law_is_that_of_all_choices_and_of_real_draws(kind, lanes):
    if lanes == 1 or kind not in ONE_DIM:
        play(kind, seed=3, lanes=lanes, draws=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", SAMPLERS)
def test_the_law_over_many_histories(kind):
    for seed in range(420):  # of 24 kinds: 10,080
        play(kind, seed, lanes=1 if kind in ONE_DIM else 1 + seed % 2, draws=seed % 5 == 0)


def filled(kind, seed):
    model = LawModel(kind, seed)
    for _ in range(5):
        model.write()
    return model


@pytest.mark.parametrize("p", [None, [0.7, 0.0, 0.3]])
def test_members_of_an_ensemble_have_their_part(p):
    models = [filled("priorities", 0), filled("uniform", 1), filled("consuming", 2)]
    ensemble = ensemble_of(models, p=p, num_buffer_sampled=MANY, batch_size=MANY)
    law = ensemble.sampler.chances(ensemble.storage)
    share = [1 / 3] * 3 if p is None else p
    expected = np.concatenate([part * model.check()[0] for part, model in zip(share, models, strict=True)])
    np.testing.assert_allclose(law.probability, expected, rtol=2e-5)
    assert law.probability.sum() == pytest.approx(1)
    for member, model in enumerate(models):
        for slot in range(12):
            found = ensemble.why((member, slot))
            assert found.member == member
            assert found.probability == pytest.approx(share[member] * model.check()[0][slot], rel=2e-5)
            assert (found.code == fbuf.Reason.EXCLUDED) == (share[member] == 0)
    models[0].buffer.empty()
    found = ensemble.why((2, 1))
    assert found.code == fbuf.Reason.BLOCKED and found.probability == 0
    with pytest.raises(RuntimeError, match="empty storage"):
        ensemble.sample()
    assert isinstance(ensemble.sampler, SamplerEnsemble)


def test_a_law_does_not_change_the_next_draws():
    for kind in SAMPLERS:
        one, other = LawModel(kind, 5), LawModel(kind, 5)
        for model in (one, other):
            for _ in range(4):
                model.write()
        for _ in range(3):
            one.sampler.chances(one.storage, one.batch)
            one.buffer.why(2)
            try:
                index = one.buffer.sample(return_info=True)[1]["index"]
            except RuntimeError:
                break
            again = other.buffer.sample(return_info=True)[1]["index"]
            pairs = zip(index, again, strict=True) if isinstance(index, tuple) else [(index, again)]
            assert all(torch.equal(*pair) for pair in pairs), kind


class Newest(RandomSampler):
    """Draws the newest item."""

    def draw(self, storage, batch_size, key):
        return torch.full((batch_size,), storage.ring.cursor - 1), {}


class SaysSo(Newest):
    def chances(self, storage, batch_size=None):
        mass = np.zeros(len(storage))
        mass[storage.ring.cursor - 1] = 1
        return fbuf.Chances.of(mass, fbuf.Reason.WAITING)


class DrawsOtherwise(SaysSo):
    def draw(self, storage, batch_size, key):
        return torch.zeros(batch_size, dtype=torch.int64), {}


def test_a_class_of_the_users_says_its_law_or_it_is_not_known():
    for kind, known in ((Newest, False), (SaysSo, True), (DrawsOtherwise, False)):
        buffer = ReplayBuffer(storage=LazyTensorStorage(4), sampler=kind())
        buffer.extend(torch.arange(3))
        assert buffer.why(2).probability == (1.0 if known else None)
        assert buffer.why(0).code == (fbuf.Reason.WAITING if known else fbuf.Reason.UNKNOWN)
        assert buffer.why(3).code == fbuf.Reason.NOT_WRITTEN
        with pytest.raises(IndexError, match=r"places 0 to 3$"):
            buffer.why(4)
        with pytest.raises(TypeError, match="an int"):
            buffer.why((1, 2))


def test_of_several_item_dims_the_error_names_the_dim():
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(8, ndim=2), dim_extend=0)
    buffer.extend(TensorDict({"x": torch.zeros(3, 2)}, [3, 2]))
    assert buffer.why((2, 1)).slot == 5
    with pytest.raises(IndexError, match=r"\(2, 3\) does not exist: .* 0 to 1 in item dim 1, the lane"):
        buffer.why((2, 3))
    with pytest.raises(IndexError, match=r"0 to 3 in item dim 0, the row in the ring"):
        buffer.why((-1, 0))
