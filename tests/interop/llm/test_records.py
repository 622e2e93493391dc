"""KL controllers, records of prompts and responses, and tokenization by any callable."""

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import interop
from interop import AdaptiveKLController, ConstantKLController, LLMData, LLMInput, LLMOutput, PromptData
from tests.interop.llm.fakes import WordTokenizer

words = st.text("ab ", max_size=20)


def model(coef: float = 0.5) -> SimpleNamespace:
    return SimpleNamespace(kl_coef=coef)


def test_a_constant_coefficient_is_written_to_the_model() -> None:
    held = model()
    assert ConstantKLController(model=held).update([9.0]) == held.kl_coef == 0.5
    controller = ConstantKLController(kl_coef=0.2, model=held)
    assert held.kl_coef == 0.2
    held.kl_coef = 7.0
    assert controller.update() == controller.coef == held.kl_coef == 0.2


@given(st.lists(st.lists(st.floats(-5, 5), min_size=1, max_size=6), max_size=5), st.floats(0.1, 9), st.integers(2, 50))
def test_an_adapted_coefficient_follows_its_formula(histories: list[list[float]], target: float, horizon: int) -> None:
    held = model()
    controller = AdaptiveKLController(init_kl_coef=0.3, target=target, horizon=horizon, model=held)
    coef = held.kl_coef
    assert coef == 0.3
    for values in histories:
        kl = -sum(values) / len(values) / coef
        coef *= 1 + max(-0.2, min(0.2, kl / target - 1)) * len(values) / horizon
        given = [torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in values]
        assert controller.update(given) == controller.coef == held.kl_coef == pytest.approx(coef)
        coef = controller.coef


@pytest.mark.parametrize("name", ["init_kl_coef", "target", "horizon"])
@pytest.mark.parametrize("value", [0, float("nan")])
def test_numbers_that_cannot_work_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        AdaptiveKLController(**({"init_kl_coef": 0.1, "target": 1.0, "horizon": 10} | {name: value}))


@pytest.mark.parametrize("values", [None, [], [1.0, float("nan")], torch.ones(50)])
def test_values_that_cannot_be_used_change_nothing(values: object) -> None:
    controller = AdaptiveKLController(init_kl_coef=0.1, target=1.0, horizon=10)
    with pytest.raises(ValueError, match="KL values"):
        controller.update(values)
    assert controller.coef == 0.1


def test_a_model_must_have_a_coefficient() -> None:
    for make in (lambda: ConstantKLController(kl_coef=1, model=object()),
                 lambda: AdaptiveKLController(init_kl_coef=1, target=1, horizon=1, model=object())):  # fmt: skip
        with pytest.raises(AttributeError, match="doesn't have attribute 'kl_coef'"):
            make()
    with pytest.raises(ValueError, match="needs kl_coef"):
        ConstantKLController()


@pytest.mark.parametrize("kind", [LLMInput, LLMOutput, LLMData])
def test_lists_follow_their_rows(kind: type) -> None:
    texts, lists = ["a", "bb", "c"], [[1, 2], [3], [4, 5, 6]]
    data = kind(tokens=torch.arange(6).reshape(3, 2), token_list=lists, text=texts, batch_size=[3])
    for other in (data, pickle.loads(pickle.dumps(data)), data.clone(), copy.copy(data), torch.stack([*data.unbind(0)]),
                  torch.cat([data[:1], data[1:]]), kind.from_tensordict(data.to_tensordict())):  # fmt: skip
        assert other.text == texts and other.token_list == lists and other.batch_size == (3,)
    assert data[1].text == "bb" and data[1].token_list == [3]
    assert data[torch.tensor([2, 0])].token_list == [[4, 5, 6], [1, 2]]
    twice = torch.stack([data, data])
    assert twice[1, 2].text == "c" and twice[:, 1].token_list == [[3], [3]]
    assert kind(tokens=torch.ones(2, 1, 1), text=[["a"], ["b"]], batch_size=[2, 1])[1, 0].text == "b"
    alone = kind(tokens=torch.ones(2), token_list=[1, 2], text="a", batch_size=[])
    assert alone.token_list == [1, 2] and alone.text == "a" and alone.to_tensordict()["text"] == "a"
    other = kind(tokens=torch.ones(2), token_list=[3], text="b", batch_size=[])
    assert torch.stack([alone, other]).token_list == [[1, 2], [3]]
    with pytest.raises(ValueError, match="text has 2 values for a batch of size"):
        data.text = texts[:2]
    assert data.text == texts
    data.text = tuple(texts)
    assert data[1:].text == texts[1:]
    empty = kind(tokens=torch.ones(0, 2), token_list=[], text=[], batch_size=[0])
    assert empty.text == empty.token_list == [] and torch.cat([empty, data]).text == texts
    with pytest.raises(ValueError, match="text has 1 values for a batch of size \\[2\\]: give one a row"):
        kind(tokens=torch.ones(2, 2, 1), text=["ab", "cd"], batch_size=[2, 2])  # no rows of letters


def vllm(prompt: list[int], *responses: tuple[list[int], str], logprobs: bool = True) -> SimpleNamespace:
    outputs = [
        SimpleNamespace(
            token_ids=ids,
            text=text,
            logprobs=[{id: SimpleNamespace(logprob=-float(id)), 99: 0.0} for id in ids] if logprobs else None,
        )
        for ids, text in responses
    ]
    return SimpleNamespace(prompt_token_ids=prompt, outputs=outputs)


