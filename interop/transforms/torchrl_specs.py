"""The specs of an environment behind a transform: found by running it once on zeros. Bounds are not guessed.

torchrl is not imported here: specs are made of the classes of `torchrl.data` that the program has imported.
"""

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from tensordict import TensorDictBase, is_leaf_nontensor, is_tensor_collection, unravel_key
from tensordict.utils import NestedKey
from torch import Tensor

Spec = Any
Specs = Mapping[NestedKey, Spec]


def outputs(
    output_spec: Spec, run: Callable[[TensorDictBase], Any], pairs: Mapping[NestedKey, NestedKey], known: Specs
) -> Spec:
    """The specs of what an environment returns behind a transform.

    An entry that is the same tensor after the run keeps its spec, under another name too. Any other is unbounded.

    Args:
        output_spec: what the environment returns before the transform.
        run: what the transform does to a step.
        pairs: an entry that the transform writes -> the entry that it reads: it tells rewards from observations.
        known: specs of entries behind the transform, which are taken as they are.

    ValueError where the result has another batch size.
    """
    found, places = output_spec.clone(), _places(output_spec)
    first, *others = (part.zero() for part in output_spec.values() if part is not None)
    for other in others:
        first.update(other)
    zeros = {key: first.get(key) for key in places}  # held: an id is of one tensor only while it lives
    names = {id(value): key for key, value in zeros.items()}
    size = first.batch_size
    result = run(first)
    if not is_tensor_collection(result) or result.batch_size != size:
        became = list(result.batch_size) if is_tensor_collection(result) else type(result).__name__
        raise ValueError(f"the batch size of a step, {list(size)}, became {became}: it must stay what it is")
    made = {key: result.get(key) for key in result.keys(True, True, is_leaf=is_leaf_nontensor)}
    for key in places.keys() - made.keys():
        del found[places[key]]
    for key, value in made.items():
        source = names.get(id(value))
        place = places.get(key) or places.get(pairs.get(key, source), ("full_observation_spec",))
        if key in known or source != key:
            spec = _unbounded(value) if source is None else output_spec[places[source]]
            found[unravel_key((place[0], key))] = known.get(key, spec).clone()
    return found


def inputs(
    input_spec: Spec, pairs: Mapping[NestedKey, NestedKey], image: Callable[[Tensor], Tensor], known: Specs
) -> Spec:
    """The specs of what an environment takes behind a transform.

    An entry that the inverse writes is replaced by the one that it reads, with the spec of its image.

    Args:
        input_spec: what the environment takes before the transform.
        pairs: an entry that the inverse writes -> the entry that it reads.
        image: undoes the inverse for one tensor.
        known: specs of entries behind the transform, which are taken as they are.
    """
    found, places = input_spec.clone(), _places(input_spec)
    for key in places.keys() & pairs.keys():
        del found[places[key]]
    for key, place in places.items():
        outer = pairs.get(key, key)
        if outer in known or key in pairs:
            spec = known[outer] if outer in known else _image(input_spec[place], image)
            found[unravel_key((place[0], outer))] = spec.clone()
    return found


def _image(spec: Spec, image: Callable[[Tensor], Tensor]) -> Spec:
    """The spec of the image of a value: choices stay choices, any other changed value is unbounded."""
    data, value = sys.modules["torchrl.data"], spec.zero()
    one_hot, chosen = type(spec) is data.OneHot, type(spec) in (data.OneHot, data.Categorical)
    if one_hot:
        value[..., 0] = 1
    made = image(value)
    if made is value:
        return spec
    lead = spec.shape[:-1] if one_hot else spec.shape
    if chosen and made.shape == lead and not made.is_floating_point():
        return data.Categorical(spec.n, made.shape, made.device, made.dtype)
    if chosen and made.ndim == len(lead) + 1 and made.shape[:-1] == lead and bool((made.sum(-1) == 1).all()):
        return data.OneHot(made.shape[-1], made.shape, made.device, made.dtype)
    return _unbounded(made)


def _unbounded(value: Any) -> Spec:
    data = sys.modules["torchrl.data"]
    if not isinstance(value, Tensor):
        return data.NonTensor(shape=value.batch_size)
    about = {"shape": value.shape, "dtype": value.dtype, "device": value.device}
    return data.Categorical(2, **about) if value.dtype == torch.bool else data.Unbounded(**about)


def _places(spec: Spec) -> dict[NestedKey, Any]:
    """Where each entry is: the part of the spec, then its key there."""
    parts = ((name, part) for name, part in spec.items() if part is not None)
    return {key: unravel_key((name, key)) for name, part in parts for key in part.keys(True, True)}
