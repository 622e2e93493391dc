"""Streams of vectorized environments through everything that joins rows (T1), held to their known episodes."""

import random

from tests.faults.counts import Counts
from tests.interop.streams import COMBINATIONS
from tests.interop.test_one_rule import check_batches
from tests.interop.test_trajectory_oracle import (
    NOT_BY_TURNS,
    ONE_DIM,
    check_functional,
    check_goals,
    check_trajectories,
    check_windows,
)

CHECKS = {"windows": check_windows, "goals": check_goals, "functional": check_functional, "batches": check_batches}


def streams(size: int) -> Counts:
    """`size` random streams, each through one consumer."""
    counts, choose = Counts(), random.Random(size)
    for seed in range(size):
        name = choose.choice(["trajectories", "windows", "goals", "batches"])
        name = "functional" if seed % 50 == 0 else name  # compiles programs
        kind = choose.choice(["memory", "memory", "files", "lists"]) if name == "trajectories" else "memory"
        among = NOT_BY_TURNS if name == "functional" else ONE_DIM if kind == "lists" else COMBINATIONS
        layout, marks = choose.choice(among)
        try:
            if name == "trajectories":
                check_trajectories(kind, layout, marks, seed)
            else:
                CHECKS[name](layout, marks, seed)
            outcome = name
        except Exception as error:
            outcome = f"{type(error).__name__}: {error}"
        counts.note(outcome, {name}, f"{name} of {kind}, {layout}, {marks}, seed {seed}")
    return counts
