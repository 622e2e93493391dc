"""A transform of this library as one of torchrl's, for its environments and buffers.

torchrl is not imported here: specs are made of the classes of `torchrl.data` that the program has imported.
"""

import contextlib
import copy
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import torch
from tensordict import TensorDictBase, is_leaf_nontensor, is_tensor_collection, unravel_key
from tensordict.utils import NestedKey
from torch import Tensor

from interop.transforms.chain import Call, Compose, as_transform, tolerate
from interop.transforms.transform import Transform

Spec = Any


def as_torchrl(transform: Any, *, specs: Mapping[NestedKey, Any] | None = None) -> Any:
    """The transform as a `torchrl.envs.Transform`, for `TransformedEnv` and the buffers of torchrl.

    The result holds the transform and is no copy: parameters, buffers and `state_dict` are those of the transform.

    - The data that a step or a reset returns goes through it. Entries that it reads may be missing after a reset.
    - The data that a step takes goes through `inv` before. A `VecNorm` learns from the data that a step returns.
    - One run of a copy on zeros finds the shapes and dtypes of the specs. An entry that is not changed, or only renamed,
      keeps its spec. A changed entry becomes unbounded, or a choice of two for bools.
    - An entry that `inv` writes gets the spec of the result of `_apply_transform`, or keeps its spec if there is none.

    Args:
        transform: a `Transform`, a chain, which becomes a `torchrl.envs.Compose`, a module with `forward` and `inv`, or a
            callable. One of torchrl's is returned as it is.
        specs: entry -> its spec, of `torchrl.data` or `interop.specs`, under its name behind the transform: for bounds and
            choices of changed entries, of the data that the environment returns and of the data that it takes.

    ImportError if the program has not imported `torchrl.envs`: it is never imported here. In an environment ValueError for
    transforms that keep data from one write to the next, or that change the batch size.
    """
    envs = sys.modules.get("torchrl.envs")
    if envs is None:
        raise ImportError("as_torchrl() needs torchrl.envs, which is not imported: import it in your program first")
    if isinstance(transform, envs.Transform):
        return transform
    if isinstance(transform, Compose):
        return envs.Compose(*(as_torchrl(part, specs=specs) for part in transform))
    adapted = as_transform(transform)
    from interop.specs.beside_torchrl import to_torchrl  # here: programs without torchrl need no specs

    torchrl_specs = {key: to_torchrl(spec) for key, spec in (specs or {}).items()}
    return _class(envs.Transform)(adapted if isinstance(adapted, Transform) else TwoWay(adapted), torchrl_specs)


class TwoWay(Call):
    """A module with `forward` and `inv`."""

    def inv(self, data: Any) -> Any:
        inverse: Any = self.function
        return inverse.inv(data)


def _keys(name: str) -> property:
    """The keys of the transform."""
    return property(lambda self: getattr(self.transform, name), lambda self, keys: setattr(self.transform, name, keys))


