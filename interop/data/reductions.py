"""One number of several."""

import torch
from torch import Tensor

REDUCTIONS = {
    "max": lambda values: values.amax(-1),
    "min": lambda values: values.amin(-1),
    "mean": lambda values: values.mean(-1, dtype=None if values.is_floating_point() else torch.float64),
    "median": lambda values: values.median(-1).values,
    "sum": lambda values: values.sum(-1),
}


def reduced(priority: Tensor | list[Tensor], rows: int, sampler: object) -> Tensor:
    """One priority for each row, by the `reduction` of a sampler, "max" by default. A list has the values of each row.

    TypeError for what are no real numbers, RuntimeError for another number of values, NotImplementedError for another name.
    """
    if isinstance(priority, list):
        if len(priority) != rows:
            raise RuntimeError(f"there are priorities of {len(priority)} items for {rows} items")
        return torch.cat([reduced(real_numbers(value).reshape(1, -1), 1, sampler) for value in priority])
    real_numbers(priority)
    if priority.shape == (rows,):  # nearly always: nothing is reduced, and no sampler is asked how
        return priority
    if priority.numel() == 0 or priority.numel() % rows:
        raise RuntimeError(f"there are {priority.numel()} of shape {list(priority.shape)} for {rows} items")
    values = priority.reshape(rows, -1)
    if values.shape[-1] == 1:
        return values[:, 0]
    reduction = getattr(sampler, "reduction", "max")
    if reduction not in REDUCTIONS:
        raise NotImplementedError(f"unknown reduction {reduction!r}: use one of {', '.join(REDUCTIONS)}")
    return REDUCTIONS[reduction](values)


def real_numbers(priority: object) -> Tensor:
    """The priorities as they came. TypeError for what are no real numbers."""
    if not isinstance(priority, Tensor) or priority.dtype == torch.bool or priority.is_complex():
        came = priority.dtype if isinstance(priority, Tensor) else type(priority).__name__
        raise TypeError(f"priorities must be real numbers, got {came}")
    return priority
