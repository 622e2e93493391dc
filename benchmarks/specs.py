"""A Composite of eight leaves: what do drawing, checking, encoding and reshaping it cost, beside torchrl's?

    python benchmarks/specs.py [--quick] [--json FILE]

A batch of 64: bounded and unbounded floats, three kinds of integers, two of one-hot vectors, bits, and a nested image of
uint8. "project" corrects one leaf of eight, "encode" is given arrays for six of them.
"""

import sys
import warnings
from types import ModuleType
from typing import Any

import measure
import torch

import interop.specs

BATCH = 64


def composite(library: Any) -> Any:
    """The same spec of either library."""
    return library.Composite(
        position=library.Bounded(-1, 1, (BATCH, 4)),
        velocity=library.Unbounded((BATCH, 8)),
        phase=library.Categorical(5, (BATCH,)),
        action=library.OneHot(6, (BATCH, 6)),
        flags=library.Binary(3, (BATCH, 3)),
        gears=library.MultiCategorical([3, 4], (BATCH, 2)),
        levers=library.MultiOneHot([2, 3], (BATCH, 5)),
        camera=library.Composite(pixels=library.Bounded(0, 255, (BATCH, 3, 8, 8), dtype=torch.uint8), shape=(BATCH,)),
        shape=(BATCH,),
    )


def calls(library: Any) -> dict[str, Any]:
    """Every operation of one library."""
    spec, other = composite(library), composite(library)
    value = spec.rand()
    outside = value.clone()
    outside["position"] *= 5
    arrays = spec.to_numpy(value)
    raw = {name: arrays[name] for name in ("position", "velocity", "phase", "action", "flags", "gears")}
    return {
        "construct": lambda: composite(library),
        "rand": spec.rand,
        "zero": spec.zero,
        "is_in": lambda: spec.is_in(value),
        "project": lambda: spec.project(outside.copy()),
        "encode": lambda: spec.encode(raw),
        "expand": lambda: spec.expand(3, BATCH),
        "clone": spec.clone,
        "index": lambda: spec[3],
        "index, slice": lambda: spec[2:9],
        "equal": lambda: spec == other,
    }


def main() -> int:
    options = measure.arguments("Specs of eight leaves, beside torchrl's").parse_args()
    libraries: dict[str, ModuleType] = {measure.OURS: interop.specs}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if torchrl := measure.rival("torchrl.data"):
            libraries["torchrl"] = torchrl
    sides = {side: calls(library) for side, library in libraries.items()}
    timings = [
        measure.compare(work, {side: each[work] for side, each in sides.items()}, quick=options.quick)
        for work in sides[measure.OURS]
    ]
    measure.report(f"a Composite of eight leaves, batch {BATCH}", timings, {}, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
