"""Which class describes the one-hot vectors of a class of integer specs.

The classes of one-hot vectors are made of those of integers, and enter themselves here: `to_one_hot_spec` of an integer spec
finds its class without importing it.
"""

from collections.abc import Callable
from typing import TypeVar

from interop.specs.spec import TensorSpec

_CLASSES: dict[type[TensorSpec], Callable[..., TensorSpec]] = {}
OneHotClass = TypeVar("OneHotClass", bound=type[TensorSpec])


def encodes(integers: type[TensorSpec]) -> Callable[[OneHotClass], OneHotClass]:
    """Decorator of the class that describes one-hot vectors of the values of another class."""

    def enter(one_hot: OneHotClass) -> OneHotClass:
        _CLASSES[integers] = one_hot
        return one_hot

    return enter


def one_hot_of(integers: type[TensorSpec]) -> Callable[..., TensorSpec]:
    """The class that was decorated with `encodes(integers)`."""
    return _CLASSES[integers]
