"""A keyword argument that does not exist: the error names what was called, the nearest name, and what it takes."""

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest

import fbuf
from fbuf import Buffer, Prioritized, RoundRobin, Slices, Uniform
from fbuf.keywords import checked

MODULES = [fbuf.checkpoint, fbuf.looking, fbuf.priority_tree, fbuf.returns, fbuf.storage, fbuf.trajectories]
ENUMS_AND_ERRORS = (int, Exception)


def public() -> dict[str, Any]:
    """All public classes and functions of the package and of its public modules, by name."""
    found = {name: getattr(fbuf, name) for name in fbuf.__all__}
    for module in MODULES:
        names = getattr(module, "__all__", [name for name in vars(module) if not name.startswith("_")])
        own = {name: getattr(module, name) for name in names}
        package = module.__name__
        found |= {
            f"{package}.{name}": each
            for name, each in own.items()
            if getattr(each, "__module__", "").startswith(package)
        }
    return {name: each for name, each in found.items() if callable(each)}


def is_state(kind: type) -> bool:
    """Whether JAX takes objects of the class apart, and so calls its constructor for the results of each program."""
    try:
        return not inspect.isabstract(kind) and not jax.tree_util.all_leaves([object.__new__(kind)])
    except AttributeError:  # it has no fields yet
        return True


def called() -> Iterator[tuple[str, Callable[..., Any]]]:
    """All that a user may call with keyword arguments, and its name in errors."""
    for each in public().values():
        if not isinstance(each, type):
            yield each.__name__, each
            continue
        if issubclass(each, ENUMS_AND_ERRORS):
            continue
        if not is_state(each) and not inspect.isabstract(each):
            yield each.__name__, each
        for name, member in inspect.getmembers(each):
            static = inspect.getattr_static(each, name)
            if name.startswith("_") or getattr(static, "__isabstractmethod__", False):
                continue
            if isinstance(static, classmethod):
                yield f"{each.__name__}.{name}", member
            elif inspect.isfunction(static):
                kind = Uniform if each is fbuf.Sampler else RoundRobin if each is fbuf.Writer else each
                yield f"{kind.__name__}.{name}", getattr(object.__new__(kind), name)


def misspelled(name: str, taken: list[str]) -> str:
    """The name with two letters exchanged, or one too many."""
    swapped = name[:1] + name[2:3] + name[1:2] + name[3:]
    return swapped if len(name) > 4 and swapped not in taken else f"{name}x"


CALLED = dict(called())


def test_all_public_names_are_there() -> None:
    assert {"Buffer", "Buffer.sample", "Slices.by_count", "resize", "n_step", "save_state", "Plan.of"} <= set(CALLED)
    assert len(CALLED) > 150
    states = {
        name for name, each in public().items() if isinstance(each, type) and not issubclass(each, ENUMS_AND_ERRORS)
    }
    states = {name for name in states if is_state(public()[name])}
    assert {"BufferState", "Draw", "RingState", "NStep"} <= states
    assert not {"Buffer", "Slices", "Plan", "Description"} & states


@pytest.mark.parametrize("name", CALLED)
def test_each_parameter_misspelled_is_named(name: str) -> None:
    function = CALLED[name]
    parameters = [*inspect.signature(function).parameters.values()]
    takes = [each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    assert all(each.kind is not each.VAR_KEYWORD for each in parameters)
    for each in takes:
        wrong = misspelled(each, takes)
        text = f"{name}() got an unexpected keyword argument {wrong!r} (did you mean {each!r}?). It takes {', '.join(takes)}"
        with pytest.raises(TypeError, match=rf"^{re.escape(text)}(\n|$)"):
            function(**{wrong: None})
    with pytest.raises(
        TypeError, match=rf"^{re.escape(name)}\(\) got an unexpected keyword argument 'Qqqqqqq'\. It takes "
    ):
        function(Qqqqqqq=None)


def test_the_class_that_was_called_is_named_also_in_jit_and_in_replace() -> None:
    @dataclasses.dataclass(frozen=True)
    class Own(Uniform):
        """A rule that inherits its methods."""

    with pytest.raises(TypeError, match=r"^Own\.sample\(\) got .* 'kee' \(did you mean 'key'\?\)"):
        Own().sample((), kee=1)  # type: ignore[call-arg]
    buffer = Buffer(3)
    with pytest.raises(TypeError, match=r"^Buffer\.extend\(\) got .* 'bach' \(did you mean 'batch'\?\)"):
        jax.jit(buffer.extend)(buffer.init(0.0), bach=np.zeros(2, np.float32))
    with pytest.raises(TypeError, match=r"^Buffer\(\) got .* 'capcity' \(did you mean 'capacity'\?\)"):
        dataclasses.replace(buffer, capcity=4)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^Slices\(\) got .* 'lenght'") as caught:
        Slices(lenght=3)  # type: ignore[call-arg]
    assert caught.value.__context__ is None


def test_signatures_and_other_errors_stay() -> None:
    assert [*inspect.signature(Buffer).parameters][:2] == ["capacity", "sampler"]
    assert [*inspect.signature(Buffer.sample).parameters] == ["self", "state", "key", "batch_size"]
    assert Buffer.sample.__doc__ and Prioritized.sample.__module__ == "fbuf.samplers.prioritized"
    with pytest.raises(TypeError, match=r"missing 1 required positional argument: 'capacity'"):
        Buffer()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="alpha must be a number"):
        Prioritized(alpha="0.6")  # type: ignore[arg-type]

    @checked
    def any_name(**named: int) -> int:
        return sum(named.values()) / len(named["two"])  # type: ignore[arg-type]

    with pytest.raises(TypeError, match="has no len"):
        any_name(one=1, two=2)
