"""Monte Carlo tree search with a forest as its memory, on tic-tac-toe, until it does not lose to a random player.

Each simulation (UCT, Kocsis & Szepesvari 2006) descends the boards of the forest, tries one new move, plays
randomly to the end of the game, and writes its steps with their new visits and wins. The forest holds the last result of
each pair of board and move, so a board that is reached in several ways has one entry.
"""

import argparse
import copy
import json
import math
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from interop import MCTSForest, Tree

LINES = [(0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6)]
PAIRS = 16_167  # of a board that can be met and a move
POINTS = 9  # of the curve, at each of which a copy of the search plays games with one simulation a move
Board = tuple[int, ...]  # of nine cells: 1 for crosses, -1 for noughts, 0 where none is


def mover(board: Board) -> int:
    """The player whose turn it is; crosses begin."""
    return 1 if sum(board) == 0 else -1


def moves(board: Board) -> list[int]:
    """The free cells."""
    return [cell for cell, mark in enumerate(board) if not mark]


def play(board: Board, move: int) -> Board:
    return (*board[:move], mover(board), *board[move + 1 :])


def outcome(board: Board) -> int | None:
    """1 or -1 for the winner, 0 for a draw, None for an unfinished game."""
    for line in LINES:
        if abs(total := sum(board[cell] for cell in line)) == 3:
            return total // 3
    return None if 0 in board else 0


class Search:
    """The forest, and the simulations that fill it.

    Args:
        exploration: the constant of UCT.
        seed: of the random moves.
    """

    def __init__(self, exploration: float, seed: int) -> None:
        self.exploration, self.rng = exploration, np.random.default_rng(seed)
        self.forest = MCTSForest(max_size=PAIRS)
        self.simulations = 0

    def known(self, board: Board) -> tuple[Tensor, Tensor, Tensor]:
        """The tried moves of a board, their visits, and the sums of their results for the mover."""
        key = observed(board)
        if not len(self.forest) or key not in self.forest.node_map:
            return torch.empty(0, dtype=torch.int64), torch.empty(0), torch.empty(0)
        steps = self.forest.data_map.storage.get(self.forest.node_map[key]["_index"])
        return steps["action"], steps["next", "visits"], steps["next", "wins"]

    def simulate(self, board: Board) -> None:
        """One simulation from a board."""
        path: list[tuple[Board, int, float, float]] = []  # board, move, visits and wins so far
        while outcome(board) is None:
            tried, visits, wins = self.known(board)
            untried = set(moves(board)) - set(tried.tolist())
            if untried:
                path.append((board, int(self.rng.choice(sorted(untried))), 0.0, 0.0))
                board = play(*path[-1][:2])
                break
            score = wins / visits + self.exploration * torch.sqrt(math.log(float(visits.sum())) / visits)
            best = int(score.argmax())
            path.append((board, int(tried[best]), float(visits[best]), float(wins[best])))
            board = play(*path[-1][:2])
        while (result := outcome(board)) is None:
            board = play(board, int(self.rng.choice(moves(board))))
        self.forest.extend(steps_of(path, result))
        self.simulations += 1

    def move(self, board: Board, simulations: int) -> int:
        """The most visited move, after some more simulations."""
        for _ in range(simulations):
            self.simulate(board)
        tried, visits, _ = self.known(board)
        return int(tried[visits.argmax()])


def observed(board: Board) -> TensorDict:
    return TensorDict({"observation": torch.tensor(board, dtype=torch.int8)})


