"""Through torch, drawing uniformly: are `extend`, `sample` and `add` faster than torchrl's?

Transitions of six leaves in a full buffer, in memory and memory-mapped. Both sides run the same lines; only the import
differs. Beside them what one would write without a library (`plain.py`), always in memory.
"""

import functools
import tempfile
from types import ModuleType
from typing import Any

import measure
import plain
import torch_rows

import interop


def buffer_of(data: ModuleType, storage: Any, capacity: int) -> Any:
    """A full buffer from the classes of `data`: torchrl.data, or ours."""
    buffer = data.TensorDictReplayBuffer(storage=storage)
    torch_rows.fill(buffer, torch_rows.transitions(min(capacity, 50_000)), capacity)
    return buffer


def main() -> None:
    options = measure.arguments(
        "Through torch, drawing uniformly: are extend, sample and add faster than torchrl's?"
    ).parse_args()
    sides = {measure.OURS: interop}
    if torchrl := measure.rival("torchrl.data"):
        sides["torchrl"] = torchrl
    capacity = 20_000 if options.quick else 1_000_000
    timings = []
    bare = plain.rings(torch_rows.transitions(min(capacity, 50_000)), capacity)
    for kind in ("LazyTensorStorage", "LazyMemmapStorage"):
        with tempfile.TemporaryDirectory() as folder:
            buffers = {}
            for name, data in sides.items():
                where = {"scratch_dir": f"{folder}/{name}"} if kind == "LazyMemmapStorage" else {}
                buffers[name] = buffer_of(data, getattr(data, kind)(capacity, **where), capacity)
            for batch in (256, 65_536):
                if batch > capacity:
                    continue
                rows = torch_rows.transitions(batch)
                extend, sample = {}, {}
                for name, buffer in (buffers | bare).items():
                    extend[name] = functools.partial(buffer.extend, plain.rows_for(name, rows))
                    sample[name] = functools.partial(buffer.sample, batch)
                timings.append(measure.compare(f"{kind}, extend {batch}", extend, quick=options.quick))
                timings.append(measure.compare(f"{kind}, sample {batch}", sample, quick=options.quick))
            row = torch_rows.transitions(1)[0]
            add = {
                name: functools.partial(buffer.add, plain.rows_for(name, row))
                for name, buffer in (buffers | bare).items()
            }
            timings.append(measure.compare(f"{kind}, add", add, quick=options.quick))
            del buffers, buffer, extend, sample, add  # before the files go
    measure.report(f"Through torch, uniform, {capacity} rows of six leaves", timings, {}, options.json)


if __name__ == "__main__":
    main()
