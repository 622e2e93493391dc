"""The state goes out to jitted loops and comes back; a loop that fails leaves a whole buffer."""

import concurrent.futures
import dataclasses
import os
import subprocess
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from tensordict import TensorDict

import fbuf
import interop

BUFFER = fbuf.Buffer(16, fbuf.Prioritized())
ITEM = {"a": jnp.zeros(()), "n": {"b": jnp.zeros(3, jnp.int32)}}


def rows(count: int = 5, first: int = 0) -> TensorDict:
    a = torch.arange(first, first + count)
    return TensorDict({"a": a.float(), "n": {"b": a.int()[:, None].expand(-1, 3)}}, [count])


@pytest.fixture
def rb() -> interop.FunctionalReplayBuffer:
    made = interop.from_fbuf(BUFFER, BUFFER.init(ITEM), batch_size=4)
    made.extend(rows())
    return made


def _loop(state, fails):
    def step(state, first):
        row = {"a": first, "n": {"b": jnp.full(3, first, jnp.int32)}}
        return BUFFER.add(state, row)[0], None

    state, _ = jax.lax.scan(step, state, jnp.arange(5.0, 8.0))
    return jax.tree.map(lambda leaf: jax.pure_callback(_check, leaf, leaf, fails), state)


def _check(leaf, fails):
    if fails:
        raise ValueError("the program fails")
    return leaf


loop = jax.jit(_loop, donate_argnums=0)


def stored(rb: interop.FunctionalReplayBuffer) -> list[float]:
    return rb[:]["a"].tolist()


def test_a_loop_takes_the_state_over_and_gives_it_back(rb):
    with rb.functional(backup=False) as handle:
        assert rb.is_out
        before = handle.state
        handle.state = loop(before, False)
        assert before.items["a"].is_deleted()
    assert not rb.is_out and stored(rb) == [0, 1, 2, 3, 4, 5, 6, 7]
    with pytest.raises(RuntimeError, match="has ended"):
        handle.state
    with pytest.raises(RuntimeError, match="has ended"):
        handle.state = rb.state


def test_every_call_is_refused_while_the_state_is_out_by_all_threads(rb, tmp_path):
    calls = [
        lambda: rb.extend(rows()),
        lambda: rb.add(rows()[0]),
        rb.sample,
        lambda: rb.update_priority(0, 1.0),
        lambda: next(iter(rb)),
        rb.next,
        rb.empty,
        lambda: rb.dumps(tmp_path / "x"),
        lambda: rb.loads(tmp_path / "y"),
        lambda: rb[0],
        lambda: len(rb),
        lambda: rb.state,
        lambda: rb.functional().__enter__(),
    ]
    rb.dumps(tmp_path / "y")
    with rb.functional(), concurrent.futures.ThreadPoolExecutor(1) as pool:
        for call in calls:
            for run in (lambda call: call(), lambda call: pool.submit(call).result()):
                with pytest.raises(RuntimeError, match="the state of this buffer is out"):
                    run(call)
    assert stored(rb) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("place", ["before", "between", "after", "in the program", "nothing given back"])
@pytest.mark.parametrize("backup", [True, False])
def test_a_block_that_fails_leaves_the_last_whole_state(rb, place, backup):
    kept = place in ("before", "between", "after") or backup
    with pytest.raises((ZeroDivisionError, RuntimeError, ValueError)) as caught, rb.functional(backup=backup) as handle:
        if place == "before":
            raise ZeroDivisionError
        if place in ("between", "in the program"):
            handle.state = jax.tree.map(jnp.copy, loop(handle.state, False))
        if place == "between":
            raise ZeroDivisionError
        if place == "in the program":
            jax.block_until_ready(loop(handle.state, True))
        result = loop(handle.state, False)
        if place == "after":
            handle.state = result
            raise ZeroDivisionError
    assert not rb.is_out
    if place == "nothing given back":
        assert "no state that is alive" in str(caught.value)
    if not kept:
        for call in (rb.sample, lambda: rb.extend(rows()), lambda: rb.functional().__enter__()):
            with pytest.raises(RuntimeError, match=r"loads\(\) or empty\(\)"):
                call()
        rb.empty()
        assert len(rb) == 0
        rb.extend(rows())
    longer = place in ("between", "after")
    assert stored(rb) == list(range(8 if longer else 5))
    rb.extend(rows(2, 20))
    assert stored(rb)[-2:] == [20, 21] and len(rb.sample()) == 4


