"""Errors for keyword arguments that do not exist: what was called, the nearest name, and the names that it takes."""

import difflib
import functools
import inspect
import types
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

_T = TypeVar("_T")


def checked(called: _T) -> _T:
    """The function, or the class, whose TypeError for an unknown keyword argument names the nearest one.

    Of a class these are the constructor and the public methods that it defines itself. Signatures stay. A correct call
    takes 0.1 µs more; in `jax.jit` it is made once. So classes of arrays are not checked: JAX calls their
    constructors for each result of a program.
    """
    if not isinstance(called, type):
        return cast(_T, _checked_function(cast(Callable[..., Any], called)))
    for name, member in list(vars(called).items()):
        if name.startswith("_") and (name != "__init__" or vars(called).get("_is_protocol")):
            continue
        if isinstance(member, classmethod | staticmethod):
            setattr(called, name, type(member)(_checked_function(member.__func__)))
        elif isinstance(member, types.FunctionType):
            setattr(called, name, _checked_function(member))
    return called


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The name that is most like the given one; None if none is like it."""
    found = difflib.get_close_matches(name, list(known), 1, 0.6)
    return found[0] if found else None


def _checked_function(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*given: object, **named: object) -> object:
        try:
            return function(*given, **named)
        except TypeError:
            text = _unknown(function, given, named) if named else None
            if text is None:
                raise
        raise TypeError(text)

    return call


def _unknown(function: Callable[..., Any], given: tuple[object, ...], named: dict[str, object]) -> str | None:
    """The error text for keyword arguments that a function does not take. None if it takes them all."""
    parameters = [*inspect.signature(function).parameters.values()]
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return None
    name = function.__name__
    if parameters and parameters[0].name in ("self", "cls") and given:
        kind = given[0] if isinstance(given[0], type) else type(given[0])
        name = kind.__name__ if name == "__init__" else f"{kind.__name__}.{name}"
        parameters = parameters[1:]
    takes = [each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    unknown = [each for each in named if each not in takes]
    if not unknown:
        return None
    like = nearest(unknown[0], takes)
    question = f" (did you mean {like!r}?)" if like else ""
    return (
        f"{name}() got an unexpected keyword argument {unknown[0]!r}{question}. It takes {', '.join(takes) or 'none'}"
    )
