"""Every storage, sampler and writer joined in each kind of buffer: what comes of it.

`python -m tests.interop.every_pair > docs/pairs.md` writes the table.
"""

import functools
import warnings

from tests.fbuf import every_pair as core
from tests.interop.pair_history import BUFFERS, LAYOUTS, LISTS, SAMPLERS, WRITERS, Cell, History


@functools.cache
def outcome(cell: Cell, run: bool = True) -> tuple[str, str]:
    """ "works" or "reads", and nothing; or the type and the words of the error with which joining is refused.

    Without `run` the parts are only joined.
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
    """All of docs/pairs.md."""
    return TEXT.format(interop=table(run), core=core.table(run))


TEXT = """\
# Which parts go together

Written by `python -m tests.interop.every_pair > docs/pairs.md`: each entry is a test that has run.

## `interop`

Each pair was joined in a `ReplayBuffer` and in a `TensorDictReplayBuffer`, which agree throughout, and went through one
history: `extend`, `add`, both again around the ring, batches in between, `update_priority`, `rb[:]`, `empty`, and all anew.
What was drawn was compared with what had been written: the right items, whole slices, each item once an epoch, the item
with the only priority. Two lanes with ndim=2.

- **works**: all of that.
- **reads**: the storage was filled before; batches are right, and a RuntimeError refuses `add`, `extend` and `empty`.
- **no (n)**: the constructor refuses it, and so do `set_sampler` and `set_writer`, with error n below.

{interop}

## `fbuf`

Each buffer was joined and, where that is not refused, compiled and run: two writes that fill the ring, two that go around
it, `clear` and another, with six draws after each; two lanes where there are some, items with stacks of two frames. What
came was compared with what had been written, bit for bit; each item or start once an epoch, what has the only priority,
items in their order. A mixture has members with all samplers of its kind, with and without lanes and frames, and one with
`HighestRanked`.

{core}
"""

if __name__ == "__main__":
    print(page(), end="")
