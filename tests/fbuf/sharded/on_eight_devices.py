"""All checks of sharded buffers that need several devices, for one process with eight; it reports each by name."""

import dataclasses
import json
import re
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from scipy import stats

import fbuf
from fbuf import Buffer, BufferState, Fifo, Frames, HighestRanked, Prioritized, Sharded, Shuffled, Slices, Trajectories
from fbuf.sharded import OnMesh

DEVICES = 8
ITEM = {"x": np.float32(0), "n": np.int32(0)}
EXACT = Prioritized(alpha=1.0, eps=0)  # sums of small whole priorities are exact


def mesh_of(devices: int = DEVICES, kind: AxisType = AxisType.Auto) -> Mesh:
    return jax.make_mesh((devices,), ("data",), axis_types=(kind,), devices=jax.devices()[:devices])


def only_on(places: list[int], new: Any, old: Any) -> Any:
    """The new state on some devices, on the others the old one: devices that hold more than others."""
    return _chosen(np.isin(np.arange(DEVICES), places), new, old)


@jax.jit
def _chosen(here: jax.Array, new: Any, old: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(here.reshape(-1, *(1 for _ in a.shape[1:])), a, b), new, old)


class Model:
    """What items each device holds, by local slot, and one sampler that was given the same at the global slots."""

    def __init__(self, on_mesh: OnMesh) -> None:
        self.on_mesh, self.rule, self.state = on_mesh, on_mesh.sharded.buffer.sampler, on_mesh.init(ITEM)
        self.single = self.rule.init(on_mesh.sharded.buffer.capacity)
        self.room, self.written = on_mesh.sharded.buffer.capacity // DEVICES, 0
        self.held: list[dict[int, int]] = [{} for _ in range(DEVICES)]
        self.cursor = [0] * DEVICES
        self.extend, self.update_all = (jax.jit(each) for each in (on_mesh.extend, on_mesh.update))
        self.one_update, self.one_written = jax.jit(self.rule.update), jax.jit(self.rule.written)
        self.one_sample = jax.jit(self.rule.sample, static_argnums=2)

    def write(self, rows: int, places: list[int]) -> None:
        numbers = np.arange(rows * DEVICES, dtype=np.int32) + self.written
        self.written += numbers.size
        new, slots = self.extend(self.state, {"x": np.sqrt(numbers).astype(np.float32), "n": numbers})
        self.state = only_on(places, new, self.state)
        for place in places:
            for number in numbers[place * rows : (place + 1) * rows]:
                self.held[place][self.cursor[place]] = int(number)
                self.cursor[place] = (self.cursor[place] + 1) % self.room
        told = np.concatenate([np.asarray(slots)[place * rows : (place + 1) * rows] for place in places])
        self.single = self.one_written(self.single, jnp.asarray(told))

    def update(self, slots: Any, priorities: Any) -> None:
        slots, priorities = jnp.asarray(slots, jnp.int32), jnp.asarray(priorities, jnp.float32)
        self.state = self.update_all(self.state, slots, priorities)
        self.single = self.one_update(self.single, slots, priorities)

    def reweight(self, alpha: float) -> None:
        """As the documentation of `Sharded` says it."""
        many = jax.jit(jax.vmap(self.rule.reweight, (0, None)))(self.state.sampler, alpha)
        self.state = dataclasses.replace(self.state, sampler=many)
        self.single = jax.jit(self.rule.reweight)(self.single, alpha)

    @property
    def numbers(self) -> dict[int, int]:
        """What is stored, by global slot."""
        return {place * self.room + slot: n for place, held in enumerate(self.held) for slot, n in sorted(held.items())}

    def compare(self, seed: int, count: int = 64) -> None:
        key, size = jax.random.key(seed), jnp.int32(len(self.numbers))
        self.state, batch, draw = self.on_mesh.sample(self.state, key, count)
        _, wanted = self.one_sample(self.single, key, count, size)
        if not self.rule.keeps_priorities:  # it counts items without the gaps between devices
            slots = np.asarray(list(self.numbers), np.int32)[wanted.slots]
            wanted = fbuf.Draw(slots, wanted.probability, wanted.valid, wanted.smallest, wanted.size)
        jax.tree.map(np.testing.assert_array_equal, draw, wanted)
        numbers = np.asarray([self.numbers[int(slot)] for slot in np.asarray(draw.slots)])
        np.testing.assert_array_equal(batch["n"], numbers)
        np.testing.assert_array_equal(batch["x"], np.sqrt(numbers).astype(np.float32))


