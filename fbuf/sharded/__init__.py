"""Buffers whose rows are spread over the devices of a mesh axis, inside `jax.jit`."""

from fbuf.sharded.on_mesh import OnMesh
from fbuf.sharded.rule import Sharded

__all__ = ["OnMesh", "Sharded"]
