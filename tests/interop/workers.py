"""What worker processes of the tests run."""

import torch

from tests.interop.rows import flat_td


def extend_many(buffer, first, batches, both):
    both.wait(100)
    for batch in range(batches):
        buffer.extend(flat_td([first + batch] * 4))


def sample_and_extend(buffer, ids, answers):
    torch.manual_seed(0)
    answers.put(buffer.sample(512)["obs"][:, 0].unique().tolist())
    buffer.extend(flat_td(ids))


def extend_and_edit(buffer, rows):
    buffer.extend(rows)
    buffer[:]["a"][1] = 5j
