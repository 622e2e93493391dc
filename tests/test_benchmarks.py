"""The benchmark tooling: what is kept of a measurement, what counts as slower, which targets are met, what is drawn."""

import copy
import json
import pathlib
import sys
from typing import Any

import compare
import measure
import numpy as np
import pytest
import records
import run
import targets

BENCHMARKS = pathlib.Path(__file__).parents[1] / "benchmarks"
Results = dict[str, Any]
EXTEND = "LazyTensorStorage, extend 256"


def results(ours: float, *, seed: int = 0, drift: float = 1.0, noise: float = 0.05, rivals: int = 1) -> Results:
    """Made up: a line of one script with rivals at 200 us (times a drift that all meet), one with a yardstick."""
    draw = np.random.default_rng(seed)

    def rounds(us: float) -> list[float]:
        return list(us * drift * np.exp(draw.normal(0, noise, 41)))

    with_rival = {measure.OURS: rounds(ours)} | {name: rounds(200.0) for name in ("torchrl", "NumPy")[:rivals]}
    alone = {measure.OURS: rounds(2 * ours), measure.YARDSTICK: rounds(30.0)}
    timings = [_timing(EXTEND, with_rival), _timing("alone", alone)]
    return made_of({"torch_uniform": timings}, {})


def _timing(name: str, rounds: dict[str, list[float]]) -> measure.Timing:
    return measure.of_rounds(name, {who: [us / measure.MICROSECOND for us in each] for who, each in rounds.items()})


def made_of(scripts: dict[str, list[measure.Timing]], values: dict[str, float]) -> Results:
    about = {"machine": "a machine", "python": "3.12", "versions": {"jax": "1"}, "torch threads": "2", "quick": False}
    parts = {
        script: {"about": about, "timings": [timing.record() for timing in timings], "values": values}
        for script, timings in scripts.items()
    }
    return {"schema": measure.SCHEMA, "scripts": {name: records.joined([part]) for name, part in parts.items()}} | {
        "failed": {}
    }


def status(folder: pathlib.Path, old: Results, new: Results, *options: str) -> int:
    for name, each in (("old", old), ("new", new)):
        records.write(folder / f"{name}.json", each)
    return compare.main([str(folder / "old.json"), str(folder / "new.json"), *options])


def test_a_measurement_keeps_its_rounds():
    timing = measure.compare(
        "a line", {"ours": lambda: sum(range(100)), "rival": lambda: sum(range(10_000))}, quick=True
    )
    assert timing.ratio["rival"] > 5
    assert set(timing.rounds) == {"ours", "rival"}
    assert len(timing.rounds["ours"]) == len(timing.rounds["rival"]) >= 5
    assert measure.Timing.of(timing.record(), "another name").us == timing.record()["us"]


def test_the_same_numbers_are_no_change(tmp_path, capsys):
    assert status(tmp_path, results(100), results(100)) == 0
    assert "0 slower, 0 unclear, 0 faster, 2 same" in capsys.readouterr().out


@pytest.mark.parametrize("seed", range(1, 4))
def test_noise_and_drift_are_no_change(tmp_path, seed):
    drifted = results(100, seed=seed, drift=1.5, noise=0.2)
    assert status(tmp_path, results(100, noise=0.2), drifted) == 0


@pytest.mark.parametrize("drift", [0.7, 1.5])
def test_what_takes_half_as_long_again_is_slower(tmp_path, capsys, drift):
    assert status(tmp_path, results(100), results(150, seed=1, drift=drift)) == 1
    told = capsys.readouterr().out
    assert "slower:" in told
    assert EXTEND in told
    assert "2 slower" in told


@pytest.mark.parametrize(
    ("what", "value"), [("machine", "another"), ("python", "3.13"), ("quick", True), ("versions", {"jax": "2"})]
)
def test_other_ground_is_refused_and_named(tmp_path, capsys, what, value):
    other = results(100)
    other["scripts"]["torch_uniform"]["about"] = other["scripts"]["torch_uniform"]["about"] | {what: value}
    assert status(tmp_path, results(100), other) == 2
    told = capsys.readouterr().err
    assert ("jax: 1 and 2" if what == "versions" else f"{what}: ") in told
    assert status(tmp_path, results(100), other, "--anyway") == 0


def test_a_target_that_is_not_met_any_more_fails(tmp_path, capsys):
    old, new = (results(100) for _ in range(2))
    for each, value in ((old, 1.0), (new, 2.0)):
        each["scripts"]["scaling"] = copy.deepcopy(each["scripts"]["torch_uniform"]) | {"timings": []}
        each["scripts"]["scaling"]["values"] = {"traces": value}
    assert status(tmp_path, old, new) == 1
    assert "scaling: traces: 1, now 2" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["{", '{"schema": 0}'])
def test_files_that_are_no_results_are_refused(tmp_path, capsys, text):
    (tmp_path / "bad.json").write_text(text)
    assert compare.main([str(tmp_path / "bad.json"), str(tmp_path / "bad.json")]) == 2
    assert "bad.json" in capsys.readouterr().err
    with pytest.raises(records.RecordError, match="is not there"):
        records.read(tmp_path / "none.json")


def test_targets_say_what_they_were_measured_against():
    table = targets.table(results(80))
    row = next(line for line in table.splitlines() if EXTEND in line)
    assert "2.5" in row
    assert row.endswith("met (torchrl / ours)")
    absent = results(80, rivals=0)
    assert "not measured: torchrl was not there" in targets.table(absent)
    absent["failed"]["ted"] = "exit status 1"
    assert "not measured: ted failed" in targets.table(absent)
    assert "not measured: jit_cycle was not run" in targets.table(absent)


@pytest.mark.parametrize("script", sorted({target.script for target in targets.TARGETS}))
def test_targets_are_of_scripts_that_run(script):
    assert script in run.SCRIPTS
    assert (BENCHMARKS / f"{script}.py").exists()


def test_a_run_keeps_what_worked_and_goes_on(tmp_path, monkeypatch, capsys):
    part = results(100)["scripts"]["torch_uniform"] | {"about": measure.about()}
    found: dict[str, Any] = {"floors": part, "ted": "exit status 1", "scaling": part}
    asked: list[str] = []

    def measured(script: str, folder: str, quick: bool) -> Any:
        asked.append(script)
        return found[script]

    monkeypatch.setattr(run, "measured", measured)
    file = tmp_path / "results.json"

    def main(*options: str) -> int:
        monkeypatch.setattr(sys, "argv", ["run.py", "--json", str(file), *options])
        return run.main()

    assert main("--only", "floors", "ted", "scaling") == 1
    kept = json.loads(file.read_text())
    assert list(kept["scripts"]) == ["floors", "scaling"]
    assert kept["failed"] == {"ted": "exit status 1"}
    assert main() == 2
    assert "exists: --resume" in capsys.readouterr().err
    asked.clear()
    found["ted"] = part
    assert main("--resume", "--only", "floors", "ted", "--repeats", "2") == 0
    assert asked == ["ted", "ted"]
    kept = json.loads(file.read_text())
    assert kept["failed"] == {}
    assert len(kept["scripts"]["ted"]["timings"][0]["rounds"]["ours"]) == 2
    elsewhere = part | {"about": part["about"] | {"machine": "another"}}
    records.write(file, kept | {"scripts": kept["scripts"] | {"ted": elsewhere}})
    assert main("--resume") == 2
    assert "ted was measured elsewhere (machine: another" in capsys.readouterr().err
