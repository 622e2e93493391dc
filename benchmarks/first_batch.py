"""How long a fresh process waits for `import interop`, for its first prioritized batch, and for one of another size.

Each number is of processes of their own, in seconds: beyond the import of torch and tensordict; from an empty buffer for
10^6 rows through `extend` to a batch of 256; and what the first update and batches of other sizes cost after that. With an
empty compilation cache, and with what an earlier process has left there. In a program that imports JAX before, the import is
beyond that of JAX too, and there is no cache but the program's own.
"""

import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

import measure

CHILD = """
import json, sys, time
import torch
if sys.argv[1:] == ["jax"]:
    import jax
from tensordict import TensorDict
start = time.perf_counter()
import interop
from interop import LazyTensorStorage, PrioritizedSampler, TensorDictReplayBuffer
after = {"import": time.perf_counter() - start}

def timed(name, call):
    start = time.perf_counter()
    found = call()
    after[name] = time.perf_counter() - start
    return found

rows = TensorDict({"observation": torch.randn(1000, 8), "reward": torch.randn(1000)}, [1000])

def first():
    global rb
    sampler = PrioritizedSampler(1_000_000, alpha=0.6, beta=0.4)
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(1_000_000), sampler=sampler)
    rb.extend(rows)
    return rb.sample(256)

def again():
    rb.update_tensordict_priority(batch.set("td_error", torch.rand(256)))
    return rb.sample(256)

batch = timed("first batch of 256", first)
timed("first update, and the next batch", again)
timed("the first batch before which nothing was updated", lambda: rb.sample(256))
timed("another batch size, 200 after 256", lambda: rb.sample(200))
timed("another batch size, 64 after 256", lambda: rb.sample(64))
print(json.dumps(after))
"""


def one_process(cache: str, *before: str) -> dict[str, float]:
    """Seconds of each part, in a process that keeps compiled programs in this folder, and imports JAX before if asked to."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package is not compiled at each import
    environment |= {"XDG_CACHE_HOME": cache, "PYTHONPATH": os.pathsep.join([str(measure.ROOT), *sys.path[1:]])}
    command = [sys.executable, "-c", CHILD, *before]
    run = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    seconds: dict[str, float] = json.loads(run.stdout)
    return seconds


def main() -> None:
    options = measure.arguments("The first batches of a fresh process").parse_args()
    cold, warm, jax_first = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        one_process(folder)  # the files of Python are read from the disk
        for turn in range(1 if options.quick else 5):
            empty = pathlib.Path(folder) / str(turn)
            cold.append(one_process(str(empty)))
            warm.append(one_process(str(empty)))
            jax_first.append(one_process(str(empty), "jax"))
    values = {"seconds: import": statistics.median(each["import"] for each in cold + warm)}
    values["seconds: import after JAX"] = statistics.median(each["import"] for each in jax_first)
    first = "first batch of 256"
    values[f"seconds: {first}, JAX imported before"] = statistics.median(each[first] for each in jax_first)
    for name in cold[0]:
        if name != "import":
            values[f"seconds: {name}, nothing cached"] = statistics.median(each[name] for each in cold)
            values[f"seconds: {name}, cached"] = statistics.median(each[name] for each in warm)
    measure.report("Fresh processes", [], values, options.json)


if __name__ == "__main__":
    main()
