"""Draws without a generator of their own are the same in every run. A process that has used neither JAX nor threads of
torch, from which tests are forked: they may fork themselves, and nothing is imported again."""

import gc
import json
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator

import pytest
import torch

_LOOP = """
import gc, json, os, signal, sys, tempfile, time, traceback, warnings
import jax, torch, interop, tests.faults.sharing
gc.freeze()
warnings.simplefilter("ignore")
for line in sys.stdin:
    with tempfile.TemporaryFile("w+") as told:
        child = os.fork()
        if child == 0:
            os.setsid()
            os.dup2(told.fileno(), 1), os.dup2(told.fileno(), 2), os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            status = 1
            try:
                exec(compile(json.loads(line), "<test>", "exec"), {"__name__": "forked"})
                status = 0
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            os._exit(status)
        left, before, status = 120.0, time.monotonic(), None
        while status is None and left > 0:
            ended, code = os.waitpid(child, os.WNOHANG)
            status = os.waitstatus_to_exitcode(code) if ended else None
            time.sleep(0 if ended else 0.005)
            now = time.monotonic()
            left -= (now - before) / max(1, os.getloadavg()[0] / os.cpu_count())
            before = now
        try:
            os.killpg(child, signal.SIGKILL)
        except ProcessLookupError:
            pass
        told.seek(0)
        print(json.dumps([status, told.read()]), flush=True)
"""


@pytest.fixture(autouse=True)
def settled_draws() -> Iterator[None]:
    """Seeds torch, which seeds every draw."""
    torch.manual_seed(0)
    yield


@pytest.fixture(scope="module")
def frozen() -> None:
    """For files that collect garbage in each test: nothing that is there before the first one is looked through."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def _clean() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", _LOOP], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()
        process.wait(10)


@pytest.fixture(scope="session")
def in_a_fork(_clean: subprocess.Popen[str]) -> Callable[..., str]:
    """Runs code in a process of its own, which must end well within two minutes; what it printed.

    Where more processes run than there are cores, it has as much longer.
    """

    def run(code: str, **values: object) -> str:
        assert _clean.stdin is not None and _clean.stdout is not None
        given = "\n".join(f"{name} = {value!r}" for name, value in values.items())
        _clean.stdin.write(json.dumps(f"{given}\n{textwrap.dedent(code)}") + "\n")
        _clean.stdin.flush()
        status, told = json.loads(_clean.stdout.readline())
        assert status == 0, f"ended with {status}\n{told[-4000:]}"
        return str(told)

    return run
