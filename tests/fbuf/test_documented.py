"""States print as shapes and dtypes, and every public field and property is documented."""

import dataclasses
import importlib
import inspect
import pkgutil
import re
from typing import Any

import jax
import numpy as np
import pytest

import fbuf
from fbuf import Buffer, Frames, HighestRanked, Prioritized, Shuffled, Slices, Trajectories
from tests.fbuf.compiled import extend


def classes() -> list[type]:
    """All public dataclasses of the package."""
    modules = [importlib.import_module(each.name) for each in pkgutil.walk_packages(fbuf.__path__, "fbuf.")]
    found = [(module, name, each) for module in modules for name, each in vars(module).items()]
    return [
        each
        for module, name, each in found
        if isinstance(each, type)
        and dataclasses.is_dataclass(each)
        and each.__module__ == module.__name__
        and not name.startswith("_")
    ]


@pytest.mark.parametrize("kind", classes(), ids=lambda kind: kind.__name__)
def test_every_field_has_a_line_in_the_docstring(kind: type) -> None:
    text = "\n".join(inspect.getdoc(base) or "" for base in kind.__mro__ if dataclasses.is_dataclass(base))
    for field in dataclasses.fields(kind):
        assert re.search(rf"^\s+(\w+, )*{field.name}(, \w+)*: \S", text, re.MULTILINE), field.name
    for name, each in vars(kind).items():
        if isinstance(each, property) and not name.startswith("_"):
            assert each.__doc__, name


def test_states_print_shapes_and_dtypes() -> None:
    buffer = Buffer(8, Prioritized())
    state, _ = extend(buffer, buffer.init({"obs": np.zeros(4, np.float32)}), {"obs": np.zeros((3, 4), np.float32)})
    text = repr(state)
    assert text.startswith("BufferState(3 of 8 rows, items={'obs': float32[8, 4]}, ring=RingState(cursor=3, size=3, ")
    assert "sampler=PrioritizedState(priorities=float32[16], tree=PriorityTree(leaves=float32[16]" in text
    assert len(text) < 600

    seen = []
    jax.jit(lambda state: seen.append(repr(state)))(state)
    assert seen[0].startswith("BufferState(items={'obs': float32[8, 4]}, ring=RingState(counters=uint32[4])")
    jax.tree.leaves(state.items)[0].delete()
    assert "float32[8, 4] (donated)" in repr(state)


@pytest.mark.parametrize(
    "buffer",
    [
        Buffer(500, Shuffled(), lanes=(2,)),
        Buffer(500, Slices(2), trajectories=Trajectories("end"), frames=Frames(stack=1)),
        Buffer(500, writer=HighestRanked("rank")),
    ],
    ids=str,
)
def test_no_state_prints_its_arrays(buffer: Buffer) -> None:
    item = {"obs": np.zeros(300), "next_obs": np.zeros(300), "end": np.bool_(False), "rank": np.float32(0)}
    state: Any = buffer.init(item)
    assert "of 500 rows" in repr(state) and "array" not in repr(state).lower() and len(repr(state)) < 1500
    assert "array" not in repr(jax.eval_shape(buffer.init, item)).lower()
