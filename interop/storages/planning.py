"""Rows made of specs, for storages that are asked for their memory before the first data."""

from typing import Any

from interop.data.item_specs import is_spec


def row_of(spec: object, ndim: int) -> Any:
    """A row of zeros of a spec, of `interop.specs` or torchrl; see `example_row` there."""
    from interop.specs.example_rows import example_row  # here: a program without specs does not load them

    return example_row(spec, ndim)


def example(data: Any, ndim: int) -> Any:
    """`row_of` a spec; other data as it is."""
    return row_of(data, ndim) if is_spec(data) else data
