"""No more memory for rows in anonymous maps, or a limit on the size of files: an OSError that changes nothing."""

import errno
import gc
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from interop import LazyFrameStorage, LazyMemmapStorage, LazyTensorStorage, PrioritizedSampler, ReplayBuffer
from tests.faults.children import forked

SHM = Path("/dev/shm")
SIZE = 12 << 20  # bytes of /dev/shm
CAPACITY, ROW = 100, 50_000  # bytes a row


def rows(first: int, count: int) -> TensorDict:
    ids = torch.arange(first, first + count)
    return TensorDict({"id": ids, "x": (ids % 251).to(torch.uint8)[:, None].repeat(1, ROW)}, [count])


def memmap(**more: Any) -> ReplayBuffer:
    return ReplayBuffer(storage=LazyMemmapStorage(CAPACITY), batch_size=64, **more)


def of_rows(count: int) -> ReplayBuffer:
    buffer = memmap()
    buffer.extend(rows(0, count))
    return buffer


def fill() -> None:
    """Leave no memory."""
    with open(SHM / "fill", "wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12):
            try:
                while file.write(bytes(size)) == size:
                    pass
            except OSError as error:
                assert error.errno == errno.ENOSPC


def clear() -> None:
    (SHM / "fill").unlink()


def of(buffer: ReplayBuffer) -> tuple[Any, ...]:
    """All of a buffer that a write changes."""
    writer, storage = buffer.writer, buffer.storage
    return (ids(buffer), len(buffer), writer.cursor, writer.write_count, storage.ring.written, storage.ring.cursor)


def ids(buffer: ReplayBuffer) -> list[int]:
    if not len(buffer):
        return []
    held = buffer[:]
    assert bool((held["x"] == (held["id"] % 251)[:, None]).all())
    return held["id"].tolist()


def refused(buffer: ReplayBuffer, write: Callable[[], Any]) -> None:
    """A write raises and changes nothing, and is done when there is memory again."""
    before = of(buffer)
    fill()
    for _ in range(2):
        with pytest.raises(OSError) as raised:
            write()
        assert raised.value.errno == errno.ENOSPC
        assert of(buffer) == before
    clear()
    write()


# ------------------------------------------------------------------ what a process with little memory does


def extend(_: Path) -> None:
    buffer = of_rows(20)
    refused(buffer, lambda: buffer.extend(rows(20, 60)))
    assert ids(buffer) == list(range(80))
    refused(buffer, lambda: buffer.extend(rows(80, 50)))
    assert ids(buffer) == [*range(100, 130), *range(30, 100)]
    fill()  # all rows have memory
    buffer.extend(rows(130, 80))
    assert sorted(ids(buffer)) == list(range(110, 210))


def more_than_there_is(_: Path) -> None:
    buffer = ReplayBuffer(storage=LazyMemmapStorage(1000))
    for first in range(0, 200, 20):
        buffer.extend(rows(first, 20))
    before = of(buffer)
    with pytest.raises(OSError, match="nothing was written") as raised:
        for first in range(200, 1000, 20):
            buffer.extend(rows(first, 20))
            before = of(buffer)
    assert raised.value.errno == errno.ENOSPC
    assert of(buffer) == before
    assert len(buffer) * ROW > SIZE - 3 * 20 * ROW  # what there is is used


def in_places(_: Path) -> None:
    mask = torch.arange(CAPACITY) >= 20
    for place in (torch.arange(20, CAPACITY).flip(0), slice(20, CAPACITY), (torch.arange(20, CAPACITY),), mask):
        buffer = of_rows(20)
        data = rows(0, CAPACITY)[place[0] if isinstance(place, tuple) else place]
        refused(buffer, lambda buffer=buffer, place=place, data=data: buffer.storage.set(place, data))  # type: ignore[misc]
        assert ids(buffer) == list(range(CAPACITY))
        del buffer, data
        gc.collect()  # what was raised has them, too


def loads(folder: Path) -> None:
    source = ReplayBuffer(storage=LazyTensorStorage(CAPACITY), batch_size=64)
    source.extend(rows(7, 80))
    source.dumps(folder / "c")
    empty, full = memmap(), of_rows(10)
    refused(empty, lambda: empty.loads(folder / "c"))
    refused(full, lambda: full.load_state_dict(source.state_dict()))
    assert ids(empty) == ids(full) == list(range(7, 87))


def priorities(_: Path) -> None:
    buffer = memmap(sampler=PrioritizedSampler(CAPACITY, 0.7, 0.5))
    buffer.extend(rows(0, 20))
    buffer.update_priority(torch.arange(20), torch.rand(20) + 0.1)
    fill()
    before = buffer.sampler.priorities
    with pytest.raises(OSError, match="No space left"):
        buffer.extend(rows(20, 60))
    assert torch.equal(buffer.sampler.priorities, before)
    assert int(buffer.sample()["id"].max()) < 20
    clear()
    buffer.extend(rows(20, 60))
    assert ids(buffer) == list(range(80))


def forked_worker(_: Path) -> None:
    buffer = of_rows(20)

    def work() -> None:
        refused(buffer, lambda: buffer.extend(rows(20, 70)))

    how, told = forked(work)
    assert how == "done", told.decode()
    assert ids(buffer) == list(range(90))
    buffer.extend(rows(90, 10))

    def write_over() -> None:  # more than what has memory of the record by which it is taken back
        refused(buffer, lambda: buffer.extend(rows(100, 30)))

    how, told = forked(write_over)
    assert how == "done", told.decode()
    assert ids(buffer) == [*range(100, 130), *range(30, 100)]


def moved(_: Path) -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(CAPACITY), batch_size=64)
    buffer.extend(rows(0, 50))
    fill()
    with pytest.raises(OSError, match="No space left") as raised:
        buffer.storage.table.rows.share()
    assert raised.value.errno == errno.ENOSPC
    assert ids(buffer) == list(range(50))
    clear()
    buffer.storage.table.rows.share()
    assert ids(buffer) == list(range(50))
    fill()
    buffer.extend(rows(50, 50))
    assert ids(buffer) == list(range(100))