def steps_of(path: list[tuple[Board, int, float, float]], result: int) -> TensorDict:
    """The steps of a simulation, [steps], each with one more visit and the result added to the wins of the mover."""
    boards = torch.tensor([board for board, *_ in path], dtype=torch.int8)
    after = [play(board, move) for board, move, *_ in path]
    done = torch.tensor([outcome(board) is not None for board in after])[:, None]
    reward = torch.tensor([float(outcome(board) or 0) for board in after])[:, None]
    visits = torch.tensor([visits + 1 for *_, visits, _ in path])
    wins = torch.tensor([wins + result * mover(board) for board, *_, wins in path])
    ends = {"reward": reward, "done": done, "terminated": done.clone()}
    return TensorDict(
        {"observation": boards, "action": torch.tensor([move for _, move, *_ in path])}
        | {"next": {"observation": torch.tensor(after, dtype=torch.int8), "visits": visits, "wins": wins, **ends}},
        batch_size=[len(path)],
    )


def match(search: Search, games: int, simulations: int, rng: np.random.Generator) -> dict[str, int]:
    """Games against a random player, the search beginning in every other one."""
    results = {"won": 0, "drawn": 0, "lost": 0}
    for game in range(games):
        board, side = (0,) * 9, 1 if game % 2 == 0 else -1
        while (result := outcome(board)) is None:
            is_ours = mover(board) == side
            board = play(board, search.move(board, simulations) if is_ours else int(rng.choice(moves(board))))
        results[("drawn", "won", "lost")[result * side]] += 1
    return results


def drawn(vertex: Tree) -> str:
    """A board in one line, with the statistics of the move to it."""
    cells = "".join("o.x"[mark + 1] for mark in vertex.node_observation.tolist())
    last = vertex.rollout[-1]["next"]
    return (
        f"{cells[:3]}/{cells[3:6]}/{cells[6:]}  visits {last['visits']:.0f}, won {last['wins'] / last['visits']:+.2f}"
    )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--simulations", type=int, default=20_000, help="from the empty board, before the match")
    parser.add_argument("--games", type=int, default=200, help="of the match, half of them begun by the search")
    parser.add_argument("--thinking", type=int, default=20, help="simulations before each move of the match")
    parser.add_argument("--exploration", type=float, default=1.0, help="the constant of UCT")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--plot", type=pathlib.Path, metavar="FILE", help="draw the first two moves to an .html or image"
    )
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="also write the numbers to FILE")
    parser.add_argument("--quick", action="store_true", help="few simulations and games, to see that it runs")
    options = parser.parse_args(argv)
    if options.quick:
        options.simulations, options.games, options.thinking = 300, 6, 20
    return options


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Search, play the match, print the statistics. Returns the results; "passed" is None for a quick run."""
    options = parse(argv)
    torch.set_num_threads(1)
    search = Search(options.exploration, options.seed)
    points = np.geomspace(100, options.simulations, POINTS).astype(int).tolist()
    seconds, tried = 0.0, []
    for until in points:
        begin = time.perf_counter()
        while search.simulations < until:
            search.simulate((0,) * 9)
        seconds += time.perf_counter() - begin
        tried.append(match(copy.deepcopy(search), options.games, 1, np.random.default_rng(options.seed + 2)))
    results = match(search, options.games, options.thinking, np.random.default_rng(options.seed + 1))
    tree = search.forest.get_tree(observed((0,) * 9), max_depth=0, compact=False)
    print(tree.to_string(drawn))
    if options.plot is not None:
        backend = "plotly" if options.plot.suffix == ".html" else "matplotlib"
        tree.plot(backend, make_labels=lambda vertex, path: drawn(vertex) if path else "start", path=str(options.plot))
    result = {**results, "simulations": search.simulations, "pairs": len(search.forest), "seconds": seconds}
    result["curve"] = {
        name: [points, [each[name] / options.games for each in tried]] for name in ("won", "drawn", "lost")
    }
    result["passed"] = None if options.quick else results["lost"] == 0
    print(
        f"{search.simulations:,} simulations, {len(search.forest):,} pairs, {seconds:.0f} s before the match: "
        f"{results['won']} won, {results['drawn']} drawn, {results['lost']} lost against a random player"
    )
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))
    return result


if __name__ == "__main__":
    sys.exit(1 if main()["passed"] is False else 0)
