"""The public names of both packages, as their name tables have them, with topic, members and what is not documented."""

import dataclasses
import importlib
import inspect
import types
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("fbuf", "interop")
# Modules with a table of names.
TABLES = ("fbuf", "interop", "interop.transforms", "interop.datasets", "interop.view", "interop.transfer_queue")

# Modules by topic: a name belongs to the topic with the longest prefix of the module that defines it. Pages of the
# reference are in this order.
TOPICS = {
    "Buffers inside jit": (
        "fbuf.buffer", "fbuf.mixture", "fbuf.sharded", "fbuf.resizing", "fbuf.memory_plan", "fbuf.hash_table",
        "fbuf.rate_limits",
    ),
    "Sampling rules inside jit": ("fbuf.samplers", "fbuf.priority_tree"),
    "Writers and storage inside jit": ("fbuf.writers", "fbuf.highest_ranked", "fbuf.storage", "fbuf.frames"),
    "Trajectories and returns inside jit": ("fbuf.trajectories", "fbuf.returns"),
    "Looking into a functional buffer": ("fbuf.looking",),
    "Checkpoints": (
        "fbuf.checkpoint", "interop.checkpoint", "interop.storages.checkpointers", "interop.formats",
    ),
    "Buffers": ("interop.buffers", "interop.doors"),
    "Storages": ("interop.storages",),
    "Samplers": ("interop.samplers", "interop.sample_units", "interop.schedulers"),
    "Writers": ("interop.writers",),
    "Transforms": ("interop.transforms",),
    "Episodes and returns": ("interop.postprocs", "interop.ted", "interop.trajectories"),
    "Specs": ("interop.specs",),
    "Maps and trees": ("interop.maps",),
    "Language data": ("interop.llm",),
    "Actions of robots": ("interop.vla",),
    "Numbers for logs": ("interop.metrics",),
    "Several processes and machines": ("interop.remote", "interop.transfer_queue"),
    "Between torch and JAX": ("interop.data",),
    "What is on disk": ("interop.looking", "interop.opening", "interop.doctor"),
    "Datasets": ("interop.datasets",),
    "A page in the browser": ("interop.view",),
}  # fmt: skip

# Names whose values do not know the module that defines them.
HOMES = {"DEFAULT_DONE_KEYS": "interop.trajectories", "DEVICE_TYPING": "interop.specs"}


@dataclasses.dataclass(frozen=True)
class PublicName:
    """A value with a page: its first name, such as "fbuf.Buffer", its other names, and its topic."""

    name: str
    others: tuple[str, ...]
    value: object
    topic: str

    @property
    def short(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def kind(self) -> str:
        """The kind of directive that documents it."""
        if isinstance(self.value, types.ModuleType):
            return "module"
        if inspect.isclass(self.value):
            return "exception" if issubclass(self.value, BaseException) else "class"
        return "function" if inspect.isroutine(self.value) else "data"


def public_names() -> list[PublicName]:
    """All of them, each value once, in the order of topics and then of names."""
    names: dict[int, list[str]] = {}
    values: dict[int, object] = {}
    for table in TABLES:
        module = importlib.import_module(table)
        for name in module.__all__:
            if name != "__version__":
                value = getattr(module, name)
                values[id(value)] = value
                names.setdefault(id(value), []).append(f"{table}.{name}")
    found = []
    for key, value in values.items():
        first, *others = sorted(names[key], key=lambda name: (is_alias(name, value), names[key].index(name)))
        found.append(PublicName(first, tuple(others), value, topic_of(first, value)))
    order = list(TOPICS)
    return sorted(found, key=lambda each: (order.index(each.topic), each.short.lower(), each.name))


def is_alias(name: str, value: object) -> bool:
    """Whether a class has another name of its own: such a name comes last."""
    return name.rpartition(".")[2] != getattr(value, "__name__", name).rpartition(".")[2]


def topic_of(name: str, value: object) -> str:
    home = HOMES.get(name.rpartition(".")[2]) or home_of(value)
    fits = [
        (len(prefix), topic)
        for topic, prefixes in TOPICS.items()
        for prefix in prefixes
        if home == prefix or home.startswith(f"{prefix}.")
    ]
    if not fits:
        raise ValueError(f"{name} is defined in {home}, which belongs to no topic: enter it in TOPICS of {__file__}")
    return max(fits)[1]


def home_of(value: object) -> str:
    """The module that defines a value, or the module itself."""
    return value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", "")


def is_ours(value: object) -> bool:
    """Whether the code of a function, property or class is in one of the packages, and written there, not generated."""
    if isinstance(value, property):
        value = value.fget
    value = inspect.unwrap(getattr(value, "__func__", value))  # type: ignore[arg-type]
    code = getattr(value, "__code__", None) or getattr(getattr(value, "func", None), "__code__", None)
    if code is None:
        return inspect.isclass(value) and value.__module__.partition(".")[0] in PACKAGES
    return any(code.co_filename.startswith(f"{ROOT / package}/") for package in PACKAGES)


def members(value: type) -> Iterator[tuple[str, type]]:
    """Public methods and properties of a class that are our code, with the class that defines each."""
    for name in sorted(dir(value)):
        owner = next((each for each in value.__mro__ if name in vars(each)), None)
        if name.startswith("_") or owner is None:
            continue
        member = vars(owner)[name]
        is_method = inspect.isroutine(member) or isinstance(member, property) or hasattr(member, "func")
        if is_method and is_ours(member):
            yield name, owner


def documentation(value: type, name: str) -> str | None:
    """The docstring of a member, or the one of the method that it overrides."""
    for each in value.__mro__:
        if (member := vars(each).get(name)) is not None and (text := getattr(member, "__doc__", None)):
            return inspect.cleandoc(text)
    return None


def undocumented(each: PublicName) -> list[str]:
    """What has no docstring: the name itself, or its public methods and properties."""
    if each.kind == "data":
        return []
    missing = [] if inspect.getdoc(each.value) else [each.name]
    if inspect.isclass(each.value):
        missing += [f"{each.name}.{name}" for name, _ in members(each.value) if not documentation(each.value, name)]
    return missing
