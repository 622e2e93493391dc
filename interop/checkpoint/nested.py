"""TED data in a checkpoint by trajectory."""

from typing import Any

import numpy as np

from fbuf.checkpoint import Fields, Writing
from interop.checkpoint.flat import Content, FlatStorageCheckpointer
from interop.ted import Nested2TED, TED2Nested
from interop.ted.flattening import Flattened


class NestedStorageCheckpointer(FlatStorageCheckpointer):
    """`FlatStorageCheckpointer`, with the rows that each trajectory has: flat arrays cut by these are nested tensors.

    Hooks of the user's are given nested tensors, as `TED2Nested` makes them, and have to make of them what can be saved.
    """

    _save_hook = TED2Nested
    _load_hook = Nested2TED

    def _written(self, flat: Flattened, storage: Any, out: Writing) -> dict[str, Any]:
        lengths, ended = flat.order.trajectories()
        return {**super()._written(flat, storage, out), "lengths": lengths.numpy(), "ended": ended.numpy()}

    def _check(self, content: Content, fields: Fields) -> None:
        for name, expected in zip(("lengths", "ended"), content.rebuilt.order.trajectories(), strict=True):
            if not np.array_equal(np.asarray(fields.array(name, expected.numpy().dtype)), expected.numpy()):
                raise ValueError(f"{name!r} are not those of the trajectories")
