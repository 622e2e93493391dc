"""What a GPU would be asked to run, without one: programs compiled for an H100, and their thunks counted.

It needs the compiler for CUDA (`pip install .[gpu-check]`), and no driver. XLA writes what it compiles into a folder that
is named in `XLA_FLAGS` before JAX is imported, so this is a program of its own:

    python -m tests.gpu.compiled                 # every program against `limits.json`; make gpu-check
    python -m tests.gpu.compiled --only Slices   # some, without a check; --verbose lists what they run
    python -m tests.gpu.compiled --lower         # writes counts that fell into `limits.json`
"""

import argparse
import collections
import json
import os
import pathlib
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

H100 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 84929347584
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  driver_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  runtime_version: "13.0.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 12 }
runtime_version { major: 13 minor: 0 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
_STRUCTURE = {"kCommandBuffer", "kWhile", "kConditional", "kAsyncStart", "kAsyncDone", "kSequential"}
LIMITS = pathlib.Path(__file__).with_name("limits.json")


@dataclass(frozen=True)
class Counts:
    """What one call of a program runs.

    Attributes:
        nodes: kernels and copies, one after the other; those in a loop count once.
        graphs: CUDA graphs.
        outside: nodes that are in none.
        loops: loops that the host drives.
        forks: hand-offs to another stream.
        copies: copies of half of the largest array that is given, or more.
    """

    nodes: int
    graphs: int
    outside: int
    loops: int
    forks: int
    copies: int


def of_thunks(text: str, program: str, large: int) -> Counts:
    """The counts of a list of thunks, as XLA writes it, and of the program's text; `large` copies have so many elements."""
    kinds: collections.Counter[str] = collections.Counter()
    outside, within = 0, None
    for line in text.splitlines():
        found = re.match(r"^( *)\d+: (k\w+)", line)
        if not found:
            continue
        depth, kind = len(found.group(1)), found.group(2)
        kinds[kind] += 1
        if within is not None and depth <= within:
            within = None
        if kind == "kCommandBuffer":
            within = depth
        elif within is None and kind not in _STRUCTURE:
            outside += 1
    shapes = re.findall(r"= \(?\w+\[([\d,]*)\][^=]* copy(?:-start)?\(", program)
    sizes = [_product(shape) for shape in shapes]
    return Counts(
        nodes=sum(count for kind, count in kinds.items() if kind not in _STRUCTURE),
        graphs=kinds["kCommandBuffer"],
        outside=outside,
        loops=kinds["kWhile"],
        forks=kinds["kAsyncStart"],
        copies=sum(size >= large for size in sizes),
    )


def _product(shape: str) -> int:
    size = 1
    for each in filter(None, shape.split(",")):
        size *= int(each)
    return size


def compiler(folder: pathlib.Path) -> Callable[[Any, bool], Counts]:
    """Compiles a program for an H100 and counts; XLA dumps into the folder. Prints the thunks, if that is asked."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={folder}"

    import jax
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding

    device = topologies.get_topology_desc(platform="cuda", target_config=H100, topology="1x1x1").devices[0]

    def place(shape: Any) -> Any:
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=SingleDeviceSharding(device))

    def count(program: Any, verbose: bool) -> Counts:
        for file in folder.iterdir():
            file.unlink()
        text = program.lowered(place).compile().as_text()
        found = sorted(folder.glob("*thunk_sequence_after_thunk_passes.txt"))
        found = found or sorted(folder.glob("*thunk_sequence.txt"))
        thunks = found[-1].read_text()
        if verbose:
            print(re.sub(r"\[(source|prev).*?\]\s*", "", thunks))
        return of_thunks(thunks, text, max(leaf.size for leaf in jax.tree.leaves(program.operands)) // 2)

    return count


def counted(batches: list[int], only: str, verbose: bool) -> Iterator[tuple[str, Counts]]:
    """The name and the counts of each program."""
    with tempfile.TemporaryDirectory() as folder:
        count = compiler(pathlib.Path(folder))
        from tests.gpu import programs

        for batch in batches or programs.BATCHES:
            for program in programs.programs(batch):
                if only in program.name:
                    yield str(program), count(program, verbose)


def above(name: str, counts: Counts, limits: dict[str, dict[str, int]]) -> list[str]:
    """What is more than the limit, in words."""
    if name not in limits:
        return [f"{name}: no limit is known; --lower writes one"]
    return [
        f"{name}: {count} {kind}, at most {limits[name][kind]} are allowed"
        for kind, count in asdict(counts).items()
        if count > limits[name][kind] and kind != "graphs"
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="programs whose name contains this")
    parser.add_argument("--batch", type=int, nargs="*", default=[])
    parser.add_argument("--lower", action="store_true", help="write counts that fell, and those of new programs")
    parser.add_argument("--verbose", action="store_true", help="print the thunks, too")
    options = parser.parse_args()
    limits = json.loads(LIMITS.read_text()) if LIMITS.exists() else {}
    wrong: list[str] = []
    for name, counts in counted(options.batch, options.only, options.verbose):
        print(f"{name:<45}", *(f"{kind} {count}" for kind, count in asdict(counts).items()), flush=True)
        wrong += above(name, counts, limits)
        if options.lower:
            held = limits.setdefault(name, asdict(counts))
            limits[name] = {kind: min(count, held[kind]) for kind, count in asdict(counts).items()}
    if options.lower:
        LIMITS.write_text(json.dumps(limits, indent=1) + "\n")
    elif wrong:
        sys.exit("\n".join(["a GPU would be asked for more than before:", *wrong]))


if __name__ == "__main__":
    main()
