"""Items of four kinds, and a worker that writes them when it is asked to."""

import torch
from tensordict import TensorDict


def of_kind(number, count):
    """Rows of which no two kinds fit the same memory."""
    ids = torch.arange(count)
    kinds = (
        lambda: {"id": ids, "obs": ids[:, None].float()},
        lambda: {"id": ids, "next": TensorDict({"obs": ids[:, None].repeat(1, 3)}, [count]), "_reset": ids > 1},
        lambda: {"id": ids, "obs": ids[:, None].repeat(1, 5000).double()},
        lambda: {"id": ids, "obs": ids[:, None]},
    )
    return TensorDict(kinds[number](), [count])


def names(data):
    return sorted(map(str, data.keys(True, True)))


def hold_together(buffer, number, count):
    """The buffer has so many items of a kind, whole."""
    held = buffer[:]
    assert len(buffer) == count and names(held.exclude("index")) == names(of_kind(number, 1))
    given = of_kind(number, 16)[held["id"]]
    assert (held.exclude("index") == given).all()


def write_when_asked(buffers, asked, answers):
    """`empty`, or `extend` by items of a kind, all buffers; then say what went wrong."""
    torch.set_num_threads(1)
    for what, number, count in iter(asked.get, None):
        try:
            for buffer in buffers.values():
                if what == "extend":
                    buffer.extend(of_kind(number, count))
                elif what == "empty":
                    buffer.empty()
                else:
                    hold_together(buffer, number, count)
            answers.put(None)
        except Exception as error:
            answers.put(repr(error))
