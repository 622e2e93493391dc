"""The dtypes that arrays in files can have, by name. A name in a file is looked up here and nowhere else."""

import ml_dtypes
import numpy as np

_INTEGERS = [f"{sign}int{bits}" for bits in (8, 16, 32, 64) for sign in ("", "u")]
_FLOATS = ["float16", "float32", "float64", "complex64", "complex128"]
_EIGHT_BITS = ["e3m4", "e4m3", "e4m3b11fnuz", "e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu"]
_MORE = ["bfloat16", *(f"float8_{name}" for name in _EIGHT_BITS), "int2", "int4", "uint2", "uint4"]
BY_NAME: dict[str, np.dtype] = {name: np.dtype(name) for name in ["bool", *_INTEGERS, *_FLOATS]} | {
    name: np.dtype(getattr(ml_dtypes, name)) for name in _MORE if hasattr(ml_dtypes, name)
}


def name_of(dtype: np.dtype) -> str:
    """The name of a dtype; TypeError for one that no file holds."""
    native = dtype.newbyteorder("=")
    if BY_NAME.get(native.name) != native:
        raise TypeError(f"an array of dtype {dtype} cannot be saved; known are {', '.join(BY_NAME)}")
    return native.name
