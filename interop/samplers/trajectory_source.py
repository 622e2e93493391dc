"""Where a sampler of slices has the trajectories of a storage from."""

import weakref
from abc import ABC, abstractmethod

from interop.host.trajectories import Trajectories
from interop.samplers.boundary_keys import BoundaryKeys
from interop.storages import Storage


class TrajectorySource(ABC):
    """The index of the trajectories of one storage. A subclass says what divides them.

    Attributes:
        keys: the entries that mark trajectories; None if no stored entry does.
        version: grows when trajectories change.
        index: of the last call of `of`.
    """

    keys: BoundaryKeys | None = None
    version = 0
    index: Trajectories

    def __init__(self) -> None:
        self.index = Trajectories(1)
        self._of: weakref.ref[Storage] | None = None  # the storage that the index is of

    @abstractmethod
    def anew(self) -> "TrajectorySource":
        """An index of the same kind that has read nothing."""

    @abstractmethod
    def of(self, storage: Storage) -> Trajectories:
        """The index, up to date. The lock of the storage is held.

        RuntimeError for an empty storage, KeyError, TypeError, ValueError or RuntimeError where trajectories cannot be told.
        """

    def refresh(self) -> bool:
        """Update the index for the storage of the last call; whether that was possible."""
        storage = None if self._of is None else self._of()
        if storage is None:
            return False
        try:
            self.of(storage)
        except (KeyError, TypeError, ValueError, RuntimeError):
            return False
        return True
