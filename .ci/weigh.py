"""What a reader must hold in mind: large classes, circles, arrows upward, halves of classes, names with two meanings.

`python .ci/weigh.py` prints each measure with the names behind it, and the lines a folder. With `--check` it prints what
passes its limit, and the exit status is 1. Limits only fall: lower one when you have removed code. Lines have no limit:
code is as long as it takes to be read at the first reading.
"""

import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import measures
from source_tree import SourceTree, last

ROOT = Path(__file__).parent.parent
PACKAGES = ("fbuf", "interop")
BESIDE = ("specs", "maps", "llm", "datasets", "remote")  # folders whose lines are not of the core

LIMITS = {
    "files in circles": 0,
    "folders in circles": 0,
    "imports upward": 0,
    "companions": 0,
    "class names with two meanings": 0,
    "file names with two meanings": 16,
    "types imported under another name": 0,
    "SLF001": 0,
    "ANN401": 1_430,
}

# The limits of public methods of a class, with the inherited ones. A class is in the first family that has the name of
# the class or of one that it inherits from.
FAMILIES = {
    "storages": (45, ("Storage",)),
    "buffers": (60, ("Buffer", "Sampled", "FunctionalReplayBuffer", "RayReplayBuffer")),
    "samplers": (30, ("Sampler",)),
}
OTHERS = 67
# The classes above the limit of their family, and how many they may have. Remove the line of a class that is not any more.
DEBTS = {
    # buffers
    "interop.datasets.atari_dqn.AtariDQNExperienceReplay": 69,
    "interop.datasets.openml.OpenMLExperienceReplay": 69,
    "interop.datasets.d4rl.D4RLExperienceReplay": 68,
    "interop.datasets.experience_replay.BaseDatasetExperienceReplay": 68,
    "interop.datasets.gen_dgrl.GenDGRLExperienceReplay": 68,
    "interop.datasets.hub_folder.HubFolderExperienceReplay": 68,
    "interop.datasets.lerobot.LeRobotExperienceReplay": 68,
    "interop.datasets.minari_data.MinariExperienceReplay": 68,
    "interop.datasets.openx.OpenXExperienceReplay": 68,
    "interop.datasets.roboset.RobosetExperienceReplay": 68,
    "interop.datasets.vd4rl.VD4RLExperienceReplay": 68,
}

# Homes of a name that have one meaning, and which.
SAME_MEANING = {
    ("fbuf.samplers.protocol.Sampler", "interop.samplers.sampler.Sampler"): "base class of the samplers of a door",
    ("fbuf.writers.Writer", "interop.writers.writer.Writer"): "base class of the writers of a door",
    ("fbuf.trajectories.Trajectories", "interop.host.trajectories.Trajectories"): "the index, in each engine",
    ("fbuf/trajectories.py", "interop/host/trajectories.py"): "the index, in each engine",
    ("fbuf.rate_limits.RateLimiter", "interop.buffers.rate_limiter.RateLimiter"): "one rule, for jit and for torch",
    ("fbuf.frames.Frames", "interop.engine.places.frames.Frames"): "frames that are stored once, for jit and for torch",
    ("fbuf/names.py", "interop/names.py"): "the public names of a package",
    ("fbuf/resizing.py", "interop/buffers/resizing.py"): "the newest rows in another capacity, for jit and for torch",
    ("fbuf/storage.py", "interop/storages/storage.py"): "items by slot, for jit and for torch",
    (
        "fbuf/frames.py",
        "interop/engine/places/frames.py",
        "interop/storages/frames.py",
    ): "frames that are stored once, for jit and for torch",
    ("fbuf/samplers/prioritized.py", "interop/samplers/prioritized.py"): "one rule, for jit and for torch",
    ("fbuf/samplers/slices.py", "interop/samplers/slices.py"): "one rule, for jit and for torch",
    ("fbuf/samplers/uniform.py", "interop/samplers/uniform.py"): "one rule, for jit and for torch",
    (
        "interop/buffers/ensemble.py",
        "interop/samplers/ensemble.py",
        "interop/storages/ensemble.py",
        "interop/writers/ensemble.py",
    ): "the ensemble of each kind of component",
}

REMEDIES = {
    "files in circles": "Move what both files need to a third one below them, or pass the object in.",
    "folders in circles": "Remove the imports of one direction: move what they need to the lower folder, or pass it in.",
    "imports upward": "Move what is needed to the lower layer, or have the upper one pass it in.",
    "companions": "Make the function a method, or pass it the values that it works on in place of the object.",
    "class names with two meanings": "Rename one of the classes. Homes with one meaning go to SAME_MEANING.",
    "file names with two meanings": "Rename one of the files. Homes with one meaning go to SAME_MEANING.",
    "types imported under another name": "Rename one of the two types where it is defined.",
    "SLF001": "A method is missing where the private name is defined. `ruff check --select SLF001` shows the places.",
    "ANN401": "Give the parameters a type. `ruff check --isolated --select ANN401` shows the places.",
    "public methods": "Remove methods, or give some of them and their part of the state to an object that it holds.",
}


@dataclass(frozen=True)
class Measure:
    """A number with a limit, and the names that were counted."""

    title: str
    count: int
    limit: int
    remedy: str
    names: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lower = f"; lower it to {self.count:,}" if self.count < self.limit else ""
        return f"{self.count:8,}  {self.title} (limit {self.limit:,}{lower})"

    def excess(self) -> str:
        """By how much the limit is passed, and what to do. "" if it is not."""
        if self.count <= self.limit:
            return ""
        text = f"{self.title}: {self.count:,}, which is {self.count - self.limit:,} above the limit of {self.limit:,}."
        return "\n".join([f"{text} {self.remedy}", *(f"    {name}" for name in self.names)])


