"""GRPO on texts, shortened; and its checks see what they are there to see."""

import pytest
import torch

pytest.importorskip("transformers")

from tests.examples.test_examples import load


@pytest.fixture(scope="module")
def grpo():
    return load("grpo")


def test_a_short_run_learns_from_text_in_a_ring_that_went_around(grpo, capsys):
    result = grpo.main(["--quick"])
    assert result["passed"] is None
    assert result["written"] == 10 * 64  # of 256 that there is room for
    assert result["updates"] == 10 * 2
    assert result["shown"][-1]["kl"] > 0
    assert "prompt, completion" in capsys.readouterr().out


@pytest.fixture(scope="module")
def drawn(grpo):
    """A batch, the options, and the learner that it is for."""
    options = grpo.parse(["--quick", "--completion", "5"])
    torch.manual_seed(0)
    tokenizer = grpo.trained_tokenizer(options.letters)
    model = grpo.language_model(options, tokenizer)
    rollout = grpo.RolloutFromModel(model, model, None, max_new_tokens=5, eos_token_id=tokenizer.eos_token_id)
    collector, buffer = grpo.Collector(options, rollout, tokenizer), grpo.replay_buffer(options)
    for version in range(2):
        buffer.extend(collector.collect(version))
    return buffer.sample(), options, grpo.Learner(options, model, tokenizer)


def test_texts_are_the_tokens_that_were_drawn(drawn):
    batch, options, learner = drawn
    found, written = learner.log_probs(batch["prompt"], batch["completion"])
    torch.testing.assert_close(found, batch["log_probs"], rtol=1e-4, atol=1e-5)
    lengths = torch.tensor([min(len(each) + 1, options.completion) for each in batch["completion"]])
    assert torch.equal(written.sum(1), lengths) and int(lengths.min()) < options.completion


def an_odd_completion(batch):
    batch["prompt_id"][3] += 1


def the_reward_of_another_text(batch):
    batch["reward"][0] += 0.125


def a_stale_row(batch):
    batch["policy_version"][-1] = -3


def used_too_often(batch):
    batch["group_uses"][5] = 3


def test_a_batch_as_drawn_passes_the_check(grpo, drawn):
    grpo.check(drawn[0], drawn[1], 1)


@pytest.mark.parametrize("spoil", [an_odd_completion, the_reward_of_another_text, a_stale_row, used_too_often])
def test_a_spoilt_batch_does_not(grpo, drawn, spoil):
    batch = drawn[0].clone()
    spoil(batch)
    with pytest.raises(AssertionError):
        grpo.check(batch, drawn[1], 1)
