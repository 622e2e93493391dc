"""A transform of ours as one of torchrl's, for its environments and buffers."""

import contextlib
import copy
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import nn

from interop.specs.beside_torchrl import to_torchrl
from interop.transforms import torchrl_specs
from interop.transforms.chain import Call, Compose, as_transform
from interop.transforms.running_norm import RunningNorm
from interop.transforms.transform import Transform


def as_torchrl(transform: Any, *, specs: Mapping[NestedKey, Any] | None = None) -> Any:
    """The transform as a `torchrl.envs.Transform`, which `TransformedEnv` and the buffers of torchrl ask for.

    Given as it is, torchrl takes it for a function: specs stay what they were, `inv` is not called, and what reads the
    reward fails at a reset. What is made here holds the transform and is no copy: parameters, buffers and `state_dict` are
    those of the transform.

    - What a step or a reset returns goes through it. Entries that it reads may be missing after a reset, as rewards are.
    - What is given to a step, the action among it, goes through `inv` before. A `VecNorm` learns of what comes back.
    - Shapes and dtypes of its specs are found by running a copy of the transform once on zeros. An entry that it leaves
      alone or renames keeps its spec. Bounds of a changed entry are not guessed: it becomes unbounded (bools and discrete
      actions keep their choices). Give `specs` where a policy needs the bounds of an action. A change in place is not seen.
    - An entry that `inv` writes gets the spec of what `_apply_transform` makes of it; where the transform has none, the
      entry keeps its spec.

    Args:
        transform: a `Transform`, a chain, which becomes a `torchrl.envs.Compose`, a module with `forward` and `inv`, or a
            callable. One of torchrl's is returned as it is.
        specs: entry -> its spec, of `torchrl.data` or `interop.specs`, under its name behind the transform. It is taken as
            it is, for what the environment returns and for what it takes.

    ImportError where the program has not imported `torchrl.envs`: it is never imported here. In an environment ValueError
    for transforms that keep what is written or that change the batch size.
    """
    envs = sys.modules.get("torchrl.envs")
    if envs is None:
        raise ImportError(
            "as_torchrl() needs torchrl.envs, which is not imported here: import it in your program first"
        )
    if isinstance(transform, envs.Transform):
        return transform
    if isinstance(transform, Compose):
        return envs.Compose(*(as_torchrl(each, specs=specs) for each in transform))
    known = {key: to_torchrl(spec) for key, spec in (specs or {}).items()}
    return _class(envs.Transform)(as_transform(transform), known)


def _keys(name: str) -> property:
    def get(self: Any) -> list[NestedKey]:
        return getattr(self.transform, name, [])

    def put(self: Any, keys: Any) -> None:
        setattr(self.transform, name, keys)

    return property(get, put)


