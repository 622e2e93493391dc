"""A batch of whole groups of completions, of those whose rewards differ, beside a loop over ids as trainers have it."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import measure
import numpy as np
import torch
from tensordict import TensorDict

import interop

GROUP, GROUPS = 8, 64


def completions(count: int) -> TensorDict:
    """Groups of 8; in half of them all rewards are equal."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.arange(count // GROUP).repeat_interleave(GROUP)
    reward = torch.rand(count, generator=generator) * (ids % 2)
    return TensorDict({"prompt_id": ids, "reward": reward, "tokens": torch.zeros(count, 64)}, [count])


def of_a_buffer(data: TensorDict, **choices: Any) -> Callable[[], Any]:
    rb = interop.TensorDictReplayBuffer(
        storage=interop.LazyTensorStorage(len(data)),
        sampler=interop.PromptGroupSampler(GROUP, **choices),
        batch_size=GROUP * GROUPS,
    )
    rb.extend(data)
    return rb.sample  # type: ignore[no-any-return]


def of_a_loop(data: TensorDict) -> Callable[[], Any]:
    """Rows by id, the deviation of each group, and a choice of those above zero."""
    rng = np.random.default_rng(0)

    def draw() -> Any:
        rows = defaultdict(list)
        for row, id_ in enumerate(data["prompt_id"].tolist()):
            rows[id_].append(row)
        rewards = data["reward"].numpy()
        kept = [each for each in rows.values() if np.std(rewards[each]) > 0]
        chosen = rng.choice(len(kept), GROUPS, replace=False)
        return data[torch.tensor([row for each in chosen for row in kept[each]])]

    return draw


def main() -> None:
    options = measure.arguments("Groups of completions whose rewards differ").parse_args()
    timings = []
    for count in (2_048, 16_384):
        data = completions(count)
        sides = {
            measure.OURS: of_a_buffer(data, spread=interop.RewardSpread()),
            "a loop over ids": of_a_loop(data),
            "without a filter": of_a_buffer(data),
        }
        timings.append(
            measure.compare(f"{GROUPS} groups of {GROUP} of {count} completions", sides, quick=options.quick)
        )
    measure.report("Groups whose rewards differ", timings, {}, options.json)


if __name__ == "__main__":
    main()
