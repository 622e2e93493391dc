"""Conditions on whole trajectories, written as Python expressions: `(traj.reward.sum() > 100) & (traj.length < 50)`."""

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, TypeVar, cast

import torch
from tensordict.utils import NestedKey
from torch import Tensor

from interop.buffers.trajectory import Trajectory
from interop.data.arguments import class_of
from interop.data.keys import checked_key

Keys = frozenset[Any] | None
C = TypeVar("C", "TrajectoryPredicate", "StepCondition")
_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
}
_LENGTH, _TOTAL = "length", "total_reward"


class TrajectoryPredicate:
    """A condition on a trajectory. `&`, `|` and `~` combine conditions, and take other functions of a trajectory, too.

    Comparisons of expressions of `traj` make them. A predicate has no truth value of its own, so `and`, `or` and `not` are a
    TypeError.

    Args:
        fn: takes a `Trajectory`, returns a bool.
        description: the text of `repr`.
        keys: the entries that `fn` reads; None if that is not known.
    """

    def __init__(self, fn: Callable[[Trajectory], object], description: str = "predicate", keys: Keys = None) -> None:
        if not callable(fn):
            raise TypeError(
                f"a predicate is a function of a Trajectory, or a comparison such as traj.length > 5, got {fn!r}"
            )
        self._fn = fn
        self._description = description
        self._keys = keys

    def __call__(self, trajectory: Trajectory) -> bool:
        return bool(self._fn(trajectory))

    def required_keys(self) -> Keys:
        """The entries that the condition reads, each under its key or under ("next", key); None if that is not known."""
        return self._keys

    def __and__(self, other: Callable[[Trajectory], object]) -> "TrajectoryPredicate":
        return self._joined("and", "&", other)

    def __or__(self, other: Callable[[Trajectory], object]) -> "TrajectoryPredicate":
        return self._joined("or", "|", other)

    def __rand__(self, other: Callable[[Trajectory], object]) -> "TrajectoryPredicate":
        return as_predicate(other) & self

    def __ror__(self, other: Callable[[Trajectory], object]) -> "TrajectoryPredicate":
        return as_predicate(other) | self

    def __invert__(self) -> "TrajectoryPredicate":
        return TrajectoryPredicate(_Joined("not", self), f"~{self._description}", self._keys)

    def _joined(self, how: str, symbol: str, other: Callable[[Trajectory], object]) -> "TrajectoryPredicate":
        second = as_predicate(other)
        mine, theirs = self._keys, second.required_keys()
        keys = None if mine is None or theirs is None else mine | theirs
        return TrajectoryPredicate(_Joined(how, self, second), f"({self._description} {symbol} {second})", keys)

    def __bool__(self) -> NoReturn:
        raise TypeError(f"{self} is a condition on trajectories, not a bool: combine it by & | ~, not by and, or, not")

    def __str__(self) -> str:
        return self._description

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._description})"


def as_predicate(condition: object) -> TrajectoryPredicate:
    """A condition as a predicate. TypeError for what is none, such as a comparison of single steps."""
    if isinstance(condition, TrajectoryPredicate):
        return condition
    if isinstance(condition, OfSteps):
        condition.refuse()
    if not callable(condition):
        raise TypeError(
            f"a predicate is a comparison such as traj.length > 5 or a function of a Trajectory, got {class_of(condition)}"
        )
    return TrajectoryPredicate(condition, getattr(condition, "__name__", "predicate"))


class Expression(ABC, Generic[C]):
    """A value of each trajectory, one number or one for each step. Comparisons give conditions."""

    @abstractmethod
    def of(self, trajectory: Trajectory) -> Tensor | int:
        """The value for a trajectory."""

    @property
    @abstractmethod
    def keys(self) -> frozenset[Any]:
        """The entries that it reads."""

    def _compared(self, symbol: str, other: object) -> C:
        reads = self.keys | (other.keys if isinstance(other, Expression) else frozenset())
        condition = _Compared(symbol, self, other)
        of_steps = isinstance(self, OfSteps) or isinstance(other, OfSteps)
        return cast(
            C, StepCondition(condition, reads) if of_steps else TrajectoryPredicate(condition, str(condition), reads)
        )

    def __gt__(self, other: object) -> C:
        return self._compared(">", other)

    def __ge__(self, other: object) -> C:
        return self._compared(">=", other)

    def __lt__(self, other: object) -> C:
        return self._compared("<", other)

    def __le__(self, other: object) -> C:
        return self._compared("<=", other)

    def __eq__(self, other: object) -> C:  # type: ignore[override]  # no bool
        return self._compared("==", other)

    def __ne__(self, other: object) -> C:  # type: ignore[override]  # no bool
        return self._compared("!=", other)

    __hash__ = None  # type: ignore[assignment]  # equal expressions are not one

    def __bool__(self) -> NoReturn:
        raise TypeError(f"{self} is a value of each trajectory, not a bool: compare it, as in traj.length > 5")


class OfSteps(Expression["StepCondition"]):
    """A value of each step of a trajectory. `any()` and `all()` make a condition of it."""

    def any(self) -> TrajectoryPredicate:
        """True for a trajectory with a step where it is true (not zero)."""
        return TrajectoryPredicate(_Some(self), f"{self}.any()", self.keys)

    def all(self) -> TrajectoryPredicate:
        """True for a trajectory where it is true (not zero) in each step."""
        return TrajectoryPredicate(_Every(self), f"{self}.all()", self.keys)

    def __call__(self, trajectory: object = None) -> NoReturn:
        self.refuse()

    def refuse(self) -> NoReturn:
        """TypeError: it is no condition on a trajectory."""
        raise TypeError(
            f"{self} has a value for each step of a trajectory: use .any() or .all() to make a condition of it"
        )

    def __and__(self, other: object) -> NoReturn:
        self.refuse()

    __or__ = __rand__ = __ror__ = __and__

    def __invert__(self) -> NoReturn:
        self.refuse()

    def __bool__(self) -> NoReturn:
        self.refuse()


