"""The hooks that give each trajectory of TED data a row of its own before it is saved, and TED data again."""

import os

from tensordict import TensorDictBase

from interop.ted.entries import shown
from interop.ted.flat import Flat2TED, TED2Flat, parted
from interop.ted.gathered import components, gathered


class TED2Nested(TED2Flat):
    """A save hook: `TED2Flat` with a row for each trajectory, in nested tensors of [trajectories, its rows, ...].

    Observations have one row more than done flags and rewards, except for a last row of each lane with what was never
    written. The arguments and the errors are those of `TED2Flat`.
    """

    def __call__(self, data: TensorDictBase, path: str | os.PathLike[str] | None = None) -> TensorDictBase:
        flat, told = self._flattened(data)
        return gathered(flat, told, path, by_trajectory=True)


class Nested2TED(Flat2TED):
    """A load hook: TED data from what `TED2Nested` made. The arguments and the errors are those of `Flat2TED`."""

    def __call__(self, data: TensorDictBase, out: TensorDictBase | None = None) -> TensorDictBase:
        tensors, told = parted(data)
        found = {path: components(tensor) for path, tensor in tensors.items()}
        rows = found[self._done_key][1] if self._done_key in found else None
        for path, (_, counts) in found.items():
            if rows is not None and not (counts.shape == rows.shape and ((counts - rows) & ~1 == 0).all()):
                raise ValueError(
                    f"{shown(path)} and {shown(self._done_key)} have other numbers of rows in a trajectory"
                )
        return self._rebuilt({path: memory for path, (memory, _) in found.items()}, told, out)
