"""The memory that code takes at its peak."""

import gc
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

LIMITED = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of memory is Linux's")


def status(name: str) -> int:
    """A size of this process in bytes."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


@contextmanager
def bounded(most: int) -> Iterator[None]:
    """Less than `most` bytes are taken within, at any time, and not many times more are reserved."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted anew
    before, (soft, hard) = status("VmRSS"), resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (status("VmSize") + 3 * most + (2 << 30), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert status("VmHWM") - before < most
