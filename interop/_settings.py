"""How JAX is set up beside torch, where the user has set nothing and JAX has not started.

- `XLA_PYTHON_CLIENT_PREALLOCATE=false`: JAX would take three quarters of a GPU at its first use and leave torch the rest.
- `jax_cpu_enable_async_dispatch=False`: on the CPU every small program would be handed to another thread, which takes
  longer than the draw of a batch itself. `JAX_CPU_ENABLE_ASYNC_DISPATCH=1` in the environment keeps it on.
"""

import os

import jax

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
if "JAX_CPU_ENABLE_ASYNC_DISPATCH" not in os.environ:
    jax.config.update("jax_cpu_enable_async_dispatch", False)
