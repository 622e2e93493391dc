"""How JAX is set up beside torch, where the user has set nothing and JAX has not started.

- `XLA_PYTHON_CLIENT_PREALLOCATE=false`: JAX would take three quarters of a GPU at its first use and leave torch the rest.
- `jax_cpu_enable_async_dispatch=False`: on the CPU every small program would be handed to another thread, which takes
  longer than the draw of a batch itself. `JAX_CPU_ENABLE_ASYNC_DISPATCH=1` in the environment keeps it on.
- One CPU thread for XLA, in a program that had not imported JAX before: XLA splits small programs over threads, and
  waits for the slowest. A batch of 256 takes half the time on one, and a fifth on a machine that is busy otherwise.
  Programs that import JAX first, or set `NPROC`, keep the threads they have.
- JAX's persistent compilation cache in `~/.cache/fbuf` (`XDG_CACHE_HOME` counts), in a program that had not imported JAX
  before: the programs of a prioritized sampler take a second to compile. `JAX_COMPILATION_CACHE_DIR` puts it elsewhere,
  `JAX_ENABLE_COMPILATION_CACHE=0` turns it off. Without a folder that can be written there is none.
"""

import os
import platform
import sys
import threading
import warnings
import zlib
from typing import Any

_jax_is_ours = "jax" not in sys.modules
_torch_only = _jax_is_ours and "NPROC" not in os.environ

import jax  # noqa: E402
from jax.experimental.compilation_cache import compilation_cache  # noqa: E402

from interop.shared.processes import jax_started  # noqa: E402

if not jax_started():
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if "JAX_CPU_ENABLE_ASYNC_DISPATCH" not in os.environ:
        jax.config.update("jax_cpu_enable_async_dispatch", False)
_started = False
_lock = threading.Lock()
_folder: str | None = None  # of the cache, as long as it is ours
_LOOKS = "/jax/compilation_cache/compile_requests_use_cache"
_TROUBLE = "Error (reading|writing) persistent compilation cache"
_COMPILE_SECONDS = 0.1  # programs that take less to compile are not kept


def _processor() -> str:
    """The kind of processor: a program compiled for one may not run on another, and JAX does not tell them apart."""
    try:
        with open("/proc/cpuinfo") as file:
            features = next((line for line in file if line.startswith(("flags", "Features"))), "")
    except OSError:  # not Linux
        features = platform.processor()
    return f"{platform.machine()}-{zlib.crc32(features.encode()):08x}"


def keep_programs() -> None:
    """Turn JAX's persistent compilation cache on, unless the user has set one or has turned it off."""
    config = jax.config.values
    if config["jax_compilation_cache_dir"] is not None or not config["jax_enable_compilation_cache"]:
        return
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = os.path.join(home, "fbuf", _processor())
    if not os.path.isabs(folder):  # nobody's home, or a setting that is to be ignored
        return
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
    except OSError:
        return
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        return
    global _folder
    _folder = folder
    jax.monitoring.register_event_listener(_before_looking)
    jax.config.update("jax_compilation_cache_dir", folder)
    seconds = "jax_persistent_cache_min_compile_time_secs"
    jax.config.update(seconds, min(config[seconds], _COMPILE_SECONDS))


def _before_looking(event: str, **_: Any) -> None:
    """Before JAX looks for a program in the cache: have it be silent, or give way to one that the user has set since.

    An entry that cannot be read or written (a full disk, a process killed while writing) costs a compilation, no more.
    Filters of warnings are looked at each time: tests and others set their own. JAX itself stays with the first folder.
    """
    global _folder
    if event != _LOOKS or _folder is None:
        return
    if jax.config.values["jax_compilation_cache_dir"] != _folder:
        _folder = None
        compilation_cache.reset_cache()
    elif _TROUBLE not in str(warnings.filters[:1]):
        warnings.filterwarnings("ignore", _TROUBLE, UserWarning)


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
