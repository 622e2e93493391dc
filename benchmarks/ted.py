"""Flat rows: what does it cost to make TED data flat, as a checkpoint does, and TED data again?

    python benchmarks/ted.py [--quick] [--json FILE]

A million rows of two observations of four floats, and rows with an image; episodes of 200 rows, in a full ring that begins
in the middle. The rivals are torchrl's hooks, called the same way in the same process. Ours also verify what they save:
that every bit will come back. "files" are memory maps in a new folder, which is deleted within the time of both. "in place"
is into the rows of a storage that is there. Beside them: what flat rows take of the bytes, and how long a copy of the
bytes of the TED data takes.
"""

import pathlib
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import measure
import torch
from tensordict import TensorDict

import interop

EPISODE = 200


def ring(rows: int, oldest: int, observations: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> TensorDict:
    """TED data: what follows a row is in the next one, but at ends of episodes and behind the newest row."""
    done = (torch.arange(1, rows + 1) % EPISODE == 0)[:, None]
    cut = done.clone()
    cut[oldest - 1] = True
    root, below = {}, {}
    for name, (item, dtype) in observations.items():
        root[name] = torch.randint(0, 255, (rows, *item)).to(dtype)
        after = root[name].roll(-1, 0)
        below[name] = torch.where(cut.view(-1, *(1 for _ in item)), after + 1, after)
    flags = {name: torch.zeros_like(done) for name in ("done", "terminated", "truncated")}
    nexts = {**below, **flags, "done": done, "truncated": done, "reward": torch.rand(rows, 1)}
    return TensorDict({**root, "action": torch.rand(rows, 2), **flags, "next": nexts}, [rows])


def bytes_of(data: Any) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in data.values(True, True) if isinstance(leaf, torch.Tensor))


def told(hook: Any, oldest: int) -> Any:
    hook.shift, hook.is_full = oldest, True
    return hook


def to_files(hook: Any, data: TensorDict, above: pathlib.Path) -> Callable[[], None]:
    """A call that makes files, and deletes them."""

    def call() -> None:
        folder = above / "flat"
        hook(data, path=folder)
        shutil.rmtree(folder)

    return call


def timings_of(name: str, data: TensorDict, oldest: int, sides: dict[str, Any], quick: bool) -> list[measure.Timing]:
    """One line for each thing that hooks do."""
    calls: dict[str, dict[str, Callable[[], Any]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for side, hooks in sides.items():
            save, nest = told(hooks.TED2Flat(), oldest), told(hooks.TED2Nested(), oldest)
            flat, nested, rows = save(data), nest(data), data.clone()
            folder = pathlib.Path(scratch, side)
            folder.mkdir()
            for work, call in {
                "TED2Flat": lambda save=save: save(data),
                "TED2Flat, files": to_files(save, data, folder),
                "Flat2TED": lambda hooks=hooks, flat=flat: hooks.Flat2TED()(flat),
                "Flat2TED, in place": lambda hooks=hooks, flat=flat, rows=rows: hooks.Flat2TED()(flat, out=rows),
                "TED2Flat and Flat2TED": lambda hooks=hooks, save=save: hooks.Flat2TED()(save(data)),
                "TED2Nested": lambda nest=nest: nest(data),
                "Nested2TED": lambda hooks=hooks, nested=nested: hooks.Nested2TED()(nested),
            }.items():
                calls.setdefault(work, {})[side] = call
        return [measure.compare(f"{name}: {work}", each, quick=quick) for work, each in calls.items()]


def main() -> int:
    options = measure.arguments("TED data flat and back, beside torchrl's hooks").parse_args()
    rows, images = (50_000, 500) if options.quick else (1_000_000, 20_000)
    sides: dict[str, Any] = {measure.OURS: interop}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if hooks := measure.rival("torchrl.data.replay_buffers.utils"):
            sides["torchrl"] = hooks
    cases = {
        f"{rows} rows": ring(rows, rows // 3, {"left": ((4,), torch.float32), "right": ((4,), torch.float32)}),
        f"{images} images": ring(images, images // 3, {"pixels": ((84, 84), torch.uint8)}),
    }
    timings, values = [], {}
    for name, data in cases.items():
        oldest = len(data) // 3
        values[f"{name}: bytes of flat rows, of those of TED data"] = bytes_of(
            told(interop.TED2Flat(), oldest)(data)
        ) / bytes_of(data)
        whole = torch.zeros(bytes_of(data) // 4)
        copy = measure.compare(name, {measure.OURS: lambda whole=whole: whole.clone()}, quick=options.quick)
        values[f"{name}: a copy of the bytes, us"] = copy.us[measure.OURS]
        timings += timings_of(name, data, oldest, sides, options.quick)
    measure.report(f"TED data of {' and '.join(cases)}, flat and back", timings, values, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
