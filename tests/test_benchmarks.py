"""The benchmark tooling: what is kept of a measurement, what counts as slower, which targets are met, what is drawn."""

import copy
import json
import pathlib
import sys
from typing import Any

import compare
import gpu_trees
import jax
import jax.numpy as jnp
import measure
import numpy as np
import plain
import plots
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


def test_a_line_without_a_rival_is_measured_beside_the_yardstick():
    timing = measure.compare("a line", {"ours": lambda: None}, quick=True)
    assert set(timing.rounds) == {"ours", measure.YARDSTICK}
    assert set(timing.us) == {"ours"}
    assert timing.ratio == {}


def test_the_same_numbers_are_no_change(tmp_path, capsys):
    assert status(tmp_path, results(100), results(100)) == 0
    assert "0 slower, 0 unclear, 0 faster, 2 same" in capsys.readouterr().out


@pytest.mark.parametrize("seed", range(1, 9))
def test_noise_and_drift_are_no_change(tmp_path, seed):
    drifted = results(100, seed=seed, drift=1.5, noise=0.2)
    assert status(tmp_path, results(100, noise=0.2), drifted) == 0


@pytest.mark.parametrize("drift", [0.7, 1.0, 1.5])
def test_what_takes_half_as_long_again_is_slower(tmp_path, capsys, drift):
    assert status(tmp_path, results(100), results(150, seed=1, drift=drift)) == 1
    told = capsys.readouterr().out
    assert "slower:" in told
    assert EXTEND in told
    assert "2 slower" in told


def test_what_takes_a_third_less_is_faster(tmp_path, capsys):
    assert status(tmp_path, results(150), results(100, seed=1)) == 0
    assert "2 faster" in capsys.readouterr().out


def test_less_than_the_least_effect_is_the_same(tmp_path, capsys):
    assert status(tmp_path, results(100, noise=0.001), results(105, seed=1, noise=0.001)) == 0
    assert "2 same" in capsys.readouterr().out
    assert status(tmp_path, results(100, noise=0.001), results(140, seed=1, noise=0.001), "--least", "0.5") == 0


def test_more_runs_tell_smaller_changes(tmp_path):
    def runs(ours: float, first: int) -> Results:
        several = [results(ours, seed=seed)["scripts"]["torch_uniform"] for seed in range(first, first + 8)]
        return results(ours) | {"scripts": {"torch_uniform": records.joined(several)}}

    assert status(tmp_path, results(100), results(115, seed=1)) == 0
    assert status(tmp_path, runs(100, 0), runs(115, 8)) == 1


def test_a_change_of_one_rival_does_not_hide_in_another(tmp_path):
    """The steadiest rival is the measure; one that is not in both files is none."""
    assert status(tmp_path, results(100), results(150, seed=1, rivals=2)) == 1
    assert status(tmp_path, results(100, rivals=0), results(150, seed=1)) == 1


def test_another_form_of_ours_is_no_measure(tmp_path, capsys):
    old, new = (
        made_of({"gpu": [_timing("cycle", {"ours": [us] * 9, "ours, calls": [us] * 9})]}, {}) for us in (100.0, 300.0)
    )
    assert status(tmp_path, old, new) == 1
    assert "by its time alone" in capsys.readouterr().out


def test_a_time_alone_may_drift(tmp_path):
    old, drifted = (made_of({"scaling": [_timing("sample", {"ours": [us] * 9})]}, {}) for us in (100.0, 150.0))
    assert status(tmp_path, old, drifted) == 0


def test_lines_in_one_file_only_are_named(tmp_path, capsys):
    fewer = results(100)
    fewer["scripts"]["torch_uniform"]["timings"].pop()
    fewer["failed"]["ted"] = "exit status 1"
    assert status(tmp_path, results(100), fewer) == 0
    told = capsys.readouterr().out
    assert "alone: only in the old file" in told
    assert "ted: failed in the new file (exit status 1)" in told
    nothing = results(100) | {"scripts": {}}
    assert status(tmp_path, results(100), nothing) == 2


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


@pytest.mark.parametrize("text", ["{", '{"schema": 0}', "[]", '{"torch_uniform": {}}'])
def test_files_that_are_no_results_are_refused(tmp_path, capsys, text):
    (tmp_path / "bad.json").write_text(text)
    assert compare.main([str(tmp_path / "bad.json"), str(tmp_path / "bad.json")]) == 2
    assert "bad.json" in capsys.readouterr().err
    with pytest.raises(records.RecordError, match="is not there"):
        records.read(tmp_path / "none.json")


