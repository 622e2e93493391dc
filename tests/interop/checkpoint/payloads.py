"""Values that would do harm where what is loaded was more than data, and saved trees that have them at each place."""

import itertools
import os
import pickle

CANARY = "canary-of-test-no-code"
TOUCH = f"touch {CANARY}"


class Runs:
    """Runs a command when it is unpickled."""

    def __init__(self, run, *args):
        self.run, self.args = run, args

    def __reduce__(self):
        return self.run, self.args


PICKLES = [
    pickle.dumps(Runs(os.system, TOUCH), protocol=protocol) for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1)
] + [
    pickle.dumps(Runs(eval, f"__import__('os').system({TOUCH!r})")),
    pickle.dumps(Runs(exec, f"import os; os.mkdir({CANARY!r})")),
    pickle.dumps(Runs(os.mkdir, CANARY)),
    b"cos\nsystem\n(S'" + TOUCH.encode() + b"'\ntR.",
]
NAMES = [
    *(
        "os:system",
        "posix:system",
        "builtins:eval",
        "builtins:exec",
        "builtins:open",
        "builtins:dict",
        "subprocess:Popen",
    ),
    *(
        "subprocess:CompletedProcess.__init__",
        "importlib:import_module",
        "antigravity:x",
        "this:d",
        "turtledemo:x",
        "pickle:loads",
    ),
    *("tests.interop.checkpoint.payloads:Runs", "tests.interop.checkpoint.payloads:<lambda>", "__main__:x"),
    *(
        "",
        ":",
        "::",
        "a",
        ":x",
        "os:",
        "os:path",
        "..:..",
        "sys:modules.os.system",
        "os:system\n",
        "tensordict:TensorDict",
    ),
    "tests.interop.checkpoint.saved_values:Step.__init__",
]
TEXTS = [
    f"__import__('os').system({TOUCH!r})",
    f"torch.float32, __import__('os').system({TOUCH!r})",
    f"!!python/object/apply:os.system [{TOUCH}]",
    *("torch.float32", "float32;", "O", "object", "V8", "f4,f4", "(3,)f4", "U" + "9" * 30, "datetime64[7D/3]"),
    *("cpu\n", "cuda:0; import os", "cpu:99999", "meta", f"/tmp/{CANARY}", f"../{CANARY}", "../../etc/passwd"),
    *("/etc/passwd", "a\0b", "x" * 10_000),
]
NUMBERS = [-1, 2**40, 2**62, 2**63 - 1, -(2**63), 0.5, 1e300, True]
NESTED: list = []
for _ in range(180):
    NESTED = [NESTED]
MARKED = [
    {"kind": "pickled"},
    {"$dict": {}},
    *(
        {"$array": each}
        for each in (["float32", [2**40], 0], ["uint8", [2**42], 0], [TEXTS[0], [1], 0], ["uint8", [1], -5])
    ),
    {"$columns": [2**40, 1, 0, [["uint8", [2**20]]]]},
    {"$float": "9" * 400},
    {"$unknown": 1},
]
PAYLOADS = [*NAMES, *TEXTS, *NUMBERS, *MARKED, None, [], {}, NESTED]


def nodes(tree, path=()):
    yield path
    if isinstance(tree, dict | list):
        for key in tree if isinstance(tree, dict) else range(len(tree)):
            yield from nodes(tree[key], (*path, key))


def changed(tree, path, value):
    if not path:
        return value
    copy = dict(tree) if isinstance(tree, dict) else list(tree)
    copy[path[0]] = changed(copy[path[0]], path[1:], value)
    return copy


def attacks(tree, each=6):
    """The tree with every node replaced by some of the payloads; all of them have their turn."""
    turn = itertools.cycle(PAYLOADS)
    for path in nodes(tree):
        for payload in itertools.islice(turn, each):
            yield changed(tree, path, payload)