class StepCondition(OfSteps):
    """A comparison of single steps."""

    def __init__(self, condition: "_Compared", keys: frozenset[Any]) -> None:
        self._condition = condition
        self._keys = keys

    def of(self, trajectory: Trajectory) -> Tensor | int:
        return self._condition(trajectory)

    @property
    def keys(self) -> frozenset[Any]:
        return self._keys

    def __repr__(self) -> str:
        return str(self._condition)


class StepEntry(OfSteps):
    """An entry of the steps, [steps, ...]: of the items, else of their "next".

    `sum()`, `mean()`, `max()` and `min()` are over all numbers of all steps, in float64 for entries of floats.
    `first()` and `last()` are of one step, whose entry must have one number.
    """

    def __init__(self, key: NestedKey) -> None:
        self._key = checked_key("key", key)

    def of(self, trajectory: Trajectory) -> Tensor:
        return trajectory.entry(self._key)

    @property
    def keys(self) -> frozenset[Any]:
        return frozenset([self._key])

    def sum(self) -> "Number":
        """The sum over the trajectory."""
        return Number(self._key, "sum")

    def mean(self) -> "Number":
        """The mean over the trajectory."""
        return Number(self._key, "mean")

    def max(self) -> "Number":
        """The highest value of the trajectory."""
        return Number(self._key, "max")

    def min(self) -> "Number":
        """The lowest value of the trajectory."""
        return Number(self._key, "min")

    def first(self) -> "Number":
        """The value of the first step."""
        return Number(self._key, "first")

    def last(self) -> "Number":
        """The value of the last step."""
        return Number(self._key, "last")

    def __repr__(self) -> str:
        return f"traj.{self._key}" if isinstance(self._key, str) else f"traj[{self._key!r}]"


class Number(Expression[TrajectoryPredicate]):
    """One number for each trajectory: of an entry, or of the trajectory itself.

    Args:
        key: the entry; None for the length and the total reward.
        how: the name of a method of `StepEntry`, "length" or "total_reward".
    """

    def __init__(self, key: NestedKey | None, how: str) -> None:
        self._key = key
        self._how = how

    def of(self, trajectory: Trajectory) -> Tensor | int:
        if self._how == _LENGTH:
            return trajectory.length
        if self._how == _TOTAL:
            return trajectory.total_reward
        assert self._key is not None
        values = trajectory.entry(self._key)
        if self._how in ("first", "last"):
            step = values[0 if self._how == "first" else -1]
            if step.numel() != 1:
                raise ValueError(
                    f"{self} has {step.numel()} numbers, of shape {list(step.shape)}: compare entries with one number a "
                    "step, or use a function of the trajectory"
                )
            return step.reshape(())
        if values.is_floating_point():
            values = values.double()
        elif self._how == "mean" or values.dtype == torch.bool:
            values = values.to(torch.float64 if self._how == "mean" else torch.int64)
        return cast(Tensor, getattr(values, self._how)())

    @property
    def keys(self) -> frozenset[Any]:
        if self._key is not None:
            return frozenset([self._key])
        return frozenset(["reward"] if self._how == _TOTAL else [])

    def __repr__(self) -> str:
        return f"traj.{self._how}" if self._key is None else f"{StepEntry(self._key)!r}.{self._how}()"


class AnyTrajectory:
    """Stands for each trajectory in conditions: `traj.reward` is an entry, `traj.length` a number of each.

    `traj["next", "reward"]` is the entry under a nested key, or under a name that is no Python name.
    """

    @property
    def length(self) -> Number:
        """How many steps a trajectory has."""
        return Number(None, _LENGTH)

    @property
    def total_reward(self) -> Number:
        """The sum of its rewards, under "reward" or ("next", "reward")."""
        return Number(None, _TOTAL)

    def __getattr__(self, name: str) -> StepEntry:
        if name.startswith("__"):
            raise AttributeError(name)
        return StepEntry(name)

    def __getitem__(self, key: NestedKey) -> StepEntry:
        return StepEntry(key)

    def __repr__(self) -> str:
        return "traj"


traj = AnyTrajectory()
"""Stands for each trajectory in conditions."""


# ------------------------------------------------------------------ conditions as functions, which can be pickled


@dataclass(frozen=True)
class _Compared:
    symbol: str
    left: Any
    right: Any

    def __call__(self, trajectory: Trajectory) -> Tensor | int:
        left, right = (
            side.of(trajectory) if isinstance(side, Expression) else side for side in (self.left, self.right)
        )
        return cast(Tensor | int, _COMPARISONS[self.symbol](left, right))

    def __str__(self) -> str:
        return f"({self.left!r} {self.symbol} {self.right!r})"


@dataclass(frozen=True)
class _Joined:
    how: str
    first: TrajectoryPredicate
    second: TrajectoryPredicate | None = None

    def __call__(self, trajectory: Trajectory) -> bool:
        value = self.first(trajectory)
        if self.second is None:
            return not value
        return value and self.second(trajectory) if self.how == "and" else value or self.second(trajectory)


@dataclass(frozen=True)
class _Some:
    steps: OfSteps

    def __call__(self, trajectory: Trajectory) -> bool:
        return bool(torch.as_tensor(self.steps.of(trajectory) != 0).any())


@dataclass(frozen=True)
class _Every:
    steps: OfSteps

    def __call__(self, trajectory: Trajectory) -> bool:
        return bool(torch.as_tensor(self.steps.of(trajectory) != 0).all())