def history(buffer: Buffer, priorities: Callable[[np.random.Generator, int], np.ndarray] | None, **how: Any) -> None:
    """Writes, overwrites and updates on devices that hold different numbers of items, and draws in between."""
    random = np.random.default_rng(0)
    model = Model(Sharded(buffer, **how).over(mesh_of()))
    model.write(3, [0, 2, 6, 7])
    model.compare(0)
    for turn in range(3):
        model.write(3, [2, 3, 5, 7])
        if priorities is not None:
            stored = random.choice(list(model.numbers), 64)
            assert np.unique(stored).size < 64  # equal slots, on one device and across
            given = priorities(random, 64)
            given[:3] = np.nan, -1, 0
            model.update(np.concatenate([stored[:-3], [-1, buffer.capacity, 0]]), given)
            got, wanted = model.state.sampler, model.single
            np.testing.assert_array_equal(got.highest, jnp.full(DEVICES, wanted.highest))
            assert int(got.refused.sum()) == int(wanted.refused)
        model.compare(turn + 1)
    if priorities is not None:
        model.reweight(2.0)
        model.compare(4)
    assert int(model.on_mesh.size(model.state)) == len(model.numbers)
    cleared = model.on_mesh.clear(model.state)
    assert int(model.on_mesh.size(cleared)) == 0
    assert not model.on_mesh.sample(cleared, jax.random.key(0), 64)[2].valid.any()


def whole(random: np.random.Generator, count: int) -> np.ndarray:
    return random.integers(0, 9, count).astype(np.float32)


def any_size(random: np.random.Generator, count: int) -> np.ndarray:
    return (10 ** random.uniform(-3, 3, count)).astype(np.float32)


def global_uniform_draws_are_those_of_one_buffer() -> None:
    history(Buffer(DEVICES * 7), None)


def global_draws_by_exact_priorities_are_those_of_one_buffer_of_any_capacity() -> None:
    history(Buffer(DEVICES * 7, dataclasses.replace(EXACT, stratified=True)), whole, batches="replicated")


def global_draws_by_any_priorities_are_those_of_one_buffer_where_parts_are_powers_of_eight() -> None:
    history(Buffer(DEVICES * 8, Prioritized(stratified=True)), any_size, batches="replicated")
    with jax.enable_x64(True):
        history(Buffer(DEVICES * 8, Prioritized(dtype="float64")), any_size)


ODD = {
    "bool": np.asarray([True, False]),
    "brain": np.asarray([-0.0, np.nan, 3], jnp.bfloat16),
    "eight": np.int8(-3),
    "sixteen": np.asarray([1, 2, 65535], np.uint16),
    "float": np.asarray([0x80000000, 0x7FC01234, 0xFF800001], np.uint32).view(np.float32),
    "complex": np.asarray([1 - 2j, complex(-0.0, np.nan)], np.complex64),
    "four": np.asarray([-8, 7, 0], jnp.int4),
    "tiny": np.asarray([-0.0, 6], jnp.float4_e2m1fn),
    "none": np.zeros(0, np.float32),
}


def rows_of_any_dtype_arrive_bit_for_bit() -> None:
    def bits(leaf: Any) -> Any:
        array = np.asarray(leaf)
        return array.astype(np.float32).view(np.uint32) if array.dtype.itemsize == 1 else array.view(np.uint8)

    rows = jax.tree.map(
        lambda leaf: np.stack([leaf * (i % 2) if leaf.dtype == np.int8 else leaf for i in range(16)]), ODD
    )
    on_mesh = Sharded(Buffer(16)).over(mesh_of())
    state, slots = on_mesh.extend(on_mesh.init(ODD), rows)
    shuffled = np.random.default_rng(0).permutation(np.asarray(slots))
    wanted = jax.tree.map(lambda leaf: bits(leaf[shuffled]), rows)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(bits, on_mesh.read(state, shuffled)), wanted)
    none = on_mesh.read(state, np.zeros(0, np.int32))
    assert [leaf.shape for leaf in jax.tree.leaves(none)] == [(0, *leaf.shape) for leaf in jax.tree.leaves(ODD)]


