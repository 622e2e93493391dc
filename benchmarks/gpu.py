"""On a GPU: how far from its bandwidth is replay, how does it grow, which kernel is best, does torch get its calls back?

    python benchmarks/gpu.py [--json FILE] [--parts PART ...] [--hlo FOLDER] [--device cpu] [--quick]

Needs no network. It runs beside the torch and the JAX with CUDA that a machine has (tried with Python 3.12, torch 2.11, jax
0.11, CUDA 13), from the root of the repository. Packages that are missing there can be carried as wheels, some 1 MB in
all, for that Python and platform:

    python -m pip download --no-deps --only-binary=:all: --python-version 3.12 --platform manylinux_2_28_x86_64 \
        --platform manylinux_2_17_x86_64 -d wheels tensordict pyvers orjson importlib_metadata lazy-importer
    # there:
    python -m pip install --no-index --no-deps --target /tmp/site wheels/*.whl
    PYTHONPATH=/tmp/site:. python benchmarks/gpu.py --json gpu.json

The part `rivals` measures flashbax beside ours if it is there; it needs chex, flax and tensorstore with all of theirs. The
part `torch` measures torchrl beside ours if its wheel fits that torch and brings its priority trees. On a
card in two runs of ten minutes each: `--parts nodes cycle rivals` and `--parts floors growth torch`.
The wheels above are what tensordict 0.14 needs beside numpy, packaging, cloudpickle and zipp (lazy-importer and zipp for
importlib_metadata); fbuf needs jaxtyping (which needs wadler-lindig) and ml_dtypes. All parts but `torch` do without
tensordict. A part that fails costs its own numbers only. With `--device cpu --quick` all of it runs anywhere.
"""

import argparse
import importlib
import os
import pathlib
import sys
import traceback
from collections.abc import Callable

import measure

PARTS = ("nodes", "floors", "cycle", "rivals", "growth", "trees", "torch")


def arguments() -> argparse.Namespace:
    parser = measure.arguments("Replay on a GPU")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--hlo", type=pathlib.Path, metavar="FOLDER", help="also write the compiled programs there")
    return parser.parse_args()


def start(device: str) -> str:
    """Have JAX take the device, and leave torch its memory. Returns its name. RuntimeError where it is not there."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.environ.setdefault("JAX_PLATFORMS", {"cuda": "cuda,cpu"}.get(device, device))
    import jax
    import torch

    found = jax.devices()[0]
    if device == "cuda" and (found.platform != "gpu" or not torch.cuda.is_available()):
        raise RuntimeError(
            f"a GPU that both see is needed: JAX has {found}, torch {torch.cuda.is_available()}; or pass --device cpu"
        )
    return found.device_kind


def programs(folder: pathlib.Path, quick: bool) -> None:
    """The compiled cycle as text, to count its kernels."""
    import gpu_parts
    import jax
    import jax.numpy as jnp

    import fbuf

    folder.mkdir(parents=True, exist_ok=True)
    for capacity, batch in ((10_000, 512),) if quick else ((1_000_000, 65_536), (1_000_000, 256)):
        buffer = fbuf.Buffer(capacity, fbuf.Prioritized(alpha=gpu_parts.ALPHA, stratified=True))
        rows = jax.ShapeDtypeStruct((batch, 32), jnp.float32)
        state = jax.eval_shape(buffer.init, jax.ShapeDtypeStruct((32,), jnp.float32))
        key = jax.eval_shape(lambda: jax.random.key(0))
        for name, program in (("call", gpu_parts.one_cycle), ("scan", gpu_parts.cycles)):
            jitted = jax.jit(program, static_argnums=0, donate_argnums=1)
            compiled = jitted.lower(buffer, state, key, rows).compile()
            (folder / f"cycle_{name}_{batch}.hlo.txt").write_text(compiled.as_text())


def measured(options: argparse.Namespace, card: str) -> dict[str, str]:
    """Run the parts; the file has what there is after each. Returns which failed, and why."""
    import gpu_parts

    place = gpu_parts.Place(options.device, options.quick)
    timings: list[measure.Timing] = []
    values: dict[str, float] = {}
    failed: dict[str, str] = {}

    def bandwidth() -> float:
        known = values if "floors" in options.parts else gpu_parts.floors(place)[1]
        return max(rate for name, rate in known.items() if name.startswith("copy, "))

    work: dict[str, Callable[[], gpu_parts.Part]] = {
        "nodes": lambda: importlib.import_module("gpu_rivals").nodes(place),
        "floors": lambda: gpu_parts.floors(place),
        "cycle": lambda: gpu_parts.cycle(place, bandwidth()),
        "rivals": lambda: importlib.import_module("gpu_rivals").measured(place),
        "growth": lambda: gpu_parts.growth(place),
        "trees": lambda: importlib.import_module("gpu_trees").measured(place),
        "torch": lambda: gpu_parts.torch_calls(place),
    }
    for part in options.parts:
        try:
            some, more = work[part]()
        except Exception as error:  # time on a GPU is dear: the other parts go on
            traceback.print_exc()
            failed[part] = f"{type(error).__name__}: {error}"
        else:
            timings += some
            values |= more
            measure.show(f"Replay on {card}: {part}", some, more)
        if options.json is not None:
            told = {"card": card, "failed parts": failed}
            measure.save(f"Replay on {card}", timings, values, options.json, told)
    return failed


def main() -> int:
    options = arguments()
    try:
        card = start(options.device)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 2
    failed = measured(options, card)
    if options.hlo:
        programs(options.hlo, options.quick)
    for part, why in failed.items():
        print(f"{part} failed: {why}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
