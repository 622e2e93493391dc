"""The lock among processes: whoever ends gives it back, forks do not hold it, threads and nested turns are counted."""

import fcntl
import subprocess
import sys

import pytest

from interop import LazyTensorStorage


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
            with buffer.storage.lock.held():
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


def held_elsewhere(lock):
    """Whether another process would have to wait."""
    code = "import fcntl, sys; fcntl.lockf(int(sys.argv[1]), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    descriptor = lock.processes._descriptor
    assert fcntl.fcntl(descriptor, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    done = subprocess.run(
        [sys.executable, "-S", "-c", code, str(descriptor)], pass_fds=[descriptor], capture_output=True, text=True
    )
    assert not done.returncode or "BlockingIOError" in done.stderr, done.stderr
    return done.returncode != 0


def test_the_outermost_turn_takes_and_releases_the_lock_among_processes():
    storage = LazyTensorStorage(8)
    with storage.lock.held():
        storage.share()
        with storage.lock.held():
            assert held_elsewhere(storage.lock)
    assert not held_elsewhere(storage.lock)
    with storage.lock.held(), storage.lock.held():
        assert held_elsewhere(storage.lock)
    assert not held_elsewhere(storage.lock)


def test_an_error_when_the_lock_is_taken_releases_it(monkeypatch):
    storage = LazyTensorStorage(8)
    storage.share()
    monkeypatch.setattr(storage.guard, "acquired", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError), storage.lock.held():
        pass
    assert not held_elsewhere(storage.lock)
    monkeypatch.undo()
    assert len(storage) == 0
