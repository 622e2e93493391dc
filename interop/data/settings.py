"""How JAX is set up beside torch, unless the user has set it up or JAX has started.

- `XLA_PYTHON_CLIENT_PREALLOCATE=false`: JAX would take three quarters of a GPU at its first use and leave torch the
  rest.
- `jax_cpu_enable_async_dispatch=False`: on the CPU every small program would be handed to another thread, which takes
  longer than the draw of a batch itself. `JAX_CPU_ENABLE_ASYNC_DISPATCH=1` in the environment keeps it on.
- One CPU thread for XLA, in a program that had not imported JAX before: XLA splits small programs over threads, and
  waits for the slowest. A batch of 256 takes half the time on one, and a fifth on a machine that is busy otherwise.
  Programs that import JAX first, or set `NPROC`, keep the threads they have.
- JAX's persistent compilation cache in `~/.cache/fbuf` (or `$XDG_CACHE_HOME/fbuf`), in a program that had not imported
  JAX before: the programs of a prioritized sampler take a second to compile. `JAX_COMPILATION_CACHE_DIR` names another
  folder, `JAX_ENABLE_COMPILATION_CACHE=0` turns it off. Without a writable folder there is none.
"""

import os
import platform
import threading
import warnings
import zlib
from importlib.util import find_spec
from typing import Any

for _library in ("torch", "tensordict", "numpy", "h5py"):  # whatever needs one of them imports this module first
    if find_spec(_library) is None:
        raise ImportError(
            f"interop needs {_library}, which is not installed: pip install '.[interop]' in a copy of the repository. fbuf "
            "alone needs JAX only",
            name=_library,
        )

import jax  # noqa: E402

from interop.data.import_order import JAX_CAME_FIRST  # noqa: E402

_jax_is_ours = not JAX_CAME_FIRST
_torch_only = _jax_is_ours and "NPROC" not in os.environ

_started = False
_lock = threading.Lock()
_TROUBLE = "Error (reading|writing) persistent compilation cache"
_COMPILE_SECONDS = 0.1  # programs that take less to compile are not kept


def jax_started() -> bool:
    """Whether JAX has started a backend in this process."""
    try:  # JAX has no public way to ask
        from jax._src.xla_bridge import backends_are_initialized
    except ImportError:
        return True
    return bool(backends_are_initialized())


if not jax_started():
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if "JAX_CPU_ENABLE_ASYNC_DISPATCH" not in os.environ:
        jax.config.update("jax_cpu_enable_async_dispatch", False)


def start_jax() -> None:
    """Start JAX, once, with the number of CPU threads that suits; other programs started later do not inherit it."""
    global _started
    if _started:
        return
    with _lock:
        if _jax_is_ours and not _started:
            keep_programs()
        if _torch_only and "NPROC" not in os.environ:
            os.environ["NPROC"] = "1"
            try:
                jax.local_devices(backend="cpu")
            finally:
                del os.environ["NPROC"]
        _started = True


def keep_programs() -> None:
    """Turn JAX's persistent compilation cache on, unless the user has set one or has turned it off."""
    config = jax.config.values
    if config["jax_compilation_cache_dir"] is not None or not config["jax_enable_compilation_cache"]:
        return
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = os.path.join(home, "fbuf", _processor())
    if not os.path.isabs(folder):  # the user has no home
        return
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
    except OSError:
        return
    if os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        jax.monitoring.register_event_listener(_silence)
        jax.config.update("jax_compilation_cache_dir", folder)
        seconds = "jax_persistent_cache_min_compile_time_secs"
        jax.config.update(seconds, min(config[seconds], _COMPILE_SECONDS))


def _processor() -> str:
    """The kind of processor: a program compiled for one may not run on another, and JAX does not tell them apart."""
    try:
        with open("/proc/cpuinfo") as file:
            features = next((line for line in file if line.startswith(("flags", "Features"))), "")
    except OSError:  # not Linux
        features = platform.processor()
    return f"{platform.machine()}-{zlib.crc32(features.encode()):08x}"


def _silence(event: str, **_: Any) -> None:
    """Ignore the warning about an entry that cannot be read or written: it costs one compilation.

    JAX sends an event before it looks into the cache. The filter is set each time, because tests and others replace
    all.
    """
    if event.startswith("/jax/compilation_cache/") and _TROUBLE not in str(warnings.filters[:1]):
        warnings.filterwarnings("ignore", _TROUBLE, UserWarning)
