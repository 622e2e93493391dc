"""Arguments of samplers, writers and sample units that are refused at construction, and how they show."""

import pytest
import torch

from interop import (
    ConsumingSampler,
    ImmutableDatasetWriter,
    LazyTensorStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    PromptGroupSampler,
    RandomSampler,
    ReplayBuffer,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    Sequence,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    StalenessAwareSampler,
    TensorDictMaxValueWriter,
    Transition,
)

ENDS, IDS = torch.ones(8, dtype=torch.bool), torch.zeros(8, dtype=torch.int64)
STATIC = {"slice_len": 2, "cache_values": True}


def buffer_of(**choices):
    return ReplayBuffer(storage=LazyTensorStorage(4), **choices)


REFUSED = [
    (lambda: SamplerWithoutReplacement(drop_last=1), TypeError, "drop_last"),
    (lambda: PrioritizedSampler(0, 1.0, 1.0), ValueError, "max_capacity"),
    (lambda: PrioritizedSampler(10, 1.0, 1.0, dtype=torch.float16), NotImplementedError, "float16"),
    (lambda: ConsumingSampler(0), ValueError, "max_sample_count"),
    (lambda: StalenessAwareSampler(max_staleness=-2), ValueError, "max_staleness"),
    (lambda: StalenessAwareSampler(staleness_weight_fn=3), TypeError, "staleness_weight_fn"),
    (lambda: setattr(StalenessAwareSampler(), "consumer_version", 2**63), ValueError, "consumer_version"),
    (lambda: PromptGroupSampler(0), ValueError, "group_size"),
    (lambda: PromptGroupSampler(2, max_uses=0), ValueError, "max_uses"),
    (lambda: PromptGroupSampler(2, staleness=3), TypeError, "staleness"),
    (lambda: SliceSampler(slice_len=2, cache_values=False, ends=ENDS), RuntimeError, "cache_values=True"),
    (lambda: SliceSampler(slice_len=2, pad_output=True), ValueError, "needs strict_length=False"),
    (lambda: SliceSampler(slice_len=4, span=-1), ValueError, "span"),
    (lambda: SliceSampler(slice_len=4, span=(1, 2, 3)), ValueError, "a pair of these"),
    (lambda: SliceSampler(2), TypeError, "positional"),
    (lambda: PrioritizedSliceSampler(16, -1.0, 1.0, slice_len=2), ValueError, "alpha"),
    (lambda: TensorDictMaxValueWriter("key", reduction="product"), NotImplementedError, "'product'"),
    (lambda: TensorDictMaxValueWriter("key", unknown=1), TypeError, "unknown"),
    (lambda: buffer_of(sampler=SamplerWithoutReplacement(drop_last=True)), ValueError, "batch_size"),
    (lambda: buffer_of(consume_after_n_samples=0), ValueError, "consume_after_n_samples"),
    (lambda: buffer_of(consume_after_n_samples=2, sampler=RandomSampler()), TypeError, "RandomSampler"),
    (
        lambda: buffer_of(consume_after_n_samples=2, sampler=ConsumingSampler(1)),
        ValueError,
        "consume_after_n_samples=2",
    ),
    (lambda: buffer_of(sample_unit=3), TypeError, "sample_unit"),
    (lambda: Sequence(0), ValueError, "length"),
    (lambda: Sequence(2, "wrap"), ValueError, "episode_boundary"),
    (lambda: Sequence(2, burn_in=-1), ValueError, "burn_in"),
    (lambda: Sequence(2, done_key=()), TypeError, "done_key"),
]


@pytest.mark.parametrize(("make", "error", "match"), REFUSED)
def test_arguments_that_are_refused(make, error, match):
    with pytest.raises(error, match=match):
        make()


SLICES = [
    ({}, TypeError, "one of num_slices and slice_len, got None and None"),
    ({"slice_len": 0}, ValueError, "slice_len"),
    ({"slice_len": 2, "end_key": "a", "end_keys": ["b"]}, RuntimeError, "one of end_key and end_keys"),
    ({"slice_len": 2, "end_key": ["a", "b"]}, TypeError, "end_key must be a name"),
    ({"slice_len": 2, "compile": 3}, TypeError, "compile must be a bool or a dict"),
    ({**STATIC, "ends": ENDS, "trajectories": IDS}, RuntimeError, "give one of ends and trajectories"),
    ({**STATIC, "ends": ENDS, "end_key": "a"}, RuntimeError, "neither end_key nor traj_key"),
    ({**STATIC, "ends": IDS}, TypeError, "ends must be bool"),
    ({**STATIC, "ends": ENDS[:, None]}, RuntimeError, r"of shape \[items\], got shape \[8, 1\]"),
]


@pytest.mark.parametrize("kind", [SliceSampler, SliceSamplerWithoutReplacement, PrioritizedSliceSampler])
@pytest.mark.parametrize(("choices", "error", "match"), SLICES)
def test_arguments_of_slices_that_are_refused(kind, choices, error, match):
    given = (8, 1.0, 1.0) if kind is PrioritizedSliceSampler else ()
    if kind is SliceSamplerWithoutReplacement:
        choices = {key: value for key, value in choices.items() if key != "cache_values"}
    with pytest.raises(error, match=match):
        kind(*given, **choices)


def test_a_span_on_the_left_counts_for_nothing_where_starts_have_priorities():
    with pytest.warns(UserWarning, match="no span on the left"):
        assert PrioritizedSliceSampler(16, 1.0, 1.0, slice_len=4, span=True).span == (False, True)


@pytest.mark.parametrize(
    ("part", "text"),
    [
        (RandomSampler(), "RandomSampler()"),
        (SamplerWithoutReplacement(), "SamplerWithoutReplacement(0.0000% left)"),
        (PrioritizedSampler(10, 0.7, 0.9), "PrioritizedSampler(alpha=0.7, beta=0.9, eps=1e-08, reduction=max)"),
        (RoundRobinWriter(), "RoundRobinWriter(cursor=0, full_storage=False)"),
        (ImmutableDatasetWriter(), "ImmutableDatasetWriter()"),
        (
            TensorDictMaxValueWriter(),
            "TensorDictMaxValueWriter(cursor=0, full_storage=False, rank_key=('next', 'reward'), reduction=sum)",
        ),
        (Transition(), "Transition()"),
    ],
)
def test_how_parts_show(part, text):
    assert repr(part) == text
