"""Which entries of TED data are observations, outcomes of a step, or of the root alone."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tensordict import TensorDictBase, is_leaf_nontensor, is_non_tensor, is_tensor_collection
from torch import Tensor

from interop.data.keys import as_path

Path = tuple[str, ...]
Leaves = Mapping[Path, Tensor]

REWARD_KEYS = ("reward",)


@dataclass(frozen=True)
class Names:
    """The keys of done flags and rewards, as paths below the root and below "next" alike."""

    done: tuple[Path, ...]
    reward: tuple[Path, ...]

    @classmethod
    def of(cls, done_keys: Iterable[Any], reward_keys: Iterable[Any]) -> "Names":
        """From keys. TypeError for a single string, whose letters would be taken for keys."""
        for name, keys in (("done_keys", done_keys), ("reward_keys", reward_keys)):
            if isinstance(keys, str):
                raise TypeError(f"{name} must be a list or tuple of keys, got {keys!r}: pass ({keys!r},)")
        return cls(tuple(map(as_path, done_keys)), tuple(map(as_path, reward_keys)))

    def __contains__(self, path: object) -> bool:
        return path in self.done or path in self.reward


@dataclass(frozen=True)
class Entries:
    """The paths of TED data by kind; those of `followed` and `outcomes` are below "next".

    Args:
        followed: observations: "next" has the value of the root in the following row.
        outcomes: done flags and rewards of "next".
        plain: entries of the root alone.
        root_only: those of `plain` with the name of an outcome.
        next_only: done flags that the root does not have.
    """

    followed: tuple[Path, ...]
    outcomes: tuple[Path, ...]
    plain: tuple[Path, ...]
    root_only: tuple[Path, ...]
    next_only: tuple[Path, ...]

    @classmethod
    def of(cls, paths: Iterable[Path], names: Names) -> "Entries":
        """Sorted by kind. ValueError for an observation that the root does not have."""
        paths = list(paths)
        below = [path[1:] for path in paths if is_below(path)]
        above = [path for path in paths if not is_below(path)]
        for path in below:
            if path not in names and path not in above:
                raise ValueError(
                    f"{shown(('next', *path))} is there from row 0 on, the root has no {shown(path)}, and it "
                    "is none of done_keys and reward_keys. Only TED data can be flattened"
                )
        plain = tuple(path for path in above if path not in below)
        return cls(
            tuple(path for path in below if path not in names),
            tuple(path for path in below if path in names),
            plain,
            tuple(path for path in plain if path in names),
            tuple(path for path in below if path in names.done and path not in above),
        )


def is_below(path: Path) -> bool:
    """Whether a path is one of "next"."""
    return path[0] == "next" and len(path) > 1


def parted(data: TensorDictBase) -> tuple[dict[Path, Tensor], dict[Path, Any]]:
    """The tensors of a tensordict by path, and the values of its other entries."""
    if not is_tensor_collection(data):
        raise TypeError(f"expected a tensordict, got {type(data).__name__}")
    tensors, others = {}, {}
    for key in data.keys(True, True, is_leaf=is_leaf_nontensor):
        value = data.get(key)
        if isinstance(value, Tensor):
            tensors[as_path(key)] = value.detach().as_subclass(Tensor)
        else:
            others[as_path(key)] = value.data if is_non_tensor(value) else value
    return tensors, others


def leaves_of(data: TensorDictBase) -> dict[Path, Tensor]:
    """The tensors of a tensordict by path. TypeError for other entries."""
    tensors, others = parted(data)
    for path, value in others.items():
        raise TypeError(f"{shown(path)}: only tensors can be flattened, got {type(value).__name__}")
    return tensors


def shown(path: Path) -> str:
    """A key as users write it."""
    return repr(path[0] if len(path) == 1 else path)
