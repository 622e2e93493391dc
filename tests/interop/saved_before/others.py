"""Maps, trees, specs, and datasets."""

import dataclasses
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from tensordict import TensorDict

from interop import (
    HashToInt,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    MCTSForest,
    QueryModule,
    RandomProjectionHash,
    SamplerWithoutReplacement,
    Storage,
    TensorDictMap,
    Tree,
)
from interop.datasets import BaseDatasetExperienceReplay, Part, Source, nested
from tests.interop.saved_before.case import (
    Case,
    drawn,
    from_folder,
    from_state,
    standing,
    through_folder,
    through_state,
)
from tests.interop.saved_before.plain import Seen, flat

OTHERS: dict[str, Case[object]] = {}

# ------------------------------------------------------------------ maps


def keys(*numbers: int) -> TensorDict:
    found = torch.tensor(numbers)
    return TensorDict({"k": found.double()[:, None] / 2, "n": found % 2}, [len(numbers)])


def values(*numbers: int) -> TensorDict:
    found = torch.tensor(numbers)
    return TensorDict({"v": found[:, None].expand(-1, 2).clone(), "w": {"x": found.float()}}, [len(numbers)])


def of_hashes() -> QueryModule:
    """One that decides by whole numbers which keys are equal."""
    return QueryModule(["k", "n"], hash_to_int=HashToInt())


def a_map(
    storage: Callable[[int], Storage], query: Callable[[], QueryModule] = lambda: QueryModule(["k", "n"])
) -> TensorDictMap:
    return TensorDictMap(query_module=query(), storage=storage(8))


def map_case(make: Callable[[], TensorDictMap], way: str) -> Case[TensorDictMap]:
    def fill(held: TensorDictMap) -> None:
        held[keys(1, 2, 3)] = values(1, 2, 3)
        held[keys(2, 5)] = values(20, 50)

    def go_on(held: TensorDictMap, scratch: Path) -> Seen:
        seen = flat({"length": len(held), "there": held.contains(keys(1, 9, 5)), "max size": held.max_size}, "loaded")
        seen |= flat(held[keys(5, 1, 2)], "read")
        new = keys(7, 2)
        held[new] = values(70, 21)
        seen |= flat(new, "keys") | flat(held[keys(7, 3, 2)], "read again")
        held.dumps(scratch / "again")
        other = make()
        other.loads(scratch / "again")
        assert flat(other[keys(7, 3, 2)]) == flat(held[keys(7, 3, 2)])
        return seen

    return Case(make, fill, *WAYS[way], go_on)


WAYS = {
    "dumps": (through_folder, from_folder),
    "state_dict": (through_state, from_state),
}
for name, make_map in {
    "memory": lambda: a_map(LazyTensorStorage),
    "maps": lambda: a_map(LazyMemmapStorage),
    "list": lambda: a_map(ListStorage),
    "lazy stack": lambda: a_map(LazyStackStorage),
    "hashes": lambda: a_map(LazyTensorStorage, of_hashes),
}.items():
    for way in WAYS:
        OTHERS[f"map: {name}: {way}"] = map_case(make_map, way)  # type: ignore[assignment]


# ------------------------------------------------------------------ hashes


def hash_case(way: str) -> Case[RandomProjectionHash]:
    """A projection that was drawn at the first call."""

    def go_on(held: RandomProjectionHash, scratch: Path) -> Seen:
        return flat(held(torch.tensor([[0.5, 1.0], [-3.0, 2.0], [7.0, -8.0]])), "hashes")

    def fill(held: RandomProjectionHash) -> None:
        torch.manual_seed(11)
        held(torch.tensor([[0.5, 1.0], [-3.0, 2.0], [4.0, 0.0]]))

    return Case(lambda: RandomProjectionHash(n_components=4), fill, *WAYS[way], go_on)


def numbers_case(way: str) -> Case[HashToInt]:
    def fill(held: HashToInt) -> None:
        held(torch.tensor([30, 10, 30, -20]), extend=True)

    def go_on(held: HashToInt, scratch: Path) -> Seen:
        return flat([len(held), held(torch.tensor([-20, 30, 5])), held(torch.tensor([5, 10]), extend=True)], "numbers")

    return Case(HashToInt, fill, *WAYS[way], go_on)


for way in ("state_dict",):
    OTHERS[f"hash: projection: {way}"] = hash_case(way)  # type: ignore[assignment]
    OTHERS[f"hash: numbers: {way}"] = numbers_case(way)  # type: ignore[assignment]


