"""Hidden states brought up to date on the first steps of sequences."""

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictModuleBase

from interop import LazyTensorStorage, ReplayBuffer
from interop.transforms import BurnInTransform


class Recurrent(TensorDictModuleBase):
    """A GRU over time from the hidden state of the first step; the one after each step is under "next"."""

    def __init__(self):
        super().__init__()
        self.in_keys, self.out_keys = ["observation", "hidden"], ["out", ("next", "hidden")]
        self.gru = torch.nn.GRUCell(3, 4)
        self.ran_with = []

    def forward(self, tensordict):
        self.ran_with.append((tensordict.batch_size, torch.is_grad_enabled()))
        hidden, states = tensordict["hidden"][..., 0, :], []
        for step in tensordict["observation"].unbind(-2):
            hidden = self.gru(step.reshape(-1, 3), hidden.reshape(-1, 4)).reshape(*step.shape[:-1], 4)
            states.append(hidden)
        tensordict["out"] = tensordict["next", "hidden"] = torch.stack(states, -2)
        return tensordict


def data(*shape):
    return TensorDict(
        {
            "observation": torch.randn(*shape, 3),
            "hidden": torch.randn(*shape, 4),
            "step": torch.arange(shape[-1]).expand(shape),
            "next": TensorDict({"hidden": torch.zeros(*shape, 4)}, shape),
        },
        shape,
    )


@pytest.mark.parametrize("shape", [(2, 9), (9,), (2, 3, 9)])
def test_the_state_goes_on_from_the_steps_that_were_run(shape):
    module, given = Recurrent(), data(*shape)
    before = given.clone()
    found = BurnInTransform([module], burn_in=4)(given)
    assert module.ran_with == [((*shape[:-1], 4), False)]
    assert (given == before).all() and set(given.keys(True)) == set(before.keys(True))
    assert found.batch_size == (*shape[:-1], 5) and found["step"].reshape(-1)[:5].tolist() == [4, 5, 6, 7, 8]
    with torch.no_grad():
        whole = module(before.clone())["out"]
        assert torch.allclose(found["hidden"][..., 0, :], whole[..., 3, :])
        assert torch.equal(found["hidden"][..., 1:, :], before["hidden"][..., 5:, :])
        assert torch.allclose(module(found.copy())["out"], whole[..., 4:, :])
    assert not found["hidden"].requires_grad and "out" not in found


def test_a_state_that_was_not_stored_is_made():
    module = TensorDictModule(torch.nn.Linear(3, 4), in_keys=["observation"], out_keys=[("next", "a", "hidden")])
    transform = BurnInTransform(module, burn_in=2)
    assert transform.out_keys == [("a", "hidden")] and transform.in_keys == ["observation"]
    given = data(2, 5)
    found = transform(given)
    assert torch.allclose(found["a", "hidden"][:, 0], module.module(given["observation"][:, 1]))
    assert found["a", "hidden"].shape == (2, 3, 4) and (found["a", "hidden"][:, 1:] == 0).all()


def test_a_buffer_has_no_part_in_the_modules():
    module = Recurrent()
    transform = BurnInTransform([module], burn_in=4)
    rb = ReplayBuffer(storage=LazyTensorStorage(3), transform=transform, batch_size=2)
    rb.extend(data(3, 9))
    assert rb.sample().batch_size == (2, 5)
    assert module.training and not rb.transform.state_dict() and not list(transform.parameters())
    assert rb.storage[:].batch_size == (3, 9) and "out" not in rb.storage[:]


@pytest.mark.parametrize("shape", [(2, 4), (2, 3), (4,)])
def test_too_short_sequences_are_refused(shape):
    with pytest.raises(ValueError, match="burn_in=4 leaves nothing of a batch size of"):
        BurnInTransform([Recurrent()], burn_in=4)(data(*shape))
    with pytest.raises(ValueError, match="leaves nothing"):
        BurnInTransform([Recurrent()], burn_in=1)(data(3)[0])


def test_a_state_that_cannot_hold_what_is_written_is_refused():
    given = data(2, 6)
    given["hidden"] = torch.zeros(2, 6, 4, dtype=torch.int64)
    module = TensorDictModule(torch.nn.Linear(3, 4), in_keys=["observation"], out_keys=[("next", "hidden")])
    with pytest.raises(TypeError, match=r"'hidden' is torch.int64 .* the modules write torch.float32"):
        BurnInTransform([module], burn_in=2)(given)


def test_another_dim_named_time_is_refused():
    given = data(2, 6)
    given.names = ["time", None]
    with pytest.raises(ValueError, match="time is the last batch dim"):
        BurnInTransform([Recurrent()], burn_in=2)(given)


def test_no_state_goes_on_into_another_trajectory():
    module, given = Recurrent(), data(3, 9)
    given["next", "done"] = torch.zeros(3, 9, 1, dtype=torch.bool)
    given["next", "done"][1, 3] = True  # the last step that is run
    given["collector"] = TensorDict({"traj_ids": torch.tensor([[0] * 9, [1] * 9, [2] * 4 + [3] * 5])}, [3, 9])
    found = BurnInTransform([module], burn_in=4)(given.copy())
    with torch.no_grad():
        state = module(given[:, :4].clone())["next", "hidden"][:, -1]
    assert torch.allclose(found["hidden"][0, 0], state[0])
    assert torch.equal(found["hidden"][1:, 0], given["hidden"][1:, 4])
    del given["hidden"]
    module = TensorDictModule(torch.nn.Linear(3, 4), in_keys=["observation"], out_keys=[("next", "hidden")])
    found = BurnInTransform([module], burn_in=4)(given)
    assert not found["hidden"][1:].any() and found["hidden"][0, 0].any()
    given["collector", "traj_ids"][0, 1::2] = 9
    with pytest.raises(ValueError, match="interleaved"):
        BurnInTransform([module], burn_in=4)(given)
