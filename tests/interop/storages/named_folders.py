"""Buffers over storages in a folder that has a name, and those that go on with what is there."""

import gc

from interop import LazyMemmapStorage, ReplayBuffer


def made(path, rows, capacity=5, **options):
    buffer = ReplayBuffer(storage=LazyMemmapStorage(capacity, scratch_dir=path), **options)
    if rows is not None:
        buffer.extend(rows)
    return buffer


def reopened(path, sampler=None, **options):
    gc.collect()
    return ReplayBuffer(storage=LazyMemmapStorage.open(path), sampler=sampler, **options)
