"""The numbers that we want to reach: script, line, rival, ratio."""

import dataclasses
from typing import Any

import records

UNIFORM = ("torch_uniform", "LazyTensorStorage, sample 256")


@dataclasses.dataclass(frozen=True)
class Target:
    """How many times faster than a rival, or without one a value that is not to be exceeded."""

    script: str
    name: str  # of a timing or value in that script
    rivals: tuple[str, ...]  # the first that was measured counts; the others stand in for it
    bound: float
    estimate: float | None = None  # the rival's time is this many times torchrl's uniform sample of the same run

    def reached(self, results: dict[str, Any]) -> tuple[float, str] | None:
        """The number, and against whom; None where it was not measured."""
        if not self.rivals:
            value = results["scripts"].get(self.script, {"values": {}})["values"].get(self.name)
            return None if value is None else (value, "")
        lines = records.lines(results)
        line = lines.get((self.script, self.name))
        if line is None:
            return None
        if self.estimate is not None:
            uniform = lines.get(UNIFORM, {"us": {}})["us"].get("torchrl")
            return None if uniform is None else (self.estimate * uniform / line["us"]["ours"], self.against)
        return next(((line["ratio"][rival], rival) for rival in self.rivals if rival in line["ratio"]), None)

    def met(self, reached: float) -> bool:
        return reached >= self.bound if self.rivals else reached <= self.bound

    @property
    def against(self) -> str:
        if self.estimate is not None:
            return f"torchrl by estimate, {self.estimate:g} of its uniform samples"
        return " or ".join(self.rivals)


def _against(rival: str, script: str, bounds: dict[str, float]) -> tuple[Target, ...]:
    return tuple(Target(script, name, (rival,), bound) for name, bound in bounds.items())


def _prioritized(operation: str, bound: float, estimate: float) -> tuple[Target, ...]:
    """torchrl's C++ trees do not load everywhere: cpprb stands in, and an estimate from where they did."""
    name = f"{operation}, batch 256"
    return (
        Target("torch_prioritized", name, ("torchrl", "cpprb"), bound),
        Target("torch_prioritized", name, ("torchrl",), bound, estimate),
    )


