"""Bad arguments are refused at construction or while tracing; the message names the leaf and the cure."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from tensordict import TensorDict

from fbuf import (
    Buffer,
    BufferState,
    Draw,
    Fifo,
    Frames,
    HashTable,
    HighestRanked,
    Mixture,
    PerTrajectory,
    Prioritized,
    Sharded,
    Shuffled,
    Slices,
    Trajectories,
    Uniform,
    describe,
    importance_weights,
    n_step,
    priority_tree,
    resize,
    returns_to_go,
    save_state,
    why,
)
from fbuf.sharded import OnMesh

pytestmark = pytest.mark.usefixtures("device")

ITEM = {"reward": np.zeros((), np.float32), "observation": {"pixels": np.zeros((2, 3), np.uint8)}}
PIXELS = r"\['observation'\]\['pixels'\]"
THREE, RANKED = Buffer(3), Buffer(3, Prioritized())
ENDS, IDS, OBS = Trajectories("end"), Trajectories("end", id="id"), np.zeros((3, 4), np.float32)
STEP = {"obs": OBS, "next_obs": OBS, "end": np.bool_(0), "id": np.int32(0), "next": {"end": np.bool_(0)}, "rank": 0.0}
SLICED = Buffer(9, Slices(3), trajectories=ENDS)


def shapes(reward: Any = (4,), pixels: Any = (4, 2, 3), kind: Any = np.float32) -> Any:
    """A batch like ITEM, for tracing without running."""
    made = jax.ShapeDtypeStruct
    return {"reward": made(reward, kind), "observation": {"pixels": made(pixels, np.uint8)}}


def state_of(buffer: Buffer, item: Any = ITEM) -> BufferState:
    return jax.eval_shape(lambda: buffer.init(item))


def extended(batch: Any, lanes: tuple[int, ...] = ()) -> tuple[BufferState, Any]:
    buffer = Buffer(5, lanes=lanes)
    return jax.eval_shape(buffer.extend, state_of(buffer), batch)


def lanes_first(lanes: tuple[int, ...], shape: tuple[int, ...]) -> Any:
    buffer = Buffer(4, lanes=lanes)
    return buffer.extend(buffer.init(np.zeros(3, np.float32)), np.zeros(shape, np.float32), lanes_first=True)


def sampled(batch_size: Any) -> Any:
    return THREE.sample(state_of(THREE), jax.random.key(0), batch_size)


def updated(buffer: Buffer, slots: Any = ((2,), np.int32), priorities: Any = ((2,), np.float32)) -> Any:
    given = (jax.ShapeDtypeStruct(*each) for each in (slots, priorities))
    return jax.eval_shape(buffer.update, state_of(buffer), *given)


def made(item: Any = STEP, **how: Any) -> Any:
    """The shapes of the state of a buffer of 8 rows."""
    return state_of(Buffer(8, **how), item)


def framed(frames: Any, **others: Any) -> Any:
    return made({**STEP, **others}, trajectories=ENDS, frames=frames)


def wide() -> Any:
    with jax.enable_x64(True):
        return jnp.arange(2.0)


def call(function: Callable[..., Any], *arguments: Any, **named: Any) -> Callable[[], Any]:
    return functools.partial(function, *arguments, **named)


TWO = {"reward": np.zeros(2, np.float32)}


def donated(method: Callable[..., Any], *arguments: Any) -> Any:
    """Call a method with a state that was donated."""
    state = THREE.init({"reward": np.float32(0)})
    jax.jit(THREE.extend, donate_argnums=0)(state, TWO)
    return method(state, *arguments)


def donated_table(method: Callable[..., Any], *arguments: Any) -> Any:
    state = TABLE.init(np.int32(0), np.float32(0))
    jax.jit(TABLE.insert, donate_argnums=0)(state, np.arange(2, dtype=np.int32), np.ones(2, np.float32))
    return method(TABLE, state, *arguments)


def donated_on_mesh(method: Callable[..., Any], *arguments: Any) -> Any:
    on_mesh = Sharded(Buffer(3)).over(jax.make_mesh((1,), ("data",), (jax.sharding.AxisType.Explicit,)))
    state = on_mesh.init({"reward": np.float32(0)})
    jax.tree.map(lambda leaf: leaf.delete(), state)  # as a jitted call that donates does
    return method(on_mesh, state, *arguments)


def on_mesh_of_torch() -> Any:
    on_mesh = Sharded(Buffer(3)).over(jax.make_mesh((1,), ("data",), (jax.sharding.AxisType.Explicit,)))
    return on_mesh.extend(on_mesh.init({"reward": np.float32(0)}), {"reward": torch.zeros(2)})


def updated_with(priorities: Any) -> Any:
    return RANKED.update(RANKED.init(0.0), np.arange(1), priorities)


def reweighted(alpha: Any) -> Any:
    return Prioritized().reweight(Prioritized().init(4), alpha)


KEY, TABLE = jax.random.key(0), HashTable(4)
ROWS = jax.eval_shape(lambda: TABLE.init({"a": np.int32(0)}, np.float32(0)))
DRAW = Draw(*[jnp.ones(2)] * 2, jnp.ones(2, bool), jnp.ones(()), jnp.ones((), int))
ONE, HELD = shapes(), jax.eval_shape(lambda: Buffer(3).init({"reward": np.float32(0)}))
WIDE_TYPES = r"\['reward'\]: float64 needs 64-bit types on \(jax_enable_x64\)"
REFUSED: list[tuple[Callable[[], Any], Any, str]] = [
    # batches: structure, shape, lanes, dtype
    (
        call(extended, {**ONE, "more": ONE["reward"]}),
        ValueError,
        r"the batch has \['more'\], which items do not have\. A batch has the leaves of an item: .*\['reward'\]",
    ),
    (
        call(extended, {"rewards": ONE["reward"], "observation": ONE["observation"]}),
        ValueError,
        r"has \['rewards'\] \(did you mean \['reward'\]\?\), .* lacks \['reward'\]",
    ),
    (call(extended, {"reward": ONE["reward"]}), ValueError, rf"the batch lacks {PIXELS}"),
    (call(extended, {"reward": ONE["reward"], "observation": None}), ValueError, rf"the batch lacks {PIXELS}"),
    (
        call(Buffer(3).extend, jax.eval_shape(lambda: Buffer(3).init((0.0, 0.0))), [OBS, OBS]),
        ValueError,
        "the structure .*, the batch has",
    ),
    (call(extended, shapes(pixels=(4, 2, 4))), ValueError, rf"{PIXELS}: .* needs shape \[n, 2, 3\] .*, got "),
    (call(extended, shapes(())), ValueError, r"\['reward'\]: .* needs shape \[n\] .*, got \["),
    (call(extended, shapes((1,))), ValueError, r"\['reward'\]: this leaf has 1 rows, the leaves before .* 4"),
    (
        call(extended, shapes((4, 2), (4, 2, 2, 3)), (3,)),
        ValueError,
        r"needs shape \[n, 3, 2, 3\] \(n rows, then lanes",
    ),
    (call(lanes_first, (2,), (4, 2, 3)), ValueError, r"shape \[2, n, 3\] \(lanes \(2,\), then n rows, then one item\)"),
    (call(lanes_first, (), (3,)), ValueError, r"needs shape \[n, 3\] \(n rows, then one item\), got \[3\]"),
    (call(extended, shapes(kind=np.int32)), TypeError, r"\['reward'\]: items are float32, the batch is .*: cast it"),
    # tensors of torch, numbers, donated states
    (
        lambda: THREE.extend(HELD, {"reward": torch.zeros(2)}),
        TypeError,
        r"\['reward'\]: fbuf takes arrays of JAX and NumPy, got a torch Tensor: .*to_jax",
    ),
    (
        lambda: THREE.add(HELD, {"reward": torch.zeros(())}),
        TypeError,
        "got a torch Tensor: convert it by interop.to_jax",
    ),
    (lambda: THREE.extend(HELD, TensorDict({"reward": torch.zeros(2)}, [2])), TypeError, "got a tensordict TensorDict"),
    (lambda: THREE.add(HELD, TensorDict({"reward": torch.zeros(())}, [])), TypeError, "got a tensordict TensorDict"),
    (call(THREE.init, {"reward": torch.zeros(2)}), TypeError, r"\['reward'\]: fbuf takes .* got a torch Tensor"),
    (
        lambda: RANKED.update(RANKED.init(0.0), torch.arange(2), np.ones(2)),
        TypeError,
        "slots: fbuf takes .* torch Tensor",
    ),
    (
        lambda: RANKED.update(RANKED.init(0.0), np.arange(2), torch.ones(2)),
        TypeError,
        "priorities: fbuf takes .* torch",
    ),
    (lambda: importance_weights(DRAW, "0.4"), TypeError, "beta must be a number, or an array of one, got '0.4'"),  # type: ignore
    (lambda: importance_weights(DRAW, None), TypeError, "beta must be a number, or an array of one, got None"),  # type: ignore
    (lambda: importance_weights(DRAW, True), TypeError, "beta must be a number, or an array of one, got True"),
    (lambda: importance_weights(DRAW, torch.ones(())), TypeError, "beta: fbuf takes .* got a torch Tensor"),  # type: ignore
    (
        call(donated, THREE.sample, jax.random.key(0), 2),
        RuntimeError,
        "was donated: .*Use the state that the function returned",
    ),
    (call(donated, THREE.size), RuntimeError, "was donated"),
    (call(donated, THREE.clear), RuntimeError, "was donated"),
    (call(donated, THREE.chances), RuntimeError, "was donated"),
    (call(donated, functools.partial(save_state, "unused")), RuntimeError, "was donated"),
    *[
        (call(donated, method, *more), RuntimeError, "was donated: .*Use the state that the function returned")
        for method, *more in (
            (THREE.extend, TWO),
            (THREE.add, {"reward": np.float32(0)}),
            (THREE.update, np.arange(2), 1.0),
            (THREE.read, np.arange(2)),
            (THREE.intact, np.arange(2)),
            (functools.partial(describe, THREE),),
            (lambda state: why(THREE, state, 0),),
            (lambda state: resize(THREE, state, 2),),
            (lambda state: Mixture((THREE,)).size((state,)),),
            (lambda state: Mixture((THREE,)).sample((state,), KEY, 2),),
            (lambda state: describe(Mixture((THREE,)), (state,)),),
        )
    ],
    *[
        (call(donated_table, method, *more), RuntimeError, "was donated: .*Use the state that the function returned")
        for method, *more in (
            (HashTable.insert, np.arange(2, dtype=np.int32), np.ones(2, np.float32)),
            (HashTable.update, np.arange(2, dtype=np.int32), np.ones(2, np.float32)),
            (HashTable.find, np.arange(2, dtype=np.int32)),
            (HashTable.read, np.arange(2)),
            (HashTable.clear,),
            (describe,),
        )
    ],
    *[
        (call(donated_on_mesh, method, *more), RuntimeError, "was donated: .*Use the state that the function returned")
        for method, *more in (
            (OnMesh.extend, TWO),
            (OnMesh.sample, KEY, 2),
            (OnMesh.read, np.arange(2)),
            (OnMesh.size,),
            (OnMesh.clear,),
        )
    ],
    # other things in the place of tensors, keys, numbers and states
    (on_mesh_of_torch, TypeError, r"\['reward'\]: fbuf takes arrays of JAX and NumPy, got a torch Tensor"),
    (lambda: n_step(torch.ones(3), np.zeros(3, bool), 0.9, 2), TypeError, "rewards: fbuf takes .* got a torch Tensor"),
    (lambda: returns_to_go(np.ones(3), torch.zeros(3), 0.9), TypeError, "ends: fbuf takes .* got a torch Tensor"),
    (lambda: save_state("unused", {"a": torch.ones(2)}), TypeError, "the state: fbuf takes .* got a torch Tensor"),
    (lambda: THREE.sample(HELD, 0, 2), TypeError, r"key must be a random key, such as jax.random.key\(0\), got 0"),  # type: ignore
    (lambda: THREE.sample(HELD, torch.Generator(), 2), TypeError, "key must be a random key, .* got <torch"),  # type: ignore
    (lambda: THREE.sample(HELD, torch.zeros(2), 2), TypeError, "key must be a random key, .* got tensor"),  # type: ignore
    (lambda: Mixture((THREE,)).sample((HELD,), None, 2), TypeError, "key must be a random key, .* got None"),  # type: ignore
    (
        lambda: Mixture((THREE,)).sample(HELD, KEY, 2),
        TypeError,
        "a tuple with a state for each member, got BufferState",
    ),  # type: ignore
    (lambda: THREE.extend(TWO, HELD), TypeError, "is the BufferState that init.. returned, got dict"),  # type: ignore
    (
        lambda: THREE.sample((HELD, 0), KEY, 2),
        TypeError,
        "got tuple: a call returns more than the state, state, slots =",
    ),  # type: ignore
    (
        lambda: THREE.extend(HELD, [{"reward": np.float32(0)}] * 2),
        ValueError,
        r"a list of 2 items: stack them.*jax.tree.map\(lambda \*leaves",
    ),
    (
        lambda: TABLE.insert(ROWS, {"b": np.arange(2)}, np.ones(2)),
        ValueError,
        r"has \['b'\] \(did you mean \['a'\]\?\)",
    ),
    (lambda: TABLE.find(ROWS, torch.arange(2)), TypeError, "fbuf takes .* got a torch Tensor"),
    *[
        (call(updated_with, given), TypeError, f"priorities must be real numbers, got {says}")
        for given, says in (("high", "'high'"), (None, "None"), ({"a": 1}, "{'a': 1}"), (["1"], r"\['1'\]"))
    ],
    *[
        (call(reweighted, given), TypeError, f"alpha must be a number, or an array of one, got {given!r}")
        for given in ("0.6", None, True)
    ],
    (call(reweighted, torch.ones(())), TypeError, "alpha: fbuf takes .* got a torch Tensor"),
    *[
        (call(Prioritized, **{name: given}), TypeError, f"{name} must be a number, got {given!r}")
        for name in ("alpha", "eps")
        for given in ("0.6", None, True)
    ],
    *[(call(sampled, given), TypeError, "batch_size must be an int or a whole number") for given in ([], "2", 2.5)],
    (call(sampled, None), TypeError, "needs a batch size"),
    # items
    (call(THREE.init, {"reward": wide()}), TypeError, WIDE_TYPES),
    (lambda: THREE.extend(HELD, {"reward": wide()}), TypeError, WIDE_TYPES),
    (call(THREE.init, jax.random.key(0)), TypeError, r"hold key<fry>; store jax.random.key_data\(key\)"),
    (call(THREE.init, {"reward": "text"}), TypeError, r"\['reward'\]: an item holds arrays or jax.Shape"),
    (call(THREE.init, {"reward": None}), ValueError, "at least one array"),
    # draws and priorities
    (call(sampled, 0), ValueError, "batch_size must be .*, got"),
    (call(sampled, True), TypeError, "batch_size must be .*, got"),
    (call(jax.eval_shape, sampled, jax.ShapeDtypeStruct((), np.int32)), TypeError, "known before the program runs"),
    (
        lambda: SLICED.sample(SLICED.init(STEP), jax.random.key(0), 7),
        ValueError,
        "not a multiple of the slice length, 3",
    ),
    (call(updated, RANKED, ((2,), np.float32)), TypeError, "slots must be integers, got"),
    (call(updated, RANKED, priorities=((3,), np.float32)), ValueError, r"the shape of slots, \(2,\), or"),
    (call(updated, RANKED, priorities=((2,), np.complex64)), TypeError, "priorities must be real numbers"),
    (call(updated, THREE), TypeError, r"sampler=fbuf.Prioritized\(\.\.\.\)"),
    (lambda: SLICED.update(SLICED.init(STEP), np.arange(2), 1.0), TypeError, "keeps no priorities"),
    (lambda: Prioritized().reweight(Prioritized().init(4), np.ones(1)), ValueError, "alpha must be one number"),
    (call(THREE.place, HELD, np.arange(2)), ValueError, "another buffer|build it with trajectories="),
    # buffers and samplers
    (call(Buffer, 0), ValueError, "capacity must be at least 1, got"),
    (call(Buffer, 2.5), TypeError, r"capacity must be an int .*, got"),
    (call(Buffer, 3, lanes=(0,)), ValueError, "lanes"),
    (call(Buffer, 3, lanes=[2]), TypeError, "lanes"),
    (call(Buffer, 2**31 - 8), ValueError, f"at most {2**31 - 9} items"),
    (call(Buffer, 1, lanes=(2**16, 2**15)), ValueError, f"at most {2**31 - 9} items"),
    (call(Buffer, 4, Prioritized), TypeError, r"sampler must be an instance, .* write Prioritized\(\)"),
    (call(Buffer, 4, "uniform"), TypeError, "sampler must be"),
    (call(Buffer, 4, writer=None), TypeError, "writer must be a Writer, got None"),
    (call(Buffer, 4, trajectories="end"), TypeError, "trajectories must be"),
    (call(Buffer(3, Prioritized(dtype="float64")).init, np.float32(0)), ValueError, "jax_enable_x64"),
    (call(Prioritized, alpha=-0.1), ValueError, "alpha must be from 0 to 1e.30, got"),
    (call(Prioritized, eps=float("nan")), ValueError, "eps must be from 0 to 1e.30, got"),
    (call(Prioritized, alpha="0.6"), TypeError, "alpha must be a number, got"),
    (call(Prioritized, eps=1e-50), ValueError, "eps"),
    (call(Prioritized, new_items="highest"), ValueError, "new_items must be '.*' or '.*', got"),
    (call(Prioritized, dtype="float16"), ValueError, "dtype must be '.*' or '.*', got"),
    (call(Prioritized, stratified="no"), TypeError, "stratified must be True or False, got 'no'"),
    (call(Shuffled, drop_last=1), TypeError, "drop_last must be True or False"),
    # slices
    (call(Slices, 0), ValueError, "length must be at least 1"),
    (call(Slices, 2, least=3), ValueError, "least=3 is more than length=2"),
    (call(Slices, 2, burn_in=None), TypeError, "burn_in must be an int"),
    (call(Slices, 2, PerTrajectory), TypeError, r"starts must be an instance.*PerTrajectory\(\)"),
    (call(Slices, 2, None), TypeError, "starts must be a Sampler"),
    (call(Slices, 2, Fifo()), TypeError, "needs the order of writing"),
    (call(Slices, 2, Slices(2)), TypeError, "draws slices"),
    (call(PerTrajectory, Prioritized()), TypeError, "trajectories=.* keeps a state of slots"),
    (call(Slices.by_count, 4, 33), ValueError, "batch_size=33 is not a multiple of count=4"),
    (call(Buffer, 8, Slices(2)), ValueError, "build the buffer with trajectories="),
    (call(Buffer, 8, Slices(6, burn_in=3), trajectories=ENDS), ValueError, r"slices of 3 \+ 6 rows do not fit"),
    (call(Buffer, 8, PerTrajectory(), trajectories=ENDS), TypeError, "must be a Sampler, got PerTrajectory"),
    # trajectories
    (call(Trajectories), ValueError, "at least one of terminated, truncated, id, discount and first"),
    (call(Trajectories, "a", endless=True), ValueError, "or endless=True without any, got endless="),
    (call(Trajectories, ()), TypeError, "terminated must be a key, or a tuple of keys"),
    (call(Trajectories, id=("a", 1.0)), TypeError, "id must be a key, or a tuple of keys"),
    (
        call(made, trajectories=Trajectories(("next", "id"))),
        ValueError,
        r"terminated=\('next', 'id'\): an item has no such leaf\. ",
    ),
    (
        call(made, trajectories=Trajectories("ends")),
        ValueError,
        r"='ends'.* Did you mean 'end'\? Its leaves are 'end', 'id', \('next', 'end'\), ",
    ),
    (call(made, trajectories=Trajectories("next")), TypeError, "must be bool or floating, got <class 'dict'>"),
    (call(made, trajectories=Trajectories("id")), TypeError, "must be bool or floating, got int32"),
    (call(made, trajectories=Trajectories(id="next")), TypeError, "must be integer or bool or floating, got <class"),
    (call(Trajectories, []), ValueError, "a list of at least one path"),
    (call(Trajectories, ["a", 1.5]), TypeError, "terminated must be a key, or a tuple of keys"),
    (call(made, trajectories=Trajectories(["end", "id"])), TypeError, "must be bool or floating, got int32"),
    (call(made, trajectories=Trajectories("obs")), ValueError, r"must be one value an item, got shape \(3, 4\)"),
    # frames
    (call(Frames, stack=0), ValueError, "stack must be at least 1"),
    (call(Frames, axis=0.5), TypeError, "axis must be an int"),
    (call(Frames, padding="reset"), ValueError, "'first' or 'zero'"),
    (call(Frames, obs=()), TypeError, "obs must be a key"),
    (call(Buffer, 8, frames=Frames()), ValueError, "where trajectories end"),
    (call(Buffer, 8, trajectories=ENDS, frames=(Frames(), "obs")), TypeError, "frames must be"),
    (call(framed, Frames(), next_obs=OBS[:2]), ValueError, "one shape and dtype"),
    (call(framed, Frames(stack=3)), ValueError, "axis=-1 of it must be the 3 frames"),
    (call(framed, Frames(axis=-3)), ValueError, "axis=-3 of it"),
    (call(framed, Frames(obs="pixels")), ValueError, "no such leaf"),
    (call(framed, Frames(next_obs="next")), ValueError, "no single array"),
    (call(framed, (Frames(), Frames())), ValueError, "a leaf twice"),
    (call(framed, Frames(), obs=OBS + 0j, next_obs=OBS + 0j), TypeError, "real numbers"),
    (call(framed, Frames(finals=2**31 - 10)), ValueError, "at most 2147483639 frames"),
    # writers
    (call(HighestRanked, True), TypeError, "a key, or a tuple of keys"),
    (call(Buffer, 4, Fifo(), writer=HighestRanked("rank")), ValueError, "Fifo needs the order of writing"),
    (call(Buffer, 4, writer=HighestRanked("rank"), trajectories=ENDS), ValueError, "trajectories need the order"),
    (call(Buffer, 4, writer=HighestRanked("rank"), lanes=(2,)), ValueError, "takes no lanes"),
    (call(made, writer=HighestRanked("a")), ValueError, "an item has no such leaf"),
    (call(made, writer=HighestRanked("next")), ValueError, "must lead to a leaf, got dict"),
    (call(made, writer=HighestRanked("obs")), ValueError, r"one number an item, got shape \[3, 4\]"),
    (call(made, writer=HighestRanked("end")), TypeError, "must be a real number, got bool"),
    # mixtures
    (call(Mixture, [THREE]), TypeError, "tuple of at least one Buffer"),
    (call(Mixture, (THREE, Uniform())), TypeError, "must be a Buffer"),
    (call(Mixture, (THREE, RANKED), (1,)), ValueError, "one number for each of 2 buffers"),
    (call(Mixture, (THREE, RANKED), (1, True)), TypeError, "tuple of numbers"),
    (call(Mixture, (THREE, RANKED), (1, float("nan"))), ValueError, "at least 0, finite"),
    (call(Mixture, (THREE, RANKED), (0, 0)), ValueError, "not all zero"),
    (call(Mixture, (THREE, Buffer(4, Shuffled())), drawn=True), ValueError, "would lose most of what Shuffled"),
    (call(Mixture, (THREE, SLICED)), ValueError, "same length and burn_in"),
    (call(Mixture, (Buffer(2**30), Buffer(2**30))), ValueError, "in all members together"),
    # other parts
    (call(HashTable, 2**30), ValueError, "capacity must be at most"),
    (call(priority_tree.init, 2**31 - 8), ValueError, f"capacity must be an int from 1 to {2**31 - 9}, got"),
    (call(priority_tree.init, 4, dtype="float64"), ValueError, "float64"),
    (call(priority_tree.minimum, priority_tree.init(4, minima=False)), ValueError, "minima=True"),
    (call(priority_tree.largest, priority_tree.init(4)), ValueError, "maxima=True"),
    (call(priority_tree.update, priority_tree.init(4), jnp.arange(2), jnp.ones(3)), ValueError, "one value for each"),
    (call(priority_tree.fill, priority_tree.init(4), jnp.ones(3)), ValueError, "one value for each of 4 slots"),
    (call(Sharded, Buffer(8, Fifo())), ValueError, "by Uniform or Prioritized, got Fifo.*law='balanced'"),
    (call(Sharded, Buffer(8, Prioritized(new_items="highest_stored"))), ValueError, "highest_ever"),
    (call(Sharded, THREE, law="local"), ValueError, "'global' or 'balanced', got 'local'"),
    (call(Sharded, THREE, batches="here"), ValueError, "'split' or 'replicated', got 'here'"),
    (call(Sharded, THREE, ("a", "b")), TypeError, r"one mesh axis, got \('a', 'b'\)"),
]


@pytest.mark.parametrize(("make", "error", "says"), REFUSED, ids=[says for *_, says in REFUSED])
def test_what_does_not_fit_is_refused(make: Callable[[], Any], error: Any, says: str) -> None:
    with pytest.raises(error, match=says):
        make()


FRAMED = Buffer(8, trajectories=ENDS, frames=Frames())
OTHERS: list[tuple[Buffer, Buffer, str]] = [
    (Buffer(8), Buffer(4), "another buffer made it"),
    (Buffer(4, lanes=(2,)), Buffer(4), "another buffer made it"),
    (Buffer(4), Buffer(4, Prioritized()), "was not made for"),
    (Buffer(4, Prioritized()), Buffer(4, Prioritized(new_items="highest_stored")), "was not made for"),
    (SLICED, Buffer(9, Slices(3, least=2), trajectories=ENDS), "was not made for"),
    (SLICED, Buffer(9, Slices(3, PerTrajectory()), trajectories=ENDS), "was not made for"),
    (Buffer(4), Buffer(4, trajectories=ENDS), "other trajectories"),
    (Buffer(4, trajectories=ENDS), Buffer(4), "other trajectories"),
    (Buffer(4, trajectories=IDS), Buffer(4, trajectories=ENDS), "other trajectories"),
    (FRAMED, Buffer(8, trajectories=ENDS), "other frames"),
    (FRAMED, Buffer(8, trajectories=ENDS, frames=Frames(finals=3)), "other frames"),
    (Buffer(4), Buffer(4, writer=HighestRanked("rank")), "another writer"),
    (Buffer(4, writer=HighestRanked("rank")), Buffer(4), "another writer"),
]


@pytest.mark.parametrize(("buffer", "other", "says"), OTHERS, ids=str)
def test_the_state_of_another_buffer_is_refused_by_every_method(buffer: Buffer, other: Buffer, says: str) -> None:
    state = state_of(other, STEP)
    batch = jax.tree.map(lambda leaf: np.zeros((1, *buffer.lanes, *np.shape(leaf)), np.asarray(leaf).dtype), STEP)
    methods = [call(jax.eval_shape, buffer.extend, state, batch)]
    if buffer.trajectories != IDS:  # only writes need ids
        methods += [call(buffer.sample, state, jax.random.key(0), 6), call(buffer.read, state, np.zeros(1, np.int32))]
    for method in methods:
        with pytest.raises(ValueError, match=says):
            method()


def test_what_fits_is_taken() -> None:
    for lanes in ((), (3,)):
        _, slots = extended(shapes((4, *lanes), (4, *lanes, 2, 3)), lanes)
        assert (slots.shape, slots.dtype) == ((4, *lanes), jnp.int32)
    buffer = Buffer(np.int64(8), lanes=(np.int32(2),))  # type: ignore[arg-type]
    assert buffer == Buffer(8, lanes=(2,)) and type(buffer.capacity) is int and type(buffer.lanes[0]) is int
    assert Prioritized(alpha=np.float32(0.5)) == Prioritized(alpha=0.5)  # type: ignore[arg-type]
    assert Slices.by_count(4, 32, starts=PerTrajectory(), least=1) == Slices(8, PerTrajectory(), least=1)


def test_wide_numpy_batches_fit_what_jax_holds_of_them() -> None:
    item = {"count": np.int64(0), "value": np.float64(0)}
    batch = {"count": np.arange(2), "value": np.asarray([0.5, 1.5])}
    state, _ = THREE.extend(THREE.init(item), batch)
    np.testing.assert_array_equal(state.items["count"], [0, 1, 0])
    np.testing.assert_array_equal(state.items["value"], [0.5, 1.5, 0])
    with pytest.raises(ValueError, match=f"{2**40 + 5} does not fit in int32"):
        THREE.extend(state, {**batch, "count": np.asarray([1, 2**40 + 5])})
    with jax.enable_x64(True):
        held = THREE.init(item)
        assert (held.items["count"].dtype, held.items["value"].dtype) == (np.int64, np.float64)
        with pytest.raises(TypeError, match=r"\['value'\]: items are float64, the batch is float32"):
            THREE.extend(held, {"count": np.arange(2), "value": np.zeros(2, np.float32)})


@pytest.mark.parametrize("sampler", [Uniform(), Prioritized()], ids=repr)
def test_as_many_items_as_slots_can_number_are_traced(sampler: Any) -> None:
    buffer = Buffer(2**31 - 9, sampler)
    state = jax.eval_shape(buffer.init, jax.ShapeDtypeStruct((), np.bool_))
    state, slots = jax.eval_shape(buffer.extend, state, jax.ShapeDtypeStruct((4,), np.bool_))
    state, _, draw = jax.eval_shape(lambda s, k: buffer.sample(s, k, 4), state, jax.random.key(0))
    assert draw.slots.dtype == slots.dtype == np.int32


def test_slots_of_every_integer_type_are_read_and_none_wraps() -> None:
    buffer = Buffer(300, Prioritized(alpha=1, eps=0))
    state, _ = buffer.extend(buffer.init(np.float32(0)), np.arange(300, dtype=np.float32))
    for kind in (np.int8, np.uint8, np.uint16, np.uint32, np.int64, np.uint64):
        assert buffer.read(state, np.array([100, 3], kind)).tolist() == [100, 3]
        narrow = kind if np.dtype(kind).itemsize < 8 else np.uint32
        assert buffer.read(state, jnp.asarray([100, 3], narrow)).tolist() == [100, 3]
    after = buffer.update(state, np.asarray([2**32 + 1, -(2**32) + 2, 3]), [7, 8, 9])
    np.testing.assert_array_equal(after.sampler.priorities[:4], [1, 1, 1, 9])
    assert buffer.update(state, [], []).sampler.highest == 1
    after = buffer.update(state, [0], np.array([1e300]))  # infinite in JAX's floats: refused in silence
    assert int(after.sampler.refused) == 1 and float(after.sampler.priorities[0]) == 1
