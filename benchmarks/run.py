"""Run every benchmark, collect the numbers in one file, and say which targets are met."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

import measure

SCRIPTS = (
    "torch_uniform",
    "torch_prioritized",
    "torch_images",
    "torch_slices",
    "torch_family",
    "jit_cycle",
    "jit_slices",
    "checkpoints",
    "cold_reads",
    "multi_step",
    "cat_frames",
    "ted",
    "scaling",
)


@dataclasses.dataclass(frozen=True)
class Target:
    """A number we want: how many times faster than `rival`, or without one a value that is not to be exceeded."""

    script: str
    name: str  # of a timing or value in that script
    rival: str | None
    bound: float

    def reached(self, results: dict[str, Any]) -> float | None:
        """None where it was not measured."""
        found = results.get(self.script, {"timings": [], "values": {}})
        if self.rival is None:
            return found["values"].get(self.name)
        ratios = {timing["name"]: timing["ratio"] for timing in found["timings"]}
        return ratios.get(self.name, {}).get(self.rival)

    def met(self, reached: float) -> bool:
        return reached <= self.bound if self.rival is None else reached >= self.bound


TARGETS = (
    Target("torch_uniform", "LazyTensorStorage, extend 256", "torchrl", 1.5),
    Target("torch_uniform", "LazyTensorStorage, sample 256", "torchrl", 1.5),
    Target("torch_prioritized", "extend + sample + update, batch 256", "cpprb", 1.0),
    Target("torch_prioritized", "extend + sample + update, batch 65536", "cpprb", 1.0),
    Target("torch_images", "sample 256 images", "torchrl", 10.0),
    Target("torch_slices", "slices by traj_key", "torchrl", 10.0),
    Target("torch_slices", "slices by end_key", "torchrl", 10.0),
    Target("torch_slices", "extend 200 + slices by traj_key", "torchrl", 10.0),
    Target("torch_slices", "extend 200 + slices by end_key", "torchrl", 10.0),
    Target("torch_slices", "slices by traj_key, cached", "torchrl", 5.0),
    Target("torch_slices", "slices by end_key, cached", "torchrl", 5.0),
    Target("torch_slices", "growth of slices, 10000 to 10000000 rows", None, 1.5),
    Target("torch_slices", "growth of extend 200 + slices, 10000 to 10000000 rows", None, 1.5),
    Target("torch_family", "sample without replacement", "torchrl", 1.5),
    Target("torch_family", "sample of an ensemble of four", "torchrl", 1.5),
    Target("torch_family", "sample of a list of tensors", "torchrl", 1.5),
    Target("torch_family", "sample of a list of tensordicts", "torchrl", 1.5),
    Target("torch_family", "extend of the highest-ranked", "torchrl", 1.5),
    Target("jit_cycle", "prioritized sample + update, 32 floats [default]", "flashbax", 2.0),
    Target("jit_cycle", "prioritized sample + update, 32 floats, scan [default]", "flashbax", 2.0),
    Target("jit_cycle", "add 1 + sample, 32 floats [default]", "flashbax", 1.0),
    Target("jit_cycle", "add 1 + sample, 32 floats, scan [default]", "flashbax", 1.0),
    Target("jit_cycle", "add 256 + sample, 32 floats [default]", "flashbax", 1.0),
    Target("jit_cycle", "add 256 + sample, 32 floats, scan [default]", "flashbax", 1.0),
    Target("multi_step", "MultiStepTransform, n = 3", "torchrl", 2.0),
    Target("cat_frames", "pixels", "torchrl", 2.0),
    Target("cat_frames", "pixels and next pixels", "torchrl", 2.0),
    Target("ted", "1000000 rows: TED2Flat and Flat2TED", "torchrl", 2.0),
    Target("ted", "20000 images: bytes of flat rows, of those of TED data", None, 0.55),
    Target("checkpoints", "dumps + loads", "torchrl", 1.0),
    Target("scaling", "growth of sample 256, 10000 to 10000000 items", None, 2.0),
    Target("scaling", "peak memory / state, uniform extend", None, 1.1),
    Target("scaling", "peak memory / state, prioritized extend", None, 1.1),
    Target("scaling", "traces", None, 1.0),
)


def run(script: str, folder: str, quick: bool) -> dict[str, Any] | None:
    """The numbers of one script, in a process of its own with this interpreter; None if it failed."""
    file = pathlib.Path(folder) / f"{script}.json"
    command = [sys.executable, str(measure.ROOT / "benchmarks" / f"{script}.py"), "--json", str(file)]
    paths = [str(measure.ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command + ["--quick"] * quick, env=environment, check=False)
    return json.loads(file.read_text()) if done.returncode == 0 else None


def summary(results: dict[str, Any]) -> None:
    print(f"\n{'target':<74}{'wanted':>10}{'reached':>10}")
    for target in TARGETS:
        reached = target.reached(results)
        if reached is not None:
            verdict = f"{reached:>10.2f}  {'met' if target.met(reached) else 'missed'}"
        elif target.rival and target.script in results and measure.rival(target.rival) is None:
            verdict = f"{'-':>10}  {target.rival} is not installed"
        else:
            verdict = f"{'-':>10}  not measured"
        against = f", {target.rival} / ours" if target.rival else ""
        sign = ">=" if target.rival else "<="
        print(f"{target.name + against:<74}{sign:>6}{target.bound:>4.1f}{verdict}")


def main() -> int:
    options = measure.arguments("Run every benchmark and say which targets are met").parse_args()
    file = options.json or measure.ROOT / "out" / "bench.json"
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for script in SCRIPTS:
            numbers = run(script, folder, options.quick)
            if numbers is not None:
                results[script] = numbers
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(results, indent=1))
    if options.quick:
        print("\n--quick: small buffers and few rounds; the targets are meant for the full sizes")
    summary(results)
    failed = [script for script in SCRIPTS if script not in results]
    print(f"\nnumbers in {file}" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
