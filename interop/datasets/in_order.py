"""Ordered results of calls in other processes, with limited lookahead."""

import multiprocessing
import os
import pickle
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorStack, TensorDict, TensorDictBase
from torch import Tensor

from interop.datasets.errors import DatasetError
from interop.datasets.rows import entries, leaf

Portable = tuple[list[int], dict[Any, Any]]


def in_order(
    submit: Callable[[Any], Callable[[], Any]], tasks: Iterable[Any], ahead: int
) -> Generator[Any, None, None]:
    """Yield the results of tasks in order. `submit` starts a task and returns a wait function; `ahead` run at once."""
    waiting: deque[Callable[[], Any]] = deque()
    for task in tasks:
        waiting.append(submit(task))
        if len(waiting) > ahead:
            yield waiting.popleft()()
    while waiting:
        yield waiting.popleft()()


def by_processes(
    function: Callable[[Any], Any],
    tasks: Iterable[Any],
    workers: int,
    *,
    method: str | None = None,
    threads: int = 1,
    max_tasks_per_child: int | None = None,
) -> Generator[Any, None, None]:
    """Yield the results of `function(task)` in order, from `workers` processes; 0 runs in this process.

    `method` is the start method ("spawn" by default); each process has `threads` torch threads. All are replaced after
    `max_tasks_per_child` tasks each on average. DatasetError if a process dies.
    """
    if not workers:
        yield from map(function, tasks)
        return
    pickle.dumps(function)  # raise errors here: the pool may hang
    context = multiprocessing.get_context(method or "spawn")
    tasks = iter(tasks)
    for first in tasks:
        some = chain([first], islice(tasks, max_tasks_per_child and workers * max_tasks_per_child - 1))
        with ProcessPoolExecutor(workers, context, _start, (threads,)) as pool:
            try:
                yield from in_order(partial(_submitted, pool, function), some, workers)
            except BrokenProcessPool as error:
                raise DatasetError(
                    f"a worker process died. Of a lack of memory: use fewer workers than {workers}. While it started: a "
                    'script starts processes below `if __name__ == "__main__":` only'
                ) from error
            finally:
                pool.shutdown(cancel_futures=True)


def _start(threads: int) -> None:
    torch.set_num_threads(threads)
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()


def _end_with_parent(parent: Any) -> None:
    """End this process when its parent ends. A forked orphan would keep the parent's locks."""
    parent.join()
    os._exit(1)


def _submitted(pool: ProcessPoolExecutor, function: Callable[[Any], Any], task: Any) -> Callable[[], Any]:
    future: Future[Any] = pool.submit(function, task)
    return future.result


def portable(rows: TensorDictBase) -> Portable:
    """Convert rows to bytes and lists for another process, as tensors would each take a file descriptor."""
    return [*rows.batch_size], {key: _as_bytes(entry) for key, entry in entries(rows)}


def rebuilt(packed: Portable) -> TensorDict:
    """Convert a result of `portable` back to rows."""
    shape, parts = packed
    out = TensorDict({}, shape)
    for key, value in parts.items():
        if isinstance(value, RaggedBytes):
            content, dtype, size = value.values
            flat = torch.from_numpy(content).view(dtype).reshape(size)
            out[key] = torch.nested.nested_tensor_from_jagged(flat, torch.from_numpy(value.offsets))
        elif isinstance(value, tuple):
            content, dtype, size = value
            out[key] = torch.from_numpy(content).view(dtype).reshape(size)
        else:
            out[key] = leaf(value) if len(shape) == 1 else NonTensorStack.from_list(value)
    return out


@dataclass(frozen=True)
class RaggedBytes:
    """Ragged rows: the bytes of their values, one behind the other, and where each row starts."""

    values: Any
    offsets: np.ndarray


def _as_bytes(value: Any) -> tuple[np.ndarray, torch.dtype, torch.Size] | list[Any] | RaggedBytes:
    if not isinstance(value, Tensor):
        return value.tolist()
    if value.is_nested:
        jagged: Any = value
        return RaggedBytes(_as_bytes(jagged.values()), jagged.offsets().numpy())
    flat = value.detach().cpu().contiguous().reshape(-1)
    # Values without elements may have the stride 0, of which torch makes no view.
    content = flat.view(torch.uint8).numpy() if flat.numel() else np.zeros(0, np.uint8)
    return content, value.dtype, value.shape