def test_spreads_are_quartiles_over_all_runs():
    lines = [_timing("a line", {"ours": [first, 20.0], "torchrl": [40.0, 40.0]}).record() for first in (10.0, 30.0)]
    about: Results = {"about": {}, "values": {}}
    line = records.joined([about | {"timings": [each]} for each in lines])["timings"][0]
    assert line["us_spread"]["ours"] == pytest.approx([17.5, 22.5])
    assert line["ratio_spread"]["torchrl"] == pytest.approx([40 / 22.5, 40 / 17.5], rel=0.1)
    assert line["rounds"]["ours"] == [[10, 20], [30, 20]]


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


def test_cpprb_stands_in_and_an_estimate_is_called_one():
    cycle = "extend + sample + update, batch 256"
    uniform = _timing("LazyTensorStorage, sample 256", {"ours": [100.0], "torchrl": [200.0]})
    made = made_of(
        {"torch_uniform": [uniform], "torch_prioritized": [_timing(cycle, {"ours": [300.0], "cpprb": [390.0]})]}, {}
    )
    rows = [line for line in targets.table(made).splitlines() if cycle in line]
    assert "1.30  MISSED (cpprb / ours, cpprb stands in)" in rows[0]
    assert "2.97  met (torchrl by estimate" in rows[1]


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


def test_what_was_measured_on_a_busy_machine_is_called_that(tmp_path, capsys):
    assert records.disturbed(results(100)) == []
    busy = results(100)
    busy["scripts"]["torch_uniform"]["about"] = busy["scripts"]["torch_uniform"]["about"] | {
        "cores used by others": 1.5
    }
    assert "not to be believed: torch_uniform (1.5 cores)" in targets.table(busy)
    assert status(tmp_path, results(100), busy) == 0
    assert "new.json: measured while others used the machine" in capsys.readouterr().err


def test_plots_are_the_same_for_the_same_numbers(tmp_path, capsys):
    made = results(100)
    growing = [_timing(f"sample 256, {10**k} items", {"ours": [100.0 * k]}) for k in (4, 5)]
    batches = [_timing(f"cycle, batch {n}", {"ours": [100.0 + n], "NumPy": [90.0 + n]}) for n in (16, 64)]
    made["scripts"] |= made_of({"scaling": growing, "batch_sizes": batches}, {})["scripts"]
    records.write(tmp_path / "results.json", made)
    for folder in ("one", "other"):
        assert plots.main([str(tmp_path / "results.json"), "--folder", str(tmp_path / folder)]) == 0
    for name in plots.PLOTS:
        one, other = ((tmp_path / folder / f"{name}.svg").read_bytes() for folder in ("one", "other"))
        assert one == other
        assert b"<svg" in one
    del made["scripts"]["scaling"]
    records.write(tmp_path / "results.json", made)
    capsys.readouterr()
    assert plots.main([str(tmp_path / "results.json"), "--folder", str(tmp_path / "one")]) == 0
    assert "growth: " in capsys.readouterr().out


@pytest.mark.parametrize("kind", [plain.Numpy, plain.PrioritizedNumpy, plain.Torch, plain.PrioritizedTorch])
def test_plain_rings_write_in_order_and_draw_what_they_hold(kind):
    import torch

    by_torch = issubclass(kind, plain.Torch)
    numbers = torch.arange(10.0) if by_torch else np.arange(10.0)
    ring = kind({"x": numbers}, 4, *((0.6, 0.4) if "Prioritized" in kind.__name__ else ()))
    assert list(map(int, ring.extend({"x": numbers[5:8]}))) == [0, 1, 2]
    assert ring.add({"x": numbers[9]}) == 3
    assert int(ring.extend({"x": numbers[1:2]})[0]) == 0
    drawn = ring.sample(400)
    assert set(map(float, drawn["x"])) == {1.0, 6.0, 7.0, 9.0}
    if "Prioritized" in kind.__name__:
        only = torch.tensor([2]) if by_torch else np.array([2])
        others = torch.tensor([0, 1, 3]) if by_torch else np.array([0, 1, 3])
        ring.update(others, numbers[:1] * 0 + 1e-12)
        ring.update(only, numbers[4:5])
        drawn = ring.sample(100)
        assert set(map(float, drawn["x"])) == {7.0}
        assert float(max(drawn["weight"])) <= 1


@pytest.mark.parametrize("way", [gpu_trees.FanOut(16), gpu_trees.BlockSums(32)], ids=repr)
def test_other_trees_find_what_a_running_sum_does(way):
    draw = np.random.default_rng(0)
    values = draw.integers(0, 5, 600).astype(np.float32)
    slots = draw.permutation(600)[:64].astype(np.int32)
    new = draw.integers(0, 9, 64).astype(np.float32)
    after = values.copy()
    after[slots] = new
    masses = draw.integers(0, int(after.sum()), 256).astype(np.float32) + np.float32(0.5)
    found = jax.jit(lambda: way.find(way.update(way.of(jnp.asarray(values)), slots, new), masses))()
    np.testing.assert_array_equal(found, np.searchsorted(np.cumsum(after), masses, side="right"))
