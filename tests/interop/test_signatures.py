"""Constructors name their parameters, so that type checkers and editors know them, and Python refuses others."""

import importlib
import inspect

import pytest

_NUMBER = "any number of {}, by position"
_OLD_SPECS = (
    "BinaryDiscreteTensorSpec",
    "BoundedTensorSpec",
    "CompositeSpec",
    "DiscreteTensorSpec",
    "LazyStackedCompositeSpec",
    "LazyStackedTensorSpec",
    "MultiDiscreteTensorSpec",
    "MultiOneHotDiscreteTensorSpec",
    "NonTensorSpec",
    "OneHotDiscreteTensorSpec",
    "UnboundedContinuousTensorSpec",
    "UnboundedDiscreteTensorSpec",
)
# The constructors with *args or **kwargs, and the reason.
GATHERING = {
    "Compose": _NUMBER.format("transforms"),
    "SelectTransform": _NUMBER.format("keys"),
    "ExcludeTransform": _NUMBER.format("keys"),
    "ReplayBufferEnsemble": _NUMBER.format("buffers"),
    "SamplerEnsemble": _NUMBER.format("samplers"),
    "StorageEnsemble": _NUMBER.format("storages"),
    "WriterEnsemble": _NUMBER.format("writers"),
    "Stacked": _NUMBER.format("specs"),
    "StackedComposite": _NUMBER.format("specs"),
    "Composite": "the names are those of the entries",
    **dict.fromkeys(_OLD_SPECS, "an old name: the arguments are those of the class of the new name"),
    "Sampler": "abstract: its `__new__` is called with the arguments of subclasses",
    "Storage": "abstract: its `__new__` is called with the arguments of subclasses",
    "RayReplayBuffer": "the arguments are those of the class of buffers that the user names",
    "ActionTokenizerBase": "abstract: its `__new__` is called with the arguments of subclasses",
    "StoreStorage": "the options of the client of a server, which it checks",
    "OfflineToOnlineReplayBuffer": "the arguments of the dataset that a text names",
    "D4RLExperienceReplay": "the arguments of an environment, which `gym.make` checks",
}
_MODULES = (
    "interop",
    "interop.buffers",
    "interop.datasets",
    "interop.llm",
    "interop.maps",
    "interop.postprocs",
    "interop.remote",
    "interop.samplers",
    "interop.specs",
    "interop.storages",
    "interop.ted",
    "interop.transforms",
    "interop.writers",
)
_GATHERS = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _public_classes() -> dict[str, type]:
    classes = {}
    for name in _MODULES:
        module = importlib.import_module(name)
        for public in module.__all__:
            value = getattr(module, public)
            if inspect.isclass(value) and not issubclass(value, Exception):
                classes[public] = value
    return classes


def test_constructors_name_their_parameters() -> None:
    gathering = {
        name
        for name, each in _public_classes().items()
        if any(parameter.kind in _GATHERS for parameter in inspect.signature(each).parameters.values())
    }
    assert not gathering - GATHERING.keys(), "name the parameters, or enter the class with a reason"
    assert not GATHERING.keys() - gathering, "these name their parameters now: take them out of the list"


@pytest.mark.parametrize(
    "name", ["ReplayBuffer", "TensorDictPrioritizedReplayBuffer", "HERReplayBuffer", "MinariExperienceReplay"]
)
def test_a_mistyped_name_is_refused(name: str) -> None:
    parameters = inspect.signature(_public_classes()[name]).parameters
    required = {each.name: None for each in parameters.values() if each.default is inspect.Parameter.empty}
    with pytest.raises(TypeError, match="batch_sise"):
        _public_classes()[name](**required, batch_sise=32)
