"""The dtypes that arrays in files can have, by name. A name in a file is looked up here and nowhere else."""

import ml_dtypes
import numpy as np

_NAMES = [
    "bool",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
]
_MORE = [
    "bfloat16",
    "float8_e3m4",
    "float8_e4m3",
    "float8_e4m3b11fnuz",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "int2",
    "int4",
    "uint2",
    "uint4",
]
BY_NAME: dict[str, np.dtype] = {name: np.dtype(name) for name in _NAMES} | {
    name: np.dtype(getattr(ml_dtypes, name)) for name in _MORE if hasattr(ml_dtypes, name)
}


def name_of(dtype: np.dtype) -> str:
    """The name of a dtype; TypeError for one that no file holds."""
    native = dtype.newbyteorder("=")
    if BY_NAME.get(native.name) != native:
        raise TypeError(f"an array of dtype {dtype} cannot be saved; known are {', '.join(BY_NAME)}")
    return native.name
