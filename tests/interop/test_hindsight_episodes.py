"""Where HERReplayBuffer takes episodes to begin and end: kept between draws, always as if looked up anew."""

import copy
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from interop import HERReplayBuffer, LazyMemmapStorage, LazyTensorStorage

KEYS = (("next", "done"), ("next", "terminated"))


def reward_fn(td):
    return torch.zeros(td.batch_size)


def walk(first, ended, flag=torch.bool):
    """Steps that reach the time that they are at; some end an episode, by one of two flags in turn."""
    times = torch.arange(first, first + len(ended))
    ended = torch.as_tensor(ended).reshape(-1, 1)
    odd = (times % 2 == 1)[:, None]
    place = times[:, None].double()
    later = {"done": (ended & odd).to(flag), "terminated": (ended & ~odd).to(flag), "achieved_goal": place}
    later["reward"] = torch.zeros_like(place)
    return TensorDict({"desired_goal": -torch.ones_like(place), "next": TensorDict(later, times.shape)}, times.shape)


def buffer_of(storage, strategy="final", **choices):
    generator = torch.Generator().manual_seed(0)
    return HERReplayBuffer(reward_fn, storage=storage, strategy=strategy, her_ratio=1.0, generator=generator, **choices)


def walked_around(storage, rows):
    """How many rows of its episode are stored before and after each row, by a walk over all that is stored."""
    held, ring, filled = storage[:], storage.ring, len(storage)
    full = filled == storage.row_capacity(None)
    flags = [held[key].bool().reshape(-1) for key in KEYS if key in held.keys(True)]
    ends = torch.stack(flags).any(0).numpy().copy()
    for row in (ring.cursor, *ring.discontinuities(), *([] if full else [filled])):
        if full or row <= filled:
            ends[row - 1] = True
    before, after = [], []
    for row in rows.tolist():
        back = on = 0
        while not ends[(row + on) % filled]:
            on += 1
        while not ends[(row - back - 1) % filled]:
            back += 1
        before.append(back)
        after.append(on)
    return np.array(before), np.array(after)


def check(buffer, size=40):
    """Goals are of the episodes that a look at all that is stored finds."""
    batch = buffer.sample(size)
    rows, goals = batch["index"].numpy(), batch["desired_goal"][:, 0].long().numpy()
    held, filled = buffer.storage, len(buffer.storage)
    before, after = walked_around(held, rows)
    reached = held[:]["next", "achieved_goal"][:, 0].long().numpy()
    if buffer.strategy.value == "final":
        assert (goals == reached[(rows + after) % filled]).all()
        return
    low = before if buffer.strategy.value == "episode" else np.zeros_like(before)
    for row, goal, back, on in zip(rows, goals, low, after, strict=True):
        assert goal in reached[np.arange(row - back, row + on + 1) % filled]


steps = st.tuples(
    st.sampled_from(["extend"] * 5 + ["add", "edit", "empty", "copy", "pickle", "anew"]),
    st.integers(1, 40),
    st.floats(0, 0.5),
)


@pytest.mark.parametrize("kind", [LazyTensorStorage, LazyMemmapStorage])
@given(
    capacity=st.integers(1, 30),
    strategy=st.sampled_from(["future", "final", "episode"]),
    history=st.lists(steps, max_size=10),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=25, deadline=None)
def test_any_history(kind, capacity, strategy, history, seed):
    random, time = np.random.default_rng(seed), 0
    buffer = buffer_of(kind(capacity), strategy)
    for what, count, chance in [("extend", 5, 0.3), *history]:
        if what == "add":
            buffer.add(walk(time, random.random(1) < chance)[0])
            time += 1
        elif what in ("extend", "empty", "anew"):
            if what == "empty":
                buffer.empty()
            elif what == "anew":  # as another writer on the same storage would
                buffer.writer.cursor = 0
            buffer.extend(walk(time, random.random(count) < chance))
            time += count
        elif what == "edit":
            row = int(random.integers(len(buffer.storage)))
            item = buffer.storage[row].clone()
            item["next", "done"] = ~item["next", "done"]
            buffer.storage.set(row, item, set_cursor=False)
        elif what == "copy":
            buffer = copy.deepcopy(buffer)
        else:
            buffer = pickle.loads(pickle.dumps(buffer))
        check(buffer)


def test_one_buffer_writes_and_another_draws():
    storage = LazyTensorStorage(40)
    one, other = buffer_of(storage, "episode"), buffer_of(storage)
    for time in range(0, 130, 13):
        one.writer.cursor = time % 40
        one.extend(walk(time, np.arange(time, time + 13) % 7 == 3))
        check(one)
        check(other)
