"""Whether JAX was imported before this library, and what must be set before JAX starts. See `interop.data.settings`.

`import interop` imports neither torch nor JAX: the first use of a name does, and sets up JAX unless that has started.
"""

import os
import sys

JAX_CAME_FIRST = "jax" in sys.modules

if not JAX_CAME_FIRST:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
