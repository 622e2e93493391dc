"""Every sampler and writer with lanes, trajectories and frames: they work together, or are refused where they are joined."""

from pathlib import Path

import pytest

from fbuf import Slices
from tests.fbuf.every_pair import CELLS, SAMPLERS, Cell, joined, mixed, mixtures, outcome, run_mixture, table

PAGE = (Path(__file__).parents[2] / "docs" / "lookup" / "pairs.md").read_text()
KNOWS, FRAMES = "trajectories", "trajectories and frames"
ONE_OF_EACH = [  # each rule in some cell, alone or within another
    Cell("Uniform", "RoundRobin", (2,), FRAMES),
    Cell("Prioritized", "HighestRanked", (), ""),
    Cell("Shuffled", "RoundRobin", (), ""),
    Cell("Fifo", "RoundRobin", (2,), KNOWS),
    Cell("Slices(starts=Prioritized)", "RoundRobin", (), KNOWS),
    Cell("Slices(starts=PerTrajectory)", "RoundRobin", (2,), KNOWS),
    Cell("Slices(starts=PerTrajectory(Shuffled))", "RoundRobin", (), KNOWS),
    Cell("Slices(least=1), n-step windows", "RoundRobin", (2,), KNOWS),
]


def is_refused(cell: Cell) -> bool:
    """What needs to know where trajectories end, or the order of a ring, is not joined with what does not have that."""
    knows = cell.known in (KNOWS, FRAMES)
    sampler = SAMPLERS[cell.sampler]
    unknown = not knows and (isinstance(sampler, Slices) or "frames" in cell.known)
    unordered = knows or bool(cell.lanes) or sampler.needs_order
    return unknown or (cell.writer == "HighestRanked" and unordered)


def test_what_does_not_go_together_is_refused_where_it_is_joined() -> None:
    found = {cell: joined(cell) for cell in CELLS}
    assert {cell for cell in CELLS if found[cell][1]} == {cell for cell in CELLS if is_refused(cell)}
    assert {what for what, words in found.values() if words} == {"ValueError"}


@pytest.mark.parametrize("cell", ONE_OF_EACH, ids=str)
def test_a_buffer_of_each_kind_gives_what_was_written(cell: Cell) -> None:
    assert outcome(cell) == ("works", "")


def test_each_sampler_is_among_them() -> None:
    within = {"Slices(starts=Uniform)", "Slices(starts=Shuffled)"}  # n-step windows, and those a trajectory
    assert {cell.sampler for cell in ONE_OF_EACH} == set(SAMPLERS) - within


@pytest.mark.slow
@pytest.mark.parametrize("cell", [cell for cell in CELLS if not is_refused(cell)], ids=str)
def test_every_buffer_gives_what_was_written(cell: Cell) -> None:
    assert outcome(cell) == ("works", "")


def test_mixtures_refuse_to_draw_members_whose_items_would_be_lost() -> None:
    once = {"Shuffled", "Fifo", "Slices(starts=Shuffled)", "Slices(starts=PerTrajectory(Shuffled))"}
    assert {name for name in SAMPLERS if mixed(name, drawn=True)[1]} == once
    assert not [name for name in SAMPLERS if mixed(name, drawn=False)[1]]


@pytest.mark.slow
@pytest.mark.parametrize(("names", "drawn"), mixtures(), ids=str)
def test_a_mixture_of_all_samplers_gives_what_was_written(names: tuple[str, ...], drawn: bool) -> None:
    run_mixture(names, drawn)


def test_the_table_in_the_documents_is_this_one() -> None:
    assert PAGE.endswith(f"\n{table(run=False)}\n"), "run `python -m tests.interop.every_pair > docs/lookup/pairs.md`"
