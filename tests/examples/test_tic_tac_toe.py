"""The search on tic-tac-toe, shortened; its rules and its memory."""

import pytest

from tests.examples.test_examples import load


@pytest.fixture(scope="module")
def example():
    return load("tic_tac_toe")


def test_a_short_run_plays_a_match_and_draws_the_tree(example, capsys, tmp_path):
    result = example.main(["--quick", "--plot", str(tmp_path / "tree.png")])
    assert result["passed"] is None
    assert result["won"] + result["drawn"] + result["lost"] == 6
    assert result["simulations"] > 300
    text = capsys.readouterr().out.splitlines()
    assert len(text) == 10  # the first moves, and the result
    assert text[4].startswith("(4,)")
    assert (tmp_path / "tree.png").stat().st_size > 1000


def test_games_end_where_they_do(example):
    assert example.outcome((1, 1, 1, -1, -1, 0, 0, 0, 0)) == 1
    assert example.outcome((1, 1, 0, -1, -1, -1, 1, 0, 0)) == -1
    assert example.outcome((1, -1, 1, 1, -1, -1, -1, 1, 1)) == 0
    assert example.outcome((0,) * 9) is None


def test_the_search_sees_a_win_and_a_threat(example):
    search = example.Search(1.0, 0)
    assert search.move((1, 1, 0, -1, -1, 0, 0, 0, 0), 60) == 2
    assert search.move((1, 0, 0, -1, -1, 0, 1, 0, 0), 100) == 5  # noughts would win there
    tried, visits, _ = search.known((1, 1, 0, -1, -1, 0, 0, 0, 0))
    assert sorted(tried.tolist()) == [2, 5, 6, 7, 8]
    assert visits.sum() == 60
