"""Families of names that no buffer needs are imported at the first use of one of them, and are there from then on."""

import os
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import pytest
import torch

import interop
from interop import LazyTensorStorage, ReplayBuffer, RewardData

ROOT = Path(__file__).parents[2]
FAMILIES = ("specs", "looking", "maps", "llm", "remote", "doors", "formats", "datasets", "vla")
BUFFERS = """
buffer = interop.TensorDictPrioritizedReplayBuffer(
    alpha=0.6, beta=0.4, storage=interop.LazyTensorStorage(10), batch_size=4, priority_key="td_error"
)
buffer.extend(TensorDict({"obs": torch.zeros(3, 2)}, [3]))
buffer.update_tensordict_priority(buffer.sample().set("td_error", torch.ones(4)))
plain = interop.ReplayBuffer(storage=interop.LazyTensorStorage(10), batch_size=4)
plain.extend(torch.arange(6))
plain.sample(), plain[:], plain.plan(), plain.state_dict()
"""


def new_families(*programs: Sequence[str]) -> list[list[set[str]]]:
    """The families that each step of each program loads; each program begins where only torch and interop are imported."""
    lines = ["import os, sys, torch, interop", "from tensordict import TensorDict"]
    for steps in programs:
        lines += ["if (child := os.fork()) == 0:", "    for step in " + repr([*steps]) + ":"]
        lines += ["        exec(step)", '        print(*(name for name in sys.modules if name.startswith("interop.")))']
        lines += ["    sys.stdout.flush(), os._exit(0)", "assert os.waitpid(child, 0)[1] == 0"]
    command = [sys.executable, "-W", "error", "-c", "\n".join(lines)]
    output = iter(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines())
    found = []
    for steps in programs:
        modules = [next(output).split() for _ in steps]
        loaded = [{each for each in FAMILIES if f"interop.{each}" in names} for names in modules]
        found.append([after - before for before, after in zip([set(), *loaded], loaded, strict=False)])
    return found


def test_a_family_is_loaded_by_its_names_or_items_and_by_nothing_else(tmp_path: Path) -> None:
    steps = {
        "": set(),
        BUFFERS: set(),
        "dir(interop), hasattr(interop, 'nothing')": set(),
        "interop.from_fbuf": {"doors"},
        "from interop import H5StorageCheckpointer": {"formats"},
        "plain.plan(interop.Unbounded(dtype=torch.int64))": {"specs"},
        "interop.maps": {"maps"},
        "from interop import RayReplayBuffer": {"remote"},
        "from interop import *": {"datasets", "llm", "looking", "vla"},
        "interop.open": set(),
        "interop.datasets.merged": set(),
    }
    buffer = ReplayBuffer(storage=LazyTensorStorage(4))
    buffer.extend(RewardData(torch.zeros(2, 3), torch.ones(2, 3), batch_size=[2]))
    buffer.dumps(tmp_path)
    loads = f"buffer = interop.ReplayBuffer(storage=interop.LazyTensorStorage(4)); buffer.loads({str(tmp_path)!r})"
    of_items = {loads: {"llm"}, "assert type(buffer[:]) is interop.RewardData": set()}
    assert new_families([*steps], [*of_items]) == [[*steps.values()], [*of_items.values()]]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_names_of_a_family_are_those_of_its_module(family: str) -> None:
    module = import_module(f"interop.{family}")
    assert getattr(interop, family) is module
    names = set() if family in ("datasets", "vla") else set(module.__all__)
    assert names <= set(interop.__all__)
    assert all(getattr(interop, name) is getattr(module, name) for name in names)
    assert {family, *names} <= set(dir(interop))


def test_all_public_names_are_there_once() -> None:
    assert all(getattr(interop, name) is not None for name in interop.__all__)
    assert len(set(interop.__all__)) == len(interop.__all__)
    # Type checkers read the second list, `from interop import *` the first; families have lists of their own.
    families = {name for family in FAMILIES for name in getattr(import_module(f"interop.{family}"), "__all__", ())}
    core = [name for name in interop.__all__ if name not in {*families, "open", "show_versions", "__version__"}]
    assert core == import_module("interop.names").__all__
    with pytest.raises(AttributeError, match="module 'interop' has no attribute 'Nothing'"):
        interop.Nothing


def test_torch_and_jax_are_loaded_by_the_first_name_that_needs_them() -> None:
    code = """
import sys, interop
interop.inspect, interop.verify, interop.show_versions, interop.__version__, dir(interop)
print({"torch", "jax", "tensordict"} & set(sys.modules))
import jax
from interop.storages import LazyTensorStorage
print(interop.data.settings._jax_is_ours, interop.LazyTensorStorage is LazyTensorStorage, interop.buffers.ReplayBuffer)
print(jax.config.values["jax_cpu_enable_async_dispatch"])
"""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("JAX_CPU_")}
    command = [sys.executable, "-W", "error", "-c", code]
    output = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, env=clean).stdout
    found = ["set()", "True True <class 'interop.buffers.replay_buffer.ReplayBuffer'>", "False"]
    assert output.splitlines() == found
