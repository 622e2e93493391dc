"""The rows of a storage, transformed once by a function, into a folder."""

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from tensordict import TensorDictBase

from interop.datasets.conversion import agreeing, write
from interop.datasets.in_order import Portable, by_processes, in_order, portable, rebuilt
from interop.numbers import whole
from interop.published import KEPT
from interop.storages import LazyMemmapStorage, Storage

_ROWS = 4096  # that `fn` sees at a time, at most, by default
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def transformed(
    storage: Storage, fn: Callable[[Any], Any], dim: int, num_workers: int | None, scratch: Path, *,
    chunksize: int | None = None, num_chunks: int | None = None, pool: Pool | None = None,
    generator: torch.Generator | None = None, max_tasks_per_child: int | None = None, worker_threads: int = 1,
    index_with_generator: bool = False, pbar: bool = False, mp_start_method: str | None = None,
    num_frames: int | None = None, resume: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Write `fn` of the rows of a storage to `scratch / "data"`. In memory are some chunks for each process.

    Args:
        fn, dim, num_workers, num_frames: as for `BaseDatasetExperienceReplay.preprocess`.
        chunksize: rows that `fn` is called with; 0 for single rows, without a batch dim. By default at most 4,096.
        num_chunks: into how many chunks the rows are divided, in the place of `chunksize`.
        pool: runs `fn`, in the place of processes that are started for it.
        generator: seeds torch's random numbers for each chunk, so that they do not depend on the number of workers.
        max_tasks_per_child: chunks after which a process is replaced; "fork" then becomes "forkserver".
        worker_threads: threads of torch in each process.
        index_with_generator: accepted; chunks are always read one after the other.
        pbar: show a progress bar.
        mp_start_method: how processes are started, by default "spawn".
        resume: go on where an interrupted call stopped, if it ran since the machine started. It must have had the same
            arguments, and an `fn` with the same results, which cannot be checked.
    """
    total = len(storage) if num_frames is None else min(whole("num_frames", num_frames), len(storage))
    if chunksize is not None and num_chunks is not None:
        raise ValueError("pass either chunksize or num_chunks")
    if num_chunks is not None:
        chunksize = -(-total // whole("num_chunks", num_chunks))
    workers = (os.cpu_count() or 1) if num_workers is None else num_workers
    step = chunksize or min(_ROWS, -(-total // max(workers, 1)))
    out, done = _begun(scratch / KEPT, total, resume)
    if dim:  # rows are no chunks of it: in memory, by tensordict
        rows: Any = storage.get(slice(0, total))
        pieces: Iterator[Any] = iter([rows.map(fn, dim, workers, chunksize=chunksize, pool=pool, generator=generator)])
    else:
        seed = None if generator is None else int(torch.randint(2**62, (), generator=generator))
        tasks = _chunks(storage, range(done, total, step), total, seed)
        call = partial(_call, cloudpickle.dumps(fn), chunksize == 0, worker_threads)
        if pool is not None:
            results = in_order(lambda task: pool.apply_async(call, (task,)).get, tasks, 2 * workers)
        else:
            method = "forkserver" if max_tasks_per_child and mp_start_method == "fork" else mp_start_method
            results = by_processes(call, tasks, workers, method=method, max_tasks_per_child=max_tasks_per_child)
        pieces = map(rebuilt, results)
    try:
        write(out, agreeing(pieces, "preprocess"), total - done, "Preprocessing", pbar)
        count = len(out)
    finally:
        out.close()
    (scratch / KEPT / "rows").rename(scratch / "data")
    return {"rows": count, "preprocessed": getattr(fn, "__qualname__", type(fn).__qualname__)}


def _begun(kept: Path, total: int, resume: bool) -> tuple[LazyMemmapStorage, int]:
    """The storage for the result, and how many rows an interrupted call has left in it."""
    this = json.dumps({"rows": total, "boot": _BOOT.read_text() if _BOOT.exists() else secrets.token_hex(8)})
    progress = kept / "progress.json"
    if resume and progress.exists() and progress.read_text() == this:
        with contextlib.suppress(FileNotFoundError):  # nothing was written
            out = LazyMemmapStorage.open(kept / "rows")
            return out, len(out)
    shutil.rmtree(kept, ignore_errors=True)
    kept.mkdir()
    progress.write_text(this)
    return LazyMemmapStorage(total, scratch_dir=kept / "rows"), 0


def _chunks(storage: Storage, starts: range, total: int, seed: int | None) -> Iterator[Any]:
    for start in starts:
        rows: Any = storage.get(slice(start, min(start + starts.step, total)))
        yield portable(rows), None if seed is None else seed + start


def _call(fn: bytes, single: bool, threads: int, task: Any) -> Portable:
    """Run `fn` on a chunk."""
    given, seed = task
    rows, transform = rebuilt(given), cloudpickle.loads(fn)
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    with torch.random.fork_rng(devices=[], enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        made = torch.stack([transform(row) for row in rows.unbind(0)]) if single else transform(rows)
    if not isinstance(made, TensorDictBase) or made.batch_size[:1] != rows.batch_size[:1]:
        came = f"batch size {[*made.batch_size]}" if isinstance(made, TensorDictBase) else type(made).__name__
        raise ValueError(
            f"fn must return a tensordict with a row for each of the {len(rows)} that it was given, got {came}"
        )
    return portable(made)
