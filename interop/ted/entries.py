"""Which entries of TED data are what: observations that come twice, outcomes of a step, and what only the root has."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tensordict import TensorDictBase, is_leaf_nontensor
from torch import Tensor

from interop.data.keys import as_path

Path = tuple[str, ...]
Leaves = Mapping[Path, Tensor]

REWARD_KEYS = ("reward",)


@dataclass(frozen=True)
class Names:
    """The keys with a meaning, as paths below the root and below "next" alike."""

    done: tuple[Path, ...]
    reward: tuple[Path, ...]

    @classmethod
    def of(cls, done_keys: Iterable[Any], reward_keys: Iterable[Any]) -> "Names":
        """From keys. TypeError for a single one, whose letters would be taken for keys."""
        for name, keys in (("done_keys", done_keys), ("reward_keys", reward_keys)):
            if isinstance(keys, str):
                raise TypeError(f"{name} must be a list or tuple of keys, got {keys!r}: pass ({keys!r},)")
        return cls(tuple(map(as_path, done_keys)), tuple(map(as_path, reward_keys)))

    def __contains__(self, path: object) -> bool:
        return path in self.done or path in self.reward


@dataclass(frozen=True)
class Entries:
    """The paths of TED data by kind; those of `followed` and `outcomes` are below "next"."""

    followed: tuple[Path, ...]
    """Observations: "next" has what the root has in the row that follows."""
    outcomes: tuple[Path, ...]
    """Done flags and rewards of "next"."""
    plain: tuple[Path, ...]
    """What only the root has."""
    root_only: tuple[Path, ...]
    """Those of `plain` that have a name of `outcomes`."""
    next_only: tuple[Path, ...]
    """Done flags that the root does not have."""

    @classmethod
    def of(cls, leaves: Leaves, names: Names) -> "Entries":
        """Sorted by kind. ValueError for an observation that the root does not have."""
        below = [path[1:] for path in leaves if path[0] == "next" and len(path) > 1]
        above = {path for path in leaves if path[0] != "next" or len(path) == 1}
        for path in below:
            if path not in names and path not in above:
                raise ValueError(
                    f"{shown(('next', *path))} is there from row 0 on, the root has no {shown(path)}, and it "
                    "is none of done_keys and reward_keys. Only TED data can be flattened"
                )
        plain = tuple(path for path in leaves if path in above and path not in below)
        return cls(
            followed=tuple(path for path in below if path not in names),
            outcomes=tuple(path for path in below if path in names),
            plain=plain,
            root_only=tuple(path for path in plain if path in names),
            next_only=tuple(path for path in below if path in names.done and path not in above),
        )


def leaves_of(data: TensorDictBase) -> dict[Path, Tensor]:
    """The tensors of a tensordict by path. TypeError for what is no tensor."""
    found = {}
    for key in data.keys(True, True, is_leaf=is_leaf_nontensor):
        value = data.get(key)
        if not isinstance(value, Tensor):
            raise TypeError(f"{shown(as_path(key))}: only tensors can be flattened, got {type(value).__name__}")
        found[as_path(key)] = value.detach().as_subclass(Tensor)
    return found


def shown(path: Path) -> str:
    """A key as users write it."""
    return repr(path[0] if len(path) == 1 else path)