def deleted():
    state = BUFFER.init(ITEM)
    jax.tree.map(lambda leaf: leaf.delete(), state)
    return state


@pytest.mark.parametrize(
    ("kind", "text", "make"),
    [
        (ValueError, "sampler|of another buffer", lambda: fbuf.Buffer(16).init(ITEM)),
        (ValueError, r"\[8\]", lambda: fbuf.Buffer(8, fbuf.Prioritized()).init(ITEM)),
        (TypeError, "jax.Array, got ndarray", lambda: jax.tree.map(np.asarray, BUFFER.init(ITEM))),
        (RuntimeError, "was deleted", deleted),
    ],
)
def test_only_a_state_of_this_buffer_is_taken(rb, kind, text, make):
    state = make()
    with pytest.raises(kind, match=text), rb.functional() as handle:
        handle.state = state
    assert stored(rb) == [0, 1, 2, 3, 4]
    with pytest.raises(kind, match=text):
        interop.from_fbuf(BUFFER, state)


def test_states_and_buffers_of_another_kind_are_refused(rb):
    with pytest.raises(ValueError, match="of another buffer"), rb.functional() as handle:
        handle.state = BUFFER.init({**ITEM, "a": jnp.zeros((), jnp.int32)})
    with pytest.raises(TypeError, match="is traced"):
        jax.jit(lambda state: interop.from_fbuf(BUFFER, state))(rb.state)
    with pytest.raises(ValueError, match=r"what Buffer.init returns"):
        interop.from_fbuf(BUFFER, (jnp.zeros(1),))
    state = BUFFER.init({"a": jnp.zeros(()), "b": jnp.zeros(())})
    with pytest.raises(ValueError, match="cannot be donated twice"):
        interop.from_fbuf(BUFFER, dataclasses.replace(state, items=dict.fromkeys("ab", state.items["a"])))


ON_TWO_DEVICES = """
import jax, jax.numpy as jnp, torch, fbuf, interop
first, second = jax.devices()
buffer, rows = fbuf.Buffer(8, fbuf.Prioritized()), {"a": torch.arange(5.0)}
state = buffer.init({"a": jnp.zeros(())})
def refused(call):
    try:
        call()
    except ValueError as error:
        return "device" in str(error)
mesh = jax.sharding.Mesh(jax.devices(), "x")
spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
assert refused(lambda: interop.from_fbuf(buffer, jax.device_put(state, spread)))
rb = interop.from_fbuf(buffer, jax.device_put(state, second), batch_size=4)
for change in (lambda: rb.extend(rows), lambda: rb.dumps(PATH), lambda: rb.loads(PATH), rb.sample, rb.empty):
    change()
    rb.extend(rows)
    assert {leaf.device for leaf in jax.tree.leaves(rb.state)} == {second}
with rb.functional() as handle:
    assert refused(lambda: setattr(handle, "state", jax.device_put(handle.state, first)))
rb = interop.from_fbuf(buffer, state)
with jax.default_device(second):
    rb.extend(rows)
assert rb.state.items["a"].device == first
"""


@pytest.mark.slow
def test_a_state_stays_on_its_device(tmp_path):
    code = ON_TWO_DEVICES.replace("PATH", repr(str(tmp_path / "x")))
    flags = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    subprocess.run([sys.executable, "-c", code], check=True, env=flags)


def test_a_batch_has_memory_of_its_own(rb):
    batch = rb.sample()
    kept = batch.clone()
    for leaf in batch.values(include_nested=True, leaves_only=True):
        leaf.zero_()
    again = rb.sample()
    assert torch.equal(again["n", "b"][:, 0], again["index"].int()) and (again["priority_weight"] == 1).all()
    data = rows(16, 50).clone()
    rb.extend(data)
    data["a"].zero_()  # was copied
    assert (kept["n", "b"][:, 0] == kept["a"]).all() and sorted(stored(rb)) == list(range(50, 66))


