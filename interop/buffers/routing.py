"""The priorities in a sample of an ensemble, brought to the members that have them."""

from collections.abc import Iterator, Sequence

from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase

from interop.buffers.replay_buffer import ReplayBuffer
from interop.data.members import refuse_unstored, routed

_OF_UNITS = ("anchor_index", "validity_mask")  # what a sample unit says of the rows that it made of drawn items


def widths(members: Sequence[ReplayBuffer]) -> list[int]:
    """For each member how many numbers make a slot, 0 where a slot is a number."""
    return [member.storage.ndim if member.storage.ndim > 1 else 0 for member in members]


def changes(members: Sequence[ReplayBuffer], data: TensorDictBase) -> list[tuple[ReplayBuffer, TensorDictBase]]:
    """For each member with priorities that a sample is of: "index", its slots, and what the sample has for them.

    All of them can be applied, or an error is raised.
    """
    return [each for rows, dims in _dense(data) for each in _of(members, rows, dims)]


def _dense(data: TensorDictBase) -> Iterator[tuple[TensorDictBase, int]]:
    """Samples whose parts are alike, and how many of their dims count items."""
    if isinstance(data, LazyStackedTensorDict) and data.stack_dim == 0 and data.ndim > 1:
        yield from ((row, 1) for row in data.unbind(0))
    else:
        yield data, min(data.ndim, 2)


def _of(
    members: Sequence[ReplayBuffer], rows: TensorDictBase, dims: int
) -> Iterator[tuple[ReplayBuffer, TensorDictBase]]:
    index = rows.get("index", None)
    if not isinstance(index, TensorDictBase) or not {"index", "buffer_ids"} <= set(index.keys()):
        raise KeyError('the sample has no "index" of an ensemble: pass one that came from sample(), with its index')
    count = rows.batch_size[:dims].numel()
    if count == 0:
        return
    ids = index.get("buffer_ids").reshape(count, -1)[:, 0]
    numbers, first = widths(members), int(ids[0])
    width = max(numbers[first], 1) if 0 <= first < len(members) else 1
    slots = index.get("index").reshape(count, -1, width)[:, 0]
    for place, entries, own in routed(TensorDict({"index": slots, "buffer_ids": ids}, [count]), numbers):
        member = members[place]
        if member.sampler.takes_priorities:
            key = getattr(member, "priority_key", "td_error")
            change = TensorDict({"index": own}, [own.shape[0]])
            for name in (key, *(_OF_UNITS if member.sample_unit is not None else ())):
                entry = rows.get(name, None)
                if entry is not None:
                    change.set(name, entry.reshape(count, -1)[entries.to(entry.device)])
            member.refuse_priorities(change.get(key, None), own.shape[0])
            refuse_unstored(own, member.storage, place)
            yield member, change
