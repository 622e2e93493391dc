"""The programs that draw curves: how each takes numbers."""

import contextlib
import inspect
from collections.abc import Callable, Mapping
from functools import partial

from interop.data.arguments import class_of


def sender(writer: object) -> Callable[[Mapping[str, float], int | None], None]:
    """The function that passes numbers by name, and a step, to a writer, or to a function that takes a dict.

    - An object with `add_scalar`, as `SummaryWriter` of torch and of tensorboardX: `writer.add_scalar(name, number, step)`.
    - A function: `writer(numbers, step=step)` if it has a `step`, as `wandb.log`, `mlflow.log_metrics` and `Run.track` of
      aim; else `writer(numbers)`. Without a step, `writer(numbers)` as well.

    TypeError for anything else.
    """
    add_scalar = getattr(writer, "add_scalar", None)
    if callable(add_scalar):
        return partial(_add_each, add_scalar)
    if callable(writer):
        _refuse_unless_it_takes_a_dict(writer)
        return partial(_call, writer)
    named = next((name for name in ("log", "log_metrics", "track") if callable(getattr(writer, name, None))), None)
    hint = "" if named is None else f": pass its method {named!r}"
    raise TypeError(
        f"a writer has add_scalar(name, number, step), or is a function of a dict; got {class_of(writer)}{hint}"
    )


def _add_each(add_scalar: Callable[..., object], numbers: Mapping[str, float], step: int | None) -> None:
    for name, number in numbers.items():
        add_scalar(name, number, step)


def _call(function: Callable[..., object], numbers: Mapping[str, float], step: int | None) -> None:
    if step is not None and _takes_step(function):
        function(dict(numbers), step=step)
    else:
        function(dict(numbers))


def _refuse_unless_it_takes_a_dict(function: Callable[..., object]) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some functions in C do not say
        return
    try:
        signature.bind({})
    except TypeError:
        with contextlib.suppress(TypeError):
            signature.bind({}, step=0)
            return
        raise TypeError(
            f"a function that numbers are logged with takes a dict and perhaps a step, got one with {signature}"
        ) from None


def _takes_step(function: Callable[..., object]) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some functions in C do not say
        return False
    return any(
        each.kind is each.VAR_KEYWORD or (each.name == "step" and each.kind is not each.POSITIONAL_ONLY)
        for each in parameters
    )