def test_threads_write_and_draw_together(rb):
    def write(first):
        for turn in range(20):
            rb.extend(rows(2, first + 2 * turn))

    def draw():
        for _ in range(20):
            batch = rb.sample()
            assert (batch["n", "b"] == batch["a"][:, None].int()).all()
            rb.update_tensordict_priority(batch.set("td_error", torch.rand(4)))

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        calls = [pool.submit(write, 1000), pool.submit(write, 2000), pool.submit(draw)]
    assert not any(call.exception() for call in calls) and len(rb) == 16
    for first in (1000, 2000):  # what one thread wrote is there in its order
        mine = [value for value in np.roll(stored(rb), -(85 % 16)) if first <= value < first + 1000]
        assert mine == sorted(mine)


class Step(NamedTuple):
    obs: object
    extra: object


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Extra:
    flag: object


@pytest.mark.parametrize(
    "make",
    [
        lambda one, two: one,
        lambda one, two: (one, two),
        lambda one, two: Step(one, Extra(two)),
        lambda one, two: {1: one, 0: two},
    ],
)
def test_items_of_any_structure_come_as_they_went(make, tmp_path):
    buffer = fbuf.Buffer(8, fbuf.Prioritized(eps=0.0))
    rb, other = (interop.from_fbuf(buffer, buffer.init(make(jnp.zeros(2), jnp.zeros((), bool)))) for _ in range(2))
    structure = jax.tree.structure(make(0, 0))
    rb.extend(make(torch.arange(6.0).reshape(3, 2), torch.tensor([True, False, True])))
    rb.add(make(torch.tensor([6.0, 7.0]), torch.tensor(True)))
    rb.update_priority([0, 1], 0.0)
    rb.dumps(tmp_path)
    other.loads(tmp_path)
    batch, info = other.sample(20, return_info=True)
    assert jax.tree.structure(batch) == structure and set(info["index"].tolist()) == {2, 3}
    wanted = make(torch.stack([2.0 * info["index"], 2.0 * info["index"] + 1], 1), info["index"] != 1)
    for data, like in (
        (batch, wanted),
        (other[info["index"]], wanted),
        (other[2], make(torch.tensor([4.0, 5]), torch.tensor(True))),
    ):
        assert jax.tree.structure(data) == structure
        assert all(map(torch.equal, *([leaf.cpu() for leaf in jax.tree.leaves(each)] for each in (data, like))))
    with pytest.raises(RuntimeError, match=r"items are torch.float32, got torch.int64"):
        rb.extend(make(torch.arange(6).reshape(3, 2), torch.ones(3, dtype=bool)))
    with pytest.raises(TypeError, match="items are PyTreeDef"):
        rb.extend({"obs": torch.zeros(3, 2)})
    assert len(rb) == 4


def test_bad_input_is_refused_before_anything_changes(rb):
    before = rb.state
    bad = [
        (
            KeyError,
            r"missing: \[\('n', 'b'\)\], unknown: \[\('n', 'c'\)\]",
            {"a": torch.zeros(2), "n": {"c": torch.zeros(2)}},
        ),
        (RuntimeError, "items are torch.float32, got torch.float64", rows().update({"a": torch.zeros(5).double()})),
        (
            RuntimeError,
            r"items have shape \[3\], got \[2\]",
            {"a": torch.zeros(2), "n": {"b": torch.zeros(2, 2).int()}},
        ),
        (RuntimeError, "15 priorities for 5 items", rows().set("td_error", torch.ones(5, 3))),
        (RuntimeError, "leading dims", {**rows(), "a": torch.zeros(4)}),
        (ValueError, "priorities must be finite", rows().set("td_error", -torch.ones(5))),
    ]
    for kind, text, data in bad:
        with pytest.raises(kind, match=text):
            rb.extend(data)
    for kind, index, priority in [
        (IndexError, 16, 1.0),
        (TypeError, torch.tensor([0.5]), 1.0),
        (ValueError, torch.tensor([1]), -1.0),
        (RuntimeError, torch.tensor([1, 2, 3]), [1.0, 2.0]),
    ]:
        with pytest.raises(kind):
            rb.update_priority(index, priority)
    with pytest.raises(RuntimeError, match="batch_size not specified"):
        interop.from_fbuf(BUFFER, BUFFER.init(ITEM)).sample()
    with pytest.raises(RuntimeError, match="Cannot sample from an empty storage"):
        interop.from_fbuf(BUFFER, BUFFER.init(ITEM)).sample(4)
    with pytest.raises(TypeError, match="keeps no priorities"):
        interop.from_fbuf(fbuf.Buffer(8), fbuf.Buffer(8).init(ITEM)).update_priority(0, 1.0)
    jax.tree.map(np.testing.assert_array_equal, rb.state, before)


