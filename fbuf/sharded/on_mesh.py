"""A sharded buffer on the global arrays of a mesh, which each method maps over the devices."""

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Float, Int

from fbuf import checks, memory_plan
from fbuf.buffer import BufferState
from fbuf.samplers import Draw

if TYPE_CHECKING:
    from fbuf.sharded.rule import Sharded


@dataclasses.dataclass(frozen=True)
class OnMesh:
    """The methods of `Sharded` on global arrays: a state of leaves [devices, ...], batches and slots of all devices.

    Each may be called eagerly, or in `jax.jit`, which may donate the state: `jax.jit(on_mesh.extend, donate_argnums=0)`.
    Results lie by `P(axis)`, but for replicated batches and what a draw says about the whole buffer. Arguments are moved
    to where they are needed.
    """

    sharded: "Sharded"
    mesh: Mesh

    def __post_init__(self) -> None:
        axis, names = self.sharded.axis, self.mesh.axis_names
        if axis not in names:
            raise ValueError(f"axis {axis!r} is not in the mesh, whose axes are {', '.join(map(repr, names))}")
        self.sharded.part(self.devices)

    @property
    def devices(self) -> int:
        """Devices that hold a part; where the mesh has other axes, each part is repeated along these."""
        return int(self.mesh.shape[self.sharded.axis])

    def init(self, example: Any) -> BufferState:
        """An empty buffer for items like `example`, an item as `Buffer.init` takes it."""
        item, part = checks.item_spec(example), self.sharded.part(self.devices)
        mine = [device for device in self.mesh.devices.flat if device.process_index == jax.process_index()]
        together = len(mine) if mine and mine[0].platform == "cpu" else 1  # parts in one memory
        whole = dataclasses.replace(part, capacity=part.capacity * min(together, self.devices))
        memory_plan.refuse_large(lambda: whole.init(item), item, whole.capacity * whole.items_per_row)
        leaves, structure = jax.tree.flatten(item)
        state: BufferState = _init(self, tuple((leaf.shape, leaf.dtype) for leaf in leaves), structure)()
        return state

    def extend(self, state: BufferState, batch: Any) -> tuple[BufferState, Int[Array, "*batch"]]:
        """Write a batch of leaves [n, *lanes, ...]: the first n / devices rows into the part of the first device, and so on.

        Returns the slots taken, -1 for none.
        """
        batch = checks.arrays(batch)
        for leaf in jax.tree.leaves(batch):
            if leaf.ndim and leaf.shape[0] % self.devices:
                raise ValueError(f"{leaf.shape[0]} rows cannot be divided among {self.devices} devices")
        written: tuple[BufferState, Array] = _program(self, "extend")(state, self._placed(batch, self._by_device))
        return written

    def sample(self, state: BufferState, key: Array, batch_size: int) -> tuple[BufferState, Any, Draw]:
        """Draw `batch_size` items: leaves [batch_size, ...], over the devices or on each of them, and how they were drawn."""
        drawn: tuple[BufferState, Any, Draw] = _program(self, "sample", batch_size)(state, self._placed(key, P()))
        return drawn

    def update(
        self, state: BufferState, slots: Int[Array, "*batch"], priorities: Float[Array, "*batch"]
    ) -> BufferState:
        """Give items new priorities: one for each slot, or one for all. Of equal slots the last counts."""
        slots = checks.slots(slots)
        priorities = jax.numpy.broadcast_to(checks.priorities(priorities, slots.shape), slots.shape)
        updated: BufferState = _program(self, "update")(
            state, *self._placed((slots, priorities), self._of_batch(slots))
        )
        return updated

    def read(self, state: BufferState, slots: Int[Array, "*batch"]) -> Any:
        """A copy of the items at slots, which must be in range: leaves [*batch, ...]."""
        slots = checks.slots(slots)
        return _program(self, "read")(state, self._placed(slots, self._of_batch(slots)))

    def size(self, state: BufferState) -> Int[Array, ""]:
        """Items stored on all devices, over all lanes."""
        size: Array = _program(self, "size")(state)
        return size

    def clear(self, state: BufferState) -> BufferState:
        """The same buffer with nothing in it; the memory of items is kept."""
        cleared: BufferState = _program(self, "clear")(state)
        return cleared

    def local_part(self, state: BufferState) -> BufferState:
        """The parts of the state on this process's devices, as NumPy arrays [own devices, ...].

        With several processes each saves its own with `save_state`, in a folder of its own, and a run with the same
        processes and mesh gives them back to `from_local_part`.
        """

        def parts(leaf: Array) -> np.ndarray:
            first = {shard.index[0].start or 0: shard.data for shard in leaf.addressable_shards}
            return np.concatenate([np.asarray(first[place]) for place in sorted(first)])

        local: BufferState = jax.tree.map(parts, state)
        return local

    def from_local_part(self, part: BufferState) -> BufferState:
        """The global state from the `local_part` of each process."""
        sharding = NamedSharding(self.mesh, self._by_device)
        state: BufferState = jax.tree.map(lambda leaf: jax.make_array_from_process_local_data(sharding, leaf), part)
        return state

    @property
    def _by_device(self) -> P:
        return P(self.sharded.axis)

    @property
    def specs(self) -> dict[str, Any]:
        """The specs of what methods return, behind `in_specs`."""
        state = by_device = self._by_device
        rows = by_device if self.sharded.batches == "split" else P()
        draw = Draw(rows, rows, rows, P(), P(), rows, rows)  # type: ignore[arg-type]  # specs in the place of arrays
        taken = {"extend": by_device, "sample": P(), "update": rows, "read": rows}
        given = {"init": state, "extend": (state, by_device), "sample": (state, rows, draw), "update": state}
        return {"in": taken, "out": given | {"read": rows, "size": P(), "clear": state}}

    def _of_batch(self, slots: Array) -> P:
        """The spec of slots, of which there must be as many for each device."""
        if self.sharded.batches == "replicated":
            return P()
        if not slots.ndim or slots.shape[0] % self.devices:
            raise ValueError(f"slots of shape {list(slots.shape)} cannot be divided among {self.devices} devices")
        return self._by_device

    def _placed(self, arrays: Any, spec: P) -> Any:
        return jax.device_put(arrays, NamedSharding(self.mesh, spec))


@functools.lru_cache(maxsize=256)  # JAX finds by the function what it compiled for an eager call
def _program(on_mesh: OnMesh, method: str, *static: Any) -> Callable[..., Any]:
    """A method as one program over the mesh; `static` are its last arguments."""
    specs, by_device = on_mesh.specs, P(on_mesh.sharded.axis)

    def local(state: BufferState, *arguments: Any) -> Any:
        return getattr(on_mesh.sharded, method)(state, *arguments, *static)

    count = {"size": 0, "clear": 0, "update": 2}.get(method, 1)
    in_specs = by_device, *(specs["in"][method] for _ in range(count))
    return jax.jit(jax.shard_map(local, mesh=on_mesh.mesh, in_specs=in_specs, out_specs=specs["out"][method]))


@functools.lru_cache(maxsize=64)
def _init(on_mesh: OnMesh, leaves: tuple[Any, ...], structure: Any) -> Callable[[], Any]:
    item = jax.tree.unflatten(structure, [jax.ShapeDtypeStruct(*leaf) for leaf in leaves])
    local = functools.partial(on_mesh.sharded.init, item)
    return jax.jit(jax.shard_map(local, mesh=on_mesh.mesh, in_specs=(), out_specs=P(on_mesh.sharded.axis)))
