"""Draws of a sampler whose class defines `draw` or `sample` itself."""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from tensordict import NestedKey

from fbuf.memory_plan import Share
from fbuf.samplers import Chances
from interop.checkpoint.state import defined_outside, is_ours
from interop.data.arguments import class_of
from interop.data.index import as_tensor
from interop.data.trajectory_keys import TrajectoryKeys
from interop.samplers.draws import Draws, host_share
from interop.storages import Storage
from interop.storages.all_or_nothing import Undoable


class OwnSampler(Protocol):
    """A sampler of a user's, or one of the library that draws by its own methods."""

    @property
    def buffer_generator(self) -> torch.Generator | None: ...
    @buffer_generator.setter
    def buffer_generator(self, generator: torch.Generator | None) -> None: ...
    def draw(self, storage: Storage, batch_size: int, key: np.ndarray) -> tuple[Any, dict[Any, Any]]: ...
    def sample(self, storage: Storage, batch_size: int) -> tuple[Any, dict[Any, Any]]: ...
    def chances(self, storage: Storage, batch_size: int | None = None) -> object: ...


class _OfBoth:
    """What a draw of a user's class changes: its attributes, and what the class of the library draws from, as an epoch."""

    def __init__(self, attributes: Undoable, inherited: Draws) -> None:
        self._attributes = attributes
        self._inherited = inherited

    def before_write(self) -> dict[str, Any]:
        return {"attributes": self._attributes.before_write(), "inherited": self._inherited.before_draw()}

    def put_back(self, before: dict[str, Any]) -> None:
        self._attributes.put_back(before["attributes"])
        self._inherited.put_back(before["inherited"])


class OwnDraws(Draws):
    """Calls `draw`, or `sample` with a generator seeded with the key. The results are copied where they are reserved.

    Args:
        sampler: what draws.
        by_key: tells whether by `draw`; asked at each draw, for a test may replace methods of the class.
        changes: another number after each `parameters_changed`.
        inherited: the draws of the class of the library of which it inherits; None if there is none.
        undoable: the attributes of the sampler, which a draw may change.
    """

    def __init__(
        self,
        sampler: OwnSampler,
        by_key: Callable[[], bool],
        changes: int,
        inherited: Draws | None,
        undoable: Undoable,
    ) -> None:
        self._sampler = sampler
        self._by_key = by_key
        self.changes = changes
        self._inherited = inherited
        self._undoable = undoable if inherited is None else _OfBoth(undoable, inherited)

    def draw(self, storage: Storage, batch_size: int, key: np.ndarray) -> tuple[Any, dict[Any, Any]]:
        sampler = self._sampler
        by_key = self._by_key()
        if by_key:
            drawn: Any = sampler.draw(storage, batch_size, key)
        else:
            drawn = sampled_by_key(sampler, storage, batch_size, key)
        if not (isinstance(drawn, tuple) and len(drawn) == 2 and hasattr(drawn[1], "items")):
            name = f"{class_of(sampler)}.{'draw' if by_key else 'sample'}()"
            raise TypeError(f"{name} must return (index, info), of which info is a dict, got {drawn!r:.200}")
        index, info = drawn
        return as_tensor(index) if isinstance(index, list | range) else index, info

    @property
    def errors_count(self) -> bool:  # type: ignore[override]  # a class attribute of other draws
        return defined_outside(self._sampler, "draw") or defined_outside(self._sampler, "sample")

    @property
    def undoable(self) -> Undoable | None:
        return self._undoable

    @property
    def settings(self) -> tuple[Any, ...]:
        return () if self._inherited is None else self._inherited.settings

    @property
    def versions(self) -> dict[NestedKey, int]:
        return {} if self._inherited is None else self._inherited.versions

    def let_go(self) -> None:
        if self._inherited is not None:
            self._inherited.let_go()

    def chances(self, storage: Storage, batch_size: int | None = None) -> Chances:
        """What the class says, unless a subclass of it draws otherwise."""
        sampler = self._sampler
        for kind in type(sampler).__mro__:
            if "chances" in vars(kind) and not is_ours(kind):
                return self._checked_law(sampler.chances(storage, batch_size), len(storage))
            if "draw" in vars(kind) or "sample" in vars(kind):
                break
        return Chances.unknown(len(storage))

    def _checked_law(self, law: object, size: int) -> Chances:
        """TypeError or ValueError for what is no law over `size` slots."""
        name = f"{class_of(self._sampler)}.chances()"
        if not isinstance(law, Chances):
            raise TypeError(f"{name} must return fbuf.Chances, got {law!r:.200}")
        if law.reason.shape != (size,) or (law.probability is not None and law.probability.shape != (size,)):
            raise ValueError(f"{name} must have one probability and one reason for each of {size} stored items")
        return law

    def slice_lengths(self) -> np.ndarray | None:
        return None if self._inherited is None else self._inherited.slice_lengths()

    @property
    def trajectory_keys(self) -> TrajectoryKeys | None:
        return None if self._inherited is None else self._inherited.trajectory_keys

    def check_batch_size(self, batch_size: int) -> None:
        if self._inherited is not None:
            self._inherited.check_batch_size(batch_size)

    def most_items(self, storage: Storage, batch_size: int) -> int:
        return batch_size if self._inherited is None else self._inherited.most_items(storage, batch_size)

    def memory_shares(self, storage: Storage, capacity: int) -> list[Share]:
        if self._inherited is not None:
            return self._inherited.memory_shares(storage, capacity)
        return [host_share(f"of a {type(self._sampler).__name__}", None)]


def sampled_by_key(
    sampler: OwnSampler, storage: Storage, batch_size: int, key: np.ndarray
) -> tuple[Any, dict[Any, Any]]:
    """The result of `sample` while sampler and storage have generators seeded with the key."""
    every: list[OwnSampler | Storage] = [sampler, storage]  # `random_index` of the storage draws, too
    before = [component.buffer_generator for component in every]
    seed = int(key.view(np.int64)[0])
    generators = dict[torch.device, torch.Generator]()
    try:
        for component, own in zip(every, before, strict=True):
            device = torch.device("cpu") if own is None else own.device
            if device not in generators:
                generators[device] = torch.Generator(device).manual_seed(seed)
            component.buffer_generator = generators[device]
        return sampler.sample(storage, batch_size)
    finally:
        for component, generator in zip(every, before, strict=True):
            component.buffer_generator = generator