def one_update_takes_slots_from_any_device_and_the_last_of_equal_ones_counts() -> None:
    on_mesh = Sharded(Buffer(16, EXACT), law="balanced").over(mesh_of())
    state, _ = on_mesh.extend(on_mesh.init(np.int32(0)), np.arange(16, dtype=np.int32))
    state = on_mesh.update(state, np.asarray([15, 0, 9, 0, 15, 3, 0, 15]), np.arange(1.0, 9))
    priorities = np.asarray(state.sampler.priorities)[:, :2].reshape(-1)
    wanted = np.ones(16)
    wanted[[15, 0, 9, 3]] = 8, 7, 3, 6
    np.testing.assert_array_equal(priorities, wanted)


def balanced_draws_follow_their_probabilities_and_weights_make_means_unbiased() -> None:
    for rule in (EXACT, Shuffled()):
        on_mesh = Sharded(Buffer(DEVICES * 10, rule), law="balanced").over(mesh_of())
        state, extend = on_mesh.init(np.int32(0)), jax.jit(on_mesh.extend)
        for places in ([0, 1, 2, 3, 6], [1, 3], [3]):  # 4, 8 and 10 items; three devices hold none
            written = np.arange(4 * DEVICES, dtype=np.int32)
            state = only_on(places, extend(state, written)[0], state)
        if rule is EXACT:
            slots = np.arange(DEVICES * 10)
            state = on_mesh.update(state, slots, 1.0 + slots % 4)
        keys, count = jax.random.split(jax.random.key(3), 60), 1600

        def step(state: Any, key: Any, on_mesh: OnMesh = on_mesh, count: int = count) -> Any:
            state, _, draw = on_mesh.sample(state, key, count)
            return state, (draw, fbuf.importance_weights(draw, 1.0, "none"), fbuf.importance_weights(draw, 1.0))

        draws, weights, normalized = jax.jit(jax.lax.scan, static_argnums=0)(step, state, keys)[1]
        valid = np.asarray(draws.valid).reshape(-1)
        slots = np.asarray(draws.slots).reshape(-1)[valid]
        assert set(slots // 10) == {0, 1, 2, 3, 6}
        chances = dict(zip(slots, np.asarray(draws.probability).reshape(-1)[valid], strict=True))
        found, sizes = np.bincount(slots, minlength=80), (4, 8, 4, 10, 4)
        assert set(np.asarray(draws.size)) == {sum(sizes)} == {len(chances)}
        np.testing.assert_allclose(draws.smallest, min(chances.values()), rtol=1e-6)
        np.testing.assert_allclose(sum(chances.values()), 1, rtol=1e-5)
        assert 0.999 < np.asarray(normalized).max() <= 1
        expected = np.asarray([chances.get(slot, 0) * slots.size for slot in range(80)])
        there = expected > 0
        chi = (((found - expected)[there]) ** 2 / expected[there]).sum()
        assert stats.chi2.sf(chi, sum(sizes) - 5) > 1e-4, (rule, chi)  # each device has its share exactly
        values = np.where(there, np.arange(80) ** 2, 0)
        estimate = (np.asarray(weights).reshape(-1)[valid] * values[slots]).mean()
        np.testing.assert_allclose(estimate, values[there].mean(), rtol=0.02)


END = {"trajectories": Trajectories("done")}
KINDS = {
    "first in, first out, in lanes": (Buffer(64, Fifo(), lanes=(2,)), 16),
    "slices by priority": (Buffer(64, Slices(2, Prioritized(new_items="highest_stored")), **END), 16),
    "slices of stacked frames": (
        Buffer(64, Slices(2, fbuf.PerTrajectory()), frames=Frames(stack=2, axis=0), **END),
        16,
    ),
    "highest ranked": (Buffer(64, Prioritized(), writer=HighestRanked("n")), 16),
}


def balanced_draws_of_slices_return_the_rows_of_their_slots() -> None:
    balanced_draws_return_the_rows_of_their_slots("slices by priority")


def balanced_draws_return_the_rows_of_their_slots(*names: str) -> None:
    for name in names or KINDS:
        buffer, count = KINDS[name]
        sharded = Sharded(buffer, law="balanced", batches="split" if buffer.frames else "replicated")
        on_mesh, random = sharded.over(mesh_of()), np.random.default_rng(0)
        shape = (48, *buffer.lanes)
        frames = random.normal(size=(*shape, 3)).astype(np.float32)
        batch = {"n": np.arange(np.prod(shape), dtype=np.int32).reshape(shape), "done": random.random(shape) < 0.2}
        item = {"n": np.int32(0), "done": np.bool_(False)}
        if buffer.frames:
            stacked = np.stack([frames, frames], 1)
            batch |= {"obs": stacked, "next_obs": stacked}
            item |= {"obs": np.zeros((2, 3), np.float32), "next_obs": np.zeros((2, 3), np.float32)}

        def steps(state: Any, batch: Any, on_mesh: OnMesh = on_mesh, count: int = count) -> Any:
            state, slots = on_mesh.extend(state, batch)

            def step(state: Any, key: Any) -> Any:
                state, rows, draw = on_mesh.sample(state, key, count)
                if on_mesh.sharded.buffer.sampler.keeps_priorities:
                    places = draw.slots if draw.starts is None else draw.starts
                    state = on_mesh.update(state, places, jnp.ones(places.shape))
                return state, (rows, draw)

            return slots, jax.lax.scan(step, state, jax.random.split(jax.random.key(0), 3))

        found = jax.jit(steps, donate_argnums=0)(on_mesh.init(item), batch)
        slots, (_, (rows, draws)) = jax.tree.map(np.asarray, found)
        assert draws.valid.any(), name
        for each in range(3):
            draw = jax.tree.map(lambda leaf, each=each: leaf[each], draws)
            kept = np.asarray(draw.valid if draw.mask is None else draw.mask & draw.valid[:, None])
            order = np.argsort(np.asarray(slots).reshape(-1), kind="stable")
            last = dict(zip(np.asarray(slots).reshape(-1)[order], batch["n"].reshape(-1)[order], strict=True))
            wanted = [last[slot] for slot in np.asarray(draw.slots)[kept]]
            np.testing.assert_array_equal(np.asarray(rows["n"][each])[kept], wanted, name)
            assert (np.asarray(draw.probability)[np.asarray(draw.valid)] > 0).all(), name
        if isinstance(buffer.sampler, Fifo):
            np.testing.assert_array_equal(fbuf.importance_weights(draw, 1.0), draw.valid)


# ------------------------------------------------------------------ compiled programs


def collectives(program: Any) -> list[tuple[str, int]]:
    """The kind of each collective of a program and the words of its widest side, which is what is to be moved."""
    found = []
    for line in program.as_text().splitlines():
        match = re.search(
            r"= (.*?) (all-reduce|reduce-scatter|all-gather|all-to-all|collective-permute)\((.*?)\), ", line
        )
        if match is None:
            assert not re.search(
                r" (all-reduce|reduce-scatter|all-gather|all-to-all|collective\S+)(-start)?\(", line
            ), line
            continue
        sizes = [
            int(np.prod([int(n) for n in dims.split(",") if n])) for dims in re.findall(r"\w32\[([\d,]*)\]", match[1])
        ]
        found.append((match[2], sum(sizes)))
    return sorted(found)


def arguments(on_mesh: OnMesh, item: Any, rows: int) -> Any:
    """Shapes of a state and of a batch, where the mesh has them."""
    by_device = NamedSharding(on_mesh.mesh, P("data"))
    state = jax.eval_shape(lambda: on_mesh.init(item))
    batch = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((rows, *leaf.shape), leaf.dtype), item)
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=by_device), (state, batch))


