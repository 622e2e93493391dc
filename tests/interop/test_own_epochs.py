"""Epochs of a user's sampler: iteration ends where it says, whatever is drawn ahead."""

import pytest
import torch
from tensordict import TensorDict

from interop import (
    LazyTensorStorage,
    Sampler,
    TensorDictReplayBuffer,
)
from tests.interop.rows import check_same

DEPTHS = pytest.mark.parametrize("prefetch", [None, 1, 3, 8])


class Twos(Sampler):
    """Epochs of two batches; what it draws depends on how many came before."""

    def __init__(self):
        self.drawn, self._ran_out = 0, False

    @property
    def ran_out(self):
        return self._ran_out

    @ran_out.setter
    def ran_out(self, value):
        self._ran_out = value

    def sample(self, storage, batch_size):
        self.drawn += 1
        self._ran_out = self.drawn % 2 == 0
        noise = torch.randint(3, (batch_size,), generator=self._rng)
        return torch.arange(self.drawn, self.drawn + batch_size), {"noise": noise.to(torch.uint8)}

    def state_dict(self):
        return {"drawn": self.drawn, "ran_out": self._ran_out}

    def load_state_dict(self, state):
        self.drawn, self._ran_out = state["drawn"], state["ran_out"]


def rows():
    return TensorDict({"x": torch.arange(64)}, [64])


def filled(prefetch):
    choices = {"sampler": Twos(), "generator": torch.Generator().manual_seed(0), "prefetch": prefetch}
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(64), batch_size=4, **choices)
    buffer.extend(rows())
    return buffer


@DEPTHS
def test_an_epoch_ends_where_the_sampler_says(prefetch):
    buffer = filled(prefetch)
    for turn in range(1, 4):
        assert sum(1 for _, _ in zip(buffer, range(9), strict=False)) == 2
        assert buffer.sampler.drawn == 2 * turn  # it is not called past the end


@DEPTHS
def test_next_ends_there_too(prefetch):
    buffer = filled(prefetch)
    assert [buffer.next() is None for _ in range(7)] == [False, False, True, False, False, True, False]


@DEPTHS
def test_an_epoch_that_was_broken_off_goes_on(prefetch):
    buffer = filled(prefetch)
    next(iter(buffer))
    assert [batch["x"][0].item() for batch in buffer] == [2]
    assert [batch["x"][0].item() for batch in buffer] == [3, 4]


def test_draws_do_not_end_with_the_epoch():
    buffer = filled(3)
    assert [buffer.sample()["x"][0].item() for _ in range(7)] == list(range(1, 8))


def test_a_saved_buffer_goes_on_as_the_one_that_was_saved(tmp_path):
    buffer, other = filled(3), filled(3)
    buffer.sample()
    buffer.dumps(tmp_path / "c")  # what waits is drawn again: the sampler goes on behind it
    other.loads(tmp_path / "c")
    check_same([buffer.sample() for _ in range(6)], [other.sample() for _ in range(6)])


def test_an_error_of_the_sampler_is_raised_when_its_batch_is_due():
    class Broken(Twos):
        def sample(self, storage, batch_size):
            found = super().sample(storage, batch_size)
            self._ran_out = False
            if self.drawn == 3:
                raise ArithmeticError("three")
            return found

    buffer = filled(3)
    buffer.set_sampler(Broken())
    assert [buffer.sample()["x"][0].item() for _ in range(2)] == [1, 2]
    with pytest.raises(ArithmeticError, match="three"):
        buffer.sample()
    assert [buffer.sample()["x"][0].item() for _ in range(3)] == [4, 5, 6]
