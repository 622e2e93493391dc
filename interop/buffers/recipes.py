"""How components of this library are built again: their class, and its plain arguments, as a checkpoint names them.

A checkpoint has them beside the state, where earlier versions do not look. Reading one imports nothing: a name is looked up
in the tables here, and each argument is checked by the constructor. Functions, and tensors that were given to a constructor,
are not saved; they are listed as "needs".
"""

import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from fbuf.checkpoint import CheckpointMismatch, Fields
from interop.checkpoint.state import key_of
from interop.data.arguments import class_of
from interop.samplers import (
    ConsumingSampler,
    KeyGroupSampler,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    PromptGroupSampler,
    RandomSampler,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    StalenessAwareSampler,
    StreamingSliceSampler,
)
from interop.samplers.draws import Draws
from interop.samplers.reward_spread import RewardSpread
from interop.samplers.slice_draws import SliceDraws
from interop.storages import (
    CompressedListStorage,
    LazyFrameStorage,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    TensorStorage,
)
from interop.writers import (
    ImmutableDatasetWriter,
    RoundRobinWriter,
    TensorDictMaxValueWriter,
    TensorDictRoundRobinWriter,
)

T = TypeVar("T")
Arguments = dict[str, Any]
_DTYPES = {"float32": torch.float32, "float64": torch.float64}


def _list(storage: ListStorage) -> Arguments:
    device = None if storage.device is None else str(storage.device)
    return {"max_size": None if storage.max_size == sys.maxsize else storage.max_size, "device": device}


def _tensors(storage: TensorStorage) -> Arguments:
    return {"max_size": storage.table.max_items, "ndim": storage.ndim, "device": str(storage.device)}


def _lazy(storage: LazyTensorStorage) -> Arguments:
    return {**_tensors(storage), **any_length(storage)}


def any_length(storage: LazyTensorStorage) -> Arguments:
    """The arguments that name entries whose rows have any length; {} for none, which earlier versions know."""
    table = storage.table
    kinds = {"ragged": table.ragged - table.shared_prefixes, "shared_prefixes": table.shared_prefixes}
    return {name: [key_of(path) for path in sorted(paths, key=str)] for name, paths in kinds.items() if paths}


def _frames(storage: LazyFrameStorage) -> Arguments:
    keys = storage.frame_keys
    return {
        "max_size": storage.table.max_items,
        "obs_key": [key_of(key) for key in keys.observations],
        "stack": keys.stack,
        "stack_dim": keys.stack_dim,
        "padding": "zero" if keys.pads_with_zeros else "first",
        "end_keys": None if keys.end_keys is None else [key_of(key) for key in keys.end_keys],
        "traj_key": None if keys.traj_key is None else key_of(keys.traj_key),
        "finals": keys.finals,
        "check": keys.check,
        "ndim": storage.ndim,
        "only_named_keys": keys.only_named_keys,
    }


def _prioritized(sampler: PrioritizedSampler) -> Arguments:
    return {
        "max_capacity": sampler.max_size,
        "alpha": sampler.alpha,
        "beta": sampler.beta,
        "eps": sampler.eps,
        "dtype": str(sampler.dtype).removeprefix("torch."),
        "reduction": sampler.reduction,
        "max_priority_within_buffer": sampler.item_values.highest is None,
    }


def has_given_trajectories(draws: Draws) -> bool:
    """Whether draws are of trajectories that were given, for a storage that is not written any more."""
    return isinstance(draws, SliceDraws) and draws.boundary_keys is None


def _slices(sampler: SliceSampler) -> Arguments:
    if has_given_trajectories(sampler.draws):
        return {"needs": ["ends, or trajectories"]}
    return {
        "num_slices": sampler.num_slices,
        "slice_len": sampler.slice_len,
        "end_key": key_of(sampler.end_key),
        "end_keys": None if sampler.end_keys is None else key_of(sampler.end_keys),
        "traj_key": key_of(sampler.traj_key),
        "truncated_key": key_of(sampler.truncated_key),
        "strict_length": sampler.strict_length,
        "only_named_keys": sampler.only_named_keys,
        **(
            {} if sampler.init_key == "is_init" else {"init_key": key_of(sampler.init_key)}
        ),  # unknown to earlier versions
    }


def _random_slices(sampler: SliceSampler) -> Arguments:
    return {**_slices(sampler), "cache_values": sampler.cache_values, "span": list(sampler.span)}


def _fragmented(sampler: SliceSampler) -> Arguments:
    return {"fragmented": True, "step_key": key_of(sampler.step_key)} if sampler.fragmented else {}


