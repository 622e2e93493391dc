"""States that are saved and loaded go on as they would have gone on."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf import Buffer, CheckpointMismatch, Prioritized, Uniform, load_state, save_state
from fbuf.checkpoint import CheckpointCorrupt, Writing
from tests.fbuf.every_pair import CHUNK, DRAWS, LANES, SAMPLERS, Cell, _init, _turn, build, items


def _bits(tree: Any) -> list[Any]:
    return [
        (jax.tree_util.keystr(where), type(leaf), *_bits_of(leaf))
        for where, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]


def _bits_of(leaf: Any) -> tuple[Any, ...]:
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return str(jax.random.key_impl(leaf)), np.asarray(jax.random.key_data(leaf)).tobytes()
    array = np.asarray(leaf)
    return array.dtype, array.shape, array.tobytes()


def _run(buffer: Buffer, state: Any, start: int, turns: int) -> tuple[Any, list[Any]]:
    """Writes, priorities and draws; the state, and all that was drawn."""
    drawn = []
    for time in range(start, start + CHUNK * turns, CHUNK):
        ids = np.arange(time, time + CHUNK)[:, None] + 1000 * np.arange(buffer.items_per_row)
        batch = jax.tree.map(lambda leaf: leaf.reshape(CHUNK, *buffer.lanes, *leaf.shape[2:]), items(ids))
        priorities = np.random.default_rng(time).random(buffer.capacity * buffer.items_per_row, np.float32)
        keys = jax.random.split(jax.random.key(time), DRAWS)
        state, *rest = _turn(buffer, state, batch, priorities if "Prioritized(" in repr(buffer) else None, keys)
        drawn.append(rest)
    return state, drawn


@pytest.mark.parametrize(
    "sampler",
    [pytest.param(each, marks=[] if each in ("Prioritized", "Shuffled") else pytest.mark.slow) for each in SAMPLERS],
)
def test_states_go_on_bit_for_bit(sampler: str, tmp_path: Path) -> None:
    known = "trajectories" if "Slices" in sampler else ""
    buffer = build(Cell(sampler, "RoundRobin", (LANES,), known))
    state = _init(buffer)
    for turns in (0, 3):
        state, _ = _run(buffer, state, 50 * turns, turns)
        save_state(tmp_path / "state", state)
        again = load_state(tmp_path / "state", _init(buffer))
        assert _bits(again) == _bits(state)
        assert jax.tree.structure(again) == jax.tree.structure(state)
        assert _bits(_run(buffer, again, 300, 2)) == _bits(_run(buffer, state, 300, 2))


TREE: dict[str, Any] = {
    "key": jax.random.key(3),
    "keys": jax.random.split(jax.random.key(4, impl="rbg"), 3),
    "raw key": jax.random.PRNGKey(5),
    "half": jnp.arange(300_000, dtype=jnp.bfloat16).reshape(-1, 3),
    "scalar": jnp.float32(np.nan),
    "empty": jnp.zeros((0, 3), jnp.int8),
    "wide": np.array([2**62 + 1, -(2**63)]),
    "double": np.array([0.1, np.inf, -np.nan]),
    "unsigned": np.array([2**64 - 1], np.uint64),
    "one": np.float64(0.1),
    "python": [True, 3, 0.1, 1j, None],
    "nested": ({"a": {"b'c": np.zeros(1)}},),
}


@pytest.mark.parametrize("verify", ["full", "size"])
def test_leaves_of_every_kind_come_back(verify: Any, tmp_path: Path) -> None:
    assert not jax.config.jax_enable_x64
    save_state(tmp_path / "state", TREE)
    again = load_state(tmp_path / "state", TREE, verify=verify)
    assert _bits(again) == _bits(TREE)
    assert type(again["wide"]) is np.ndarray and type(again["python"][1]) is int


def test_shapes_alone_say_what_is_wanted(tmp_path: Path) -> None:
    tree = {key: value for key, value in TREE.items() if isinstance(value, jax.Array)}
    save_state(tmp_path / "state", tree)
    again = load_state(tmp_path / "state", jax.eval_shape(lambda: tree))
    assert _bits(again) == _bits(tree)


def test_all_differences_are_listed(tmp_path: Path) -> None:
    saved = {
        "shape": jnp.zeros((2, 3)),
        "dtype": np.zeros(2),
        "gone": jnp.zeros(1),
        "same": jnp.ones(3),
        "key": jnp.ones(2),
    }
    like = {
        "shape": jnp.zeros((3, 2)),
        "dtype": np.zeros(2, np.float32),
        "new": 1,
        "same": jnp.zeros(3),
        "key": jax.random.key(0),
    }
    save_state(tmp_path / "state", saved)
    with pytest.raises(CheckpointMismatch) as raised:
        load_state(tmp_path / "state", like)
    for words in (
        "['shape']: float32[2, 3] instead of float32[3, 2]",
        "['dtype']: float64[2] instead of float32[2]",
        "['gone']: only in the checkpoint",
        "['new']: not in the checkpoint",
        "['key']: array instead of key ",
    ):
        assert words in str(raised.value)
    assert "same" not in str(raised.value)
    with pytest.raises(CheckpointMismatch, match=r"key .* instead of key rbg"):
        save_state(tmp_path / "key", jax.random.key(0))
        load_state(tmp_path / "key", jax.random.key(0, impl="rbg"))


def test_buffers_of_another_size_are_a_mismatch(tmp_path: Path) -> None:
    save_state(tmp_path / "state", Buffer(8, Prioritized()).init(jnp.zeros(3)))
    for other in (Buffer(9, Prioritized()), Buffer(8, Uniform()), Buffer(8, Prioritized(), lanes=(2,))):
        with pytest.raises(CheckpointMismatch):
            load_state(tmp_path / "state", other.init(jnp.zeros(3)))
    with pytest.raises(CheckpointMismatch):
        load_state(tmp_path / "state", Buffer(8, Prioritized()).init(jnp.zeros(3, jnp.int32)))


@pytest.mark.parametrize("leaf", ["text", object(), np.array(["a"]), np.array([None]), 2**70])
def test_what_is_no_array_is_refused(leaf: Any, tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        save_state(tmp_path / "state", {"a": jnp.zeros(3), "b": leaf})
    assert not (tmp_path / "state").exists()


def test_not_inside_jit(tmp_path: Path) -> None:
    with pytest.raises(jax.errors.TracerArrayConversionError):
        jax.jit(lambda x: save_state(tmp_path / "state", x))(jnp.zeros(3))
    assert not (tmp_path / "state").exists()


def test_a_checkpoint_of_something_else(tmp_path: Path) -> None:
    for tree, error in (
        ({"kind": "other"}, CheckpointMismatch),
        ([], CheckpointCorrupt),
        ({"kind": "pytree", "leaves": 3}, CheckpointCorrupt),
        ({"kind": "pytree", "leaves": [3]}, CheckpointCorrupt),
        ({"kind": "pytree", "leaves": [["", "array", 3]]}, CheckpointCorrupt),
        ({"kind": "pytree", "leaves": [["", "array", np.zeros(3)]] * 2}, CheckpointCorrupt),
    ):
        with Writing(tmp_path / "c") as out:
            out.write(tree)
        with pytest.raises(error):
            load_state(tmp_path / "c", np.zeros(3))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RingOfEarlierVersions:
    """The counters of a ring as they were saved one by one."""

    cursor: Any
    size: Any
    written: Any


@pytest.mark.parametrize("lead", [(), (3,)])
def test_counters_that_were_saved_one_by_one(lead: tuple[int, ...], tmp_path: Path) -> None:
    buffer = fbuf.Buffer(5, fbuf.Uniform())
    state, _ = buffer.extend(buffer.init({"x": jnp.zeros(())}), {"x": jnp.arange(7.0)})
    state = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (*lead, *leaf.shape)), state)
    ring = RingOfEarlierVersions(state.ring.cursor, state.ring.size, state.ring.written)
    fbuf.save_state(tmp_path / "a", dataclasses.replace(state, ring=ring))
    loaded = fbuf.load_state(tmp_path / "a", like=state)
    np.testing.assert_array_equal(loaded.ring.counters, state.ring.counters)
    if not lead:
        assert buffer.size(loaded) == buffer.size(jax.device_get(loaded)) == 5


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrajectoriesOfEarlierVersions:
    """The index of trajectories as it was saved, with an array for each word of a span."""

    number: Any
    first: Any
    last: Any
    kind: Any
    latest: Any
    is_open: Any
    id: Any


@pytest.mark.parametrize("lead", [(), (3,)])
def test_spans_that_were_saved_word_by_word(lead: tuple[int, ...], tmp_path: Path) -> None:
    buffer = fbuf.Buffer(7, fbuf.Slices(2), lanes=(2,), trajectories=fbuf.Trajectories(terminated="done"))
    done = jnp.arange(10).reshape(5, 2) % 3 == 2
    state, _ = buffer.extend(buffer.init({"done": jnp.zeros((), bool)}), {"done": done})
    state = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (*lead, *leaf.shape)), state)
    index = state.trajectories
    assert index is not None
    names = [field.name for field in dataclasses.fields(TrajectoriesOfEarlierVersions)]
    earlier = TrajectoriesOfEarlierVersions(*(getattr(index, name) for name in names))
    assert (earlier.kind.dtype, earlier.first.dtype) == (jnp.uint8, jnp.uint32)
    fbuf.save_state(tmp_path / "a", dataclasses.replace(state, trajectories=earlier))  # type: ignore[arg-type]
    loaded = fbuf.load_state(tmp_path / "a", like=state)
    jax.tree.map(np.testing.assert_array_equal, loaded, state)