def collectives_and_their_bytes_are_those_that_are_written_down() -> None:
    for devices, count, width, rule, law, batches in (
        (8, 64, 3, EXACT, "global", "split"),
        (2, 128, 5, fbuf.Uniform(), "global", "replicated"),
        (4, 32, 5, fbuf.Uniform(), "balanced", "split"),
    ):
        item = {"x": np.zeros(width, np.float32), "n": np.zeros(5, np.uint8), "b": np.bool_(False)}
        on_mesh = Sharded(Buffer(800, rule), law=law, batches=batches).over(mesh_of(devices))
        state, batch = arguments(on_mesh, item, count)
        split, words = batches == "split", (width + 2 + 1) + 3  # of the row; slot, probability and whether it is valid
        key, slots = jax.random.key(0), jax.ShapeDtypeStruct((count,), np.int32)
        reduced = words * count // (devices if split else 1)  # of a reduce-scatter the result is shown
        moved = [("reduce-scatter" if split else "all-reduce", reduced)] * (law == "global" or not split)
        numbers = [("all-reduce", devices * (1 if (rule, law) == (fbuf.Uniform(), "global") else 3))]
        gathered = [("all-gather", 2 * count)] * split
        highest = [("all-reduce", 1)] * (law == "global")
        expected = {"extend": [], "sample": numbers + moved, "size": [("all-reduce", 1)]}
        programs = {
            "extend": jax.jit(on_mesh.extend).lower(state, batch),
            "sample": jax.jit(on_mesh.sample, static_argnums=2).lower(state, key, count),
            "size": jax.jit(on_mesh.size).lower(state),
        }
        if rule is EXACT:
            values = jax.ShapeDtypeStruct((count,), np.float32)
            expected["update"] = gathered + highest
            programs["update"] = jax.jit(on_mesh.update).lower(state, slots, values)
        for name, program in programs.items():
            found = collectives(program.compile())
            assert found == sorted(expected[name]), (name, devices, law, batches, found, expected[name])


