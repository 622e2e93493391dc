"""A sharded buffer on the global arrays of a mesh: each method is mapped over the devices."""

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
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
    Results are sharded by `P(axis)`; replicated are `size`, `draw.size`, `draw.smallest` and replicated batches. Batches
    and slots are moved to the devices that need them. Where the mesh has other axes, these hold copies.
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
        """The number of parts of the buffer."""
        return int(self.mesh.shape[self.sharded.axis])

    def init(self, example: Any) -> BufferState:
        """An empty buffer for items like `example`, which is as in `Buffer.init`."""
        item, buffer = checks.item_spec(example), self.sharded.buffer
        here = [device for device in self.mesh.devices.flat if device.process_index == jax.process_index()]
        together = len(here) if here and here[0].platform == "cpu" else 1  # parts in one memory
        rows = buffer.capacity * together // self.mesh.devices.size or 1
        some = dataclasses.replace(buffer, capacity=rows)
        memory_plan.refuse_large(lambda: some.init(item), item, rows * buffer.items_per_row)
        zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), item)
        return _program(self, "init", P(), self._by_device, ())(zeros)

    def extend(self, state: BufferState, batch: Any) -> tuple[BufferState, Int[Array, "*batch"]]:
        """Write a batch of leaves [n, *lanes, ...]: the first n / devices rows to the first device, and so on.

        Returns the slots taken, [n, *lanes], -1 for none.
        """
        return self._run("extend", (state, checks.fits(batch)), self._by_device, (self._by_device,) * 2)

    def sample(self, state: BufferState, key: Array, batch_size: int) -> tuple[BufferState, Any, Draw]:
        """Draw `batch_size` items: leaves [batch_size, ...], and how they were drawn."""
        rows = self._of_batch
        draw = Draw(rows, rows, rows, P(), P(), rows, rows)  # type: ignore[arg-type]  # specs in the place of arrays
        return self._run("sample", (state, key), P(), (self._by_device, rows, draw), batch_size)

    def update(
        self, state: BufferState, slots: Int[Array, "*batch"], priorities: Float[Array, "*batch"]
    ) -> BufferState:
        """Give items new priorities: one for each slot, or one for all. Of equal slots the last counts."""
        slots = checks.slots(slots)
        priorities = jnp.broadcast_to(checks.priorities(priorities, slots.shape), slots.shape)
        return self._run("update", (state, slots, priorities), self._of_batch, self._by_device)

    def read(self, state: BufferState, slots: Int[Array, "*batch"]) -> Any:
        """A copy of the items at slots, which must be in range: leaves [*batch, ...]."""
        return self._run("read", (state, checks.slots(slots)), self._of_batch, self._of_batch)

    def size(self, state: BufferState) -> Int[Array, ""]:
        """Items stored on all devices, over all lanes."""
        return self._run("size", (state,), P(), P())

    def clear(self, state: BufferState) -> BufferState:
        """The buffer without items; their memory is kept."""
        return self._run("clear", (state,), P(), self._by_device)

    def local_part(self, state: BufferState) -> BufferState:
        """The parts on the devices of this process, as NumPy arrays [own devices, ...].

        With several processes each saves its own by `save_state` in its own folder. A later run on the same mesh gives
        what `load_state` returns to `from_local_part`.
        """

        def parts(leaf: Array) -> np.ndarray:
            held = {shard.index[0].start or 0: shard.data for shard in leaf.addressable_shards}
            return np.concatenate([np.asarray(held[place]) for place in sorted(held)])

        return jax.tree.map(parts, state)

    def from_local_part(self, part: BufferState) -> BufferState:
        """The state of all devices from the `local_part` of each process. Each process calls it."""
        sharding = NamedSharding(self.mesh, self._by_device)
        return jax.tree.map(lambda leaf: jax.make_array_from_process_local_data(sharding, leaf), part)

    @property
    def _by_device(self) -> P:
        return P(self.sharded.axis)

    @property
    def _of_batch(self) -> P:
        return self._by_device if self.sharded.batches == "split" else P()

    def _run(self, method: str, arguments: tuple[Any, ...], given: P, returned: Any, *static: Any) -> Any:
        """Call a method of `sharded` on the state and arguments by the spec `given`; `static` are its last arguments."""
        state, *others = arguments
        checks.parts(state, self.devices)
        if given != P():  # what is replicated, each process has
            for shape in map(jnp.shape, jax.tree.leaves(others)):
                if not shape or shape[0] % self.devices:
                    raise ValueError(
                        f"{method} needs a multiple of {self.devices} rows, as many for each device of axis "
                        f"{self.sharded.axis!r}, got shape {list(shape)}"
                    )
            others = jax.device_put(others, NamedSharding(self.mesh, given))
        return _program(self, method, (self._by_device, *(given for _ in others)), returned, static)(state, *others)


@functools.lru_cache(maxsize=256)  # JAX finds by the function what it compiled for an eager call
def _program(on_mesh: OnMesh, method: str, given: Any, returned: Any, static: tuple[Any, ...]) -> Callable[..., Any]:
    def local(*arguments: Any) -> Any:
        return getattr(on_mesh.sharded, method)(*arguments, *static)

    return jax.jit(jax.shard_map(local, mesh=on_mesh.mesh, in_specs=given, out_specs=returned))