# ------------------------------------------------------------------ forests and trees


def rollout(observations: list[int], actions: list[int]) -> TensorDict:
    count, places = len(actions), torch.tensor(observations)[:, None]
    done = torch.zeros(count, 1, dtype=torch.bool)
    done[-1] = True
    after = {"observation": places[1:], "reward": torch.arange(count)[:, None].float(), "done": done}
    below = TensorDict({**after, "terminated": done.clone()}, [count])
    return TensorDict({"observation": places[:-1], "action": torch.tensor(actions), "next": below}, [count])


def tree_of(forest: MCTSForest) -> Tree:
    return forest.get_tree(TensorDict({"observation": torch.tensor([0])}))


def of_tree(tree: Tree) -> Seen:
    """Its vertices in their order, and the rollouts of its paths."""
    paths = sorted(tree.valid_paths())
    seen = flat([list(path) for path in paths], "paths") | flat([tree.num_vertices(), tree.max_length()], "size")
    for place, path in enumerate(paths):
        found = tree.rollout_from_path(path)
        seen |= flat(None if found is None else found.to_dict(), f"path {place}")
    return seen


def forest_case(way: str) -> Case[MCTSForest]:
    def make() -> MCTSForest:
        forest = MCTSForest(max_size=20)
        if way == "state_dict":  # it knows the layout of rollouts
            forest.extend(rollout([0, 5], [1]))
        return forest

    def fill(forest: MCTSForest) -> None:
        for observations, actions in (([0, 123, 456], [3, 1]), ([0, 123, 392, 989], [3, 9, 6]), ([0, 75], [1])):
            forest.extend(rollout(observations, actions))

    def go_on(forest: MCTSForest, scratch: Path) -> Seen:
        seen = flat(len(forest), "length") | of_tree(tree_of(forest))
        forest.extend(rollout([123, 7, 456], [4, 2]))
        seen |= {f"later, {name}": each for name, each in of_tree(tree_of(forest)).items()}
        forest.dumps(scratch / "again")
        other = MCTSForest(max_size=20)
        other.loads(scratch / "again")
        assert of_tree(tree_of(other)) == of_tree(tree_of(forest))
        return seen

    return Case(make, fill, *WAYS[way], go_on)


for way in WAYS:
    OTHERS[f"forest: {way}"] = forest_case(way)  # type: ignore[assignment]


# ------------------------------------------------------------------ datasets


@dataclasses.dataclass(frozen=True)
class Walks(Source):
    """Episodes in `.npz` files, which are made instead of downloaded."""

    family = "walks"

    def download(self, folder: Path) -> Mapping[str, str]:
        for number in range(3):
            position = np.arange(8, dtype=np.float32).reshape(4, 2) + 10 * number
            np.savez(folder / f"{number}.npz", position=position, reward=position[:, 0] / 2)
        return {}

    def parts(self, folder: Path) -> list[Part]:
        return [Part(len(np.load(path)["reward"]), path) for path in sorted(folder.glob("*.npz"))]

    def read(self, part: Part) -> Iterator[TensorDict]:
        with np.load(part.path) as file:
            rows = nested({"observation": file["position"]}, part.rows, str(part.path))
            done = np.arange(part.rows) == part.rows - 1
            rows["next"] = nested({"reward": file["reward"], "done": done}, part.rows, str(part.path))
        yield rows


class WalksReplay(BaseDatasetExperienceReplay):
    """The rows of these files."""

    def __init__(self, root: Path, download: bool = False) -> None:
        super().__init__(
            Walks("short"),
            4,
            root=root,
            download=download,
            sampler=SamplerWithoutReplacement(),
            generator=torch.Generator("cpu").manual_seed(3),
        )


@dataclasses.dataclass
class Root:
    """The folder of a family of datasets."""

    path: Path


def dataset_case() -> Case[Root]:
    def make() -> Root:
        return Root(Path(tempfile.mkdtemp()))

    def fill(root: Root) -> None:
        WalksReplay(root.path, download=True)

    def save(root: Root, path: Path) -> None:
        shutil.copytree(root.path, path)

    def load(root: Root, path: Path) -> Root:
        shutil.rmtree(root.path)
        return Root(path)

    def go_on(root: Root, scratch: Path) -> Seen:
        buffer = WalksReplay(root.path)
        return standing(buffer, "loaded") | drawn(buffer, "draw 0", 0) | drawn(buffer, "draw 1", 1)

    return Case(make, fill, save, load, go_on)


OTHERS["dataset"] = dataset_case()  # type: ignore[assignment]