def training(sharded: Sharded, state: BufferState, rows: Any, keys: jax.Array) -> tuple[BufferState, jax.Array]:
    """A training loop of the user's own, to be mapped over devices."""

    def step(state: BufferState, key: jax.Array) -> tuple[BufferState, jax.Array]:
        state, _ = sharded.extend(state, rows)
        state, batch, draw = sharded.sample(state, key, 64)
        state = sharded.update(state, draw.slots, jnp.abs(batch["x"]).sum(-1) + 1e-3)
        return state, jax.lax.psum(jnp.sum(batch["x"]), "data") + 0 * draw.smallest

    return jax.lax.scan(step, state, keys)


def a_donated_loop_in_shard_map_works_in_place_with_and_without_check_vma() -> None:
    item = {"x": np.zeros(3, np.float32)}
    sharded = Sharded(Buffer(DEVICES * 8192, Prioritized()))
    on_mesh = sharded.over(mesh_of())
    (state, rows), keys = arguments(on_mesh, item, 64), jax.random.split(jax.random.key(0), 4)

    def loop(state: BufferState, rows: Any, keys: jax.Array) -> tuple[BufferState, jax.Array]:
        return training(sharded, state, rows, keys)

    for check in (True, False):
        mapped = jax.shard_map(
            loop,
            mesh=on_mesh.mesh,
            in_specs=(P("data"), P("data"), P()),
            out_specs=(P("data"), P()),
            check_vma=check,
        )
        traced = jax.jit(mapped, donate_argnums=0).trace(state, rows, keys)
        if not check:  # it is the same program
            continue
        program = traced.lower().compile()
        memory, size = program.memory_analysis(), sum(leaf.size * 4 for leaf in jax.tree.leaves(state)) / DEVICES
        assert abs(memory.alias_size_in_bytes / size - 1) < 1e-2
        assert memory.temp_size_in_bytes < 0.2 * size
        copies = re.findall(r"= \(?\w+\[([\d,]*)\][^=]* copy(?:-start)?\(", program.as_text())
        assert max((int(np.prod([int(n) for n in each.split(",") if n])) for each in copies), default=0) < 8192 // 8
        values = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)
        given = jax.device_put({"x": values}, NamedSharding(on_mesh.mesh, P("data")))
        _, found = program(on_mesh.init(item), given, keys)
    one = Buffer(64, Prioritized())

    def first(rows: Any, key: jax.Array) -> Any:
        return one.sample(one.extend(one.init(item), rows)[0], key, 64)[1]["x"]

    drawn = jax.jit(first)({"x": values}, keys[0])  # 64 rows of equal weight, in the order of devices
    np.testing.assert_allclose(found[0], drawn.sum(), rtol=1e-5)


