"""Preprocessing: applies a function to all rows of a storage, and writes the result to a folder."""

import contextlib
import json
import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from tensordict import TensorDictBase

from fbuf.checkpoint.files import remove_folder
from interop.data.arguments import whole
from interop.datasets.conversion import agreeing, write
from interop.datasets.in_order import Portable, by_processes, in_order, portable, rebuilt
from interop.shared.published_folder import PROGRESS
from interop.storages import LazyMemmapStorage, Storage

_ROWS = 4096  # the default of the most rows per call of `fn`
_CHUNKS = 64  # the default of the least number of calls
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def transformed(
    storage: Storage,
    fn: Callable[[Any], Any],
    dim: int,
    num_workers: int | None,
    scratch: Path,
    *,
    chunksize: int | None = None,
    num_chunks: int | None = None,
    pool: Pool | None = None,
    generator: torch.Generator | None = None,
    max_tasks_per_child: int | None = None,
    worker_threads: int = 1,
    index_with_generator: bool = False,
    pbar: bool = False,
    mp_start_method: str | None = None,
    num_frames: int | None = None,
    resume: bool = False,
) -> dict[str, Any]:
    """Apply `fn` to the rows of a storage and write `scratch / "data"`. Memory holds two chunks per process.

    Args:
        fn, dim, num_workers, num_frames: as for `BaseDatasetExperienceReplay.preprocess`.
        chunksize: rows per call of `fn`; 0 for single rows without a batch dim. By default there are 64 chunks, or more
            of 4,096 rows.
        num_chunks: the number of chunks, instead of `chunksize`.
        pool: a pool that runs `fn`, instead of new processes.
        generator: seeds torch's random numbers for each chunk, so that they are independent of the number of workers.
        max_tasks_per_child: chunks per process, on average, after which all processes are replaced.
        worker_threads: torch threads per process.
        index_with_generator: ignored: chunks are always read sequentially.
        pbar: show a progress bar.
        mp_start_method: the start method of processes, by default "spawn".
        resume: continue an interrupted call that ran since the machine booted. Arguments and results of `fn` must be the
            same, which cannot be checked.
    """
    total = len(storage) if num_frames is None else min(whole("num_frames", num_frames), len(storage))
    first: Any = storage.get(slice(0, 1))
    if not -first.ndim <= dim < first.ndim:
        raise ValueError(f"dim must be one of the {first.ndim} dims of the rows, got {dim}")
    dim %= first.ndim
    length = first.shape[dim] if dim else total
    workers = (os.cpu_count() or 1) if num_workers is None else whole("num_workers", num_workers, 0)
    step = _chunk_size(length, chunksize, num_chunks)
    out, done = _open_result(scratch / PROGRESS, total, resume and not dim)
    seed = None if generator is None else int(torch.randint(2**62, (), generator=generator))
    tasks = _chunks(storage, total, dim, range(done, length, step), seed)
    function = fn if not workers and pool is None else cloudpickle.dumps(fn)
    call = partial(_call, function, chunksize == 0, dim)
    if pool is not None:
        results = in_order(lambda task: pool.apply_async(call, (task,)).get, tasks, 2 * workers)
    else:
        results = by_processes(
            call,
            tasks,
            workers,
            method=mp_start_method,
            threads=worker_threads,
            max_tasks_per_child=max_tasks_per_child,
        )
    try:
        with contextlib.closing(results):
            pieces = _same(piece.transpose(0, dim) for piece in map(rebuilt, results))
            if dim:
                pieces = iter([torch.cat([*pieces]).transpose(0, dim)])
            write(out, pieces, total - done, "Preprocessing", pbar)
        count = len(out)
    finally:
        out.close()
    (scratch / PROGRESS / "rows").rename(scratch / "data")
    return {"rows": count, "preprocessed": getattr(fn, "__qualname__", type(fn).__qualname__)}


def _chunk_size(length: int, chunksize: int | None, num_chunks: int | None) -> int:
    """The number of rows per chunk."""
    if chunksize is not None and num_chunks is not None:
        raise ValueError("pass either chunksize or num_chunks")
    if num_chunks is not None:
        return -(-length // whole("num_chunks", num_chunks))
    return whole("chunksize", chunksize or 0, 0) or min(_ROWS, -(-length // _CHUNKS))


def _open_result(folder: Path, total: int, resume: bool) -> tuple[LazyMemmapStorage, int]:
    """The storage for the result, and the number of rows left by an interrupted call."""
    this = json.dumps({"rows": total, "boot": _BOOT.read_text() if _BOOT.exists() else secrets.token_hex(8)})
    progress = folder / "progress.json"
    if resume and progress.exists() and progress.read_text() == this:
        with contextlib.suppress(FileNotFoundError):  # nothing was written
            out = LazyMemmapStorage.open(folder / "rows")
            return out, len(out)
    remove_folder(folder)
    folder.mkdir()
    progress.write_text(this)
    return LazyMemmapStorage(total, scratch_dir=folder / "rows"), 0


def _chunks(storage: Storage, total: int, dim: int, starts: range, seed: int | None) -> Iterator[Any]:
    every: Any = storage.get(slice(0, total)) if dim else None
    for start in starts:
        run = slice(start, min(start + starts.step, starts.stop))
        rows: Any = every[(*[slice(None)] * dim, run)] if dim else storage.get(run)
        yield portable(rows), None if seed is None else seed + start


def _call(fn: bytes | Callable[[Any], Any], single: bool, dim: int, task: Any) -> Portable:
    """Run `fn` on a chunk."""
    packed, seed = task
    rows = rebuilt(packed).clone()  # `fn` may modify it
    transform = cloudpickle.loads(fn) if isinstance(fn, bytes) else fn
    with torch.random.fork_rng(devices=[], enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        results = [transform(row) for row in rows.unbind(dim)] if single else [transform(rows)]
    for result in results:
        if not isinstance(result, TensorDictBase) or (not single and result.shape[: dim + 1] != rows.shape[: dim + 1]):
            came = f"batch size {[*result.batch_size]}" if isinstance(result, TensorDictBase) else type(result).__name__
            raise ValueError(f"fn must return a tensordict with the rows {[*rows.shape]} that it was given, got {came}")
    if single:
        return portable(torch.cat([*_same(result.unsqueeze(0) for result in results)]).transpose(0, dim))
    return portable(results[0])


def _same(pieces: Iterable[TensorDictBase]) -> Iterator[TensorDictBase]:
    return agreeing(pieces, "fn must return the same keys, shapes and dtypes for all rows", {}, ValueError)
