"""Action tokens: bounds of the error, the reference of OpenVLA in NumPy, TorchRL where that is, and refusals."""

import json
import warnings

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, TensorDict

from interop import RobotDatasetMetadata, UniformActionTokenizer, VocabTailActionTokenizer, validate_vla_tensordict

STATS = {"arm": {"action": {"q01": [-1.0, -2.0, 0.0], "q99": [1.0, 3.0, 1.0], "mask": [True, True, False]}}}


@pytest.mark.parametrize("bins", [1, 2, 7, 256])
def test_a_decoded_action_is_at_most_half_a_bin_away(bins: int) -> None:
    low, high = torch.tensor([-1.0, 0.0, 5.0]), torch.tensor([1.0, 0.5, 9.0])
    tokenizer = UniformActionTokenizer(bins, low=low, high=high)
    actions = low + torch.rand(500, 4, 3) * (high - low)
    tokens = tokenizer.encode(actions)
    assert tokens.shape == actions.shape and tokens.min() >= 0 and tokens.max() < tokenizer.vocab_size
    assert ((tokenizer.decode(tokens) - actions).abs() <= (high - low) / (2 * bins) + 1e-5).all()
    assert torch.equal(tokenizer.encode(tokenizer.decode(tokens)), tokens)
    far = torch.tensor([[float("inf")] * 3, [float("-inf")] * 3])
    assert tokenizer.encode(far).tolist() == [[bins - 1] * 3, [0] * 3]


@pytest.mark.parametrize("size", [None, 32000])
def test_the_tail_is_that_of_openvla(size: int | None) -> None:
    edges = np.linspace(-1, 1, 256)
    actions = torch.cat([torch.from_numpy(edges).float(), torch.randn(20_000)])
    expected = (size or 256) - np.digitize(np.clip(actions.double().numpy(), -1, 1), edges)
    tokenizer = VocabTailActionTokenizer(256, full_vocab_size=size)
    tokens = tokenizer.encode(actions)
    assert np.array_equal(tokens.numpy(), expected)
    assert ((tokenizer.decode(tokens) - actions.clamp(-1, 1)).abs() <= 1 / 255 + 1e-6).all()


def test_statistics_are_undone_and_grippers_are_not_mapped() -> None:
    actions = torch.tensor([[-0.5, 1.3, 0.2], [0.5, 2.9, -0.7]])
    plain = VocabTailActionTokenizer.from_norm_stats(STATS, "arm")
    assert torch.allclose(plain.decode(plain.encode(actions)), actions, atol=0.02)
    turned = VocabTailActionTokenizer.from_norm_stats(STATS, "arm", gripper_binarize=True, gripper_invert=True)
    assert turned.decode(turned.encode(actions))[:, 2].tolist() == [-1.0, 1.0]


@pytest.mark.parametrize("seed", range(3))
def test_beside_torchrl(seed: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = pytest.importorskip("torchrl.data.vla")
    actions = torch.randn(2000, 3, generator=torch.Generator().manual_seed(seed))
    for bins in (2, 7, 256):
        ours, other = (
            kind(bins, low=-1.0, high=0.5) for kind in (UniformActionTokenizer, theirs.UniformActionTokenizer)
        )
        assert torch.equal(ours.encode(actions), other.encode(actions))
        assert torch.equal(ours.decode(ours.encode(actions)), other.decode(ours.encode(actions)))
        kinds = (VocabTailActionTokenizer, theirs.VocabTailActionTokenizer)
        ours, other = (kind.from_norm_stats(STATS, "arm", num_bins=bins, gripper_invert=True) for kind in kinds)
        assert (ours.encode(actions) != other.encode(actions)).sum() <= 2  # beside an edge: theirs is in float32
        tokens = torch.randint(-5, 400, (500, 3))
        assert torch.equal(ours.decode(tokens), other.decode(tokens))
        ours.load_state_dict(other.state_dict())
    metadata = RobotDatasetMetadata(dataset_id="x", action_low=torch.zeros(2), action_high=torch.ones(2))
    assert json.loads(theirs.RobotDatasetMetadata.from_json(metadata.to_json()).to_json()) == json.loads(
        metadata.to_json()
    )


def test_metadata_comes_back_from_json_and_makes_specs(tmp_path) -> None:
    made = RobotDatasetMetadata(
        dataset_id="x", action_names=("a", "b"), action_low=torch.zeros(2), action_high=torch.ones(2),
        camera_keys=(("observation", "image"), "wrist"), instruction_key=None,
    )  # fmt: skip
    text = made.to_json(tmp_path / "metadata.json")
    read = RobotDatasetMetadata.from_json(str(tmp_path / "metadata.json"))
    assert read.to_json() == text and read.camera_keys == made.camera_keys and read.instruction_key is None
    assert read.make_action_spec(shape_prefix=(4,)).is_in(torch.full((4, 2), 0.5))
    assert not read.make_action_spec().is_in(torch.full((2,), 1.5))
    assert UniformActionTokenizer.from_metadata(read, 8).action_dim == 2


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: UniformActionTokenizer(4, low=1.0, high=1.0), ValueError, "low must be below high"),
        (lambda: UniformActionTokenizer(4, low=float("-inf"), high=1.0), ValueError, "finite"),
        (lambda: UniformActionTokenizer(4, low=torch.zeros(3), high=1.0), ValueError, "shapes"),
        (lambda: UniformActionTokenizer(4, low=-1.0, high=1.0).encode(torch.tensor([float("nan")])), ValueError, "NaN"),
        (lambda: UniformActionTokenizer(4, low=-1.0, high=1.0).decode(torch.tensor([4])), ValueError, "from 0 to 3"),
        (lambda: UniformActionTokenizer(4, low=-1.0, high=1.0).decode(torch.tensor([1.0])), TypeError, "integers"),
        (lambda: VocabTailActionTokenizer(256, full_vocab_size=100), ValueError, "no room"),
        (lambda: VocabTailActionTokenizer(gripper_invert=True), ValueError, "need statistics"),
        (lambda: VocabTailActionTokenizer.from_norm_stats(STATS, "leg"), KeyError, "'arm'"),
        (lambda: RobotDatasetMetadata(dataset_id="x", action_space="foo"), ValueError, "joint_delta"),
        (lambda: RobotDatasetMetadata(dataset_id="x", action_dim=3, action_low=torch.zeros(2)), ValueError, "3 dims"),
        (lambda: RobotDatasetMetadata(dataset_id="x").make_action_spec(), ValueError, "action_dim"),
        (lambda: RobotDatasetMetadata.from_json("[1]"), ValueError, "dataset_id"),
    ],
)
def test_refusals(call, error, text) -> None:
    with pytest.raises(error, match=text):
        call()


def test_the_schema_names_all_that_is_missing() -> None:
    data = TensorDict(
        {
            "observation": {"state": torch.zeros(2, 5)},
            "language_instruction": NonTensorData("pick"),
            "action": torch.zeros(2, 7),
        },
        batch_size=[2],
    )
    assert validate_vla_tensordict(data) == []
    data["action"][0, 0] = float("nan")
    assert validate_vla_tensordict(data, raise_on_error=False) == ["non-finite values in action at key 'action'"]
    assert validate_vla_tensordict(data, check_finite=False) == []
    with pytest.raises(ValueError, match=r"missing language(.|\n)*no perception(.|\n)*missing action"):
        validate_vla_tensordict(TensorDict({}, batch_size=[2]))
