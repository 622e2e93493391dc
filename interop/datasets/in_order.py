"""Results of calls in other processes, in order, a few of them ahead."""

import multiprocessing
import os
import pickle
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
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
    """The results of tasks. `submit` starts one and returns what waits for its result; `ahead` of them run or wait."""
    waiting: deque[Callable[[], Any]] = deque()
    for task in tasks:
        waiting.append(submit(task))
        if len(waiting) > ahead:
            yield waiting.popleft()()
    while waiting:
        yield waiting.popleft()()


def by_processes(
    function: Callable[[Any], Any], tasks: Iterable[Any], workers: int, *,
    method: str | None = None, threads: int = 1, max_tasks_per_child: int | None = None,
) -> Generator[Any, None, None]:  # fmt: skip
    """The results of `function(task)` in order, by `workers` processes started by `method` ("spawn" by default); 0: here.

    Each has `threads` threads of torch. All are replaced when they have done `max_tasks_per_child` tasks on average.
    DatasetError where one dies.
    """
    if not workers:
        yield from map(function, tasks)
        return
    pickle.dumps(function)  # an error here; in the pool it may hang
    context, tasks = multiprocessing.get_context(method or "spawn"), iter(tasks)
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
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: Any) -> None:
    """End this process with its parent. One that was forked would keep the locks of a parent that was killed."""
    parent.join()
    os._exit(1)


def _submitted(pool: ProcessPoolExecutor, function: Callable[[Any], Any], task: Any) -> Callable[[], Any]:
    future: Future[Any] = pool.submit(function, task)
    return future.result


def portable(rows: TensorDictBase) -> Portable:
    """Rows as bytes and lists: tensors would take a file descriptor each on the way to another process."""
    return [*rows.batch_size], {key: _as_bytes(each) for key, each in entries(rows)}


def rebuilt(given: Portable) -> TensorDict:
    """The rows that `portable` took apart."""
    shape, parts = given
    out = TensorDict({}, shape)
    for key, value in parts.items():
        if isinstance(value, tuple):
            content, dtype, size = value
            out[key] = torch.from_numpy(content).view(dtype).reshape(size)
        else:
            out[key] = leaf(value) if len(shape) == 1 else NonTensorStack.from_list(value)
    return out


def _as_bytes(value: Any) -> tuple[np.ndarray, torch.dtype, torch.Size] | list[Any]:
    if not isinstance(value, Tensor):
        return value.tolist()
    content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return content, value.dtype, value.shape
