"""One Ray cluster for the tests of this folder. It leaves no files and no processes behind."""

import secrets
import shutil
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

# Of all clusters of this process: Ray remembers the first, and pytest-xdist may come back to this folder after another.
_TOKEN = secrets.token_hex(32)


@pytest.fixture(scope="package")
def cluster() -> Iterator[None]:
    ray = pytest.importorskip("ray")
    folder = Path(tempfile.mkdtemp(prefix="ray-"))  # a short path: Ray's sockets lie below it
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_TMPDIR", str(folder))
        environment.setenv("RAY_AUTH_TOKEN", _TOKEN)  # Ray writes one to the home folder otherwise
        environment.setenv("RAY_USAGE_STATS_ENABLED", "0")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Ray about its own calls, and of JAX about the processes that Ray forks
            ray.init(include_dashboard=False, log_to_driver=False, num_cpus=4, object_store_memory=300 << 20)
        try:
            yield
        finally:
            ray.shutdown()
            until = time.monotonic() + 20
            while folder.exists():  # processes that end may still write their last lines
                shutil.rmtree(folder, ignore_errors=time.monotonic() < until)
