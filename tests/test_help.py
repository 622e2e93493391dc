"""`help` and tab completion of every public name ask no network and read no file but Python's sources."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# In a process of its own, as an audit hook cannot be removed. It imports the names first: help shows what is there.
LOOK = """
import json, pydoc, rlcompleter, sys

if sys.argv[1:]:
    values = {"Here": eval(sys.argv[1])}
else:
    sys.path.insert(0, "docs/tools")
    import public_names

    values = {each.name: each.value for each in public_names.public_names()}
looked_at, completed, seen = None, 0, []

def hook(event, given):
    if looked_at is None:
        return
    if event.startswith(("socket.", "subprocess.", "sqlite3.", "urllib.", "os.system", "os.posix_spawn", "os.exec")):
        seen.append((looked_at, event, repr(given)[:200]))
    elif event == "open":
        path, mode, flags = given
        written = flags & 3 if isinstance(flags, int) else "r" not in (mode or "r")
        source = isinstance(path, str) and (path.endswith(".py") or path.startswith("<"))
        if written or not source:
            seen.append((looked_at, event, repr(given)[:200]))

sys.addaudithook(hook)
for name, value in values.items():
    looked_at = "help of " + name
    pydoc.render_doc(value)
    looked_at = "completion of " + name
    dir(value)
    completed += len(rlcompleter.Completer({"value": value}).attr_matches("value."))
    looked_at = None
print(json.dumps([len(values), completed, seen]))
"""


def looked_at(*given: str) -> tuple[int, int, list[list[str]]]:
    """How many names and completions there are, and what they touched."""
    done = subprocess.run([sys.executable, "-c", LOOK, *given], cwd=ROOT, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr[-3_000:]
    count, completed, seen = json.loads(done.stdout.splitlines()[-1])
    return count, completed, seen


def test_help_and_completion_touch_neither_network_nor_disk() -> None:
    pytest.importorskip("minari")
    count, completed, seen = looked_at()
    assert seen == [] and count > 250 and completed > 3_000


@pytest.mark.parametrize("touch", ["__import__('socket').getaddrinfo('localhost', 1)", "open('README.md').close()"])
def test_a_value_that_touches_is_found(touch: str) -> None:
    made = (
        f"type('Here', (), {{'ids': property(lambda s: 0), 'of': type('D', (), {{'__get__': lambda *_: {touch}}})()}})"
    )
    _, completed, seen = looked_at(made)
    assert completed >= 2 and seen
