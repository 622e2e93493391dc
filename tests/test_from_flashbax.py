"""The code of docs/do/from_flashbax.md runs inside jit as it stands, from top to bottom, without flashbax."""

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

TEXT = (Path(__file__).parents[1] / "docs" / "do" / "from_flashbax.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
KINDS = ("item", "prioritised_item", "flat", "prioritised_flat", "trajectory", "prioritised_trajectory")
soon = {"xla_backend_optimization_level": 0}  # most of the time of these tests goes to compiling


def ran(code: str, names: dict[str, Any], values: bool) -> Any:
    """The names after the code, which is one program: those that hold arrays as its results, or as their shapes."""

    def run() -> dict[str, Any]:
        exec(compile(code, "docs/do/from_flashbax.md", "exec"), names)
        leaves = {name: jax.tree.leaves(value) for name, value in names.items() if name != "__builtins__"}
        arrays = [name for name, held in leaves.items() if held and all(isinstance(leaf, jax.Array) for leaf in held)]
        return {name: names[name] for name in arrays}

    names.update(jax.jit(run, compiler_options=soon)() if values else jax.tree.map(like, jax.eval_shape(run)))
    return names


def like(leaf: jax.ShapeDtypeStruct) -> jax.Array:
    """An array of zeros."""
    return jnp.zeros(leaf.shape, leaf.dtype)


@pytest.mark.parametrize("values", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["shapes", "values"])
def test_code_runs(values: bool) -> None:
    assert "flashbax" not in "".join(BLOCKS)
    after: list[dict[str, Any]] = [{}]
    for code in BLOCKS:
        after.append(ran(code, dict(after[-1]), values))
    items, prioritised, pairs, _, sequences, by_priority, periodic, whole, padded, queue, mixture, functions = after[1:]
    assert periodic["sequences"]["obs"].shape == (32, 8, 4)
    assert padded["slots"].shape == (4, 16)
    if values:
        assert {*(periodic["draw"].starts // 4).tolist()} == {0, 4, 8}
        assert padded["stored"] == 28 == (padded["slots"] >= 0).sum()
    assert items["items"]["obs"].shape == (32, 4) and items["slot"].shape == ()
    assert prioritised["weights"].shape == (32,)
    assert pairs["first"]["obs"].shape == pairs["second"]["obs"].shape == (32, 4)
    for each in (sequences, by_priority, whole):
        assert each["sequences"]["obs"].shape == (32, 8, 4)
    assert sequences["slots"].shape == (4, 16) and queue["by_lane"]["obs"].shape == (4, 8, 4)
    assert functions["batch"]["obs"].shape == (32, 4)
    if values:
        assert items["can_sample"] and queue["can_sample"] and queue["can_add"]
        assert all(each["draw"].valid.all() for each in (items, pairs, sequences, by_priority, whole))
        assert (prioritised["state"].sampler.priorities == 1).sum() == 64
        assert pairs["slots"].tolist() == [8, 9, 10, 11]
        assert mixture["draw"].member.tolist() == [0] * 24 + [1] * 8


@pytest.mark.parametrize("name", [*(f"make_{kind}_buffer" for kind in KINDS), "make_trajectory_queue", "make_mixer"])
def test_each_constructor_is_there(name: str) -> None:
    assert f"| `{name}` |" in TEXT
