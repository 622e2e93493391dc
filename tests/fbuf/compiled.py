"""The functions of a buffer, a mixture and a tree, compiled once for all tests; and what compiled programs do."""

import functools
import re
from typing import Any

import jax
import numpy as np

import fbuf
from fbuf import Buffer, priority_tree

# Most of the time of the tests goes to compiling: LLVM need not optimize. The operations of a program stay the same.
SOON = {"xla_backend_optimization_level": 0}
jit: Any = functools.partial(jax.jit, compiler_options=SOON)

init, extend, update, clear, place = (
    jit(method, static_argnums=0) for method in (Buffer.init, Buffer.extend, Buffer.update, Buffer.clear, Buffer.place)
)
sample = jit(Buffer.sample, static_argnums=(0, 3))
# Of many states of one buffer in one program.
extend_many, update_many, clear_many = (
    jit(lambda buffer, *given, method=method: jax.vmap(functools.partial(method, buffer))(*given), static_argnums=0)
    for method in (Buffer.extend, Buffer.update, Buffer.clear)
)


def _sample_many(buffer: Buffer, states: Any, keys: jax.Array, batch_size: int) -> tuple[Any, Any]:
    after, _, draws = jax.vmap(lambda state, key: buffer.sample(state, key, batch_size))(states, keys)
    return after, draws


sample_many = jit(_sample_many, static_argnums=(0, 3))
sample_mixture = jit(fbuf.Mixture.sample, static_argnums=(0, 3))
update_mixture = jit(fbuf.Mixture.update, static_argnums=0)

update_tree = jit(priority_tree.update, static_argnames="settled")
fill_tree = jit(priority_tree.fill)
find = jit(priority_tree.find)


def program(function: Any, *operands: Any) -> Any:
    """The compiled program of a function whose first argument, the state, is donated; operands are arrays or shapes."""
    return jax.jit(function, donate_argnums=0).lower(*operands).compile(SOON)


def bytes_of(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def copied(program: Any) -> list[int]:
    """How many elements each copy in the compiled text moves."""
    shapes = re.findall(r"= \(?\w+\[([\d,]*)\][^=]* copy(?:-start)?\(", program.as_text())
    return [int(np.prod([int(size) for size in shape.split(",") if size])) for shape in shapes]


def assert_in_place(program: Any, state: Any, more: float = 0.1, most_copied: int = 10_000) -> None:
    """The donated state is written in place: no memory beside it that grows with it, and no large copy."""
    size, memory = bytes_of(state), program.memory_analysis()
    assert abs(memory.alias_size_in_bytes / size - 1) < 1e-3
    assert memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes < more * size
    assert max(copied(program), default=0) < most_copied
