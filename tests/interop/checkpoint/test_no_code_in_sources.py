"""No source reads pickles, or runs what it reads, but in the places that are listed here."""

import ast
from pathlib import Path

import fbuf
import interop

SOURCES = [path for package in (fbuf, interop) for path in sorted(Path(package.__file__).parent.rglob("*.py"))]
# What reads pickles: those that both ends ask for, and what processes of one family tell each other.
READERS = {"interop/checkpoint/values.py": {"loads"}, "interop/shared/first_write.py": {"loads"}}
READERS["interop/llm/memmaps.py"] = {"TensorDict.load_memmap"}  # after a look at every file of the folder
READERS["interop/datasets/preprocessing.py"] = {"loads"}  # in a worker: the function that this process was given
READERS["interop/remote/actor.py"] = {"loads"}  # the constructors that the client of the same cluster has sent
READERS["interop/remote/wire.py"] = {"loads"}  # what processes of one cluster send each other; never a file
READERS["interop/transfer_queue/field_bytes.py"] = {"loads"}  # with allow_pickle=True, which an argument asks for
FORBIDDEN = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "yaml", "joblib", "_pickle"}


def _name(node):
    return f"{_name(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _faults(path):
    """Calls in a source that run what they read."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module in FORBIDDEN:
            yield f"from {node.module} import"
        if not isinstance(node, ast.Call):
            continue
        name = _name(node.func)
        first, last = name.partition(".")[0], name.rpartition(".")[2]
        given = {each.arg: each.value for each in node.keywords}
        if name in ("eval", "exec", "compile", "__import__", "os.system", "os.popen", "builtins.eval", "builtins.exec"):
            yield name
        if first in FORBIDDEN and last in ("load", "loads", "Unpickler", "full_load", "unsafe_load", "open"):
            yield last
        if name == "torch.load" and getattr(given.get("weights_only"), "value", None) is not True:
            yield name
        if (
            "allow_pickle" in given
            and first in ("np", "numpy")
            and getattr(given["allow_pickle"], "value", None) is not False
        ):
            yield name
        if getattr(given.get("shell"), "value", False) is not False:
            yield f"{name}(shell=True)"
        if last == "load_memmap" or name in ("np.fromregex", "torch.hub.load", "torch.jit.load", "runpy.run_path"):
            yield name


def test_no_source_runs_what_it_reads():
    root = Path(interop.__file__).parents[1]
    found = {str(path.relative_to(root)): set(_faults(path)) for path in SOURCES}
    assert {name: faults for name, faults in found.items() if faults} == READERS
