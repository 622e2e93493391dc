"""Kills a process before and after every file operation of a call. Run as a program: it prints how many kills there were."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

from tests.faults.file_operations import nothing, watched
from tests.interop.transfer_queue.histories import CALLS, begin, prepared, state


def killed(path: Path, call: str, at: tuple[int, str] | None) -> int:
    """Run the call in a forked child that is killed at an operation. Returns the operations of a call that is not killed."""
    files = prepared(path)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:

        def hook(number: int, name: str, when: str, arguments: tuple[Any, ...], result: Any) -> None:
            if (number, when) == at:
                os.kill(os.getpid(), signal.SIGKILL)

        with watched(hook if at else nothing) as names:
            CALLS[call](files, path)
        os.write(write, str(len(names)).encode())
        os._exit(0)
    os.close(write)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or at is None or at[1] == "after", (call, at, status)  # mkdir may fail: no "after"
    answer = os.read(read, 100)
    os.close(read)
    files.close()
    return int(answer or b"0")


def main(folder: Path, call: str) -> None:
    count = killed(folder / "whole", call, None)
    after = state(folder / "whole")
    prepared(folder / "before").close()
    before = state(folder / "before")
    committed = 0
    for number in range(count):
        for when in ("before", "after"):
            path = folder / f"{number}-{when}"
            killed(path, call, (number, when))
            found = state(path)
            assert found in (before, after), (number, when, found)
            assert not (committed and found == before and before != after), "a commit must stay"
            committed += found == after
            files = begin(path)  # the next run goes on, and removes what the kill left
            assert state(path) == found
            CALLS[call](files, path)
            assert state(path) == after, (number, when)
            needed = {part.name for part in (path / "segments").iterdir()}
            clean = {part.name for part in (folder / "whole" / "segments").iterdir()}
            assert len(needed) <= max(len(clean), 2), (number, when, needed)
    assert before == after or committed, "no kill came after the commit"
    print(2 * count)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
