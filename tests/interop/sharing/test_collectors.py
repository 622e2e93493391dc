"""The multi-process collectors of torchrl, which feed a buffer from workers: see `torchrl_collectors`."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

COLLECTORS = ("MultiSyncCollector", "MultiAsyncCollector")
WAYS = ("creator", "factory", "key")
STORAGES = ("LazyTensorStorage", "LazyMemmapStorage", "files")
OPTIONS = ("batches", "trajectories", "steps")
EVERY = list(itertools.product(COLLECTORS, WAYS, STORAGES, (False, True), OPTIONS))
SOME = [EVERY[place] for place in (0, 41)]


def collect(cells, folder):
    """What each collector wrote, of a process of its own that no thread of the tests disturbs."""
    pytest.importorskip("torchrl")
    command = [sys.executable, "-W", "ignore", "-m", "tests.interop.sharing.torchrl_collectors"]
    done = subprocess.run(
        [*command, str(folder), json.dumps(cells)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
        timeout=60 + 60 * len(cells),
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert not {str(cell): told for cell, told in zip(cells, found, strict=True) if told != "done"}


def test_collectors_feed_a_buffer(tmp_path):
    collect(SOME, tmp_path)


def test_collectors_feed_a_prioritized_buffer_with_sync_false(tmp_path):
    collect([("MultiAsyncCollector", "key", "LazyTensorStorage", True, "prioritized")], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("place", range(0, len(EVERY), 9))
def test_collectors_feed_a_buffer_in_every_way(tmp_path, place):
    collect(EVERY[place : place + 9], tmp_path)