TARGETS = (
    *_against(
        "torchrl",
        "torch_uniform",
        {
            "LazyTensorStorage, extend 256": 2.0,
            "LazyTensorStorage, sample 256": 2.0,
            "LazyTensorStorage, add": 2.0,
            "LazyMemmapStorage, extend 256": 2.0,
            "LazyMemmapStorage, sample 256": 2.0,
        },
    ),
    *_prioritized("extend", 3.0, 2.0),
    *_prioritized("sample", 2.5, 2.0),
    *_prioritized("update", 1.2, 0.45),
    *_prioritized("extend + sample + update", 2.5, 4.45),
    Target("torch_prioritized", "extend + sample + update, batch 65536", ("torchrl", "cpprb"), 3.0),
    *_against("torchrl", "torch_images", {"sample 256 images": 20.0, "extend 256 images": 2.0}),
    *_against(
        "torchrl",
        "torch_slices",
        {
            "slices by traj_key": 20.0,
            "slices by end_key": 20.0,
            "extend 200 + slices by traj_key": 10.0,
            "extend 200 + slices by end_key": 10.0,
            "slices by traj_key, cached": 8.0,
            "slices by end_key, cached": 8.0,
            "prioritized slices": 30.0,
        },
    ),
    Target("torch_slices", "growth of slices, 10000 to 10000000 rows", (), 1.5),
    Target("torch_slices", "growth of extend 200 + slices, 10000 to 10000000 rows", (), 1.5),
    *_against(
        "torchrl",
        "torch_family",
        {
            "sample without replacement": 1.5,
            "sample of an ensemble of four": 1.5,
            "sample of a list of tensors": 1.5,
            "sample of a list of tensordicts": 1.5,
            "extend of the highest-ranked": 1.5,
        },
    ),
    *_against("torchrl", "torch_datasets", {"conversion": 3.0}),
    *_against("plain", "torch_datasets", {"sample 256": 0.9}),
    *_against("Pillow", "torch_datasets", {"2020 JPEG images, episodes read as rows": 1.0}),
    Target("torch_datasets", "MiB of anonymous memory, conversion, ours", (), 300.0),
    Target("torch_datasets", "ms: construction of what is converted", (), 50.0),
    *_against("ray.get", "remote", {"sample 256 rows of 28 KB, one shard": 0.5}),
    *_against("torchrl", "remote", {"sample 256 rows of 28 KB, one shard": 3.0}),
    *_against(
        "flashbax",
        "jit_cycle",
        {
            f"{work}, 32 floats{form} [default]": bound
            for work, bound in (
                ("prioritized sample + update", 4.0),
                ("prioritized add 256 + sample + update", 4.0),
                ("add 1 + sample", 2.0),
                ("add 256 + sample", 2.0),
            )
            for form in ("", ", scan")
        },
    ),
    *_against(
        "flashbax",
        "jit_slices",
        {
            f"add 4 + slices, {starts}{form}": 2.0
            for starts in ("uniform", "per trajectory", "prioritized")
            for form in ("", ", scan")
        },
    ),
    *_against("torchrl", "multi_step", {"MultiStepTransform, n = 3": 2.0}),
    *_against("torchrl", "cat_frames", {"pixels": 2.0, "pixels and next pixels": 2.0}),
    *_against("torchrl", "ted", {"1000000 rows: TED2Flat and Flat2TED": 2.0}),
    Target("ted", "20000 images: bytes of flat rows, of those of TED data", (), 0.55),
    *_against("torchrl", "checkpoints", {"dumps + loads": 1.0}),
    *_against("torchrl", "specs", {"construct": 1.0}),
    *_against(
        "torchrl",
        "specs",
        dict.fromkeys(("rand", "zero", "is_in", "project", "encode", "expand", "clone", "index"), 2.0),
    ),
    *_against(
        "torchrl",
        "language",
        {
            f"{kind}, {n} of {length} tokens": 1.5
            for kind in ("prompts", "pairs")
            for length in (128, 550)
            for n in (8, 32)
        },
    ),
    *_against(
        "torchrl", "maps", {"map, read 4096": 20.0, "map, write 4096": 20.0, "forest, both for 1000 steps": 20.0}
    ),
    *_against("list", "text", {"extend, texts": 2.0, "extend, as tensordicts": 2.0}),
    Target("text", "bytes stored / bytes of the texts", (), 1.1),
    Target("first_batch", "seconds: import", (), 1.0),
    Target("first_batch", "seconds: import after JAX", (), 0.25),
    Target("first_batch", "seconds: first batch of 256, nothing cached", (), 1.5),
    Target("first_batch", "seconds: first batch of 256, cached", (), 0.5),
    Target("first_batch", "seconds: another batch size, 200 after 256, nothing cached", (), 0.3),
    Target("first_batch", "seconds: another batch size, 64 after 256, nothing cached", (), 0.3),
    Target("first_batch", "seconds: another batch size, 64 after 256, cached", (), 0.3),
    Target("scaling", "growth of sample 256, 10000 to 100000000 items", (), 3.0),
    Target("scaling", "growth of torch: sample 256, 10000 to 100000000 items", (), 3.0),
    Target("scaling", "us a row above the gather, uniform step, 4096 rows", (), 1.0),
    Target("scaling", "us a row above the gather, prioritized step, 4096 rows", (), 1.0),
    Target("scaling", "peak memory / state, uniform extend", (), 1.1),
    Target("scaling", "peak memory / state, prioritized extend", (), 1.1),
    Target("scaling", "traces", (), 1.0),
    Target("gpu", "cycle over its byte floor, 1000000 rows of 128 bytes, batch 65536", (), 4.0),
    Target("gpu", "cycle over its byte floor, 100000 rows of 28224 bytes, batch 4096", (), 1.3),
    *_against("plain torch", "gpu", {"cycle, 1000000 rows of 128 bytes, batch 65536": 5.0}),
    Target("gpu", "growth of sample 256, 10000 to 100000000 items", (), 3.0),
)


def table(results: dict[str, Any]) -> str:
    """Every target, and whether it is met."""
    rows = [f"{'target':<72}{'wanted':>9}{'reached':>9}"]
    for target in TARGETS:
        sign = ">=" if target.rivals else "<="
        start = f"{target.script + ': ' + target.name:<72}{sign:>4}{target.bound:>5.2f}"
        reached = target.reached(results)
        if reached is None:
            rows.append(f"{start}{'-':>9}  {_missing(target, results)}")
            continue
        number, rival = reached
        stands_in = f", {rival} stands in" if target.estimate is None and rival not in (*target.rivals[:1], "") else ""
        against = f" ({rival} / ours{stands_in})" if rival else ""
        rows.append(f"{start}{number:>9.2f}  {'met' if target.met(number) else 'MISSED'}{against}")
    if disturbed := records.disturbed(results):
        rows.append(f"Measured while others used the machine, not to be believed: {', '.join(disturbed)}")
    return "\n".join(rows)


def _missing(target: Target, results: dict[str, Any]) -> str:
    if target.script in results["failed"]:
        return f"not measured: {target.script} failed"
    if target.script not in results["scripts"]:
        return f"not measured: {target.script} was not run"
    if not target.rivals:
        return "not measured: no such value (smaller sizes?)"
    if (target.script, target.name) not in records.lines(results):
        return "not measured: no such line"
    return f"not measured: {target.against} was not there"
