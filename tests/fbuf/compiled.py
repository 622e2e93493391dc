"""The functions of a buffer and of a tree, compiled once for all tests."""

import jax

import fbuf
from fbuf import priority_tree

extend = jax.jit(fbuf.Buffer.extend, static_argnums=0)
sample = jax.jit(fbuf.Buffer.sample, static_argnums=(0, 3))
update = jax.jit(fbuf.Buffer.update, static_argnums=0)
init = jax.jit(fbuf.Buffer.init, static_argnums=0)

update_tree = jax.jit(priority_tree.update, static_argnames="settled")
fill_tree = jax.jit(priority_tree.fill)
find = jax.jit(priority_tree.find)