def meshes_may_be_explicit_and_have_other_axes() -> None:
    found = []
    auto, explicit = (AxisType.Auto,) * 2, (AxisType.Explicit,)
    for mesh in (
        jax.make_mesh((4, 2), ("data", "model"), axis_types=auto),
        jax.make_mesh((4,), ("data",), axis_types=explicit, devices=jax.devices()[:4]),
    ):
        on_mesh = Sharded(Buffer(32, EXACT)).over(mesh)
        state, slots = on_mesh.extend(on_mesh.init(np.int32(0)), np.arange(32, dtype=np.int32))
        state = jax.jit(on_mesh.update)(state, slots, jnp.arange(32.0))
        found.append(
            jax.tree.map(np.asarray, jax.jit(on_mesh.sample, static_argnums=2)(state, jax.random.key(1), 16)[1:])
        )
        part = on_mesh.local_part(state)
        assert part.items.shape == (4, 8)
        jax.tree.map(np.testing.assert_array_equal, on_mesh.from_local_part(part), state)
        step = jax.shard_map(
            lambda state, key, rule=on_mesh.sharded: rule.sample(state, key, 16)[1],
            mesh=mesh,
            in_specs=(P("data"), P()),
            out_specs=P("data"),
            axis_names={"data"},
        )
        np.testing.assert_array_equal(jax.jit(step)(state, jax.random.key(1)), found[-1][0])
    jax.tree.map(np.testing.assert_array_equal, *found)


def checkpoints_of_a_global_state_are_read_back_to_the_same_devices() -> None:
    on_mesh = Sharded(Buffer(32, Prioritized())).over(mesh_of())
    state, _ = on_mesh.extend(on_mesh.init(ITEM), {"x": np.ones(16, np.float32), "n": np.arange(16, dtype=np.int32)})
    with tempfile.TemporaryDirectory() as folder:
        fbuf.save_state(folder, state)
        loaded = fbuf.load_state(folder, on_mesh.init(ITEM))
    jax.tree.map(np.testing.assert_array_equal, loaded, state)
    assert all(leaf.sharding.spec == P("data") for leaf in jax.tree.leaves(loaded))


def resized_parts_keep_their_newest_rows_on_their_devices() -> None:
    resized_parts_keep_their_newest_rows((4,), mesh_of())


def resized_parts_of_other_sizes_and_meshes_keep_their_newest_rows() -> None:
    other = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    resized_parts_keep_their_newest_rows((4, 16), mesh_of(), other)


def resized_parts_keep_their_newest_rows(sizes: tuple[int, ...], *meshes: Mesh) -> None:
    sharded = Sharded(Buffer(DEVICES * 8, EXACT))
    for mesh in meshes:
        on_mesh = sharded.over(mesh)
        count, room = on_mesh.devices, sharded.buffer.capacity // on_mesh.devices
        numbers = np.arange(3 * count * 4, dtype=np.int32).reshape(3, -1)
        state = on_mesh.init(ITEM)
        for new in numbers:
            state, slots = on_mesh.extend(state, {"x": new.astype(np.float32), "n": new})
        state = on_mesh.update(state, slots, np.arange(1, slots.size + 1, dtype=np.float32))
        held = numbers.reshape(3, count, 4).transpose(1, 0, 2).reshape(count, -1)[:, -room:]  # the oldest first
        for rows in sizes:
            other, after = fbuf.resize(sharded, state, count * rows)
            assert all(leaf.sharding.spec[0] == "data" for leaf in jax.tree.leaves(after))
            assert all(leaf.sharding.mesh == mesh for leaf in jax.tree.leaves(after))
            again, kept = other.over(mesh), held[:, -rows:]
            assert int(again.size(after)) == kept.size
            places = (np.arange(count)[:, None] * rows + np.arange(kept.shape[1])).reshape(-1)
            np.testing.assert_array_equal(again.read(after, places)["n"], kept.reshape(-1))
            _, items, draw = again.sample(after, jax.random.key(0), 64)
            assert set(np.asarray(items["n"]).tolist()) <= set(kept.reshape(-1).tolist())
            np.testing.assert_array_equal(again.read(after, draw.slots)["n"], items["n"])
            new = np.arange(
                1000, 1000 + count, dtype=np.int32
            )  # over the oldest row of each device, or behind the newest
            after, slots = again.extend(after, {"x": new.astype(np.float32), "n": new})
            np.testing.assert_array_equal(slots, np.arange(count) * rows + kept.shape[1] % rows)