def test_a_checkpoint_of_another_buffer_changes_nothing(rb, tmp_path):
    fbuf.save_state(tmp_path / "x", fbuf.Buffer(8, fbuf.Prioritized()).init(ITEM))
    rb.generator = torch.Generator().manual_seed(5)
    before, generator = rb.state, rb.generator.get_state()
    with pytest.raises(
        fbuf.CheckpointMismatch, match=r"items\['a'\]: float32\[8\] instead of .*priorities: float32\[16\]"
    ):
        rb.loads(tmp_path / "x")
    jax.tree.map(np.testing.assert_array_equal, rb.state, before)
    assert torch.equal(rb.generator.get_state(), generator)


def test_epochs_end(rb):
    for sampler, sizes in (
        (fbuf.Shuffled(), [4, 4, 2]),
        (fbuf.Shuffled(drop_last=True), [4, 4]),
        (fbuf.Fifo(), [4, 4, 2]),
    ):
        buffer = fbuf.Buffer(16, sampler)
        once = interop.from_fbuf(buffer, buffer.init(ITEM), batch_size=4)
        once.extend(rows(10))
        for _ in range(1 if isinstance(sampler, fbuf.Fifo) else 2):
            batches = [once.next() for _ in sizes]
            assert once.next() is None
            assert [len(each) for each in batches] == sizes
            assert len(set(torch.cat([each["a"] for each in batches]).tolist())) == sum(sizes)
    with pytest.raises(RuntimeError, match="nothing can be drawn from the 10 stored items"):
        once.sample()
    once.extend(rows(3, 10))
    assert [each["a"].tolist() for each in once] == [[10, 11, 12]]


def test_priorities_go_to_the_items_that_were_named():
    buffer = fbuf.Buffer(4, fbuf.Prioritized(alpha=1.0, eps=0.0), lanes=(2,))
    rb = interop.from_fbuf(buffer, buffer.init({"a": jnp.zeros(())}))
    data = TensorDict(
        {"a": torch.arange(6.0).reshape(2, 3), "td_error": torch.tensor([[0, 0, 2.0], [0, 0, 6]])}, [2, 3]
    )
    index = rb.extend(data.transpose(0, 1))
    assert index.tolist() == [[0, 0], [0, 1], [1, 0], [1, 1], [2, 0], [2, 1]]
    batch = rb.sample(400)
    assert set(batch["a"].tolist()) == {2, 5} and set(map(tuple, batch["index"].tolist())) == {(2, 0), (2, 1)}
    assert 240 < (batch["a"] == 5).sum() < 360
    rb.update_priority(index, torch.tensor([0, 0, 0, 1.0, 0, 0]))
    assert set(rb.sample(20)["a"].tolist()) == {4}
    assert rb[index[2:4]]["a"].tolist() == [1, 4] and rb[-1]["a"] == 5 and rb[:2]["a"].tolist() == [0, 3]
    ranked = fbuf.Buffer(2, writer=fbuf.HighestRanked("a"))
    top = interop.from_fbuf(ranked, ranked.init({"a": jnp.zeros(())}))
    assert top.extend({"a": torch.tensor([3.0, 5, 1])}).tolist() == [0, 1, -1]
    assert top.add({"a": torch.tensor(2.0)}) is None and top.add({"a": torch.tensor(9.0)}) == 0
