"""What memory samplers take beside the items of a storage."""

from fbuf import free_memory
from fbuf.memory_plan import Share, shares_of
from interop.samplers.consuming import ConsumingSampler
from interop.samplers.prioritized import PrioritizedSampler
from interop.samplers.sampler import Sampler
from interop.samplers.slices import SliceSampler
from interop.samplers.staleness import StalenessAwareSampler
from interop.samplers.uniform import RandomSampler
from interop.samplers.without_replacement import SamplerWithoutReplacement
from interop.storages import Storage, planning

PART = "sampler"


def shares(sampler: Sampler, storage: Storage, capacity: int) -> list[Share]:
    """Those of a sampler for a storage of so many items."""
    found = []
    if isinstance(sampler, PrioritizedSampler):
        found += _priorities(sampler, storage, capacity)
    if isinstance(sampler, SliceSampler):
        found.append(Share(PART, "where trajectories start and stop", free_memory.HOST, None))
    elif isinstance(sampler, SamplerWithoutReplacement):
        if sampler._epoch.shuffle:
            found.append(_of_slots("order", 2 * 4 * capacity))  # it may have doubled
    elif isinstance(sampler, ConsumingSampler):
        found += [_of_slots(name, 8 * capacity) for name in ("order", "places", "draws")]
    elif isinstance(sampler, StalenessAwareSampler):
        found.append(_of_slots("rows, staleness, weights and sums", 5 * 8 * capacity))
    elif not isinstance(sampler, RandomSampler | PrioritizedSampler):
        found.append(Share(PART, f"of a {type(sampler).__name__}", free_memory.HOST, None))
    return found


def _of_slots(key: str, size: int) -> Share:
    return Share(PART, key, free_memory.HOST, size, counts="at most")


def _priorities(sampler: PrioritizedSampler, storage: Storage, capacity: int) -> list[Share]:
    """The priorities and the tree over them, which are made at the first write."""
    device = sampler.placed_on(storage)
    place = free_memory.HOST if device is None else planning.place_of(device)
    return [
        Share(PART, f".{share.part}{share.key}", place, share.bytes, share.shape, share.dtype)
        for share in shares_of(sampler.memory(capacity), place)
    ]