class Adapter:
    """The methods that torchrl calls."""

    transform: Transform
    specs: dict[NestedKey, Any]
    in_keys = _keys("in_keys")
    out_keys = _keys("out_keys")
    in_keys_inv = _keys("in_keys_inv")
    out_keys_inv = _keys("out_keys_inv")

    def __init__(self, transform: Transform, specs: dict[NestedKey, Any]) -> None:
        super().__init__()
        self.transform = transform
        self.specs = specs

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # what the transform takes
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
        if self.transform.learns_from_steps and self._in_environment():
            return tensordict
        return self.transform.inv(tensordict)

    def set_missing_tolerance(self, mode: bool = False) -> None:
        super().set_missing_tolerance(mode)  # type: ignore[misc]
        tolerate(self.transform, mode)

    def transform_output_spec(self, output_spec: Spec) -> Spec:
        """The specs of the result of a step. ValueError if the batch size changes."""
        changed_spec = output_spec.clone()
        places = _places(output_spec)
        first, *further = (part.zero() for part in output_spec.values() if part is not None)
        for other in further:
            first.update(other)
        zeros = {key: first.get(key) for key in places}  # held: an id is of one tensor only while it lives
        names = {id(value): key for key, value in zeros.items()}
        size = first.batch_size
        with self._dry_run() as twin:
            result = twin.on_step(first)
            if not is_tensor_collection(result) or result.batch_size != size:
                became = list(result.batch_size) if is_tensor_collection(result) else type(result).__name__
                raise ValueError(f"the batch size of a step, {list(size)}, became {became}: it must not change")
        leaves = {key: result.get(key) for key in result.keys(True, True, is_leaf=is_leaf_nontensor)}
        for key in places.keys() - leaves.keys():
            del changed_spec[places[key]]
        read = dict(zip(self.out_keys, self.in_keys, strict=False))  # tells rewards from observations
        for key, value in leaves.items():
            source = names.get(id(value))
            place = places.get(key) or places.get(read.get(key, source), ("full_observation_spec",))
            if key in self.specs or source != key:
                same: Spec = _unbounded(value) if source is None else output_spec[places[source]]
                spec: Spec = self.specs.get(key, same)
                changed_spec[unravel_key((place[0], key))] = spec.clone()
        return changed_spec

    def transform_input_spec(self, input_spec: Spec) -> Spec:
        """The specs of the data that a step takes. An entry that `inv` writes is replaced by the one that it reads."""
        changed_spec = input_spec.clone()
        places = _places(input_spec)
        pairs = dict(zip(self.in_keys_inv, self.out_keys_inv, strict=False))
        for key in places.keys() & pairs.keys():
            del changed_spec[places[key]]
        with self._dry_run() as twin:
            for key, place in places.items():
                outer = pairs.get(key, key)
                if outer in self.specs:
                    changed_spec[unravel_key((place[0], outer))] = self.specs[outer].clone()
                elif key in pairs:
                    value = input_spec[place].zero()
                    read = twin.read_tensor(value)
                    spec = input_spec[place] if read is value else _unbounded(read)
                    changed_spec[unravel_key((place[0], outer))] = spec.clone()
        return changed_spec

    def transform_env_device(self, device: Any) -> Any:
        own = getattr(self.transform, "device", None)
        return device if own is None else torch.device(own)

    def _in_environment(self) -> bool:
        try:
            return self.container is not None  # type: ignore[attr-defined]
        except ValueError:  # it is a buffer
            return False

    @contextlib.contextmanager
    def _dry_run(self) -> Iterator[Transform]:
        """A copy of the transform to run on zeros: the random state of torch's CPU generator does not change."""
        if self.transform.keeps and not self.transform.learns_from_steps:
            raise ValueError(f"{self.transform} keeps data from one write to the next: it works in buffers only")
        with torch.random.fork_rng(devices=[]):
            try:
                yield copy.deepcopy(self.transform)
            except Exception as error:
                error.add_note(f"while {self.transform} was run on zeros for its specs; those of inputs: give specs=")
                raise

    def __reduce__(self) -> Any:
        base = next(
            torchrl_base for torchrl_base in type(self).__mro__ if torchrl_base.__module__.startswith("torchrl.")
        )
        return _blank, (base,), self.__getstate__()

    def __repr__(self) -> str:
        return f"as_torchrl({self.transform})"


@cache
def _class(base: type) -> Any:
    return type("AsTorchRL", (Adapter, base), {"__doc__": "A transform of ours that torchrl knows as one of its own."})


def _blank(base: type) -> Any:
    """For copies: the class is made where it is needed, and a pickle names that of torchrl."""
    blank_class = _class(base)
    return blank_class.__new__(blank_class)


def _unbounded(value: Any) -> Spec:
    data = sys.modules["torchrl.data"]
    if not isinstance(value, Tensor):
        return data.NonTensor(shape=value.batch_size)
    about = {"shape": value.shape, "dtype": value.dtype, "device": value.device}
    return data.Categorical(2, **about) if value.dtype == torch.bool else data.Unbounded(**about)


def _places(spec: Spec) -> dict[NestedKey, Any]:
    """Where the spec of each entry is: the part of the spec, then its key there."""
    parts = ((name, part) for name, part in spec.items() if part is not None)
    return {key: unravel_key((name, key)) for name, part in parts for key in part.keys(True, True)}
