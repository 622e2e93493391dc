"""The example of recurrent Q-learning from slices, shortened."""

import torch

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
