"""Documented attributes of a sampler that one of its parts has."""

from operator import attrgetter
from typing import Any, Generic, Self, TypeVar, overload

_T = TypeVar("_T")


class Parameter(Generic[_T]):
    """An attribute that is read from a part of the object, and set there, under the same name.

    Args:
        part: the attribute that has the part.
        doc: what it is. AttributeError where the part does not let it be set.
    """

    def __init__(self, part: str, doc: str) -> None:
        self._part = attrgetter(part)
        self.__doc__ = doc

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...
    @overload
    def __get__(self, instance: object, owner: type) -> _T: ...
    def __get__(self, instance: Any, owner: type) -> Any:
        return self if instance is None else getattr(self._part(instance), self._name)

    def __set__(self, instance: object, value: _T) -> None:
        setattr(self._part(instance), self._name, value)
