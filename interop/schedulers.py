"""Schedulers of a sampler's numbers, such as alpha and beta."""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from fbuf.checkpoint import CheckpointCorrupt, CheckpointMismatch
from interop.checkpoint.state import EXACT, Apply, Component, Entries, LoadOptions, states_of, together, with_states
from interop.data.arguments import class_of, whole
from interop.samplers import Sampler


class ParameterScheduler(Component, ABC):
    """Sets a number of a sampler at each `step()`, within bounds. A subclass gives `_value`.

    A step that raises has changed nothing. An attribute that was an int gets ints for whole values.

    Args:
        obj: a sampler, or a buffer, whose current sampler is used.
        param_name: the attribute.
        min_value, max_value: bounds of the values.
        choices: the arguments of a subclass by name, as its `choose` takes them.

    At construction, TypeError for an `obj` without a sampler and an attribute that is no real number, ValueError for an
    attribute that is missing or read-only, and for bounds that contradict each other.
    """

    _CHOICES: ClassVar[tuple[str, ...]] = ("min_value", "max_value")

    def __init__(
        self,
        obj: Any,
        param_name: str,
        min_value: float | None = None,
        max_value: float | None = None,
        *,
        choices: Mapping[str, object] | None = None,
    ) -> None:
        self._obj = obj
        self.param_name = param_name
        self.step_count = 0
        sampler = self.sampler
        kind = getattr(type(sampler), param_name, None)
        if not hasattr(sampler, param_name) or (isinstance(kind, property) and kind.fset is None):
            raise ValueError(f"{type(sampler).__name__} has no attribute {param_name!r} that can be set")
        self.initial_value = _real(param_name, getattr(sampler, param_name))
        self._is_int = isinstance(getattr(sampler, param_name), int | np.integer)
        self.choose({"min_value": min_value, "max_value": max_value, **(choices or {})})

    def choose(self, choices: Mapping[str, Any]) -> None:
        """Check and keep the arguments."""
        low = choices.get("min_value")
        high = choices.get("max_value")
        self.min_value = None if low is None else _real("min_value", low)
        self.max_value = None if high is None else _real("max_value", high)
        if self.min_value is not None and self.max_value is not None and self.min_value > self.max_value:
            raise ValueError(f"min_value={low} is above max_value={high}")

    @property
    def sampler(self) -> Sampler:
        """The sampler whose attribute is set."""
        sampler = self._obj if isinstance(self._obj, Sampler) else getattr(self._obj, "sampler", None)
        if not isinstance(sampler, Sampler):
            raise TypeError(f"a scheduler needs a sampler, or a buffer that has one, got {class_of(self._obj)}")
        return sampler

    @abstractmethod
    def _value(self, count: int, current: float) -> Any:
        """The value of step number `count`, the first being 1, when the attribute is `current`."""

    def step(self) -> None:
        """Set the next value."""
        sampler = self.sampler
        current = _real(self.param_name, getattr(sampler, self.param_name))
        value = _real(f"the new {self.param_name}", self._value(self.step_count + 1, current))
        if self.min_value is not None:
            value = max(value, self.min_value)
        if self.max_value is not None:
            value = min(value, self.max_value)
        setattr(sampler, self.param_name, int(value) if self._is_int and value.is_integer() else value)
        sampler.parameters_changed()  # of a user's class, too
        self.step_count += 1

    def state(self) -> dict[str, Any]:
        names = ("param_name", "initial_value", "step_count", *self._CHOICES)
        return {name: getattr(self, name) for name in names}

    def with_state(self, tree: object, options: LoadOptions = EXACT) -> Apply:
        with Entries.of(tree, self) as entries:
            saved = {name: entries.any(name) for name in self.state()}
            loaded = copy.copy(self)
            if saved["param_name"] != self.param_name:
                entries.refuse(f"it sets {saved['param_name']!r}, this scheduler sets {self.param_name!r}")
            try:
                loaded.initial_value = _real("initial_value", saved["initial_value"])
                loaded.step_count = whole("step_count", saved["step_count"], least=0)
                loaded.choose(saved)
            except (TypeError, ValueError) as error:
                raise CheckpointCorrupt(f"{entries.where}: {error}") from error
            return lambda: self.__dict__.update(loaded.__dict__)


class LinearScheduler(ParameterScheduler):
    """Goes from the value at construction to `final_value` in `num_steps` equal steps, and stays there."""

    _CHOICES = ("final_value", "num_steps")

    def __init__(self, obj: Any, param_name: str, final_value: float, num_steps: int) -> None:
        super().__init__(obj, param_name, choices={"final_value": final_value, "num_steps": num_steps})

    def choose(self, choices: Mapping[str, Any]) -> None:
        super().choose(choices)
        self.final_value = _real("final_value", choices["final_value"])
        self.num_steps = whole("num_steps", choices["num_steps"])

    def _value(self, count: int, current: float) -> float:
        if count >= self.num_steps:
            return self.final_value
        return self.initial_value + (self.final_value - self.initial_value) * count / self.num_steps


