"""Loads checkpoints into buffers that are built otherwise (M1): it works by the rule, or is refused and changes nothing.

The rule: capacity, lanes, and the kinds of storage, sampler and writer must be equal. Where the target has rows, so must be
their shapes; other keys need `strict=False`, other dtypes `cast=True`. Parameters come from the checkpoint.
"""

import dataclasses
import itertools
import random
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from fbuf.checkpoint import CheckpointMismatch
from interop import (
    CompressedListStorage,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
)
from tests.faults.counts import Counts
from tests.faults.signatures import signature
from tests.faults.subjects import states_of

STORAGES: dict[str, Any] = {
    "tensor": LazyTensorStorage,
    "memmap": LazyMemmapStorage,
    "list": ListStorage,
    "stack": LazyStackStorage,
    "compressed": CompressedListStorage,
}
OF_TENSORS = ("tensor", "memmap")


@dataclass(frozen=True)
class Build:
    """How a buffer is built, and what was written to it."""

    storage: str = "tensor"
    capacity: int = 12
    ndim: int = 1
    sampler: str = "random"
    writer: str = "ring"
    dtype: torch.dtype = torch.float32
    width: int = 3
    keys: tuple[str, ...] = ("x", "y")
    alpha: float = 0.7
    prefetch: int | None = None
    batch_size: int = 4
    buffer: str = "ReplayBuffer"
    filled: int = 5  # rows

    def __str__(self) -> str:
        told = [f"{key}={value}" for key, value in dataclasses.asdict(self).items() if value != getattr(Build(), key)]
        return ", ".join(told) or "the plain one"


VARIED: dict[str, list[Any]] = {
    "storage": [*STORAGES],
    "capacity": [12, 8, 13],
    "ndim": [1, 2],
    "sampler": ["random", "epoch", "prioritized", "slices"],
    "writer": ["ring", "tensordict ring", "best"],
    "dtype": [torch.float32, torch.float64, torch.int32],
    "width": [3, 4],
    "keys": [("x", "y"), ("x",), ("x", "y", "z"), ("x", "w")],
    "alpha": [0.7, 0.2],
    "prefetch": [None, 2],
    "batch_size": [4, 3],
    "buffer": ["ReplayBuffer", "TensorDictReplayBuffer"],
    "filled": [5, 0, 30],
}


