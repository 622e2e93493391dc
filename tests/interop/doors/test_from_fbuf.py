"""A torch-side buffer over a functional one draws, writes and weighs as that does."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from tensordict import TensorDict

import fbuf
import interop
from interop.data import randomness
from tests.interop.doors.rules import ITEM, PARAMS, Case, entries, expected


def made(case: Case, **options: Any) -> interop.FunctionalReplayBuffer:
    rb = interop.from_fbuf(case.buffer, case.buffer.init(ITEM), batch_size=case.batch, **options)
    case.filled(rb)
    return rb


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def flat_slots(index: Any, buffer: fbuf.Buffer) -> np.ndarray:
    columns = index.numpy().reshape(index.shape[0], -1).T
    return np.ravel_multi_index(tuple(columns), (buffer.capacity, *buffer.lanes))


@pytest.mark.parametrize("case", PARAMS)
def test_a_batch_is_that_of_the_jitted_functional_sample_for_the_same_key(case):
    rb = made(case, generator=seeded(), beta=0.6)
    keys = seeded()
    sample = jax.jit(case.buffer.sample, static_argnums=2)
    keeps = case.buffer.sampler.keeps_priorities
    state, batch = rb.state, TensorDict()
    for turn in range(3):
        if turn == 2 and keeps:
            index = batch["index"]
            priority = torch.rand(len(batch)) + 0.1
            rb.update_tensordict_priority(TensorDict(index=index, td_error=priority[:, None], batch_size=[len(batch)]))
            state = rb.state
        batch, info = rb.sample(return_info=True)
        batch = batch.cpu()
        key = jax.random.wrap_key_data(randomness.key(keys), impl="threefry2x32")
        state, items, draw = sample(state, key, case.batch)
        wanted = expected(items, draw)
        for name, path in (("['step']", "step"), ("['next']['obs']", ("next", "obs")), ("['obs']", "obs")):
            np.testing.assert_array_equal(batch[path].to(torch.float32).numpy(), wanted[name])
        # By an oracle that knows neither: all entries of a row belong to one item.
        alike = entries(batch["step"])
        assert torch.equal(batch["obs"], alike["obs"]) and torch.equal(batch["next", "reward"], alike["next"]["reward"])
        time = draw.slots.size // draw.valid.size
        kept = np.repeat(np.asarray(draw.valid), time)
        np.testing.assert_array_equal(flat_slots(batch["index"], case.buffer), draw.slots.reshape(-1)[kept])
        if keeps:
            weights = np.repeat(np.asarray(fbuf.importance_weights(draw, jnp.float32(0.6))), time)[kept]
            np.testing.assert_allclose(batch["priority_weight"], weights, rtol=1e-6)
        else:
            assert batch.get("priority_weight", None) is None
        if draw.mask is not None:
            check_slices(batch, info, np.asarray(draw.mask)[np.asarray(draw.valid)])
    jax.tree.map(np.testing.assert_array_equal, rb.state, state)


def check_slices(batch: TensorDict, info: dict[Any, Any], mask: np.ndarray) -> None:
    step = batch["step"].reshape(mask.shape).numpy()
    whole = mask[:, 1:] & mask[:, :-1]
    assert (np.diff(step)[whole] == 1).all()
    last = np.zeros_like(mask)
    last[np.arange(len(mask)), mask.shape[1] - 1 - mask[:, ::-1].argmax(1)] = True
    np.testing.assert_array_equal(batch["next", "truncated"], last.reshape(-1, 1))
    np.testing.assert_array_equal(batch["next", "done"], last.reshape(-1, 1))
    assert torch.equal(batch["next", "terminated"][:, 0], batch["step"] % 1000 % 7 == 6)
    if batch.get(("collector", "mask"), None) is not None:
        np.testing.assert_array_equal(batch["collector", "mask"], mask.reshape(-1))
    else:
        assert mask.all()
    assert type(info["index"]) is tuple


@pytest.mark.parametrize("case", PARAMS)
def test_both_sides_read_one_anothers_checkpoints(case, tmp_path):
    rb = made(case, generator=seeded(), beta=0.7)
    rb.sample()
    rb.dumps(tmp_path / "torch")
    loaded = fbuf.load_state(tmp_path / "torch", like=case.buffer.init(ITEM))
    jax.tree.map(np.testing.assert_array_equal, loaded, rb.state)
    fbuf.save_state(tmp_path / "functional", loaded)
    again = rb.sample()
    other = interop.from_fbuf(case.buffer, case.buffer.init(ITEM), batch_size=case.batch, generator=torch.Generator())
    other.loads(tmp_path / "torch")
    assert other.beta == pytest.approx(0.7)
    assert (other.sample() == again).all()
    other.loads(tmp_path / "functional")
    jax.tree.map(np.testing.assert_array_equal, other.state, loaded)
