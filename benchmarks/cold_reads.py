"""Files larger than memory: how fast is a random batch that is not in memory, and what do batches in memory pay for it?

    python benchmarks/cold_reads.py [--folder DIR] [--quick] [--json FILE]

Rows of 84x84x4 bytes in a `LazyMemmapStorage`. Where a control group can be made (root on Linux), the process has 512 MiB
for data and the files have more than twice that; in any case batches are also measured right after the cache was dropped.
Rivals gather from a map of the same file; `MADV_RANDOM` from one for which the kernel was told to read nothing ahead. The
measuring process is a child; its files and group are removed after it.
"""

import argparse
import contextlib
import ctypes
import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import measure
import torch
from tensordict import TensorDict

import interop

BATCH = 256
SHAPE = (84, 84, 4)
ROW = 84 * 84 * 4
MIB = 1 << 20
_RANDOM, _DONT_NEED = 1, 4


@dataclasses.dataclass(frozen=True)
class Sizes:
    limit: int  # bytes of memory for data
    rows: int
    rounds: int
    long: int  # batches of the long run

    @classmethod
    def of(cls, quick: bool) -> "Sizes":
        return cls(192 * MIB, 16_000, 3, 60) if quick else cls(512 * MIB, 44_000, 9, 600)


# ---------------------------------------------------------------------- memory for data


@contextlib.contextmanager
def group(limit: int) -> Iterator[pathlib.Path | None]:
    """A control group below our own with so much memory; None where there is no way to one."""
    made = None
    for folder, name in _memory_groups():
        place = folder / f"cold-reads-{os.getpid()}"
        with contextlib.suppress(OSError):
            place.mkdir()
            made = place
            (place / name).write_text(str(limit))
            break
    try:
        yield made if made is not None and made.joinpath("cgroup.procs").exists() else None
    finally:
        for _ in range(50):
            with contextlib.suppress(OSError):
                if made is not None:
                    made.rmdir()
                break
            time.sleep(0.1)


def _memory_groups() -> list[tuple[pathlib.Path, str]]:
    """Where groups can be made, and the name of the limit there: of version 1 and 2 of the interface."""
    root, found = pathlib.Path("/sys/fs/cgroup"), []
    with contextlib.suppress(OSError):
        for line in pathlib.Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if "memory" in controllers.split(","):
                found.append((root / "memory" / path.lstrip("/"), "memory.limit_in_bytes"))
            elif not controllers and "memory" in _read(root / path.lstrip("/") / "cgroup.subtree_control").split():
                found.append((root / path.lstrip("/"), "memory.max"))
    return found


def _read(path: pathlib.Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def resident() -> dict[str, float]:
    """Memory of this process in MiB: all, the most ever, and what is not in files."""
    fields = dict(line.split(":", 1) for line in _read(pathlib.Path("/proc/self/status")).splitlines())
    return {name: int(fields[name].split()[0]) / 1024 for name in ("VmRSS", "VmHWM", "RssAnon")}


def drop(file: pathlib.Path) -> None:
    """Have nothing of a file in memory. Pages that a map shows stay, so all maps let go of them first."""
    libc = ctypes.CDLL(None)
    for line in _read(pathlib.Path("/proc/self/maps")).splitlines():
        if line.endswith(str(file)):
            start, stop = (int(each, 16) for each in line.split()[0].split("-"))
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), _DONT_NEED)
    handle = os.open(file, os.O_RDWR)
    try:
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)


# ---------------------------------------------------------------------- what is measured


def contenders(folder: pathlib.Path, ours: Any, rows: int) -> dict[str, Callable[[], Any]]:
    file = folder / "obs.memmap"

    def plain() -> torch.Tensor:
        return torch.from_file(str(file), shared=True, size=rows * ROW, dtype=torch.uint8).view(rows, *SHAPE)

    given = interop.TensorDictReplayBuffer(
        storage=interop.TensorStorage(TensorDict.load_memmap(folder)), batch_size=BATCH
    )
    mapped, viewed, unread = plain(), plain().numpy(), plain()
    ctypes.CDLL(None).madvise(ctypes.c_void_p(unread.data_ptr()), ctypes.c_size_t(unread.nbytes), _RANDOM)
    return {
        measure.OURS: ours.sample,
        "load_memmap": given.sample,
        "index_select": lambda: mapped.index_select(0, torch.randint(0, rows, (BATCH,))),
        "MADV_RANDOM": lambda: unread.index_select(0, torch.randint(0, rows, (BATCH,))),
        "numpy take": lambda: viewed.take(torch.randint(0, rows, (BATCH,)).numpy(), 0, mode="clip"),
    }


def in_turns(name: str, calls: dict[str, Callable[[], Any]], rounds: int, before: Callable[[], Any]) -> measure.Timing:
    """Like `measure.compare`, with something done before each call that is not timed."""
    taken: dict[str, list[float]] = {each: [] for each in calls}
    for turn in range(rounds):
        for each in list(calls) if turn % 2 else list(calls)[::-1]:
            times = []
            for _ in range(4):
                before()
                start = time.perf_counter()
                calls[each]()
                times.append(time.perf_counter() - start)
            taken[each].append(statistics.median(times[1:]))  # the first finds the cache as the other left it
    return measure.of_rounds(name, taken)