def _streaming(sampler: StreamingSliceSampler) -> Arguments:
    arguments = {**_random_slices(sampler), "pad_output": sampler.pad_output}
    del arguments["num_slices"]
    return arguments


def _without_replacement(sampler: SamplerWithoutReplacement) -> Arguments:
    return {"drop_last": sampler.drop_last, "shuffle": sampler.shuffle}


def _staleness(sampler: StalenessAwareSampler) -> Arguments:
    if sampler.staleness_weight_fn is not None:
        return {"needs": ["staleness_weight_fn"]}
    return {"max_staleness": sampler.max_staleness, "version_key": key_of(sampler.version_key)}


def _prompt_groups(sampler: PromptGroupSampler) -> Arguments:
    arguments: Arguments = {}  # its state has the others
    if sampler.staleness is not None:
        arguments["staleness"] = _staleness(sampler.staleness)
    spread = sampler.spread
    if spread is not None and spread.weight_fn is not None:
        return {**arguments, "needs": ["spread.weight_fn"]}
    if spread is not None:
        arguments["spread"] = {
            "reward_key": key_of(spread.reward_key),
            "min_std": spread.min_std,
            "mean_range": None if spread.mean_range is None else list(spread.mean_range),
        }
    return arguments


def _key_groups(sampler: KeyGroupSampler) -> Arguments:
    return {
        "num_groups": sampler.num_groups,
        "samples_per_group": sampler.samples_per_group,
        "group_key": key_of(sampler.group_key),
        "strategy": sampler.strategy,
        "reward_key": key_of(sampler.reward_key),
    }


# The arguments of each class, from an object of it.
_ARGUMENTS: dict[type, Callable[[Any], Arguments]] = {
    ListStorage: _list,
    LazyStackStorage: lambda storage: {**_list(storage), "stack_dim": storage.stack_dim},
    CompressedListStorage: lambda storage: {**_list(storage), "compression_level": storage.compression_level},
    TensorStorage: _tensors,
    LazyTensorStorage: _lazy,
    LazyMemmapStorage: _lazy,
    LazyFrameStorage: _frames,
    RandomSampler: lambda sampler: {},
    SamplerWithoutReplacement: _without_replacement,
    ConsumingSampler: lambda sampler: {"max_sample_count": sampler.max_sample_count},
    PrioritizedSampler: _prioritized,
    SliceSampler: lambda sampler: {**_random_slices(sampler), "pad_output": sampler.pad_output, **_fragmented(sampler)},
    StreamingSliceSampler: _streaming,
    SliceSamplerWithoutReplacement: lambda sampler: {**_slices(sampler), **_without_replacement(sampler)},
    PrioritizedSliceSampler: lambda sampler: {**_prioritized(sampler), **_random_slices(sampler)},
    StalenessAwareSampler: _staleness,
    PromptGroupSampler: _prompt_groups,
    KeyGroupSampler: _key_groups,
    RoundRobinWriter: lambda writer: {"track_generations": writer.tracks_generations},
    TensorDictRoundRobinWriter: lambda writer: {"track_generations": writer.tracks_generations},
    TensorDictMaxValueWriter: lambda writer: {"rank_key": key_of(writer.rank_key), "reduction": writer.reduction},
    ImmutableDatasetWriter: lambda writer: {},
}
CLASSES = {kind.__name__: kind for kind in _ARGUMENTS}

# The same from the state, in checkpoints of earlier versions.
_OF_STATE: dict[str, Callable[[Fields], Arguments]] = {
    "RandomSampler": lambda state: {},
    "SamplerWithoutReplacement": lambda state: {"drop_last": state.flag("drop_last"), "shuffle": state.flag("shuffle")},
    "ConsumingSampler": lambda state: {"max_sample_count": state.whole("max_sample_count", 1)},
    "PrioritizedSampler": lambda state: {
        "max_capacity": state.whole("_max_capacity", 1),
        "alpha": state.number("_alpha", 0),
        "beta": state.number("_beta", 0),
        "eps": state.number("_eps", 0),
        "dtype": str(state.array("_priorities").dtype),
        "reduction": state.text("_reduction"),
        "max_priority_within_buffer": state.text("_new_items") == "highest_stored",
    },
    "StalenessAwareSampler": lambda state: {
        "max_staleness": state.whole("max_staleness", -1),
        "version_key": state.any("version_key"),
    },
    "PromptGroupSampler": lambda state: {
        "group_size": state.any("group_size"),
        **({"size_key": state.any("size_key")} if "size_key" in state else {}),
        "group_key": state.any("group_key"),
        "max_uses": state.any("max_uses"),
    },
    "RoundRobinWriter": lambda state: {"track_generations": "_generation" in state},
    "TensorDictRoundRobinWriter": lambda state: {"track_generations": "_generation" in state},
    "ImmutableDatasetWriter": lambda state: {},
}


