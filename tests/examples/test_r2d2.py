"""The example of recurrent Q-learning from slices, shortened; and what it checks itself by."""

import argparse
import types

import pytest
import torch
from tensordict import TensorDict

from tests.examples.test_examples import load

r2d2 = load("r2d2")


def test_a_short_run_draws_slices_of_what_happened(capsys):
    threads = torch.get_num_threads()
    try:
        result = r2d2.main(["--quick", "--quiet"])
    finally:
        torch.set_num_threads(threads)
    (run,) = result["runs"]
    assert run["slices"] >= 1_000
    assert 50 <= run["short"] < run["slices"] and run["truncated"] >= 50
    assert "slices checked" in capsys.readouterr().out


def flat_sample(*lengths):
    """Slices of one episode each, one after the other; as a buffer returns them, with the last row of each marked."""
    steps = torch.cat([torch.arange(each) for each in lengths])
    episode = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    flags = torch.zeros(sum(lengths), 1, dtype=torch.bool)
    truncated = flags.clone()
    truncated[torch.tensor(lengths).cumsum(0) - 1] = True
    obs = 100.0 * episode + steps
    after = {"observation": obs[:, None] + 1, "truncated": truncated, "terminated": flags}
    data = {"observation": obs[:, None], "episode": episode, "step": steps, "state": steps[:, None].float()}
    return TensorDict({**data, "next": after}, batch_size=[sum(lengths)])


def collector_of(**ended):
    """Of slices of 4 rows; three episodes have ended, the last one goes on."""
    known = {
        0: (1, torch.tensor([2.0]), False),
        1: (3, torch.tensor([104.0]), False),
        2: (0, torch.tensor([201.0]), False),
    }
    return types.SimpleNamespace(
        episode=torch.tensor([3]),
        step_in_episode=torch.tensor([3]),
        ended={**known, **{int(name[1:]): value for name, value in ended.items()}},
        options=argparse.Namespace(slice=4),
    )


def test_slices_of_different_lengths_are_padded_with_their_last_row():
    slices, mask = r2d2.padded(flat_sample(2, 4, 1, 3), least=2)
    assert mask.tolist() == [[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 1, 0]]
    assert slices["step"].tolist() == [[0, 1, 1, 1], [0, 1, 2, 3], [0, 0, 0, 0], [0, 1, 2, 2]]
    assert slices["episode"].tolist() == [[each] * 4 for each in range(4)]
    assert r2d2.padded(flat_sample(2, 1), least=3)[1].tolist() == [[1, 1, 0], [1, 0, 0]]


def test_slices_that_happened_are_accepted():
    assert r2d2.check(*r2d2.padded(flat_sample(2, 4, 1, 3), 4), collector_of()) == 3


@pytest.mark.parametrize("key", ["episode", "step", "observation", "state", ("next", "observation")])
def test_a_row_that_did_not_happen_is_refused(key):
    slices, mask = r2d2.padded(flat_sample(2, 4, 1, 3), 4)
    slices[key][1, 3 if key != "state" else 0] += 7
    with pytest.raises(AssertionError):
        r2d2.check(slices, mask, collector_of())


def test_ends_that_did_not_happen_are_refused():
    slices = r2d2.padded(flat_sample(2, 4, 1, 3), 4)
    with pytest.raises(AssertionError, match="short in the midst"):
        r2d2.check(*slices, collector_of(_0=(2, torch.tensor([3.0]), False)))
    with pytest.raises(AssertionError, match="frame of another"):
        r2d2.check(*slices, collector_of(_1=(3, torch.tensor([200.0]), False)))
    with pytest.raises(AssertionError):
        r2d2.check(*slices, collector_of(_2=(0, torch.tensor([201.0]), True)))


def test_only_what_is_up_to_date_is_learned_from():
    """Rows of the burn-in take part only where the slice begins its episode, whose state is known; padding never does."""
    torch.manual_seed(0)
    options = r2d2.parse(["--slice=4", "--burn-in=2", "--hidden=3", "--learning-rate=0", "--n=1"])

    def priorities(change, begins, row):
        sample = flat_sample(4, 3)
        sample["observation"] = torch.cat([sample["observation"], sample["observation"]], 1) / 100
        after = sample["next", "observation"]
        sample["next", "observation"] = torch.cat([after, after], 1) / 100
        sample["state"] = torch.zeros(7, 3)
        sample["action"] = torch.zeros(7, dtype=torch.int64)
        sample["priority_weight"] = torch.ones(7)
        sample["next", "reward"] = torch.zeros(7, 1)
        sample["next", "reward"][row] = change
        sample["step"] += 0 if begins else 9
        torch.manual_seed(0)
        return r2d2.Learner(options, forgets=False).update(*r2d2.padded(sample, 2))

    for row, begins, counts in [(0, True, True), (0, False, False), (1, False, False), (2, False, True)]:
        changed = priorities(50.0, begins, row) - priorities(0.0, begins, row)
        assert bool(changed[0] > 1) == counts
        assert changed[1] == 0
