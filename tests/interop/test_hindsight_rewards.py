"""What follows from another goal: rewards, and what is terminal."""

import pytest
import torch

from interop import HERReplayBuffer, LazyTensorStorage
from tests.interop.rows import check_same
from tests.interop.test_hindsight import buffer_of, terminal, walked


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bool, torch.int32])
def test_rewards_come_in_the_form_that_is_stored(shape, dtype):
    buffer = buffer_of(10, [4], reward_fn=lambda td: (td["time"] % 2).to(dtype).reshape(-1, *shape))
    batch = buffer.sample(20)
    check_same(batch["next", "reward"], (batch["time"] % 2).float()[:, None])


def ends_of(**flags):
    """A batch that was relabelled with the final goals of episodes 0-1 and 2-3, and what its flags were before."""
    buffer = HERReplayBuffer(terminal, her_ratio=1.0, strategy="final", storage=LazyTensorStorage(4))
    data = walked(range(4), [], flags=())
    for name, values in flags.items():
        data["next", name] = torch.tensor(values, dtype=torch.bool)[:, None]
    key = ("next", "done") if "done" in flags else ("next", "terminated")
    buffer.end_key = key
    buffer.extend(data)
    batch = buffer.sample(40)
    first = [batch["index"].tolist().index(row) for row in range(4)]
    return {name: batch["next", name][first, 0].int().tolist() for name in flags}


def test_a_function_may_say_what_is_terminal():
    """Episode 0-1 reached what it aimed at, episode 2-3 was truncated: both final transitions reach the new goals."""
    ends = [0, 1, 0, 1]
    found = ends_of(done=ends, terminated=[0, 1, 0, 0], truncated=[0, 0, 0, 1])
    assert found == {"done": ends, "terminated": ends, "truncated": [0, 0, 0, 1]}
    assert ends_of(done=ends, terminated=[0, 1, 0, 0]) == {"done": ends, "terminated": ends}
    assert ends_of(done=ends) == {"done": ends}
    assert ends_of(terminated=ends) == {"terminated": ends}


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ({"done": [0, 1], "terminated": [0, 1], "truncated": [0, 0]}, {"done": [0, 0], "terminated": [0, 0]}),
        ({"done": [0, 1], "terminated": [0, 1], "truncated": [0, 1]}, {"done": [0, 1], "terminated": [0, 0]}),
        ({"done": [0, 1], "terminated": [0, 1]}, {"done": [0, 0], "terminated": [0, 0]}),
        ({"done": [0, 1], "terminated": [0, 0]}, {"done": [0, 1], "terminated": [0, 0]}),
        ({"done": [0, 1]}, {"done": [0, 0]}),
    ],
)
def test_what_is_not_terminal_for_the_new_goal_goes_on_unless_it_was_truncated(flags, wanted):
    def never(td):
        return torch.zeros(td.shape), torch.zeros(td.shape, dtype=torch.bool)

    buffer = HERReplayBuffer(never, her_ratio=1.0, storage=LazyTensorStorage(2))
    data = walked(range(2), [], flags=())
    for name, values in flags.items():
        data["next", name] = torch.tensor(values, dtype=torch.bool)[:, None]
    buffer.extend(data)
    batch = buffer.sample(20)
    for name, values in wanted.items():
        check_same(batch["next", name][:, 0], torch.tensor(values, dtype=torch.bool)[batch["index"]])


@pytest.mark.parametrize(
    ("returned", "error"),
    [
        (1.0, TypeError),
        (torch.zeros(3), ValueError),
        (torch.zeros(4, 2), ValueError),
        (torch.zeros(4, dtype=torch.complex64), TypeError),
        ((torch.zeros(4), torch.zeros(4)), TypeError),
        ((torch.zeros(4), torch.zeros(2, dtype=torch.bool)), ValueError),
    ],
)
def test_rewards_that_do_not_fit_are_refused(returned, error):
    buffer = buffer_of(10, [4], reward_fn=lambda td: returned)
    with pytest.raises(error, match="reward_fn"):
        buffer.sample(4)
