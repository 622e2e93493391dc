"""Descriptions of buffers: what a buffer holds, and what can be drawn from it."""

from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
from tensordict.utils import NestedKey

from fbuf.looking import Description, EpisodeSummary, Quantiles, SamplingSummary
from interop.buffers.components import keeps_rows_in_order
from interop.buffers.episodes import REWARDS
from interop.data.keys import as_path
from interop.samplers import Sampler
from interop.storages import Storage, columns
from interop.storages.key_summaries import summaries
from interop.writers import Writer


class HasSums(Protocol):
    """The episodes of a buffer."""

    lengths: np.ndarray

    @property
    def ends(self) -> np.ndarray: ...
    def sums(self, key: NestedKey) -> np.ndarray: ...


def described(
    title: str,
    settings: Mapping[str, str],
    storage: Storage,
    sampler: Sampler,
    writer: Writer,
    batch_size: int | None,
    find_episodes: Callable[[], HasSums],
    rows: int | None,
    reward: NestedKey | None,
) -> Description:
    """The description of a buffer of these parts. The lock of the storage is held. See `ReplayBuffer.describe`."""
    filled, size = storage.contents.filled_rows, len(storage)
    facts: dict[str, int | float | str] = {"storage": type(storage).__name__, "capacity": storage.max_size}
    facts["items stored"] = size
    if storage.ndim > 1 and filled:
        facts |= {"rows stored": filled, "lanes": str(list((storage.shape or ())[1:]))}
    facts |= {"rows ever written": writer.write_count, "sampler": repr(sampler), "writer": repr(writer), **settings}
    held = storage.contents.compressed_bytes
    if held is not None:
        facts["compressed bytes"] = held
    episodes = draws = None
    try:
        episodes = _episodes(find_episodes(), storage, reward)
    except (RuntimeError, TypeError) as error:
        if reward is not None:
            raise
        facts["episodes"] = f"not known: {error}"
    try:
        draws = SamplingSummary.of(sampler.draws.chances(storage, batch_size))
    except (KeyError, RuntimeError, TypeError) as error:  # items lack an entry that the sampler needs
        facts["draws"] = f"not known: {error}"
    ages = Quantiles.of(storage.contents.row_ages()) if keeps_rows_in_order(sampler, writer) else None
    given = sampler.item_values.given_priorities(storage)
    return Description(
        title=title,
        facts=facts,
        columns=tuple(summaries(storage, rows)),
        episodes=episodes,
        ages=ages,
        priorities=None if given is None else Quantiles.of(given),
        draws=draws,
    )


def _episodes(episodes: HasSums, storage: Storage, reward: NestedKey | None) -> EpisodeSummary:
    key, returns = reward, None
    if key is None and len(episodes.lengths):
        key = next((each for each in REWARDS if columns.has(storage, each)), None)
    if key is not None and len(episodes.lengths):
        returns = episodes.sums(key)
        if reward is not None and returns.ndim > 1:
            raise ValueError(
                f"reward={reward!r} must be one real number an item, got {list(returns.shape[1:])} of them"
            )
    kinds, counts = np.unique(episodes.ends, return_counts=True)
    return EpisodeSummary.of(
        episodes.lengths,
        dict(zip(kinds.tolist(), counts.tolist(), strict=True)),
        begun_before=None,
        returns=returns,
        reward=None if key is None else ".".join(map(str, as_path(key))),
    )