def of_tree(tree: SourceTree, layers: measures.Layers, root: Path) -> list[Measure]:
    """The measures of LIMITS."""
    arrows = measures.arrows_of_folders(tree)
    files, folders = measures.circles_of_files(tree), measures.circles(arrows)
    classes = measures.with_two_meanings(measures.homes_of_classes(tree), SAME_MEANING)
    names = measures.with_two_meanings(measures.homes_of_files(tree), SAME_MEANING)
    broken = measures.places(root, ("SLF001", "ANN401"), PACKAGES)
    found = {
        "files in circles": [
            line for group in files for line in _circle(group, [str(each) for each in measures.closing(tree, group)])
        ],
        "folders in circles": [line for group in folders for line in _circle(group, _arrows(group, arrows))],
        "imports upward": [str(each) for each in measures.upward(tree, layers)],
        "companions": measures.companions(tree, layers),
        "class names with two meanings": [f"{name}: {', '.join(homes)}" for name, homes in classes.items()],
        "file names with two meanings": [f"{name}: {', '.join(homes)}" for name, homes in names.items()],
        "types imported under another name": [
            f"{each}: {each.name} as {each.alias}" for each in measures.renamed(tree)
        ],
        "SLF001": broken["SLF001"],
        "ANN401": measures.by_folder(broken["ANN401"]),
    }
    counts = {title: len(names) for title, names in found.items()} | {
        "files in circles": sum(map(len, files)),
        "folders in circles": sum(map(len, folders)),
        "ANN401": len(broken["ANN401"]),
    }
    return [Measure(title, counts[title], LIMITS[title], REMEDIES[title], found[title]) for title in LIMITS]


def of_classes(tree: SourceTree) -> dict[str, Measure]:
    """The public methods of each class, the largest first."""
    found = {}
    for name, methods in measures.public_methods(tree).items():
        family, limit = family_of(tree, name)
        title = f"public methods of {name}, one of the {family}"
        limit = DEBTS.get(name, limit)
        found[name] = Measure(title, len(methods), limit, REMEDIES["public methods"], [", ".join(sorted(methods))])
    return dict(sorted(found.items(), key=lambda each: (-each[1].count, each[0])))


def family_of(tree: SourceTree, name: str) -> tuple[str, int]:
    """The family of a class, and its limit."""
    names = {last(each) for each in tree.ancestors(name)}
    for family, (limit, roots) in FAMILIES.items():
        if names & set(roots):
            return family, limit
    return "other classes", OTHERS


def _circle(members: list[str], arrows: list[str]) -> list[str]:
    return [f"{len(members)}: {', '.join(members)}", *(f"    {each}" for each in dict.fromkeys(arrows))]


def _arrows(folders: list[str], arrows: Counter[tuple[str, str]]) -> list[str]:
    """The imports between some folders, the fewest first: these are the easiest to remove."""
    within = [pair for pair in reversed(arrows.most_common()) if set(pair[0]) <= set(folders)]
    return [f"{start} -> {end}: {count}" for (start, end), count in within]


def outdated(tree: SourceTree, classes: dict[str, Measure]) -> list[str]:
    """The lines of the tables above that have no meaning any more."""
    names = {last(name) for name in classes}
    roots = [root for _, roots in FAMILIES.values() for root in roots if root not in names]
    paid = [name for name in DEBTS if name not in classes or classes[name].count <= family_of(tree, name)[1]]
    known = set(classes) | {module.path.as_posix() for module in tree.modules.values()}
    homes = [home for group in SAME_MEANING for home in group if home not in known]
    return [
        *(f"FAMILIES: no class is named {each}: write the name that it has now" for each in roots),
        *(f"DEBTS: {each} is no class above the limit of its family: remove the line" for each in paid),
        *(f"SAME_MEANING: {each} does not exist: remove it" for each in homes),
    ]


def print_lines(root: Path) -> None:
    """Print the lines of each folder. Those of BESIDE are not of the core."""
    folders = [root / "fbuf", *sorted(each for each in (root / "interop").iterdir() if any(each.glob("*.py")))]
    lines = {f"{each.relative_to(root)}": measures.lines(each.rglob("*.py")) for each in folders}
    lines["interop/*.py"] = measures.lines((root / "interop").glob("*.py"))
    for folder, count in lines.items():
        print(f"{count:8,}  {folder}")
    core = sum(count for folder, count in lines.items() if Path(folder).name not in BESIDE)
    print(f"{core:8,}  core lines")
    print(f"{measures.lines((root / 'tests').rglob('*.py')):8,}  test lines")


def print_all(measured: list[Measure], classes: dict[str, Measure]) -> None:
    """Print each measure with its names, the classes with debts, and the largest of the others."""
    for each in measured:
        print("", each, *(f"          {name}" for name in each.names), sep="\n")
    limits = ", ".join(f"{family} {limit}" for family, (limit, _) in FAMILIES.items())
    print(f"\nPublic methods of classes above the limit of their family ({limits}):")
    for name in [name for name in classes if name in DEBTS]:
        print(classes[name])
    print(f"\nThe largest of the other classes ({OTHERS} at most, if of no family):")
    for name in [name for name in classes if name not in DEBTS][:12]:
        print(f"{classes[name].count:8,}  {name}")


def main() -> int:
    tree = SourceTree(ROOT, PACKAGES)
    measured, classes = of_tree(tree, measures.Layers.read(ROOT), ROOT), of_classes(tree)
    wrong = [text for each in [*measured, *classes.values()] if (text := each.excess())] + outdated(tree, classes)
    if "--check" not in sys.argv:
        print_lines(ROOT)
        print_all(measured, classes)
    for text in wrong:
        print(text, file=sys.stderr)
    return 1 if wrong and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