def warm(ours: Any, calls: dict[str, Callable[[], Any]], quick: bool) -> measure.Timing:
    """What is in memory, with and without a look at whether the disk was needed."""
    rows = ours.storage.table.rows
    watched = rows._paging

    def unwatched() -> None:
        rows._paging = None
        ours.sample()
        rows._paging = watched

    for _ in range(20):
        ours.sample()
    return measure.compare(
        f"sample {BATCH}, in memory",
        {measure.OURS: ours.sample, "unwatched": unwatched, "index_select": calls["index_select"]},
        quick=quick,
    )


def sequential(ours: Any, folder: pathlib.Path, rows: int, rounds: int) -> measure.Timing:
    """All rows in order, as views; a random batch before each pass has our reads go by the disk."""
    file = folder / "obs.memmap"
    mapped = torch.from_file(str(file), shared=True, size=rows * ROW, dtype=torch.uint8).view(rows, *SHAPE)

    def through(part: Callable[[int], torch.Tensor]) -> Callable[[], int]:
        return lambda: sum(int(part(start)[:, 0, 0, 0].sum()) for start in range(0, rows, BATCH))

    def before() -> None:
        drop(file)
        ours.sample()

    calls = {
        measure.OURS: through(lambda start: ours[start : start + BATCH]["obs"]),
        "plain map": through(lambda start: mapped[start : start + BATCH]),
    }
    return in_turns(f"all {rows} rows in order, dropped", calls, max(2, rounds // 3), before)


def long_run(ours: Any, batches: int) -> dict[str, float]:
    """Samples and writes without end: memory stays bounded."""
    new = TensorDict({"obs": torch.randint(0, 255, (BATCH, *SHAPE), dtype=torch.uint8)}, [BATCH])
    with contextlib.suppress(OSError):
        pathlib.Path("/proc/self/clear_refs").write_text("5")  # the most ever is counted from here on
    values, before = {}, resident()
    for name, call in {"sample": ours.sample, "extend": lambda: ours.extend(new)}.items():
        start = time.perf_counter()
        for _ in range(batches):
            call()
        values[f"{name}: rows per second over {batches} batches"] = batches * BATCH / (time.perf_counter() - start)
        values[f"{name}: growth of anonymous memory, MiB"] = resident()["RssAnon"] - before["RssAnon"]
    after = resident()
    values["resident at most, MiB"] = after["VmHWM"]
    values["of it anonymous, at the end, MiB"] = after["RssAnon"]
    return values


def inside(options: argparse.Namespace) -> None:
    """The child."""
    sizes, folder = Sizes.of(options.quick), options.folder
    storage = interop.LazyMemmapStorage(sizes.rows, scratch_dir=folder)
    ours = interop.TensorDictReplayBuffer(storage=storage, batch_size=BATCH)
    for start in range(0, sizes.rows, 1000):
        count = min(1000, sizes.rows - start)
        ours.extend(TensorDict({"obs": torch.randint(0, 255, (count, *SHAPE), dtype=torch.uint8)}, [count]))
    file, calls = folder / "obs.memmap", contenders(folder, ours, sizes.rows)
    values: dict[str, float] = {"rows in files, MiB": sizes.rows * ROW / MIB}
    timings = [warm(ours, calls, options.quick)]
    for _ in range(8):  # a buffer whose rows were in memory looks at one read in eight
        drop(file)
        ours.sample()
    timings.append(in_turns(f"sample {BATCH}, dropped", calls, sizes.rounds, lambda: drop(file)))
    timings.append(sequential(ours, folder, sizes.rows, sizes.rounds))
    drop(file)
    if options.group is not None:
        (options.group / "cgroup.procs").write_text(str(os.getpid()))
        name = f"sample {BATCH}, {sizes.limit // MIB} MiB for data"
        timings.append(in_turns(name, calls, sizes.rounds, lambda: None))
        del calls
        drop(file)
        values |= {"memory for data, MiB": sizes.limit / MIB, **long_run(ours, sizes.long)}
    options.json.write_text(json.dumps({"timings": [dataclasses.asdict(each) for each in timings], "values": values}))


def main() -> int:
    parser = measure.arguments("Random batches of files larger than memory")
    parser.add_argument(
        "--folder", type=pathlib.Path, help="on the disk to be measured; default: out/ of the repository"
    )
    parser.add_argument("--group", type=pathlib.Path, help=argparse.SUPPRESS)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        inside(options)
        return 0
    above = options.folder or measure.ROOT / "out"
    above.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=above) as folder, group(Sizes.of(options.quick).limit) as limited:
        numbers = pathlib.Path(folder) / "numbers.json"
        command = [sys.executable, __file__, "--inside", "--folder", f"{folder}/rows", "--json", str(numbers)]
        command += ["--quick"] * options.quick + (["--group", str(limited)] if limited else [])
        status = subprocess.run(command, check=False).returncode
        if status:
            print(f"the measuring process ended with {status}" + (" (killed: out of memory?)" if status == -9 else ""))
            return 1
        found = json.loads(numbers.read_text())
    title = f"Random batches of {BATCH} rows of {ROW} bytes in files; the device reads {read_ahead(above)} KiB ahead"
    if limited is None:
        print("No control group could be made: only with a dropped cache")
    measure.report(title, [measure.Timing(**each) for each in found["timings"]], found["values"], options.json)
    return 0


def read_ahead(folder: pathlib.Path) -> str:
    device = os.stat(folder).st_dev
    place = f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb"
    return _read(pathlib.Path(place)).strip() or "an unknown number of"


if __name__ == "__main__":
    sys.exit(main())
