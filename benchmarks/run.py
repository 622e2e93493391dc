"""Run every benchmark, collect the numbers in one file, and say which targets are met.

    python benchmarks/run.py [--json FILE] [--only SCRIPT ...] [--resume] [--repeats N] [--plots FOLDER] [--quick]

Each script runs in a process of its own, and what it measured is in the file when it ends: a script that fails, or a
run that is stopped, loses nothing of the others. `--resume` goes on with a file that was begun; `--only` measures these
scripts, anew where the file has them. `--repeats` runs each script so many times: what one process and the next differ
by is then in the numbers, too.
"""

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from typing import Any

import measure
import records
import targets

SCRIPTS = (
    "floors",
    "torch_uniform",
    "torch_prioritized",
    "torch_images",
    "torch_slices",
    "torch_hindsight",
    "torch_family",
    "torch_features",
    "meter",
    "torch_datasets",
    "exports",
    "remote",
    "durable_queue",
    "batch_sizes",
    "jit_cycle",
    "jit_slices",
    "doors",
    "mesh",
    "checkpoints",
    "cold_reads",
    "multi_step",
    "cat_frames",
    "ted",
    "maps",
    "specs",
    "text",
    "growing",
    "prefixes",
    "language",
    "first_batch",
    "scaling",
    "gpu",
)


def measured(script: str, folder: str, quick: bool) -> records.Numbers | str:
    """The numbers of one script, in a process of its own with this interpreter; or in words why there are none."""
    file = pathlib.Path(folder) / f"{script}.json"
    file.unlink(missing_ok=True)
    command = [sys.executable, str(measure.ROOT / "benchmarks" / f"{script}.py"), "--json", str(file)]
    paths = [str(measure.ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    status = subprocess.run(command + ["--quick"] * quick, env=environment, check=False).returncode
    if status:
        return f"killed by signal {-status}" if status < 0 else f"exit status {status}"
    return json.loads(file.read_text()) if file.exists() else "it wrote no numbers"


def take(script: str, results: dict[str, Any], options: argparse.Namespace) -> None:
    """Run a script and put its numbers, or why there are none, into the results."""
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(options.repeats):
            found = measured(script, folder, options.quick)
            if isinstance(found, str):
                results["failed"][script] = found
                break
            runs.append(found)
        else:
            results["failed"].pop(script, None)
    if runs:
        results["scripts"][script] = records.joined(runs)


def begun(options: argparse.Namespace) -> dict[str, Any]:
    """What the file holds already. RecordError where this run may not add to it."""
    empty = {"schema": measure.SCHEMA, "scripts": {}, "failed": {}}
    if not options.json.exists():
        return empty
    if not (options.only or options.resume):
        raise records.RecordError(f"{options.json} exists: --resume goes on with it, --only SCRIPT measures that anew")
    results = records.read(options.json)
    here = {"about": measure.about()}
    for script, numbers in results["scripts"].items():
        told = [each for each in records.differences(numbers, here) if not each.startswith("card")]
        if told:
            raise records.RecordError(f"{options.json}: {script} was measured elsewhere ({'; '.join(told)})")
    return results


def arguments() -> argparse.Namespace:
    parser = measure.arguments("Run every benchmark and say which targets are met")
    parser.add_argument("--only", nargs="+", choices=SCRIPTS, metavar="SCRIPT", help=", ".join(SCRIPTS))
    parser.add_argument("--resume", action="store_true", help="only what the file does not have yet")
    parser.add_argument("--repeats", type=int, default=1, metavar="N", help="processes for each script (1)")
    parser.add_argument("--plots", type=pathlib.Path, metavar="FOLDER", help="draw into FOLDER, if all was measured")
    options = parser.parse_args()
    if options.repeats < 1:
        parser.error(f"--repeats must be at least 1, got {options.repeats}")
    if options.json is None:
        about = measure.about()
        marks = "-changed" * about["dirty"] + "-quick" * options.quick
        name = f"{time.strftime('%Y%m%d-%H%M')}-{about['commit']}{marks}.json"
        options.json = measure.ROOT / "benchmarks" / "results" / name
    return options


def chosen(options: argparse.Namespace, results: dict[str, Any]) -> list[str]:
    scripts = options.only or [script for script in SCRIPTS if script != "gpu" or shutil.which("nvidia-smi")]
    return [script for script in scripts if not (options.resume and script in results["scripts"])]


def draw(options: argparse.Namespace, results: dict[str, Any]) -> None:
    """The plots, unless they would be of less than all."""
    missing = [script for script in SCRIPTS if script != "gpu" and script not in results["scripts"]]
    if missing or options.quick:
        print(
            f"no plots: {', '.join(missing) + ' not measured' if missing else 'small sizes'}; plots.py draws them anyway"
        )
        return
    import plots  # matplotlib is needed for nothing else

    plots.main([str(options.json), "--folder", str(options.plots)])


def main() -> int:
    options = arguments()
    try:
        results = begun(options)
    except records.RecordError as error:
        print(error, file=sys.stderr)
        return 2
    scripts = chosen(options, results)
    for script in scripts:
        take(script, results, options)
        records.write(options.json, results)
    if options.quick:
        print("\n--quick: small buffers and few rounds; the targets are meant for the full sizes")
    print(f"\n{targets.table(results)}")
    failed = [f"{script} ({results['failed'][script]})" for script in scripts if script in results["failed"]]
    print(f"\nnumbers in {options.json}" + (f"; failed: {', '.join(failed)}" if failed else ""))
    if options.plots is not None:
        draw(options, results)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
