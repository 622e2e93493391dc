"""The names of classes in error messages."""

import sys


def class_of(given: object) -> str:
    """The full name of an object's class, and the class of this package to use where one has the same name."""
    kind = given if isinstance(given, type) else type(given)
    interop = sys.modules["interop"]
    module = "interop" if getattr(interop, kind.__name__, None) is kind else kind.__module__
    named = f"{module}.{kind.__qualname__}".removeprefix("builtins.")
    for each in kind.__mro__:
        ours = getattr(interop, each.__name__, each)
        if ours is not each and isinstance(ours, type):
            return f"{named}; use interop.{each.__name__}{'' if each is kind else ' as its base'}"
    return named
