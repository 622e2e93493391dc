"""What the plots of the README say: works in words, a colour for each rival, equal files for equal results."""

import pathlib
import re

import measure
import pytest
import targets

pytest.importorskip("matplotlib")

import plots

RESULTS = sorted((measure.ROOT / "benchmarks" / "results").glob("*.json"))[-1]
SHOWN = [target for target in targets.TARGETS if target.rivals and target.estimate is None]


@pytest.mark.parametrize("target", SHOWN, ids=lambda target: f"{target.script}: {target.name}")
def test_a_bar_is_named_by_its_work(target: targets.Target) -> None:
    heading, _ = plots.WORKS[target.script]
    for shown in (heading, plots.work(target.script, target.name)):
        assert not re.search(r"_|\[|Storage|\d{5}", shown)


def test_each_line_that_is_named_is_a_target() -> None:
    lines = {(target.script, target.name) for target in SHOWN}
    assert [
        (script, name) for script, (_, names) in plots.WORKS.items() for name in names if (script, name) not in lines
    ] == []


def test_each_rival_has_a_colour_of_its_own() -> None:
    rivals = {rival for target in SHOWN for rival in target.rivals}
    assert rivals <= set(plots.COLOURS) and len(set(plots.COLOURS.values())) == len(plots.COLOURS)
    assert plots.WANTED not in {plots.COLOURS[rival] for rival in rivals}


@pytest.mark.parametrize("colour", [plots.GREY])
def test_text_is_readable_on_white_and_on_dark(colour: str) -> None:
    """The contrast of WCAG 2, section 1.4.3: 4.5 for small text; 4.2 is what one grey reaches on both."""

    def luminance(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for page in ("#ffffff", "#0d1117"):
        low, high = sorted((luminance(colour), luminance(page)))
        assert (high + 0.05) / (low + 0.05) > 4.2


def test_the_plots_are_those_of_the_results(tmp_path: pathlib.Path) -> None:
    """They are drawn, with titles and axes, and the same bytes twice."""
    for folder in (tmp_path / "one", tmp_path / "two"):
        assert plots.main([str(RESULTS), "--folder", str(folder)]) == 0
    for name in plots.PLOTS:
        assert (tmp_path / "one" / f"{name}.svg").read_bytes() == (tmp_path / "two" / f"{name}.svg").read_bytes()
