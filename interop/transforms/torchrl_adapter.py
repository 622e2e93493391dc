"""A transform of this library as one of torchrl's, for its environments and buffers."""

import contextlib
import copy
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import nn

from interop.specs.beside_torchrl import to_torchrl
from interop.transforms import torchrl_specs
from interop.transforms.chain import Call, Compose, as_transform, tolerate
from interop.transforms.running_norm import RunningNorm
from interop.transforms.transform import Transform


def as_torchrl(transform: Any, *, specs: Mapping[NestedKey, Any] | None = None) -> Any:
    """The transform as a `torchrl.envs.Transform`, which `TransformedEnv` and the buffers of torchrl ask for.

    A plain transform is a function for torchrl: specs stay what they were, `inv` is not called, and one that reads the
    reward fails at a reset. The result holds the transform and is no copy: parameters, buffers and `state_dict` are those of
    the transform.

    - The data that a step or a reset returns goes through it. Entries that it reads may be missing after a reset, as rewards
      are.
    - The data of a step, the action among it, goes through `inv` before. A `VecNorm` learns of the data that a step returns.
    - Shapes and dtypes of its specs are found by running a copy of the transform once on zeros. An entry that it leaves
      alone or renames keeps its spec. Bounds of a changed entry are not guessed: it becomes unbounded (bools and discrete
      actions keep their choices). Give `specs` where a policy needs the bounds of an action. A change in place is not seen.
    - An entry that `inv` writes gets the spec of the result of `_apply_transform`; where the transform has none, the entry
      keeps its spec.

    Args:
        transform: a `Transform`, a chain, which becomes a `torchrl.envs.Compose`, a module with `forward` and `inv`, or a
            callable. One of torchrl's is returned as it is.
        specs: entry -> its spec, of `torchrl.data` or `interop.specs`, under its name behind the transform. It is taken as
            it is, for the data that the environment returns and for the data that it takes.

    ImportError where the program has not imported `torchrl.envs`: it is never imported here. In an environment ValueError
    for transforms that keep data from one write to the next, or that change the batch size.
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
    """The keys of the transform."""
    return property(
        lambda self: getattr(self.transform, name, []), lambda self, keys: setattr(self.transform, name, keys)
    )


class Adapter:
    """The methods that torchrl calls."""

    transform: Any
    specs: dict[NestedKey, Any]
    in_keys, out_keys = _keys("in_keys"), _keys("out_keys")
    in_keys_inv, out_keys_inv = _keys("in_keys_inv"), _keys("out_keys_inv")

    def __init__(self, transform: nn.Module, specs: dict[NestedKey, Any]) -> None:
        super().__init__()
        self.transform, self.specs = transform, specs

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.transform(*args, **kwargs)

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        return _on_step(self.transform)(next_tensordict)

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        missing = [key for key in self.in_keys if tensordict_reset.get(key, None) is None]
        if not missing:
            return self._call(tensordict_reset)
        if len(missing) == len(self.in_keys):
            return tensordict_reset
        before = getattr(self.transform, "missing_tolerance", False)
        tolerate(self.transform, True)
        try:
            return self._call(tensordict_reset)
        finally:
            tolerate(self.transform, before)

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        if (self._learns and self._in_environment()) or not _inverts(self.transform):
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
        tolerate(self.transform, mode)

    def transform_output_spec(self, output_spec: Any) -> Any:
        pairs = dict(zip(self.out_keys, self.in_keys, strict=False))
        with self._dry_run():
            return torchrl_specs.outputs(output_spec, _on_step(copy.deepcopy(self.transform)), pairs, self.specs)

    def transform_input_spec(self, input_spec: Any) -> Any:
        with self._dry_run():
            if self._learns or not _inverts(self.transform):
                return input_spec
            written = getattr(type(self.transform), "_apply_transform", None) not in (None, Transform._apply_transform)
            outward = copy.deepcopy(self.transform)._apply_transform if written else lambda value: value
            pairs = dict(zip(self.in_keys_inv, self.out_keys_inv, strict=False))
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

    @contextlib.contextmanager
    def _dry_run(self) -> Iterator[None]:
        """Leave torch's CPU generator as it was; errors say that they are of a run for specs."""
        if getattr(self.transform, "keeps", False) and not self._learns:
            raise ValueError(
                f"{self.transform} keeps what is written for the next write and is for buffers: an environment has none"
            )
        with torch.random.fork_rng(devices=[]):
            try:
                yield
            except Exception as error:
                error.add_note(f"while {self.transform} was run on zeros for its specs; those of inputs: give specs=")
                raise

    def __reduce__(self) -> Any:
        base = next(each for each in type(self).__mro__ if each.__module__.startswith("torchrl."))
        return _blank, (base,), self.__getstate__()

    def __repr__(self) -> str:
        return f"as_torchrl({self.transform})"


@cache
def _class(base: type) -> Any:
    return type("AsTorchRL", (Adapter, base), {"__doc__": "A transform of ours that torchrl knows as one of its own."})


def _blank(base: type) -> Any:
    """For copies: the class is made where it is needed, and a pickle names that of torchrl."""
    made = _class(base)
    return made.__new__(made)


def _on_step(transform: Any) -> Callable[[TensorDictBase], TensorDictBase]:
    """The function for the data that a step returned: `_call` unless only `forward` was written."""
    if isinstance(transform, RunningNorm):
        return transform._call if transform.frozen else transform.learn  # of steps: nothing is written
    for kind in type(transform).__mro__:
        if "_call" in vars(kind):
            return transform._call
        if "forward" in vars(kind):
            break
    return transform


def _inverts(transform: Any) -> bool:
    """Whether `inv` changes anything."""
    if not isinstance(transform, Transform):
        return True
    kind = type(transform)
    if kind._inv_call is Transform._inv_call and kind.inv is Transform.inv:
        return bool(transform.in_keys_inv)
    return kind is not Call
