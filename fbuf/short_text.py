"""States as short text: shapes and dtypes in place of arrays."""

import dataclasses

import jax
import numpy as np

from fbuf.shown import Shown


class ShortText(Shown):
    """The base class of dataclasses of arrays, which print and show as shapes and dtypes. It waits for no array."""

    def __repr__(self) -> str:
        fields = [field.name for field in dataclasses.fields(self)]  # type: ignore[arg-type]
        return f"{type(self).__name__}({', '.join(f'{name}={short(getattr(self, name))}' for name in fields)})"


def short(value: object) -> str:
    """A value as text, an array as its dtype and shape: float32[8, 4]."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        gone = isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer) and value.is_deleted()
        return f"{value.dtype}[{', '.join(map(str, value.shape))}]{' (donated)' if gone else ''}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {short(each)}" for key, each in value.items()) + "}"
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        named = zip(value._fields, value, strict=True)
        return f"{type(value).__name__}({', '.join(f'{name}={short(each)}' for name, each in named)})"
    if isinstance(value, tuple | list):
        inner = ", ".join(map(short, value))
        return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if len(value) == 1 else ''})"
    return repr(value)


def numbers(array: object) -> list[int] | None:
    """The integers of a small array, for which it waits; None if they are not known: traced, donated, or elsewhere."""
    if isinstance(array, jax.core.Tracer):
        return None
    if isinstance(array, jax.Array) and (array.is_deleted() or not array.is_fully_addressable):
        return None
    if not isinstance(array, jax.Array | np.ndarray) or array.ndim > 1 or array.size > 4:
        return None
    return [int(each) for each in np.asarray(array).reshape(-1)]