class Beside:
    """The methods that torchrl calls."""

    transform: Any
    specs: dict[NestedKey, Any]

    def __init__(self, transform: nn.Module, specs: dict[NestedKey, Any]) -> None:
        super().__init__()
        self.transform, self.specs = transform, specs

    # ------------------------------------------------------------------ keys: those of the transform

    in_keys, out_keys = _keys("in_keys"), _keys("out_keys")
    in_keys_inv, out_keys_inv = _keys("in_keys_inv"), _keys("out_keys_inv")

    # ------------------------------------------------------------------ data

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.transform(*args, **kwargs)

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        return _on_step(self.transform)(next_tensordict)

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        keys = self.in_keys
        missing = [key for key in keys if tensordict_reset.get(key, None) is None]
        if keys and len(missing) == len(keys):
            return tensordict_reset
        return _tolerant(self.transform, self._call, tensordict_reset) if missing else self._call(tensordict_reset)

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        if self._learns and self._in_environment():
            return tensordict  # nothing is written there
        if not _inverts(self.transform):
            return tensordict
        if type(self.transform).inv is Transform.inv:
            return self.transform._inv_call(tensordict)  # torchrl has made a copy before
        return self.transform.inv(tensordict)

    def _apply_transform(self, obs: Any) -> Any:
        return self.transform._apply_transform(obs)

    def _inv_apply_transform(self, state: Any) -> Any:
        return self.transform._inv_apply_transform(state)

    def set_missing_tolerance(self, mode: bool = False) -> None:
        super().set_missing_tolerance(mode)  # type: ignore[misc]
        if callable(getattr(self.transform, "set_missing_tolerance", None)):
            self.transform.set_missing_tolerance(mode)

    # ------------------------------------------------------------------ specs

    def transform_output_spec(self, output_spec: Any) -> Any:
        self._refuse_keeping()
        pairs = dict(zip(self.out_keys, self.in_keys, strict=False))
        with self._noted():
            return torchrl_specs.outputs(output_spec, _on_step(copy.deepcopy(self.transform)), pairs, self.specs)

    def transform_input_spec(self, input_spec: Any) -> Any:
        self._refuse_keeping()
        if self._learns or not _inverts(self.transform):
            return input_spec
        written = getattr(type(self.transform), "_apply_transform", None) not in (None, Transform._apply_transform)
        outward = copy.deepcopy(self.transform)._apply_transform if written else _nothing
        pairs = dict(zip(self.in_keys_inv, self.out_keys_inv, strict=False))
        with self._noted():
            return torchrl_specs.inputs(input_spec, pairs, outward, self.specs)

    def transform_env_device(self, device: Any) -> Any:
        found = getattr(self.transform, "device", None)
        return device if found is None else torch.device(found)

    @property
    def _learns(self) -> bool:
        return isinstance(self.transform, RunningNorm)

    def _in_environment(self) -> bool:
        try:
            return self.container is not None  # type: ignore[attr-defined]
        except ValueError:  # it is a buffer
            return False

    def _refuse_keeping(self) -> None:
        if getattr(self.transform, "keeps", False) and not self._learns:
            raise ValueError(
                f"{self.transform} keeps what is written for the next write and is for buffers: an environment has none"
            )

    @contextlib.contextmanager
    def _noted(self) -> Iterator[None]:
        """Keep torch's CPU generator as it was; tell what was done where it fails."""
        with torch.random.fork_rng(devices=[]):
            try:
                yield
            except Exception as error:
                error.add_note(f"while {self.transform} was run on zeros for its specs; those of inputs: give specs=")
                raise

    # ------------------------------------------------------------------ as an object

    def __reduce__(self) -> Any:
        base = next(each for each in type(self).__mro__ if each.__module__.startswith("torchrl."))
        return _blank, (base,), self.__getstate__()

    def __repr__(self) -> str:
        return f"as_torchrl({self.transform})"


@cache
def _class(base: type) -> Any:
    return type("AsTorchRL", (Beside, base), {"__doc__": "A transform of ours that torchrl knows as one of its own."})


def _blank(base: type) -> Any:
    """For copies: the class is made where it is needed, and a pickle names that of torchrl."""
    made = _class(base)
    return made.__new__(made)


def _on_step(transform: Any) -> Callable[[TensorDictBase], TensorDictBase]:
    """What a transform does to what a step returned: `_call` unless only `forward` was written."""
    if isinstance(transform, RunningNorm):
        return partial(_learning, transform)
    for kind in type(transform).__mro__:
        if "_call" in vars(kind):
            return transform._call
        if "forward" in vars(kind):
            break
    return transform


def _learning(transform: RunningNorm, data: TensorDictBase) -> TensorDictBase:
    """What it does where nothing is written: the steps themselves are what it learns of."""
    return transform._call(data) if transform.frozen else transform._learn(data)


def _inverts(transform: Any) -> bool:
    """Whether what is given goes through anything."""
    if not isinstance(transform, Transform):
        return True
    kind = type(transform)
    if kind._inv_call is Transform._inv_call and kind.inv is Transform.inv:
        return bool(transform.in_keys_inv)
    return kind is not Call


def _tolerant(transform: Any, run: Callable[[Any], Any], data: Any) -> Any:
    """What it makes of data where entries may be missing."""
    before, tolerate = getattr(transform, "missing_tolerance", None), getattr(transform, "set_missing_tolerance", None)
    if before is None or tolerate is None:
        return run(data)
    tolerate(True)
    try:
        return run(data)
    finally:
        tolerate(before)


def _nothing(value: Any) -> Any:
    return value