def made(build: Build, seed: int) -> Any:
    """The buffer."""
    samplers: dict[str, Any] = {
        "random": RandomSampler,
        "epoch": SamplerWithoutReplacement,
        "prioritized": lambda: PrioritizedSampler(build.capacity, build.alpha, 0.5),
        "slices": lambda: SliceSampler(slice_len=2, traj_key="episode", strict_length=False),
    }
    writers: dict[str, Any] = {
        "ring": RoundRobinWriter,
        "tensordict ring": TensorDictRoundRobinWriter,
        "best": lambda: TensorDictMaxValueWriter(rank_key="rank"),
    }
    options = {"ndim": build.ndim} if build.storage in OF_TENSORS else {}
    buffer = {"ReplayBuffer": ReplayBuffer, "TensorDictReplayBuffer": TensorDictReplayBuffer}[build.buffer](
        storage=STORAGES[build.storage](build.capacity, **options),
        sampler=samplers[build.sampler](),
        writer=writers[build.writer](),
        batch_size=build.batch_size,
        prefetch=build.prefetch,
        generator=torch.Generator("cpu").manual_seed(seed),
    )
    if build.filled:
        shape = [2, build.filled // 2] if build.ndim == 2 else [build.filled]
        ids = torch.arange(shape[-1]).expand(shape) + 100 * seed
        leaves = {key: torch.full((*shape, build.width), 3 + seed, dtype=build.dtype) for key in build.keys}
        rest = {"id": ids.clone(), "rank": ids.float() + 0.5, "episode": ids // 3}
        buffer.extend(TensorDict({**leaves, **rest}, shape))
    return buffer


def can_be(build: Build) -> bool:
    """Whether there is such a buffer."""
    try:
        made(build, 0)
    except (TypeError, ValueError, RuntimeError, NotImplementedError):
        return False
    return True


def expected(saved: Build, target: Build, strict: bool, cast: bool) -> bool:
    """Whether the one can be loaded into the other."""
    if saved.storage != target.storage and not {saved.storage, target.storage} <= set(OF_TENSORS):
        return False
    if any(getattr(saved, name) != getattr(target, name) for name in ("capacity", "ndim", "sampler", "writer")):
        return False
    if target.storage not in OF_TENSORS or not target.filled:  # it takes any items
        return True
    if saved.width != target.width and set(saved.keys) & set(target.keys):
        return False
    if saved.keys != target.keys and strict:
        return False
    return saved.dtype == target.dtype or cast


def tried(saved: Build, path: Path, source: Any, target: Build, options: dict[str, Any]) -> str:
    """What comes of loading; "loads" and "refused" are right."""
    buffer = made(target, 2)
    before = signature(states_of(buffer))
    fits = expected(saved, target, **options)
    try:
        buffer.loads(path, **options)
    except CheckpointMismatch as error:
        if fits:
            return f"refused: {error}"
        return "refused" if signature(states_of(buffer)) == before else "refused, but it has changed"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if not fits:
        return "loads, which it should not"
    if len(buffer) != len(source) or buffer.batch_size != source.batch_size:
        return "loads something else"
    if len(source):
        rows, wanted = (
            list(each.storage) if target.storage == "list" else each.storage[:] for each in (buffer, source)
        )
        if target.storage in OF_TENSORS:
            for key in {"id", "rank", "episode", *saved.keys} - (
                set() if not target.filled else set(saved.keys) - set(target.keys)
            ):
                kept = wanted[key] if not target.filled or key not in saved.keys else wanted[key].to(target.dtype)
                if not torch.equal(rows[key], kept) or rows[key].dtype != kept.dtype:
                    return f"loads other values of {key!r}"
        elif signature(rows) != signature(wanted):
            return "loads other rows"
        buffer.sample()
    return "loads"


def _pairs(seed: int, count: int) -> list[tuple[Build, Build, dict[str, Any]]]:
    """What is saved and what it is loaded into: each pair that differs in one thing, and some that differ in several."""
    rng = random.Random(seed)
    builds = [dataclasses.replace(Build(), **{name: value}) for name, values in VARIED.items() for value in values]
    builds = [each for each in dict.fromkeys(builds) if can_be(each)]
    prioritized = [Build(sampler="prioritized", alpha=alpha) for alpha in VARIED["alpha"]]
    found = [(one, other) for one in builds for other in builds if one == Build() or other == Build() or one == other]
    found += itertools.product(prioritized, prioritized)
    while len(found) * 2 < count:
        both = [
            dataclasses.replace(Build(), **{name: rng.choice(VARIED[name]) for name in rng.sample([*VARIED], several)})
            for several in (2, 3)
        ]
        if all(map(can_be, both)):
            found.append((both[0], both[1]))
    options = [{"strict": strict, "cast": cast} for strict in (True, False) for cast in (False, True)]
    told = [(one, other, option) for one, other in found for option in (options[0], rng.choice(options[1:]))]
    return told if len(told) <= count else rng.sample(told, count)


def pairs(size: int, seed: int = 0) -> Counts:
    """So many pairs."""
    counts = Counts()
    with tempfile.TemporaryDirectory(prefix="matrix-") as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        known: dict[Build, tuple[Any, Path]] = {}
        for saved, target, options in _pairs(seed, size):
            if saved not in known:
                path = Path(folder, str(len(known)))
                source = made(saved, 1)
                try:
                    source.dumps(path)
                except RuntimeError:
                    cannot = not saved.filled and saved.storage in OF_TENSORS
                    counts.fail(f"{saved}: cannot be saved", times=not cannot)
                    continue
                known[saved] = source, path
            source, path = known[saved]
            outcome = tried(saved, path, source, target, options)
            counts.note(outcome, ("loads", "refused"), f"{saved} -> {target} {options}")
    return counts