class LambdaScheduler(ParameterScheduler):
    """Sets the value at construction times `lambda_fn(step)`, the first step being 1. The function is not saved."""

    def __init__(
        self,
        obj: Any,
        param_name: str,
        lambda_fn: Callable[[int], float],
        min_value: float | None = None,
        max_value: float | None = None,
    ) -> None:
        if not callable(lambda_fn):
            raise TypeError(f"lambda_fn must be callable, got {type(lambda_fn).__name__}")
        self.lambda_fn = lambda_fn
        super().__init__(obj, param_name, min_value, max_value)

    def _value(self, count: int, current: float) -> float:
        return self.initial_value * _real("the result of lambda_fn", self.lambda_fn(count))


class StepScheduler(ParameterScheduler):
    """Multiplies the current value by `gamma` at every `n_steps`-th step; adds it if `mode` is "additive"."""

    _CHOICES = ("min_value", "max_value", "gamma", "n_steps", "mode")

    def __init__(
        self,
        obj: Any,
        param_name: str,
        gamma: float = 0.9,
        n_steps: int = 1,
        mode: str = "multiplicative",
        min_value: float | None = None,
        max_value: float | None = None,
    ) -> None:
        choices = {"gamma": gamma, "n_steps": n_steps, "mode": mode}
        super().__init__(obj, param_name, min_value, max_value, choices=choices)

    def choose(self, choices: Mapping[str, Any]) -> None:
        super().choose(choices)
        self.gamma = _real("gamma", choices["gamma"])
        self.n_steps = whole("n_steps", choices["n_steps"])
        self.mode = choices["mode"]
        if self.mode not in ("multiplicative", "additive"):
            raise ValueError(f"mode must be 'multiplicative' or 'additive', got {self.mode!r}")

    def _value(self, count: int, current: float) -> float:
        if count % self.n_steps:
            return current
        return current * self.gamma if self.mode == "multiplicative" else current + self.gamma


class SchedulerList(Component):
    """Schedulers that step together, in order: all of them, or none if one raises."""

    def __init__(self, schedulers: Iterable[ParameterScheduler] = ()) -> None:
        self.schedulers: list[ParameterScheduler] = []
        for scheduler in schedulers:
            self.append(scheduler)

    def append(self, scheduler: ParameterScheduler) -> None:
        """Add a scheduler at the end. TypeError for other objects."""
        if not isinstance(scheduler, ParameterScheduler):
            raise TypeError(f"a SchedulerList holds schedulers, got {class_of(scheduler)}")
        self.schedulers.append(scheduler)

    def step(self) -> None:
        """Set the next value of each."""
        before = []
        try:
            for scheduler in self.schedulers:
                before.append((scheduler, getattr(scheduler.sampler, scheduler.param_name), scheduler.step_count))
                scheduler.step()
        except BaseException:
            for scheduler, value, count in reversed(before):
                setattr(scheduler.sampler, scheduler.param_name, value)
                scheduler.sampler.parameters_changed()
                scheduler.step_count = count
            raise

    def state(self) -> dict[str, Any]:
        return {"members": states_of(self.schedulers)}

    def state_dict(self) -> dict[str, Any]:
        """The state of each, under "0", "1" and so on."""
        return {str(place): scheduler.state_dict() for place, scheduler in enumerate(self.schedulers)}

    def with_state(self, tree: object, options: LoadOptions = EXACT) -> Apply:
        entries = Entries(tree, self)
        if "members" in entries:
            apply = with_states(entries, self.schedulers, options)
        else:
            states = entries.all()
            if set(states) != {str(place) for place in range(len(self.schedulers))}:
                raise CheckpointMismatch(f"there are {len(self.schedulers)} schedulers, the state has {sorted(states)}")
            apply = together(
                partial(scheduler.with_state, states[str(place)], options)
                for place, scheduler in enumerate(self.schedulers)
            )
        entries.settle()
        return apply

    def __len__(self) -> int:
        return len(self.schedulers)


def _real(name: str, value: Any) -> float:
    """A finite float of a number, or of a tensor or array without dims. TypeError or ValueError for others."""
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float | np.number | Tensor | np.ndarray)
        or np.ndim(value)
    ):
        raise TypeError(f"{name} must be a real number, got {type(value).__name__}")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite, got {value}")
    return number
