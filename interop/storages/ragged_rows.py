"""Memory of text and ragged rows, which rows refer to by spans."""

from typing import TYPE_CHECKING

import numpy as np
import torch

from interop.data.packed import PackedValues

if TYPE_CHECKING:
    from interop.storages.tensors import TensorStorage


def reclaim(storage: "TensorStorage", values: PackedValues) -> None:
    """Free segments of text and ragged rows that no row uses, and move the rows out of segments that few rows use."""
    layout, rows, filled, spans = storage.layout, storage.own_rows(), storage.filled_rows, storage.spans()
    assert layout is not None
    sparse = values.reclaim([each.reshape(-1, 2) for each in spans.values()])
    if not sparse.size:
        return
    within = [values.within(each, sparse).reshape(filled, -1).any(1) for each in spans.values()]
    places = torch.from_numpy(np.flatnonzero(np.any(within, 0)))
    leaves = rows.at(filled, places.to(rows.device))
    for path in spans:
        held = leaves[layout.places[path]]
        moved = torch.from_numpy(values.again(held.detach().cpu().numpy().reshape(-1, 2)))
        leaves[layout.places[path]] = moved.reshape(held.shape).to(held.device)
    storage.write_at(places, leaves, None, storage.row_count, False)
