"""Makes `isinstance` of torchrl's classes accept the specs, once the program has imported torchrl."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from interop.data.item_specs import TORCHRL, imported, is_torchrl_spec

_entered: set[str] = set()  # the modules of torchrl that know the specs
_converters: list[Callable[..., object]] = []  # `from_torchrl`
Function = TypeVar("Function", bound=Callable[..., object])


def is_entered() -> bool:
    """Whether both modules of torchrl know the specs, so that nothing is left to do."""
    return len(_entered) == 2


def enter(base: type) -> None:
    """Register the subclasses of `base` of this package with torchrl's classes of the same names.

    Does nothing for modules that the program has not imported completely: none is imported here. Torchrl's classes are
    abstract base classes, which take virtual subclasses. Its table of action spaces is keyed by class; each class gets
    the entry of torchrl's class of its name.
    """
    specs = imported(TORCHRL, "StackedComposite")
    if specs is None:
        return
    pairs = [(ours, vars(specs)[ours.__name__]) for ours in _of_package(base) if ours.__name__ in vars(specs)]
    if specs.__name__ not in _entered:
        for ours, theirs in pairs:
            theirs.register(ours)
        _entered.add(specs.__name__)
    spaces = imported("torchrl.data.utils", "ACTION_SPACE_MAP")
    if spaces is not None:
        named: dict[Any, str] = spaces.ACTION_SPACE_MAP
        named.update({ours: named[theirs] for ours, theirs in pairs if theirs in named})
        _entered.add(spaces.__name__)


def converts(function: Function) -> Function:
    """Decorator of the function by which `converted` converts: it needs all classes of specs, which import this module."""
    _converters[:] = [function]
    return function


def converted(value: Any) -> Any:
    """A spec of torchrl's classes as the spec of this package; any other value unchanged.

    TypeError for a class of torchrl that has no counterpart here.
    """
    if not is_torchrl_spec(value):
        return value
    (convert,) = _converters
    return convert(value)


def comparable(value: Any) -> Any:
    """As `converted`, but a spec without a counterpart is unchanged: it equals no spec of this package."""
    if TORCHRL in sys.modules:
        with contextlib.suppress(TypeError):
            return converted(value)
    return value


def box_class(name: str) -> type | None:
    """Torchrl's class of a box; None if the program has not imported torchrl, or there is no such class."""
    specs = imported(TORCHRL, name)
    return None if specs is None else vars(specs)[name]


def _of_package(base: type) -> Iterator[type]:
    """A class and its subclasses, without those of other packages."""
    if base.__module__.startswith("interop.specs."):
        yield base
    found: list[type] = base.__subclasses__()
    for each in found:
        yield from _of_package(each)
