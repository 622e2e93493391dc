"""GRPO (arXiv:2402.03300) with a tiny GPT-2 from random weights; a buffer stores prompts and completions as text.

A completion should repeat the last letter of its prompt: the reward is the share of its tokens that do. The buffer draws
whole groups of completions of one prompt. It draws each group twice, and none that an old policy has written. The
advantage of a completion is its reward minus the mean of its group.
"""

import argparse
import copy
import json
import pathlib
import statistics
import string
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from interop import LazyTensorStorage, PromptGroupSampler, StalenessAwareSampler, TensorDictReplayBuffer
from interop.llm import AdaptiveKLController, PromptData, RolloutFromModel

GAIN = 0.4  # by which the mean reward has to rise
END = "<end>"


def trained_tokenizer(letters: str) -> PreTrainedTokenizerFast:
    """One token a letter, learned from the letters; `END` ends and pads texts."""
    tokenizer = Tokenizer(models.WordLevel())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    tokenizer.train_from_iterator([letters], trainers.WordLevelTrainer(special_tokens=[END], show_progress=False))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)


def language_model(options: argparse.Namespace, tokenizer: PreTrainedTokenizerFast) -> GPT2LMHeadModel:
    """GPT-2 of two layers with random weights."""
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=len(tokenizer), n_positions=options.prompt + options.completion, n_embd=options.width, n_layer=2,
            n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        )
    ).eval()  # fmt: skip


def reward_of(prompt: str, completion: str, places: int) -> float:
    """The share of tokens that are the last letter of the prompt."""
    return completion.count(prompt[-1]) / places


class Collector:
    """Completes prompts by the model, and stores groups of completions as rows of text."""

    def __init__(self, options: argparse.Namespace, rollout: RolloutFromModel, tokenizer: Any) -> None:
        self.options, self.rollout, self.tokenizer = options, rollout, tokenizer
        self.visits = 0

    def collect(self, version: int) -> TensorDict:
        """Rows [prompts * group], interleaved: the first completions of all prompts, then the second ones."""
        options = self.options
        letters = torch.randint(len(options.letters), (options.prompts, options.prompt)).tolist()
        prompts = ["".join(options.letters[each] for each in row) for row in letters] * options.group
        tokens = self.tokenizer(prompts, return_tensors="pt")
        ends = torch.full((len(prompts),), options.prompt)
        found = self.rollout.generate(PromptData(tokens["input_ids"], tokens["attention_mask"], ends, batch_size=[]))
        completions = self.tokenizer.batch_decode(found.generated[:, options.prompt :], skip_special_tokens=True)
        rewards = [reward_of(*pair, options.completion) for pair in zip(prompts, completions, strict=True)]
        # A prompt may come again with other completions: the number of its visit keeps the groups apart.
        visits = self.visits + torch.arange(options.prompts).repeat(options.group)
        self.visits += options.prompts
        log_probs = found.log_probs.squeeze(-1)
        return TensorDict(
            {
                "prompt_id": visits,
                "prompt": prompts,
                "completion": completions,
                "reward": torch.tensor(rewards),
                "log_probs": log_probs,
                "reference_log_probs": log_probs - found.log_ratio,
                "policy_version": torch.full((len(prompts),), version),
            },
            batch_size=[len(prompts)],
        )


def replay_buffer(options: argparse.Namespace) -> TensorDictReplayBuffer:
    staleness = StalenessAwareSampler(max_staleness=options.max_staleness)
    return TensorDictReplayBuffer(
        storage=LazyTensorStorage(options.capacity),
        sampler=PromptGroupSampler(options.group, max_uses=options.uses, staleness=staleness),
        batch_size=options.prompts * options.group,
        generator=torch.Generator().manual_seed(options.seed),
    )


