"""How JAX is set up beside torch, where the user has set nothing and JAX has not started.

- `XLA_PYTHON_CLIENT_PREALLOCATE=false`: JAX would take three quarters of a GPU at its first use and leave torch the rest.
- `jax_cpu_enable_async_dispatch=False`: on the CPU every small program would be handed to another thread, which takes
  longer than the draw of a batch itself. `JAX_CPU_ENABLE_ASYNC_DISPATCH=1` in the environment keeps it on.
- One CPU thread for XLA, in a program that had not imported JAX before: XLA splits small programs over threads, and
  waits for the slowest. A batch of 256 takes half the time on one, and a fifth on a machine that is busy otherwise.
  Programs that import JAX first, or set `NPROC`, keep the threads they have.
"""

import os
import sys
import threading

_torch_only = "jax" not in sys.modules and "NPROC" not in os.environ

import jax  # noqa: E402

from interop.processes import jax_started  # noqa: E402

if not jax_started():
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if "JAX_CPU_ENABLE_ASYNC_DISPATCH" not in os.environ:
        jax.config.update("jax_cpu_enable_async_dispatch", False)
_started = False
_lock = threading.Lock()


def start_jax() -> None:
    """Start JAX, once, with the number of CPU threads that suits; other programs started later do not inherit it."""
    global _started
    if _started:
        return
    with _lock:
        if _torch_only and "NPROC" not in os.environ:
            os.environ["NPROC"] = "1"
            try:
                jax.local_devices(backend="cpu")
            finally:
                del os.environ["NPROC"]
        _started = True
