"""Language data beside TorchRL, where that is: the same tokens, pairs, coefficients, rollouts and files."""

import os
import pathlib
import warnings
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from tensordict import TensorDict

import interop as ours
from interop.llm import reward
from tests.interop.llm.fakes import EOS, TableModel, WordTokenizer, prompts, weighted_sum

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("torchrl")
    from torchrl import data as theirs
    from torchrl.data.llm import reward as their_reward

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("most", [1, 3, 6])
@pytest.mark.parametrize("as_tensors", [True, False])
def test_tokenizers(most: int, as_tensors: bool) -> None:
    texts, labels = ["a bb ccc", "d", "e f g h i j k"], [" l", " mm n", ""]
    sample = {"text": texts, "label": labels}
    for name, key in (("TensorDictTokenizer", "text"), ("PromptTensorDictTokenizer", "text")):
        made, expected = (
            getattr(side, name)(WordTokenizer(), most, key, return_tensordict=as_tensors)(sample)
            for side in (ours, theirs)
        )
        assert {*made.keys()} == {*expected.keys()}
        for entry in made.keys():  # noqa: SIM118
            assert torch.equal(torch.as_tensor(made[entry]), torch.as_tensor(expected[entry])), entry


def test_pairs() -> None:
    datasets = pytest.importorskip("datasets")
    answers = ["a b c d e", "a b c d", "a b c d e f", "", "x y z x y z"]
    rows = {"prompt": [f"p{n}" for n in range(25)], "chosen": answers * 5, "rejected": sorted(answers * 5)}
    dataset = datasets.Dataset.from_dict(rows)
    for least in (0, 4, 5, 6, 7):
        made, expected = (each.pre_tokenization_hook(dataset, least) for each in (reward, their_reward))
        assert {*made.features} == {*expected.features}
        assert not made.features or list(made["text"]) == list(expected["text"])


def test_coefficients() -> None:
    arguments = {"init_kl_coef": 0.2, "target": 2.0, "horizon": 20}
    pair = [side.AdaptiveKLController(**arguments) for side in (ours, theirs)]
    for values in ([-1.0, -2.0], [-0.1], [0.3, 0.4, -9.0], torch.tensor([-0.5, -0.7])):
        made, expected = (each.update(torch.as_tensor(values)) for each in pair)
        assert made == pytest.approx(float(expected), rel=1e-5)


def test_padding_and_masks() -> None:
    rows = torch.tensor(
        [[1, 2, EOS, EOS], [1, EOS, 3, EOS], [EOS] * 4, [1, 2, 3, 4], [EOS, EOS, 1, 2], [EOS, 1, EOS, EOS]]
    )
    sides: list[Any] = [ours.RolloutFromModel, theirs.RolloutFromModel]
    for options in ({}, {"sequence_length": 6}, {"eos_token_id": 1}):
        made, expected = (side._padded_left_to_right(rows, **options) for side in sides)
        assert torch.equal(made, expected)
    for options in ({}, {"eos_token_id": 9}):  # rows that are padded on the right
        made, expected = (side._padded_right_to_left(rows[:4], **options) for side in sides)
        assert torch.equal(made, expected)
    logits, labels = torch.randn(2, 3, 5), torch.randint(5, (2, 3))
    torch.testing.assert_close(*(side.logprobs_of_labels(logits, labels) for side in sides))
    made, expected = (prompts(side.PromptData).mask_label() for side in (ours, theirs))
    assert (made.to_tensordict() == expected.to_tensordict()).all() and made.batch_size == expected.batch_size


@pytest.mark.parametrize("clip", [10.0, 0.5])
def test_rollouts(clip: float) -> None:
    new = torch.tensor([[1, 2, 3, 4], [5, EOS, EOS, EOS], [EOS, EOS, EOS, EOS], [6, 7, 8, EOS]])
    found = []
    for side in (ours, theirs):
        models = TableModel(0, new), TableModel(1)
        rollout = side.RolloutFromModel(*models, weighted_sum, 0.3, 4, clip)
        found.append(
            (*rollout.generate(batch := prompts(side.PromptData)), models[0].given, rollout.rollout_from_data(batch))
        )
    (made, made_probs, made_ratio, made_given, made_td), (texts, probs, ratio, given, td) = found
    assert torch.equal(made, texts) and made_probs.shape == probs.shape
    ended = made_ratio == 0
    assert ended.sum() == 5
    torch.testing.assert_close(made_probs[~ended], probs[~ended])
    torch.testing.assert_close(made_ratio, ratio)
    assert torch.equal(made_given[0], given[0]) and torch.equal(made_given[1].bool(), given[1].bool())
    assert made_td.names == td.names and made_td.batch_size == td.batch_size
    for key in td.keys(True, True):
        assert made_td[key].dtype == td[key].dtype and made_td[key].shape == td[key].shape, key
        if key != "sample_log_prob":
            torch.testing.assert_close(made_td[key], td[key])


def test_a_real_model_draws_the_same() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_positions=16, n_embd=4, n_layer=1, n_head=1)
    models = [transformers.GPT2LMHeadModel(config).eval() for _ in range(2)]
    for model in models:
        model.transformer.ln_f.bias.data[:] = 1
        model.transformer.wte.weight.data[EOS] = 2.5  # ends about every third text
    options = transformers.GenerationConfig(
        do_sample=True, top_k=40, max_new_tokens=6, pad_token_id=EOS, return_dict_in_generate=True, output_scores=True
    )
    found = []
    for side in (ours, theirs):
        torch.manual_seed(1)
        batch = prompts(side.PromptData)
        found.append(side.RolloutFromModel(*models, weighted_sum, max_new_tokens=6).generate(batch, options))
    (made, probs, ratio), (expected, their_probs, their_ratio) = found
    assert torch.equal(made, expected)
    torch.testing.assert_close(ratio, their_ratio, atol=1e-4, rtol=0)
    torch.testing.assert_close(probs[ratio != 0], their_probs[ratio != 0], atol=1e-4, rtol=0)


def test_columns_and_files(tmp_path: pathlib.Path) -> None:
    datasets = pytest.importorskip("datasets")
    columns = {"a": [[1, 2], [3, 4], [5, 6]], "b": [1.5, 2.0, 3.0], "keep": [True, False, True]}
    made, expected = (
        side.TokenizedDatasetLoader.dataset_to_tensordict(
            datasets.Dataset.from_dict(columns), tmp_path / name, ("some", "prefix"), [*columns], valid_mask_key="keep"
        )
        for side, name in ((ours, "ours"), (theirs, "theirs"))
    )
    for loaded in (expected, TensorDict.load_memmap(tmp_path / "ours"), TensorDict.load_memmap(tmp_path / "theirs")):
        assert made.batch_size == loaded.batch_size and made["some", "prefix"].batch_size == (2,)
        assert (made == loaded).all() and {each.dtype for each in made.values(True, True)} == {
            each.dtype for each in loaded.values(True, True)
        }
