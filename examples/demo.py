"""DQN on CartPole through both doors: `fbuf` inside one jitted scan, `interop` beside torch. Exits with 0 if both learn it.

Each door runs in its own process, so that its wall time includes everything: imports, compilation, training, tables.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

THRESHOLD = 195  # average return over 100 consecutive episodes
DOORS = {"fbuf": "dqn_jax.py", "interop": "dqn_torch.py"}


def run(script: str, options: argparse.Namespace) -> dict[str, Any]:
    """The results of one example and its wall time; no "average" if it failed."""
    with tempfile.TemporaryDirectory() as folder:
        numbers = pathlib.Path(folder) / "numbers.json"
        plot = options.out / pathlib.Path(script).with_suffix(".png").name
        command = [sys.executable, str(pathlib.Path(__file__).with_name(script)), f"--json={numbers}", f"--plot={plot}"]
        command += [f"--seed={options.seed}", f"--threshold={THRESHOLD}"]
        command += ["--smoke"] * options.smoke + ["--quiet"] * options.quiet
        begin = time.perf_counter()
        status = subprocess.run(command, check=False).returncode
        result = json.loads(numbers.read_text()) if numbers.exists() else {}
        return {**result, "status": status, "wall_seconds": time.perf_counter() - begin}


def verdict(door: str, result: dict[str, Any], smoke: bool) -> tuple[bool, str]:
    """Whether the example passed, and its line of the table."""
    if "average" not in result:
        return False, f"{door:<8} broke, exit status {result['status']}, {result['wall_seconds']:.0f} s  FAIL"
    if smoke:
        return result["status"] == 0, f"{door:<8} {result['total_steps']:,} steps, {result['wall_seconds']:.0f} s"
    passed = result["status"] == 0 and result["average"] >= THRESHOLD
    line = (
        f"{door:<8} average over 100 consecutive episodes {result['average']:.1f} of {THRESHOLD}, "
        f"{result['steps']:,} steps, {result['wall_seconds']:.0f} s"
    )
    return passed, f"{line}  {'PASS' if passed else 'FAIL'}"


def main(argv: Sequence[str] | None = None) -> dict[str, dict[str, Any]]:
    """Run the examples one after the other. Returns their results, "passed" included."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of both examples")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("out"), help="folder of the learning curves")
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    parser.add_argument(
        "--smoke", action="store_true", help="some hundred steps without a threshold, to see that they run"
    )
    options = parser.parse_args(argv)
    results, lines = {}, []
    for door, script in DOORS.items():
        print(f"\n{door}: {script}", flush=True)
        result = run(script, options)
        passed, line = verdict(door, result, options.smoke)
        results[door] = {**result, "passed": passed}
        lines.append(line)
    print("\n" + "\n".join(lines))
    return results


if __name__ == "__main__":
    sys.exit(0 if all(result["passed"] for result in main().values()) else 1)
