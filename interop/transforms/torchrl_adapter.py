"""A transform of this library as one of torchrl's, for its environments and buffers."""

import contextlib
import copy
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey

from interop.specs.beside_torchrl import to_torchrl
from interop.transforms import torchrl_specs
from interop.transforms.chain import Call, Compose, as_transform, tolerate
from interop.transforms.transform import Transform


def as_torchrl(transform: Any, *, specs: Mapping[NestedKey, Any] | None = None) -> Any:
    """The transform as a `torchrl.envs.Transform`, which `TransformedEnv` and the buffers of torchrl ask for.

    The result holds the transform and is no copy: parameters, buffers and `state_dict` are those of the transform.

    - The data that a step or a reset returns goes through it. Entries that it reads may be missing after a reset.
    - The data that a step takes goes through `inv` before. A `VecNorm` learns from the data that a step returns.
    - Shapes and dtypes of its specs are found by running a copy of the transform once on zeros. An entry that it leaves
      alone or renames keeps its spec. A changed entry becomes unbounded; bools and discrete actions keep their choices.
    - An entry that `inv` writes gets the spec of the result of `_apply_transform`, or keeps its spec where there is none.

    Args:
        transform: a `Transform`, a chain, which becomes a `torchrl.envs.Compose`, a module with `forward` and `inv`, or a
            callable. One of torchrl's is returned as it is.
        specs: entry -> its spec, of `torchrl.data` or `interop.specs`, under its name behind the transform: for bounds of
            changed entries, of the data that the environment returns and of the data that it takes.

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
    found = as_transform(transform)
    known = {key: to_torchrl(spec) for key, spec in (specs or {}).items()}
    return _class(envs.Transform)(found if isinstance(found, Transform) else TwoWay(found), known)


class TwoWay(Call):
    """A module with `forward` and `inv`."""

    def inv(self, data: Any) -> Any:
        inverse: Any = self.function
        return inverse.inv(data)

    def inverts(self) -> bool:
        return True


def _keys(name: str) -> property:
    """The keys of the transform."""
    return property(lambda self: getattr(self.transform, name), lambda self, keys: setattr(self.transform, name, keys))


class Adapter:
    """The methods that torchrl calls."""

    transform: Transform
    specs: dict[NestedKey, Any]
    in_keys, out_keys = _keys("in_keys"), _keys("out_keys")
    in_keys_inv, out_keys_inv = _keys("in_keys_inv"), _keys("out_keys_inv")

    def __init__(self, transform: Transform, specs: dict[NestedKey, Any]) -> None:
        super().__init__()
        self.transform, self.specs = transform, specs

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.transform(*args, **kwargs)

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        return self.transform.on_step(next_tensordict)

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        missing = [key for key in self.in_keys if tensordict_reset.get(key, None) is None]
        if missing and len(missing) == len(self.in_keys):
            return tensordict_reset
        before = self.transform.missing_tolerance
        tolerate(self.transform, before or bool(missing))
        try:
            return self._call(tensordict_reset)
        finally:
            tolerate(self.transform, before)

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        if not self.transform.inverts() or (self.transform.learns_from_steps and self._in_environment()):
            return tensordict
        return self.transform.inv(tensordict)

    def set_missing_tolerance(self, mode: bool = False) -> None:
        super().set_missing_tolerance(mode)  # type: ignore[misc]
        tolerate(self.transform, mode)

    def transform_output_spec(self, output_spec: Any) -> Any:
        pairs = dict(zip(self.out_keys, self.in_keys, strict=False))
        with self._dry_run() as twin:
            return torchrl_specs.outputs(output_spec, twin.on_step, pairs, self.specs)

    def transform_input_spec(self, input_spec: Any) -> Any:
        pairs = dict(zip(self.in_keys_inv, self.out_keys_inv, strict=False))
        with self._dry_run() as twin:
            if twin.learns_from_steps or not twin.inverts():
                return input_spec
            return torchrl_specs.inputs(input_spec, pairs, twin.read_tensor, self.specs)

    def transform_env_device(self, device: Any) -> Any:
        found = getattr(self.transform, "device", None)
        return device if found is None else torch.device(found)

    def _in_environment(self) -> bool:
        try:
            return self.container is not None  # type: ignore[attr-defined]
        except ValueError:  # it is a buffer
            return False

    @contextlib.contextmanager
    def _dry_run(self) -> Iterator[Transform]:
        """A copy of the transform to run for specs: torch's CPU generator stays as it is, errors say what they are of."""
        if self.transform.keeps and not self.transform.learns_from_steps:
            raise ValueError(
                f"{self.transform} keeps what is written for the next write and is for buffers: an environment has none"
            )
        with torch.random.fork_rng(devices=[]):
            try:
                yield copy.deepcopy(self.transform)
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
