"""The example of prioritized replay with n-step returns and frames stored once, shortened."""

import jax

from tests.examples.test_examples import load

rainbow = load("rainbow")


def test_a_short_run_draws_what_happened_from_half_the_memory(capsys):
    with jax.numpy_rank_promotion("allow"):
        result = rainbow.main(["--quick", "--quiet"])
    (run,) = result["runs"]
    assert run["steps"] == 2_400 and run["checked"] >= 500
    assert run["short"] >= 20 and run["truncated"] >= 10
    assert result["bytes"] < 0.5 * result["plain_bytes"]
    assert "with frames stored once" in capsys.readouterr().out