EVERY = (extend, more_than_there_is, in_places, loads, priorities, forked_worker, moved)


def main() -> None:
    """Do each in a child, and tell what came of it."""
    torch.set_num_threads(1)
    tempfile.tempdir = str(SHM)  # to which maps go that are larger than what it has
    warnings.simplefilter("error")
    found = {}
    for each in EVERY:
        with tempfile.TemporaryDirectory(dir=sys.argv[1]) as folder:
            how, told = forked(lambda each=each, folder=folder: each(Path(folder)))  # type: ignore[misc]
        found[each.__name__] = how, told.decode()
        (SHM / "fill").unlink(missing_ok=True)
    print(json.dumps(found))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    unshare = shutil.which("unshare")
    mount = f"mount -t tmpfs -o size={SIZE} tmpfs {SHM}"
    if unshare is None or subprocess.run([unshare, "-m", "sh", "-c", mount], capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    command = [sys.executable, "-m", "tests.interop.storages.test_full_memory", str(tmp_path_factory.mktemp("full"))]
    done = subprocess.run(
        [unshare, "-m", "sh", "-c", f'{mount} && exec "$@"', "sh", *command],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, tuple[str, str]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", [each.__name__ for each in EVERY])
def test_no_memory_is_an_error_and_changes_nothing(outcomes, name):
    how, told = outcomes[name]
    assert how == "done", f"{how}: {told}"


# ------------------------------------------------------------------ a limit on the size of files

KINDS = {
    "anonymous": lambda place: LazyMemmapStorage(1000),
    "files": lambda place: LazyMemmapStorage(1000, scratch_dir=place),
    "shared_init": lambda place: LazyTensorStorage(1000, shared_init=True),
    "files shared_init": lambda place: LazyMemmapStorage(1000, scratch_dir=place, shared_init=True),
}


@contextmanager
def limited() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        with pytest.raises(OSError) as raised:
            yield
        assert raised.value.errno == errno.EFBIG
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("emptied", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_first_write_over_the_limit(kind, emptied, tmp_path):
    buffer = ReplayBuffer(storage=KINDS[kind](tmp_path / "held"), batch_size=4)
    if emptied:
        buffer.extend(TensorDict({"other": torch.arange(4)}, [4]))
        buffer.empty()
    data = TensorDict({"id": torch.arange(4), "obs": torch.ones(4, 100)}, [4])
    for _ in range(2):
        with limited():
            buffer.extend(data)
        assert len(buffer) == buffer.write_count == 0
    buffer.extend(data)
    assert buffer[:]["id"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("frames", [False, True])
def test_memory_over_the_limit_that_processes_are_to_share(frames):
    storage = LazyFrameStorage(1000, obs_key="obs", stack=1) if frames else LazyTensorStorage(1000)
    buffer = ReplayBuffer(storage=storage, batch_size=4)
    after = TensorDict({"obs": torch.ones(4, 100), "done": torch.zeros(4, 1, dtype=torch.bool)}, [4])
    buffer.extend(TensorDict({"obs": torch.ones(4, 100), "next": after}, [4]))
    with limited():
        buffer.share()
    assert (buffer[:]["obs"] == 1).all() and len(buffer) == 4
    buffer.share()
    assert (buffer.sample()["obs"] == 1).all()


if __name__ == "__main__":
    main()