def arguments_of(component: object) -> Arguments | None:
    """The plain arguments with which a component is built again; None for a class that is not of this library."""
    found = _ARGUMENTS.get(type(component))
    return None if found is None else found(component)


def with_arguments(component: object, saved: dict[str, Any]) -> dict[str, Any]:
    """A saved component with its class and arguments, for a checkpoint."""
    found = arguments_of(component)
    named = {"class": type(component).__name__, **saved}
    return named if found is None else {**named, "arguments": found}


def built(kind_of: type[T], saved: Fields, given: object = None) -> T:
    """A component without its state, from a saved tree.

    Args:
        kind_of: `Storage`, `Sampler` or `Writer`.
        saved: the tree of the component, with "class" and "arguments", or "state".
        given: of the user: a class, or a function, which gets the saved arguments; or the component. None for the class
            that the checkpoint names.

    CheckpointMismatch where the class, or an argument, is not known here; it says what to pass. TypeError where what was
    given is, or makes, something else.
    """
    role = kind_of.__name__.lower()
    made = given
    if given is None or (callable(given) and not isinstance(given, kind_of)):
        made = _made(role, saved, given)
    if not isinstance(made, kind_of):
        raise TypeError(f"components[{role!r}] must be, or make, a {kind_of.__name__}, got {class_of(made)}")
    return made


def _made(role: str, saved: Fields, given: Callable[..., object] | None) -> object:
    name = saved.text("class") if "class" in saved else ""
    arguments = _saved_arguments(name, saved)
    kind = CLASSES.get(name)
    if given is None and (kind is None or arguments is None or "needs" in arguments):
        needs = arguments.get("needs") if isinstance(arguments, dict) else None
        why = (
            "is none of this library"
            if kind is None
            else f"was built with {', '.join(map(str, needs))}, which a checkpoint does not have"
            if isinstance(needs, list)
            else "was saved by an earlier version, without its arguments"
        )
        raise CheckpointMismatch(
            f"{saved.where}: the {role} {name or '(of an earlier version)'} {why}. Pass it, built as it was: "
            f"interop.open(path, components={{{role!r}: {name or '...'}(...)}})"
        )
    arguments = dict(arguments or {})
    arguments.pop("needs", None)
    make = given or kind
    assert make is not None
    return called(make, arguments, f"{saved.where}, {role}")


def called(make: Callable[..., T], arguments: Mapping[str, object], where: str) -> T:
    """The result of a call with saved arguments. CheckpointMismatch where it does not take them."""
    ready = {key: _value(key, value) for key, value in arguments.items()}
    try:
        return make(**ready)
    except (TypeError, ValueError, KeyError, NotImplementedError) as error:
        raise CheckpointMismatch(
            f"{where}: {getattr(make, '__name__', make)} does not take the saved arguments {arguments}: {error}"
        ) from error


def _saved_arguments(name: str, saved: Fields) -> Arguments | None:
    found: Arguments | None = None
    if "state" in saved and name in _OF_STATE:
        found = _OF_STATE[name](saved.fields("state"))
    if "arguments" in saved:
        own = saved.any("arguments")
        if not isinstance(own, Mapping):
            raise saved.wrong("arguments", "named arguments", own)
        found = {**(found or {}), **own}
    return found


def _value(name: str, value: object) -> object:
    """A saved argument as its constructor takes it."""
    if name == "dtype" and isinstance(value, str):
        return _DTYPES.get(value, value)
    if name == "staleness" and isinstance(value, Mapping):
        return called(StalenessAwareSampler, value, "the staleness of a PromptGroupSampler")
    if name == "spread" and isinstance(value, Mapping):
        return called(RewardSpread, value, "the spread of a PromptGroupSampler")
    if name == "mean_range" and isinstance(value, list):
        return tuple(value)
    if name in ("ragged", "shared_prefixes") and isinstance(value, list):
        return [tuple(each) if isinstance(each, list) else each for each in value]
    if name in ("end_keys", "obs_key") and isinstance(value, list):
        return [_key(each) for each in value]
    if name == "span" and isinstance(value, list):
        return tuple(value)
    return _key(value)


def _key(value: object) -> object:
    return tuple(value) if isinstance(value, list) and all(isinstance(each, str) for each in value) else value
