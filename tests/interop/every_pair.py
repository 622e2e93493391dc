"""Which storages, samplers and writers go together: runs the history of every pair.

`python -m tests.interop.every_pair > docs/lookup/pairs.md` writes the table.
"""

import functools
import warnings

from tests.fbuf import every_pair as core
from tests.interop.pair_history import BUFFERS, LAYOUTS, LISTS, SAMPLERS, WRITERS, Cell, History


@functools.cache
def outcome(cell: Cell, run: bool = True) -> tuple[str, str]:
    """ "works" or "reads" and an empty text; or type and text of the error if the parts are refused.

    Without `run` the buffer is only constructed.
    """
    try:
        history = History(cell)
    except (TypeError, ValueError, RuntimeError) as error:
        return type(error).__name__, str(error)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return history.run() if run else "reads" if cell.writer == "ImmutableDatasetWriter" else "works", ""


# ------------------------------------------------------------------ the table


def table(run: bool = True) -> str:
    """The pairs in Markdown."""
    notes: dict[str, int] = {}
    lines = []
    for writer in WRITERS:
        lines += [f"### {writer}", "", "| | " + " | ".join(SAMPLERS) + " |"]
        lines += ["|---" * (len(SAMPLERS) + 1) + "|"]
        for storage, ndim in LAYOUTS:
            found = [_entry(Cell(storage, ndim, sampler, writer, ""), notes, run) for sampler in SAMPLERS]
            name = storage if storage in LISTS else f"{storage}, ndim={ndim}"
            lines.append(f"| {name} | {' | '.join(found)} |")
        lines.append("")
    lines += [f"{number}. `{note}`" for note, number in notes.items()]
    return "\n".join(lines)


def _entry(cell: Cell, notes: dict[str, int], run: bool) -> str:
    found = {outcome(cell._replace(buffer=buffer), run) for buffer in BUFFERS}
    assert len(found) == 1, f"{cell}: the buffers differ: {found}"
    what, words = found.pop()
    if not words:
        return what
    note = f"{what}: {words.split(': ')[0]}"
    return f"no ({notes.setdefault(note, len(notes) + 1)})"


def page(run: bool = True) -> str:
    """All of docs/lookup/pairs.md."""
    return TEXT.format(interop=table(run), core=core.table(run))


TEXT = """\
# Which parts go together

Written by `python -m tests.interop.every_pair > docs/lookup/pairs.md`: each entry is a test that has run.

## `interop`

Each pair is tested in a `ReplayBuffer` and in a `TensorDictReplayBuffer`, with equal results. The test calls `extend` and
`add`, also around the ring, `sample`, `update_priority`, `rb[:]` and `empty`, and starts again. It compares every batch
with the written items: the items of its index, whole slices, each item once an epoch, only the item that has priority.
With ndim=2 there are two lanes.

- **works**: the whole test passes.
- **reads**: the storage was filled before. Batches are right; `add`, `extend` and `empty` raise a RuntimeError.
- **no (n)**: the constructor, `set_sampler` and `set_writer` raise error n below.

{interop}

## `fbuf`

Each buffer that can be constructed is compiled and run: two writes fill the ring, two go around it, one follows `clear`,
with six draws after each. Items have stacks of two frames. Draws are compared with the written items bit for bit: each item
or start once an epoch, only the item that has priority, items in their order. A mixture has members with all samplers of
its kind, with and without lanes and frames, and one with `HighestRanked`.

{core}
"""

if __name__ == "__main__":
    print(page(), end="")
