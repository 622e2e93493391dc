"""A buffer over the devices of a mesh: eight in one process, and four in each of two."""

import json
import os
import pathlib
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from tests.fbuf.sharded import on_eight_devices
from tests.fbuf.sharded import on_two_hosts as hosts

ROOT = pathlib.Path(__file__).parents[3]
TIMEOUT = 600


def on_devices(count: int, module: str, *arguments: str) -> subprocess.Popen[str]:
    """A module of this folder in a process with so many devices of the CPU; most of its time goes to compiling."""
    flags = f"--xla_force_host_platform_device_count={count} --xla_backend_optimization_level=0"
    flags = f"{os.environ.get('XLA_FLAGS', '')} {flags}"
    variables = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", f"tests.fbuf.sharded.{module}", *arguments]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env=variables, cwd=ROOT, text=True, **pipes)


def failures(checks: tuple[Callable[[], None], ...]) -> str:
    """What went wrong in checks, all of them in one process."""
    process = on_devices(on_eight_devices.DEVICES, "on_eight_devices", *(check.__name__ for check in checks))
    out, errors = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0, errors
    found = [json.loads(line) for line in out.splitlines()]
    assert [name for name, *_ in found] == [check.__name__ for check in checks], errors
    return "\n".join(f"{name}: {failure}" for name, failure, _seconds in found if failure)


def test_on_eight_devices() -> None:
    assert not (found := failures(on_eight_devices.CHECKS)), found


@pytest.mark.slow
def test_on_eight_devices_slowly() -> None:
    assert not (found := failures(on_eight_devices.SLOW)), found


def test_two_processes_draw_what_one_buffer_draws(tmp_path: pathlib.Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    both = [on_devices(4, "on_two_hosts", port, str(place), str(tmp_path)) for place in range(2)]
    try:
        for process in both:
            _, errors = process.communicate(timeout=TIMEOUT)
            assert process.returncode == 0, errors
    finally:
        for process in both:
            process.kill()
    buffer, sample, update = hosts.BUFFER, jax.jit(hosts.BUFFER.sample, static_argnums=2), jax.jit(hosts.BUFFER.update)
    one, _ = jax.jit(buffer.extend)(buffer.init(np.int32(0)), hosts.ROWS)
    one = update(one, hosts.SLOTS, hosts.PRIORITIES)
    for step in range(hosts.STEPS):
        one, batch, draw = sample(one, jax.random.key(step), hosts.BATCH)
        one = update(one, draw.slots, draw.probability)
        drawn = [np.load(tmp_path / f"drawn {place} {step}.npz") for place in range(2)]
        for name, wanted in {"batch": batch, "slots": draw.slots, "probability": draw.probability}.items():
            np.testing.assert_array_equal(np.concatenate([part[name] for part in drawn]), wanted)
        np.testing.assert_array_equal([part["smallest"] for part in drawn], [draw.smallest] * 2)
