"""One of two processes with four devices each: what it draws is what one buffer draws. Arguments: port, place, folder."""

import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

import fbuf
from fbuf import Buffer, Prioritized, Sharded


def here(array: Any) -> np.ndarray:
    """The rows of a global array that this process has, in their order."""
    shards = {shard.index[0].start or 0: np.asarray(shard.data) for shard in array.addressable_shards}
    return np.concatenate([shards[start] for start in sorted(shards)])


def main() -> None:
    port, place, folder = sys.argv[1], int(sys.argv[2]), pathlib.Path(sys.argv[3])
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=place)
    assert (jax.device_count(), jax.local_device_count()) == (8, 4)
    buffer = Buffer(64, Prioritized())  # eight items a device: the same bits as of one buffer
    on_mesh = Sharded(buffer).over(jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,)))
    rows, slots = np.arange(64, dtype=np.int32) * 3, np.random.default_rng(0).permutation(64)
    priorities = np.random.default_rng(1).uniform(0, 5, 64).astype(np.float32)
    state, _ = on_mesh.extend(on_mesh.init(np.int32(0)), rows)
    state = on_mesh.update(state, slots, priorities)
    one, _ = buffer.extend(buffer.init(np.int32(0)), rows)
    one = jax.jit(buffer.update)(one, jnp.asarray(slots, jnp.int32), jnp.asarray(priorities))
    mine = folder / f"part {place}"
    for turn in range(3):
        key = jax.random.key(turn)
        state, batch, draw = on_mesh.sample(state, key, 32)
        _, wanted, single = jax.jit(buffer.sample, static_argnums=2)(one, key, 32)
        part = slice(16 * place, 16 * place + 16)
        np.testing.assert_array_equal(here(batch), wanted[part])
        np.testing.assert_array_equal(here(draw.slots), single.slots[part])
        np.testing.assert_array_equal(here(draw.probability), single.probability[part])
        np.testing.assert_array_equal(draw.smallest, single.smallest)
        state = on_mesh.update(state, draw.slots, draw.probability)
        one = buffer.update(one, single.slots, single.probability)
        fbuf.save_state(mine, on_mesh.local_part(state))  # and go on with what was saved
        state = on_mesh.from_local_part(fbuf.load_state(mine, on_mesh.local_part(state)))
    assert int(on_mesh.size(state)) == 64


if __name__ == "__main__":
    main()