def test_outputs_of_vllm() -> None:
    requests = [vllm([1, 2, 3], ([4], "d"), ([5, 6], "ef")), vllm([7], ([8, 9], "hi"))]
    out = LLMOutput.from_vllm_output(requests, pad_token_id=50)
    assert out.batch_size == (3,) and out.text == ["d", "ef", "hi"]
    assert out.tokens.tolist() == [[1, 2, 3], [1, 2, 3], [7, 50, 50]] and out.tokens.dtype == torch.int64
    assert out.tokens_response.tolist() == [[4, 50], [5, 6], [8, 9]]
    assert out.token_list == [[1, 2, 3], [1, 2, 3], [7]] and out.tokens_response_list == [[4], [5, 6], [8, 9]]
    assert out.log_probs.tolist() == [[-4, 0], [-5, -6], [-8, -9]]
    one = LLMOutput.from_vllm_output(vllm([1], ([2], "b"), logprobs=False))
    assert one.batch_size == (1,) and one.log_probs is None
    for none in ([], vllm([1]), vllm(None, ([2], "b"))):  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="completions of prompts"):
            LLMOutput.from_vllm_output(none)


def test_masked_labels() -> None:
    ids = torch.arange(12).reshape(2, 6)
    data = PromptData(ids, torch.ones_like(ids), torch.tensor([2, 6]), labels=ids, loss=torch.ones(()), batch_size=[])
    masked = data.mask_label(7)
    assert masked.input_ids.tolist() == [[0, 1, 7, 7, 7, 7], [6, 7, 8, 9, 10, 11]] and masked.batch_size == ()
    assert (
        masked.attention_mask.tolist() == [[1, 1, 0, 0, 0, 0], [1] * 6] and masked.attention_mask.dtype == torch.int64
    )
    assert masked.labels is None and masked.loss == 1 and masked.prompt_rindex is data.prompt_rindex
    assert data.mask_label().input_ids[0, 2] == 50256


@given(st.lists(words), st.integers(1, 8), st.sampled_from(["max_length", "longest", False]), st.booleans())
@example(["a b", "a"], 1, "max_length", False)
def test_tokens_of_any_tokenizer(texts: list[str], most: int, padding: str | bool, truncation: bool) -> None:
    rows = [[1 + len(word) for word in text.split()] for text in texts]
    rows = [row[:most] for row in rows] if truncation else rows
    width = most if padding == "max_length" or not texts else max(map(len, rows))
    make = interop.TensorDictTokenizer(WordTokenizer(), most, padding=padding, truncation=truncation)
    too_long = max(map(len, rows), default=0) > most
    if too_long or (not padding and len({*map(len, rows)}) > 1):
        with pytest.raises(ValueError, match="more than max_length" if too_long else "a tensor needs one length"):
            make({"text": texts})
        return
    made = make({"text": texts})
    assert made.batch_size == (len(texts),) and {each.dtype for each in made.values()} == {torch.int64}
    assert made["input_ids"].shape == made["attention_mask"].shape == (len(texts), width)
    assert made["input_ids"].tolist() == [row + [0] * (width - len(row)) for row in rows]
    assert made["attention_mask"].sum(-1).tolist() == [len(row) for row in rows]
    if texts and padding == "max_length":
        assert (make({"text": texts[0]}) == made[0]).all() and make({"text": texts[0]}).batch_size == ()


@given(st.lists(st.tuples(words, words)), st.integers(1, 8), st.booleans())
def test_prompts_and_labels_of_any_tokenizer(pairs: list[tuple[str, str]], most: int, as_tensors: bool) -> None:
    sample = {"ask": [ask for ask, _ in pairs], "label": [label for _, label in pairs]}
    make = interop.PromptTensorDictTokenizer(WordTokenizer(), most, "ask", return_tensordict=as_tensors)
    made = make(sample)
    both = [[1 + len(word) for word in (ask + label).split()][:most] for ask, label in pairs]
    if as_tensors:
        assert made.batch_size == (len(pairs),)
        assert [made[name].dtype for name in ("prompt_rindex", "valid_sample")] == [torch.int64, torch.bool]
        made = {name: rows.tolist() for name, rows in made.items()}
    if pairs or as_tensors:
        assert made["input_ids"] == [row + [0] * (most - len(row)) for row in both]
    assert list(made["prompt_rindex"]) == [min(len(ask.split()), most) - 1 for ask, _ in pairs]
    assert list(made["valid_sample"]) == [len(row) < most for row in both]


def test_bad_samples_and_tokenizers() -> None:
    tokenizer, prompted = interop.TensorDictTokenizer, interop.PromptTensorDictTokenizer
    with pytest.raises(KeyError, match=r"no entry 'text', it has \['txt'\]"):
        tokenizer(WordTokenizer(), 3)({"txt": "a"})
    with pytest.raises(TypeError, match="of one length"):
        prompted(WordTokenizer(), 3)({"prompt": ["a"], "label": []})
    without = WordTokenizer()
    without.pad_token_id = None  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"no pad token.*set tokenizer.pad_token"):
        tokenizer(without, 3)
    assert tokenizer(without, 3, padding=False)({"text": "a"}).batch_size == ()
    without.pad_token_id, without.eos_token_id = 0, None  # type: ignore[assignment]
    with pytest.raises(ValueError, match="no end-of-text token"):
        prompted(without, 3)
