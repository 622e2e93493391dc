"""Results of calls in other processes, in order, a few of them ahead."""

import multiprocessing
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from tensordict import NonTensorStack, TensorDict, TensorDictBase

from interop.datasets.errors import DatasetError
from interop.datasets.rows import leaf

Portable = tuple[list[int], dict[Any, Any]]


def in_order(submit: Callable[[Any], Callable[[], Any]], tasks: Iterable[Any], ahead: int) -> Iterator[Any]:
    """The results of tasks. `submit` starts one and returns what waits for its result; `ahead` of them run or wait."""
    waiting: deque[Callable[[], Any]] = deque()
    for task in tasks:
        waiting.append(submit(task))
        if len(waiting) > ahead:
            yield waiting.popleft()()
    while waiting:
        yield waiting.popleft()()


def by_processes(
    function: Callable[[Any], Any], tasks: Iterable[Any], workers: int, *, method: str | None = None, **options: Any
) -> Iterator[Any]:
    """`function` of each task, in order, by so many processes, started by `method` ("spawn" by default); by none: here.

    DatasetError where a process dies, as it does where the machine has no memory left.
    """
    if not workers:
        yield from map(function, tasks)
        return
    context = multiprocessing.get_context(method or "spawn")
    with ProcessPoolExecutor(workers, context, **options) as pool:

        def submit(task: Any) -> Callable[[], Any]:
            future: Future[Any] = pool.submit(function, task)
            return future.result

        try:
            yield from in_order(submit, tasks, workers + 1)
        except BrokenProcessPool as error:
            raise DatasetError(
                f"a worker process died, of a lack of memory perhaps: use fewer workers than {workers}"
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


def portable(rows: TensorDictBase) -> Portable:
    """Rows as arrays and lists: tensors would take a file descriptor each on the way to another process."""
    entries = rows.items(True, True, is_leaf=_is_leaf)
    return [*rows.batch_size], {
        key: value.tolist() if isinstance(value, NonTensorStack) else value.numpy() for key, value in entries
    }


def rebuilt(given: Portable) -> TensorDict:
    """The rows that `portable` took apart."""
    shape, entries = given
    out = TensorDict({}, shape)
    for key, value in entries.items():
        out[key] = leaf(value)
    return out


def _is_leaf(kind: type) -> bool:
    return kind is NonTensorStack or not issubclass(kind, TensorDictBase)
