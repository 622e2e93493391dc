"""Where compiled programs are kept for the next process, and what turns that off."""

import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator

import jax
import pytest

from interop.data import settings

FOLDER, ON, SECONDS = (
    "jax_compilation_cache_dir",
    "jax_enable_compilation_cache",
    "jax_persistent_cache_min_compile_time_secs",
)
PROGRAM = """
import warnings
import torch, interop, jax
hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event.endswith("/cache_hits")))
interop.to_jax(torch.zeros(1))  # JAX has started
warnings.simplefilter("error")
sampler = interop.PrioritizedSampler(100, 0.7, 0.5)
buffer = interop.ReplayBuffer(storage=interop.LazyTensorStorage(100), sampler=sampler, batch_size=8)
buffer.extend(torch.arange(50))
buffer.sample()
buffer.sample()
print(sum(hits))
"""


def hits(home: pathlib.Path) -> int:
    """How many programs a fresh process finds compiled; it gives no warning."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment | {"XDG_CACHE_HOME": str(home), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "Warning" not in run.stderr
    return int(run.stdout)


@pytest.fixture
def untouched() -> Iterator[None]:
    """The settings of JAX as a user leaves them who sets nothing."""
    before = {name: jax.config.values[name] for name in (FOLDER, ON, SECONDS)}
    for name, value in ((FOLDER, None), (ON, True), (SECONDS, 1.0)):
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.mark.slow
def test_the_next_process_finds_programs_compiled_but_for_one_that_is_damaged(tmp_path):
    assert hits(tmp_path) == 0
    kept = sorted(tmp_path.glob("fbuf/*/*-cache"))
    assert len(kept) >= 2
    kept[0].write_bytes(kept[0].read_bytes()[:1000])
    assert hits(tmp_path) == len(kept) - 1


def test_programs_are_kept_for_one_kind_of_processor(untouched, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    settings.keep_programs()
    folder = pathlib.Path(jax.config.values[FOLDER])
    assert folder.parent == tmp_path / "fbuf" and folder.stat().st_mode & 0o077 == 0
    assert jax.config.values[SECONDS] < 1


@pytest.mark.parametrize("name, value", [(FOLDER, "of the user"), (FOLDER, ""), (ON, False)])
def test_what_the_user_has_set_stays(untouched, monkeypatch, tmp_path, name, value):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    jax.config.update(name, value)
    before = dict(jax.config.values)
    settings.keep_programs()
    assert jax.config.values == before and not list(tmp_path.iterdir())


@pytest.mark.parametrize("home", ["here", "file"])
def test_a_home_that_cannot_be_used_is_passed_over(untouched, monkeypatch, tmp_path, home):
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / home) if home == "file" else home)
    settings.keep_programs()
    assert jax.config.values[FOLDER] is None and len(list(tmp_path.iterdir())) == 1
