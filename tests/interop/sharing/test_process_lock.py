"""The lock among processes: whoever ends gives it back, forks do not hold it, threads and nested turns are counted."""

import fcntl
import pickle
import subprocess
import sys
import threading
import time

import pytest
import torch

from interop import LazyTensorStorage, ReplayBuffer
from interop.shared.access import Access
from interop.shared.process_lock import ProcessLock


def test_only_one_process_holds_it_and_the_kernel_frees_it(in_a_fork):
    in_a_fork("""
        import os, signal, time
        from interop.shared.process_lock import ProcessLock

        lock = ProcessLock()
        for how in ("exit", "kill"):
            reading, writing = os.pipe()
            child = os.fork()
            if child == 0:
                lock.acquire()
                os.write(writing, b"x")
                time.sleep(0.3)
                os.write(writing, b"y")
                os.kill(os.getpid(), signal.SIGKILL) if how == "kill" else os._exit(0)
            os.read(reading, 1)
            lock.acquire()
            os.set_blocking(reading, False)
            assert os.read(reading, 1) == b"y"  # which was written while the child had the lock
            os.waitpid(child, 0)
            lock.release()
    """)


def test_a_forked_child_does_not_hold_what_its_parent_holds_and_frees_nothing(in_a_fork):
    in_a_fork("""
        import os, time
        from interop.shared.process_lock import ProcessLock

        lock = ProcessLock()
        lock.acquire()
        for _ in range(3):  # children that end, that close the file, and that drop the object
            child = os.fork()
            if child == 0:
                lock.release()
                del lock
                os._exit(0)
            os.waitpid(child, 0)
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        child = os.fork()
        if child == 0:
            lock.acquire()
            os._exit(0 if os.read(reading, 1) == b"y" else 1)
        time.sleep(0.3)
        os.write(writing, b"y")
        lock.release()
        assert os.waitpid(child, 0)[1] == 0
    """)


def test_a_wait_goes_on_after_a_signal_and_leaves_nothing_held_where_one_raises(in_a_fork):
    in_a_fork("""
        import os, signal, threading, time
        from interop import LazyMemmapStorage, ReplayBuffer
        import torch

        buffer = ReplayBuffer(storage=LazyMemmapStorage(100))
        buffer.extend(torch.arange(4))
        heard, (hearing, told) = [], os.pipe()
        signal.signal(signal.SIGUSR1, lambda *_: heard.append(os.write(told, b"x")))
        signal.signal(signal.SIGINT, signal.default_int_handler)
        (reading, writing), parent = os.pipe(), os.getpid()
        child = os.fork()
        if child == 0:
            with buffer.storage.lock.turn():
                os.write(writing, b"x")
                for _ in range(2):
                    time.sleep(0.2)
                    os.kill(parent, signal.SIGUSR1)
                    os.read(hearing, 1)
                time.sleep(0.2)
                os.kill(parent, signal.SIGINT)
                time.sleep(0.2)
            os._exit(0)
        try:
            os.read(reading, 1)
            buffer.extend(torch.arange(3))
            raise SystemError("was not interrupted")
        except KeyboardInterrupt:
            assert heard == [1, 1] and len(buffer) == 4
        os.waitpid(child, 0)
        other = os.fork()
        if other == 0:  # nothing is held here
            buffer.extend(torch.arange(2))
            os._exit(0)
        assert os.waitpid(other, 0)[1] == 0 and len(buffer) == 6
        thread = threading.Thread(target=buffer.extend, args=(torch.arange(1),))
        thread.start()
        thread.join(60)
        assert not thread.is_alive() and len(buffer) == 7
    """)


def test_a_copy_is_another_lock():
    lock = ProcessLock()
    twin = pickle.loads(pickle.dumps(lock))
    assert twin is not lock and twin._descriptor != lock._descriptor


class Held:
    """A storage, as far as its lock is concerned."""

    def _begin_turn(self):
        pass

    def _end_turn(self):
        pass


def held_elsewhere(access):
    """Whether another process would have to wait."""
    code = "import fcntl, sys; fcntl.lockf(int(sys.argv[1]), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    descriptor = access.processes._descriptor
    assert fcntl.fcntl(descriptor, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    done = subprocess.run(
        [sys.executable, "-S", "-c", code, str(descriptor)], pass_fds=[descriptor], capture_output=True, text=True
    )
    assert not done.returncode or "BlockingIOError" in done.stderr, done.stderr
    return done.returncode != 0


def test_turns_within_turns_and_a_turn_that_began_before_it_was_shared():
    storage = Held()
    access = Access(storage)
    with access.turn():
        access.share()  # in the middle of a turn
        assert held_elsewhere(access)
        with access.turn():
            pass
        assert held_elsewhere(access)
    assert not held_elsewhere(access)
    with access.turn(), access.turn():
        assert held_elsewhere(access)
    assert not held_elsewhere(access)


def test_a_turn_of_another_thread_that_began_before_it_was_shared():
    storage, entered, leave = Held(), threading.Event(), threading.Event()
    access = Access(storage)

    def hold():
        with access.turn():
            entered.set()
            leave.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    entered.wait(20)
    access.share()
    assert held_elsewhere(access)
    leave.set()
    thread.join(20)
    assert not held_elsewhere(access)


def test_no_turn_is_left_held_when_sharing_begins_while_threads_take_turns():
    storage = Held()
    for _ in range(60):
        access, stop = Access(storage), threading.Event()

        def take(access=access, stop=stop):
            while not stop.is_set():
                with access.turn(), access.turn():
                    pass

        threads = [threading.Thread(target=take) for _ in range(2)]
        for thread in threads:
            thread.start()
        time.sleep(0.002)
        access.share()
        time.sleep(0.002)
        stop.set()
        for thread in threads:
            thread.join(20)
        assert not access._begun and access._depth == 0
    assert not held_elsewhere(access)


def test_an_error_at_the_begin_of_a_turn_ends_it():
    class Refusing(Held):
        def _begin_turn(self):
            raise RuntimeError("no")

    storage = Refusing()
    access = Access(storage)
    access.share()
    with pytest.raises(RuntimeError, match="no"):
        access.turn().__enter__()
    assert not held_elsewhere(access) and access._depth == 0


def test_a_turn_costs_little():
    """About 1 us for one process, 3 us among several: 10 and 30 of a lock of a thread, and the bounds are ten times that."""
    buffer = ReplayBuffer(storage=LazyTensorStorage(8))
    buffer.extend(torch.zeros(8))

    def cost(turn, count=3000):
        best = 1.0
        for _ in range(5):
            start = time.thread_time()
            for _ in range(count):
                with turn():
                    pass
            best = min(best, (time.thread_time() - start) / count)
        return best

    least, alone = cost(threading.RLock), cost(buffer.storage.lock.turn)
    buffer.share()
    assert alone < 100 * least and cost(buffer.storage.lock.turn) < 300 * least