class Learner:
    """The tuned model and its update."""

    def __init__(self, options: argparse.Namespace, model: GPT2LMHeadModel, tokenizer: Any) -> None:
        self.options, self.model, self.tokenizer = options, model, tokenizer
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, fused=True)

    def update(self, batch: TensorDictBase, kl_coef: float) -> float:
        """One step of the clipped objective. Returns the mean KL divergence from the reference, a token."""
        log_probs, written = self.log_probs(batch["prompt"], batch["completion"])
        rewards = batch["reward"].view(-1, self.options.group)
        advantage = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
        advantage = advantage.view(-1, 1)
        ratio = (log_probs - batch["log_probs"]).exp()
        clipped = ratio.clamp(1 - self.options.clip, 1 + self.options.clip)
        gain = torch.minimum(ratio * advantage, clipped * advantage)
        off = batch["reference_log_probs"] - log_probs
        divergence = off.exp() - off - 1  # unbiased, and never below 0
        loss = ((kl_coef * divergence - gain) * written).sum() / written.sum()
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return float((divergence.detach() * written).sum() / written.sum())

    def log_probs(self, prompts: Sequence[str], completions: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Log probabilities of tokens of completions, [batch, completion], 0 after the end; and a mask of these tokens."""
        size = self.options.prompt + self.options.completion
        texts = [prompt + completion + END for prompt, completion in zip(prompts, completions, strict=True)]
        tokens = self.tokenizer(texts, padding="max_length", truncation=True, max_length=size, return_tensors="pt")
        logits = self.model(tokens["input_ids"], attention_mask=tokens["attention_mask"]).logits
        before = logits[:, self.options.prompt - 1 : -1]
        written = tokens["attention_mask"][:, self.options.prompt :]
        chosen = RolloutFromModel.logprobs_of_labels(before, tokens["input_ids"][:, self.options.prompt :])
        return chosen * written, written


def check(batch: TensorDictBase, options: argparse.Namespace, version: int) -> None:
    """Check that groups are whole and not too stale, and that rewards belong to the texts."""
    prompts, completions = list(batch["prompt"]), list(batch["completion"])
    of_groups = batch["prompt_id"].view(-1, options.group)
    assert (of_groups == of_groups[:, :1]).all() and len(of_groups.unique()) == options.prompts
    assert all(prompts[at] == prompts[at // options.group * options.group] for at in range(len(prompts)))
    assert (version - batch["policy_version"] <= options.max_staleness).all()
    assert (batch["group_uses"] <= options.uses).all()
    rewards = [reward_of(*pair, options.completion) for pair in zip(prompts, completions, strict=True)]
    assert torch.equal(batch["reward"], torch.tensor(rewards))


def train(options: argparse.Namespace) -> dict[str, Any]:
    """Collect and learn. Returns the mean reward of each collection, and the cost."""
    torch.manual_seed(options.seed)
    begin, tokenizer = time.perf_counter(), trained_tokenizer(options.letters)
    model = language_model(options, tokenizer)
    rollout = RolloutFromModel(
        model, copy.deepcopy(model), None, max_new_tokens=options.completion, eos_token_id=tokenizer.eos_token_id
    )
    kl = AdaptiveKLController(init_kl_coef=options.kl_coef, target=options.kl_target, horizon=100, model=rollout)
    collector, learner, rb = (
        Collector(options, rollout, tokenizer),
        Learner(options, model, tokenizer),
        replay_buffer(options),
    )
    rewards, shown, updates = list[float](), list[dict[str, Any]](), 0
    for version in range(options.rounds):
        rows = collector.collect(version)
        rewards.append(float(rows["reward"].mean()))
        rb.extend(rows)
        rb.sampler.staleness.consumer_version = version
        divergence = 0.0
        while len(rb) >= rb.batch_size and updates < (version + 1) * options.uses:
            batch = rb.sample()
            if updates % options.check_every == 0:
                check(batch, options, version)
            divergence = learner.update(batch, kl.coef)
            kl.update([-kl.coef * divergence])
            updates += 1
        if version % (options.rounds // 10) == 0 or version == options.rounds - 1:
            example = f"{batch['prompt'][0]} {batch['completion'][0]}"
            recent = statistics.fmean(rewards[-options.rounds // 10 :])
            shown.append({"round": version, "reward": recent, "kl": divergence, "kl_coef": kl.coef, "example": example})
            bar = "#" * round(40 * recent)
            print(f"{version:<7}{recent:<9.2f}{divergence:<8.2f}{kl.coef:<9.3f}{example:<20}{bar}", flush=True)
    seconds = time.perf_counter() - begin
    return {"rewards": rewards, "shown": shown, "updates": updates, "written": rb.write_count, "seconds": seconds}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--rounds", type=int, default=300, help="of collecting, and of updates after it")
    parser.add_argument("--prompts", type=int, default=8, help="collected in a round, and groups in a batch")
    parser.add_argument("--group", type=int, default=8, help="completions of a prompt")
    parser.add_argument("--uses", type=int, default=2, help="how often a group is drawn, and updates a round")
    parser.add_argument("--max-staleness", type=int, default=2, help="rounds after which a group is not drawn any more")
    parser.add_argument("--capacity", type=int, default=512, help="completions in the buffer")
    parser.add_argument("--letters", default=string.ascii_lowercase[:12], help="of which texts are made")
    parser.add_argument("--prompt", type=int, default=6, help="letters of a prompt")
    parser.add_argument("--completion", type=int, default=8, help="tokens of a completion at most")
    parser.add_argument("--width", type=int, default=64, help="of the model")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="of AdamW")
    parser.add_argument("--clip", type=float, default=0.2, help="how far the ratio of probabilities counts")
    parser.add_argument("--kl-coef", type=float, default=2e-3, help="weight of the divergence, in the beginning")
    parser.add_argument("--kl-target", type=float, default=2.0, help="divergence a token that the weight is adapted to")
    parser.add_argument("--check-every", type=int, default=10, help="updates from one checked batch to the next")
    parser.add_argument("--seed", type=int, default=0, help="of everything")
    parser.add_argument("--threads", type=int, default=1, help="of torch; the model is too small for more")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="also write the numbers to FILE")
    parser.add_argument("--quick", action="store_true", help="few rounds, to see that it runs")
    options = parser.parse_args(argv)
    if options.quick:
        options.rounds, options.capacity = 10, 256
    return options


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Train, print the curve of rewards. Returns the results; "passed" is None for a quick run."""
    options = parse(argv)
    torch.set_num_threads(options.threads)
    print(f"{'round':<7}{'reward':<9}{'KL':<8}{'weight':<9}{'prompt, completion'}")
    run = train(options)
    tenth = max(options.rounds // 10, 1)
    first, last = (statistics.fmean(part) for part in (run["rewards"][:tenth], run["rewards"][-tenth:]))
    passed = None if options.quick else last - first >= GAIN
    print(
        f"the mean reward rose from {first:.2f} to {last:.2f} (mark {GAIN:+.2f}) in {run['seconds']:.0f} s"
        f"{'' if passed is None else '  PASS' if passed else '  FAIL'}"
    )
    means = [statistics.fmean(run["rewards"][max(0, at - 9) : at + 1]) for at in range(len(run["rewards"]))]
    curve = {"average over 10 rounds": [list(range(len(means))), means]}
    result = {"passed": passed, "first": first, "last": last, "curve": curve, **run}
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2))
    return result


if __name__ == "__main__":
    sys.exit(main()["passed"] is False)
