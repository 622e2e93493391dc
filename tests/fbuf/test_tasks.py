"""Work that another thread does: begun once, waited for, and not lost."""

import threading
from typing import Any

import pytest

from fbuf.checkpoint.files import at_once
from fbuf.tasks import Task, begin, start_daemon


def test_a_task_is_claimed_once_and_keeps_its_result_or_error() -> None:
    task = Task()
    assert not task.has_ended(0.0) and task.claim() and not task.claim()
    task.run(lambda: 7)
    task.wait()
    assert task.ended and task.has_ended(0.0) and task.result == 7 and task.error is None
    task.wait()  # again

    failing = Task()
    begin(failing, lambda: 1 // 0)
    failing.wait()
    assert isinstance(failing.error, ZeroDivisionError) and failing.result is None


def test_a_claimed_task_is_not_begun_by_a_thread() -> None:
    done, task = list[int](), Task()
    assert task.claim()
    begin(task, lambda: done.append(1))
    later = Task()
    begin(later, lambda: done.append(2))
    later.wait()
    assert done == [2] and not task.ended


def test_a_daemon_thread_has_its_name() -> None:
    told, ended = list[Any](), threading.Event()

    def work() -> None:
        told.append((threading.current_thread().name, threading.current_thread().daemon))
        ended.set()

    start_daemon(work, "some name")
    assert ended.wait(20) and told == [("some name", True)]


def test_jobs_end_before_their_error_is_raised() -> None:
    running, free = threading.Semaphore(0), threading.Event()
    ended = list[int]()

    def slow() -> int:
        running.release()
        assert free.wait(20)
        ended.append(1)
        return 1

    def failing() -> int:
        running.acquire()
        free.set()
        raise ArithmeticError("one job")

    with pytest.raises(ArithmeticError, match="one job"):
        at_once([slow, failing, *[lambda: 2] * 20])
    assert ended == [1]
    assert at_once([lambda place=place: place for place in range(50)]) == list(range(50))  # type: ignore[misc]


def test_jobs_are_done_where_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("fbuf.tasks._thread.start_new_thread", refused)
    with pytest.raises(RuntimeError, match="new thread"):
        at_once([lambda: 1, lambda: 2])
