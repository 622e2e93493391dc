"""Rows through TransferQueue: is a queue on files as fast as the one in memory that a kill empties?

    python benchmarks/durable_queue.py [--quick] [--json FILE] [--flush] [--folder /scratch/x]

Put, get and clear by key from one process, by the backend `FbufFiles` and by TransferQueue's own `SimpleStorage`, in turns:
each round starts both systems anew. "read" gets the rows and reads every value: a get of files alone is a map of them.
`--flush` also measures files that wait for the disk, as "flushed".
"""

import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import measure
import ray
import torch
import transfer_queue as tq
from tensordict import NonTensorStack, TensorDict

import interop.transfer_queue

SIMPLE, FLUSHED = "SimpleStorage", "flushed"


def rows(count: int, length: int) -> TensorDict:
    """Five dense fields, a ragged one and a text."""
    draw = torch.Generator().manual_seed(0)
    fields: dict[str, Any] = {f"field_{number}": torch.randn(count, length, generator=draw) for number in range(5)}
    fields["ragged"] = torch.nested.as_nested_tensor(
        [torch.randn(1 + length * number // count, generator=draw) for number in range(count)], layout=torch.jagged
    )
    fields["text"] = NonTensorStack(*(str(number) * length for number in range(count)))
    return TensorDict(fields, [count])


def configuration(contender: str, folder: Path) -> dict[str, Any]:
    if contender == SIMPLE:
        return {"storage_backend": SIMPLE, SIMPLE: {"num_data_storage_units": 2}}
    return {"storage_backend": "FbufFiles", "FbufFiles": {"path": str(folder), "flush": contender == FLUSHED}}


def read(keys: list[str]) -> float:
    """Every value of the rows, summed."""
    found = tq.kv_batch_get(keys, "p")
    total = 0.0
    for value in (found[name] for name in sorted(found.keys())):
        if isinstance(value, torch.Tensor):
            total += float(value.values().sum() if value.is_nested else value.sum())
        else:
            total += sum(len(text) for text in value)
    return total


def calls(batch: TensorDict) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The operations of one round, in order."""
    for turn in range(4):
        keys = [f"{turn}-{number}" for number in range(len(batch))]
        tags = [{"turn": turn, "number": number} for number in range(len(batch))]
        yield "put", lambda keys=keys, tags=tags: tq.kv_batch_put(keys, "p", batch, tags)
        yield "read", lambda keys=keys: read(keys)
        yield "clear", lambda keys=keys: tq.kv_clear(keys, "p")


def round_of(contender: str, batch: TensorDict, folder: Path) -> dict[str, float]:
    """The least seconds of each operation, of a system that starts for them."""
    tq.init({"backend": configuration(contender, folder)})
    least: dict[str, float] = {}
    try:
        for name, call in calls(batch):
            start = time.perf_counter()
            call()
            least[name] = min(least.get(name, 1e9), time.perf_counter() - start)
    finally:
        tq.close()
        shutil.rmtree(folder, ignore_errors=True)
    return least


def timings(quick: bool, flush: bool, folder: Path) -> list[measure.Timing]:
    contenders = [measure.OURS, SIMPLE, *[FLUSHED] * flush]
    found = []
    for count, length in ((64, 256),) if quick else ((64, 256), (512, 2048)):
        batch = rows(count, length)
        taken: dict[str, dict[str, list[float]]] = {}
        for turn in range(2 if quick else 6):
            for contender in contenders[:: 1 if turn % 2 else -1]:
                for name, seconds in round_of(contender, batch, folder / f"{turn}-{contender}").items():
                    taken.setdefault(name, {}).setdefault(contender, []).append(seconds)
        whole = {
            each: [sum(parts) for parts in zip(*(times[each] for times in taken.values()), strict=True)]
            for each in contenders
        }
        for name, times in (*taken.items(), ("put + read + clear", whole)):
            found.append(measure.of_rounds(f"{name}, {count} rows of {length}", times))
    return found


def main() -> int:
    parser = measure.arguments("Rows through TransferQueue, on files and in memory")
    parser.add_argument("--flush", action="store_true", help="also files that wait for the disk")
    parser.add_argument("--folder", type=Path, help="where the files are, by default a temporary folder")
    options = parser.parse_args()
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, object_store_memory=200 << 20)
    interop.transfer_queue.register()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        found = timings(options.quick, options.flush, Path(folder))
    measure.report("a queue on files", found, {}, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
