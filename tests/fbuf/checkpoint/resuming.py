"""Goes on from saved states in a process of its own: `python resuming.py FOLDER SEED`. Prints what was drawn."""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from fbuf import Buffer, load_state, save_state
from tests.fbuf.checkpoint.test_pytrees import _bits, _run
from tests.fbuf.every_pair import LANES, SAMPLERS, Cell, _init, build

TURNS = 50


def buffers() -> dict[str, Buffer]:
    """One of each sampler, by the name of a folder."""
    known = {name: "trajectories" if "Slices" in name else "" for name in SAMPLERS}
    return {f"s{place}": build(Cell(name, "RoundRobin", (LANES,), known[name])) for place, name in enumerate(SAMPLERS)}


def went_on(buffer: Buffer, state: Any) -> str:
    """A digest of all that is drawn and stored in turns of writes, priorities and draws."""
    return hashlib.sha256(repr(_bits(_run(buffer, state, 300, TURNS))).encode()).hexdigest()


def save(folder: Path) -> dict[str, str]:
    """Save a state of each, and go on."""
    told = {}
    for name, buffer in buffers().items():
        state, _ = _run(buffer, _init(buffer), 0, 4)
        save_state(folder / name, state)
        told[name] = went_on(buffer, state)
    return told


if __name__ == "__main__":
    np.random.seed(int(sys.argv[2]))
    print(
        json.dumps(
            {name: went_on(each, load_state(Path(sys.argv[1], name), _init(each))) for name, each in buffers().items()}
        )
    )
