"""The best dialogs of a prompt, beside a plain model: however the stream is cut, over failed writes and saves."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict, lazy_stack

from interop import LazyStackStorage, ReplayBuffer, TopKRewardSelector


def buffer(total: int = 3, best: int = 2) -> ReplayBuffer:
    rb = ReplayBuffer(storage=LazyStackStorage(200), batch_size=2)
    rb.append_transform(TopKRewardSelector(total, best, prompt_key="text"))
    return rb


def item(number: int, prompt: int, reward: float, done: bool = True) -> TensorDict:
    data = {("next", "done"): torch.full((1, 1), done), ("next", "reward"): torch.full((number % 3 + 1, 1), reward)}
    return TensorDict({**data, "text": f"prompt {prompt}", "i": torch.tensor(number)})


def stored(rb: ReplayBuffer) -> list[int]:
    return [int(rb[place]["i"]) for place in range(len(rb))]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), min_size=1, max_size=20), st.integers(1, 20))
def test_a_plain_model(answers: list[tuple[int, int]], cut: int) -> None:
    rb, groups, expected = buffer(), {}, []
    items = [item(number, prompt, float(reward)) for number, (prompt, reward) in enumerate(answers)]
    for start in range(0, len(items), cut):
        rb.extend(lazy_stack(items[start : start + cut]))
    for number, (prompt, reward) in enumerate(answers):
        group = groups.setdefault(prompt, [])
        group.append((-reward, number))
        if len(group) == 3:
            expected += [number for _, number in sorted(groups.pop(prompt))[:2]]
    assert stored(rb) == expected


def test_steps_until_done_are_one_dialog_and_a_nan_stores_nothing(tmp_path) -> None:
    rb = buffer()
    steps = [item(number, 0, float(number), done=number % 2 == 1) for number in range(6)]
    rb.extend(lazy_stack(steps[:3]))
    with pytest.raises(ValueError, match="NaN"):
        rb.extend(lazy_stack([item(9, 0, float("nan"))]))
    rb.dumps(tmp_path / "rb")
    other = buffer()
    other.loads(tmp_path / "rb")
    for each in (rb, other):
        each.extend(lazy_stack(steps[3:]))
        assert stored(each) == [4, 5, 2, 3]
    with pytest.raises(ValueError, match="topk_size=6 and total_dialog_turns=5"):
        TopKRewardSelector(5, 6)
