"""Through torch, rows of 4x84x84 bytes: are `extend` and `sample` faster than torchrl's, and than what one would write?"""

import functools

import measure
import plain
import torch
import torch_rows
from tensordict import TensorDict

import interop

BATCH = 256
SHAPE = (4, 84, 84)


def frames(count: int) -> TensorDict:
    return TensorDict({"pixels": torch.randint(0, 255, (count, *SHAPE), dtype=torch.uint8)}, [count])


def main() -> None:
    options = measure.arguments("Through torch, rows of 4x84x84 bytes: extend and sample").parse_args()
    capacity = 2_000 if options.quick else 20_000
    sides = {measure.OURS: interop}
    if torchrl := measure.rival("torchrl.data"):
        sides["torchrl"] = torchrl
    buffers = {}
    for name, data in sides.items():
        buffers[name] = data.TensorDictReplayBuffer(storage=data.LazyTensorStorage(capacity), batch_size=BATCH)
        torch_rows.fill(buffers[name], frames(1_000), capacity)
    buffers |= plain.rings(frames(1_000), capacity)
    bare = frames(capacity)["pixels"]

    extend, sample = {}, {}
    rows = frames(BATCH)
    for name, buffer in buffers.items():
        extend[name] = functools.partial(buffer.extend, plain.rows_for(name, rows))
        sample[name] = functools.partial(buffer.sample, BATCH)
    sample["x[i]"] = lambda: bare[torch.randint(0, capacity, (BATCH,))]
    sample["index_select"] = lambda: bare.index_select(0, torch.randint(0, capacity, (BATCH,)))
    timings = [
        measure.compare(f"extend {BATCH} images", extend, quick=options.quick),
        measure.compare(f"sample {BATCH} images", sample, quick=options.quick),
    ]
    measure.report(f"Through torch, uniform, {capacity} rows of 4x84x84 bytes", timings, {}, options.json)


if __name__ == "__main__":
    main()
