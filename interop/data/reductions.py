"""One number of several."""

import torch

REDUCTIONS = {
    "max": lambda values: values.amax(-1),
    "min": lambda values: values.amin(-1),
    "mean": lambda values: values.mean(-1, dtype=None if values.is_floating_point() else torch.float64),
    "median": lambda values: values.median(-1).values,
    "sum": lambda values: values.sum(-1),
}