def refused(error: type[Exception], text: str, call: Callable[[], Any]) -> None:
    try:
        call()
    except error as raised:
        assert re.search(text, str(raised)), f"{raised} does not say {text}"
    else:
        raise AssertionError(f"no {error.__name__}: {text}")


def what_does_not_fit_is_refused_by_name() -> None:
    mesh, sharded, key = mesh_of(), Sharded(Buffer(16)), jax.random.key(0)
    on_mesh, away = sharded.over(mesh), Sharded(Buffer(16), "rows")
    state, few = on_mesh.init(np.int32(0)), Sharded(Buffer(16)).over(mesh_of(4)).init(np.int32(0))
    slices = Sharded(Buffer(64, Slices(4), **END), law="balanced").over(mesh)

    def mapped(call: Callable[..., Any], *axes: str) -> Any:
        return jax.shard_map(call, mesh=mesh, in_specs=P(*axes), out_specs=P("data"))

    sample = mapped(lambda state, keys: sharded.sample(state, keys[0], 8)[1], "data")
    refused(ValueError, "'rows' is not in the mesh, whose axes are 'data'", lambda: away.over(mesh))
    refused(ValueError, "capacity=20 .* 8 devices .* use 16 or 24", lambda: Sharded(Buffer(20)).over(mesh))
    refused(ValueError, "'rows' is not bound here .bound: 'data'", lambda: mapped(away.clear, "data")(state))
    refused(ValueError, "batch_size=12 must be a multiple of 8", lambda: on_mesh.sample(state, key, 12))
    held = slices.init({"done": np.bool_(False)})
    refused(ValueError, "batch_size=16 must be a multiple of 32", lambda: slices.sample(held, key, 16))
    refused(ValueError, "needs .1, .... here: pass", lambda: mapped(sharded.clear)(state))
    refused(ValueError, "not made for sampler", lambda: Sharded(Buffer(16, EXACT)).over(mesh).clear(state))
    refused(ValueError, "needs one key", lambda: sample(state, jax.random.split(key, 8)))
    refused(ValueError, "does not fit in int32", lambda: on_mesh.extend(state, np.full(8, 2**40)))
    refused(ValueError, "extend needs a multiple of 8 rows", lambda: on_mesh.extend(state, np.zeros(9, np.int32)))
    refused(ValueError, r"state.items has shape .4, 4., and needs .8, ....", lambda: on_mesh.size(few))
    refused(TypeError, "keeps no priorities", lambda: on_mesh.update(state, np.arange(8), np.ones(8)))


CHECKS = (
    global_uniform_draws_are_those_of_one_buffer,
    global_draws_by_exact_priorities_are_those_of_one_buffer_of_any_capacity,
    rows_of_any_dtype_arrive_bit_for_bit,
    one_update_takes_slots_from_any_device_and_the_last_of_equal_ones_counts,
    balanced_draws_follow_their_probabilities_and_weights_make_means_unbiased,
    balanced_draws_of_slices_return_the_rows_of_their_slots,
    collectives_and_their_bytes_are_those_that_are_written_down,
    a_donated_loop_in_shard_map_works_in_place_with_and_without_check_vma,
    checkpoints_of_a_global_state_are_read_back_to_the_same_devices,
    resized_parts_keep_their_newest_rows_on_their_devices,
    what_does_not_fit_is_refused_by_name,
)
SLOW = (
    global_draws_by_any_priorities_are_those_of_one_buffer_where_parts_are_powers_of_eight,
    meshes_may_be_explicit_and_have_other_axes,
    resized_parts_of_other_sizes_and_meshes_keep_their_newest_rows,
    balanced_draws_return_the_rows_of_their_slots,
)


def main() -> None:
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation cache")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    assert jax.device_count() == DEVICES
    for check in CHECKS + SLOW:
        if check.__name__ not in sys.argv[1:]:
            continue
        failure = ""
        try:
            check()
        except Exception:
            failure = traceback.format_exc()
        print(json.dumps([check.__name__, failure, time.process_time()]), flush=True)


if __name__ == "__main__":
    main()
