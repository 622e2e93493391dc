"""One of two processes with four devices each, which writes what it draws to files. Arguments: port, place, folder."""

import pathlib
import sys
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType

import fbuf
from fbuf import Buffer, Prioritized, Sharded

BUFFER, BATCH, STEPS = Buffer(64, Prioritized()), 32, 3  # eight items a device: the same bits as of one buffer
ROWS, SLOTS = np.arange(64, dtype=np.int32) * 3, np.random.default_rng(0).permutation(64).astype(np.int32)
PRIORITIES = np.random.default_rng(1).uniform(0, 5, 64).astype(np.float32)


def here(array: Any) -> np.ndarray:
    """The rows of a global array that this process has, in their order."""
    shards = {shard.index[0].start or 0: np.asarray(shard.data) for shard in array.addressable_shards}
    return np.concatenate([shards[start] for start in sorted(shards)])


def main() -> None:
    port, place, folder = sys.argv[1], int(sys.argv[2]), pathlib.Path(sys.argv[3])
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=place)
    assert (jax.device_count(), jax.local_device_count()) == (8, 4)
    on_mesh = Sharded(BUFFER).over(jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,)))
    state, _ = on_mesh.extend(on_mesh.init(np.int32(0)), ROWS)
    state = on_mesh.update(state, SLOTS, PRIORITIES)
    mine = folder / f"part {place}"
    for step in range(STEPS):
        state, batch, draw = on_mesh.sample(state, jax.random.key(step), BATCH)
        rows = {"batch": here(batch), "slots": here(draw.slots), "probability": here(draw.probability)}
        np.savez(folder / f"drawn {place} {step}.npz", **rows, smallest=draw.smallest)
        state = on_mesh.update(state, draw.slots, draw.probability)
        fbuf.save_state(mine, on_mesh.local_part(state))  # and go on with what was saved
        state = on_mesh.from_local_part(fbuf.load_state(mine, on_mesh.local_part(state)))
    assert int(on_mesh.size(state)) == 64


if __name__ == "__main__":
    main()
