"""Language data by the real libraries: a trained tokenizer, a small GPT-2, datasets on disk. Nothing is downloaded."""

import contextlib
import copy
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import MemoryMappedTensor, TensorDict, tensorclass

import interop
from interop import PairwiseDataset, PromptData, RewardData, RolloutFromModel, TokenizedDatasetLoader, get_dataloader
from interop.llm.reward import pre_tokenization_hook
from tests.faults.failing import small_disk
from tests.interop.llm.fakes import TableModel, prompts, weighted_sum

transformers = pytest.importorskip("transformers")
datasets = pytest.importorskip("datasets")
tokenizers = pytest.importorskip("tokenizers")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
B, T, N = 16, 6, 5  # prompts, their tokens, new tokens
WORDS = [f"w{n}" for n in range(9)]
texts = st.lists(st.sampled_from(WORDS), max_size=8).map(" ".join)
convert = TokenizedDatasetLoader.dataset_to_tensordict


@pytest.fixture(scope="module", autouse=True)
def quiet() -> Iterator[None]:
    """No bars, and no threads that wait for one another over a model of a few hundred numbers."""
    datasets.disable_progress_bars()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A tokenizer in "tokenizer", and two datasets."""
    path = tmp_path_factory.mktemp("language")
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(unk_token="<u>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    trainer = tokenizers.trainers.WordLevelTrainer(special_tokens=["<u>", "<e>"])
    backend.train_from_iterator(WORDS, trainer)
    names = ["input_ids", "attention_mask"]
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<e>", model_input_names=names)
    made.save_pretrained(path / "tokenizer")
    rows = [{"prompt": " ".join(WORDS[: 1 + n % 9]), "label": " w3" * (n % 4), "n": n} for n in range(30)]
    train = datasets.Dataset.from_list(rows)
    datasets.DatasetDict({"train": train, "valid1": train}).save_to_disk(path / "asks-and-answers")
    pairs = [{"prompt": "w0", "chosen": "w1 " * (n % 7), "rejected": "w2 " * (n % 9)} for n in range(50)]
    datasets.DatasetDict({"train": datasets.Dataset.from_list(pairs)}).save_to_disk(path / "pairs")
    return path


@pytest.fixture(scope="module")
def tokenizer(folder: pathlib.Path) -> Any:
    return TokenizedDatasetLoader.make_tokenizer(tokenizer_model_name=str(folder / "tokenizer"))


@pytest.fixture(scope="module")
def models(tokenizer: Any) -> list[Any]:
    """A model and a reference."""
    torch.manual_seed(0)
    eos = tokenizer.eos_token_id
    sizes = {"n_positions": 32, "n_embd": 8, "n_layer": 2, "n_head": 2, "initializer_range": 0.3}
    config = transformers.GPT2Config(vocab_size=len(tokenizer), eos_token_id=eos, bos_token_id=eos, **sizes)
    return [transformers.GPT2LMHeadModel(config).eval() for _ in range(2)]


def loader(folder: pathlib.Path, root: pathlib.Path, split: str = "train", length: int = 8, **more: Any) -> Any:
    tokenize = more.pop("tokenizer_fn", interop.PromptTensorDictTokenizer)
    more = {"tokenizer_model_name": str(folder / "tokenizer"), "num_workers": 1, "from_disk": True} | more
    name = more.pop("name", "asks-and-answers")
    return TokenizedDatasetLoader(split, length, str(folder / name), tokenize, root_dir=root, **more)


@given(rows=st.lists(texts, min_size=1), most=st.integers(1, 6), truncation=st.booleans())
def test_a_trained_tokenizer(tokenizer: Any, rows: list[str], most: int, truncation: bool) -> None:
    ids = [[tokenizer.vocab[word] for word in row.split()] for row in rows]
    make = interop.TensorDictTokenizer(tokenizer, most, truncation=truncation)
    if not truncation and max(map(len, ids)) > most:
        with pytest.raises(ValueError, match="more than max_length"):
            make({"text": rows})
        return
    made = make({"text": rows})
    assert made["input_ids"].tolist() == [(row + [tokenizer.eos_token_id] * most)[:most] for row in ids]
    assert made["attention_mask"].sum(1).tolist() == [min(len(row), most) for row in ids]
    assert (make({"text": rows[0]}) == made[0]).all()
    raw = interop.TensorDictTokenizer(tokenizer, most, padding=False, truncation=truncation, return_tensordict=False)
    assert raw({"text": rows})["input_ids"] == [row[:most] for row in ids]


def test_a_dataset_that_was_saved_anew_is_tokenized_anew(
    folder: pathlib.Path, tmp_path: pathlib.Path, tokenizer: Any
) -> None:
    made = pathlib.Path(shutil.copytree(folder, tmp_path / "made"))
    first = loader(made, tmp_path / "root").load()["n"]
    again = loader(made, tmp_path / "root").load()["n"]
    assert os.path.samefile(first.filename, again.filename)
    saved = datasets.load_from_disk(folder / "asks-and-answers")
    shutil.rmtree(made / "asks-and-answers")
    saved["train"] = saved["train"].select(range(5))
    saved.save_to_disk(made / "asks-and-answers")
    assert loader(made, tmp_path / "root").load()["n"].tolist() == [*range(5)]
    tokenizer.save_pretrained(made / "tokenizer")
    state = (tmp_path / "root/asks/train/8").stat().st_ino
    assert len(loader(made, tmp_path / "root").load()) == 5
    assert (tmp_path / "root/asks/train/8").stat().st_ino != state
    shutil.rmtree(made / "asks-and-answers")
    assert len(loader(made, tmp_path / "root").load()) == 5, "the files may be removed"


def test_a_dataset_is_tokenized_once(folder: pathlib.Path, tmp_path: pathlib.Path, tokenizer: Any) -> None:
    before = sorted(folder.rglob("*"))
    made = loader(folder, tmp_path).load()
    assert sorted(folder.rglob("*")) == before  # nothing is written beside the dataset
    rows = datasets.load_from_disk(folder / "asks-and-answers")["train"][:]
    expected = interop.PromptTensorDictTokenizer(tokenizer, 8)(rows)
    assert sorted(made.keys()) == ["attention_mask", "input_ids", "n", "prompt_rindex"] and made.batch_size == (30,)
    assert all((made[name] == expected[name]).all() for name in ("attention_mask", "input_ids", "prompt_rindex"))
    assert isinstance(made["n"], MemoryMappedTensor) and made["n"].tolist() == list(range(30))
    assert [path.name for path in (tmp_path / "asks" / "train").iterdir()] == ["8"]
    again = loader(folder, tmp_path)
    assert (again.load() == made).all() and "tokenizer" not in vars(again)
    with pytest.raises(ValueError, match=r"was made from .*tokenizer_fn.*: pass another root"):
        loader(folder, tmp_path, tokenizer_fn=interop.TensorDictTokenizer).load()
    data = PromptData.from_dataset(
        "train", str(folder / "asks-and-answers"), 8, tmp_path, True, 1, tokenizer_model_name=str(folder / "tokenizer")
    )
    assert type(data) is PromptData and data.batch_size == (30,) and data.labels.data_ptr() == data.input_ids.data_ptr()
    assert len(loader(folder, tmp_path, "valid1", valid_size=7).load()) == 7


def test_an_incomplete_folder_is_made_again(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    made = loader(folder, tmp_path / "a").load().clone()
    for root in (tmp_path / "b", tmp_path / "c"):
        place = root / "asks" / "train" / "8"
        place.mkdir(parents=True)
        if root.name == "b":
            (place / "input_ids.memmap").write_bytes(b"0" * 10)
        else:
            (made * 0).memmap(place)
        left = place.parent / ".8.making"
        left.mkdir()
        (loaded := loader(folder, root)).load()
        assert (loaded.load() == made).all() and [path.name for path in place.parent.iterdir()] == ["8"]


def test_a_folder_with_other_files_than_tensors_is_refused(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    loader(folder, tmp_path).load()
    place = tmp_path / "asks" / "train" / "8"
    foreign = (place / "meta.json").read_text().replace("TensorDict'", "Other'")
    for name, text in (("other.pickle", "cos\nsystem\n(S'exit 1'\ntR."), ("meta.json", foreign)):
        (place / name).write_text(text)
        with pytest.raises(ValueError, match=name):
            loader(folder, tmp_path).load()
        (place / name).unlink()


def test_what_fails_leaves_no_folder(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    def names(dataset: Any) -> Any:
        return dataset.map(lambda row: {"name": "n"}, keep_in_memory=True)

    def nothing(dataset: Any) -> Any:
        return dataset.select([])

    for hook, message in ((names, "'name' are \\['str'\\]"), (nothing, "no rows of .* are left")):
        with pytest.raises(ValueError, match=message):
            loader(folder, tmp_path, pre_tokenization_hook=hook).load()
    with pytest.raises(ValueError, match="name before the first '-'"):
        loader(folder, tmp_path, name="-x")
    with pytest.raises(KeyError, match="no entry 'prompt'"):
        loader(folder, tmp_path, name="pairs", pre_tokenization_hook=pre_tokenization_hook).load()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@given(
    st.lists(st.tuples(*(st.text("a b", max_size=6),) * 3), max_size=6).map(lambda rows: [*map(list, rows)]),
    st.integers(0, 3),
)
def test_pairs_are_chosen_then_rejected(rows: list[list[str]], least: int) -> None:
    columns = dict(zip(("prompt", "chosen", "rejected"), map(list, zip(*rows, strict=True)), strict=False))
    kept = [row for row in rows if row[1] != row[2] and min(len(each.split()) for each in row[1:]) >= least]
    made = pre_tokenization_hook(datasets.Dataset.from_dict(columns), least)
    assert list(made["text"] if kept else made.features) == [f"{row[0]}\n{row[n]}" for n in (1, 2) for row in kept]


def test_pairs_are_halves_of_one_file(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    name, model = str(folder / "pairs"), str(folder / "tokenizer")
    pairs = PairwiseDataset.from_dataset("train", name, 9, tmp_path, True, 1, tokenizer_model_name=model)
    with pytest.raises(TypeError, match="has None for a text"):
        pre_tokenization_hook(datasets.Dataset.from_dict({"prompt": [None], "chosen": ["a"], "rejected": ["b"]}))
    text = pre_tokenization_hook(datasets.load_from_disk(name)["train"])["text"]
    chosen, rejected = pairs.chosen_data.input_ids, pairs.rejected_data.input_ids
    assert type(pairs[:2].chosen_data) is RewardData and pairs.batch_size == (len(text) // 2,) and len(text) > 4
    assert chosen.untyped_storage().data_ptr() == rejected.untyped_storage().data_ptr()
    assert [row.tolist().count(chosen[0, 1]) for row in chosen] == [each.count("w1") for each in text[: len(pairs)]]
    assert not (chosen == rejected[0, 1]).any()


@pytest.mark.parametrize("prefix", [None, "a", ("a", "b"), ()])
def test_columns_as_memory_maps(prefix: Any, tmp_path: pathlib.Path) -> None:
    n = 5000  # more than are read at once
    kept = [bool(row % 3) for row in range(n)]
    columns = {"x": [[row, 2 * row] for row in range(n)], "y": [0.5 * row for row in range(n)], "kept": kept}
    dataset = datasets.Dataset.from_dict(columns)
    made = convert(dataset, tmp_path / "a", prefix, ["x", "y"], valid_mask_key="kept")
    inner = made[prefix] if prefix else made
    assert made.batch_size == (() if prefix else inner.batch_size) and inner.batch_size == (sum(kept),)
    loaded = TensorDict.load_memmap(tmp_path / "a")
    rows = torch.arange(n)[torch.tensor(kept)]
    for each in (inner, loaded[prefix] if prefix else loaded):
        assert (each["x"] == torch.stack([rows, 2 * rows], 1)).all() and each["x"].dtype == torch.int64
        assert (each["y"] == rows * 0.5).all() and each["y"].dtype == torch.float32 and len([*each.keys()]) == 2
    whole = convert(dataset, tmp_path / "b", prefix)
    assert sorted((whole[prefix] if prefix else whole).keys()) == ["kept", "x", "y"]
    two = convert({"x": columns["x"]}, tmp_path / "c", prefix, batch_dims=2)
    assert (two[prefix] if prefix else two).batch_size == (n, 2)
    kinds = {str(kind): torch.arange(6).reshape(2, 3).T.to(kind) for kind in (torch.bool, torch.uint8, torch.bfloat16)}
    nested = TensorDict({"x": torch.ones(3, requires_grad=True), "in": kinds}, [3])
    again = convert(nested, tmp_path / "d", prefix)
    again = again[prefix] if prefix else again
    assert (again == nested).all() and not again["x"].requires_grad
    assert all(again["in", kind].dtype == each.dtype for kind, each in kinds.items())


def test_a_tokenizer_that_pads_or_truncates_on_the_left(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    for side in ("padding_side", "truncation_side"):
        left = transformers.AutoTokenizer.from_pretrained(folder / "tokenizer", pad_token="<e>", **{side: "left"})
        with pytest.raises(ValueError, match=f"set tokenizer.{side} to 'right'"):
            interop.PromptTensorDictTokenizer(left, 4)
        left.save_pretrained(tmp_path / side)
        made = TokenizedDatasetLoader.make_tokenizer(tokenizer_model_name=str(tmp_path / side))
        prompts = interop.PromptTensorDictTokenizer(made, 4)({"prompt": ["w1 w1", "w2"], "label": ["", " w3" * 5]})
        last = prompts["input_ids"].gather(1, prompts["prompt_rindex"][:, None])
        assert last[:, 0].tolist() == [made.vocab["w1"], made.vocab["w2"]]


def test_splits_that_are_not_there(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    datasets.Dataset.from_dict({"text": ["w1"]}).save_to_disk(tmp_path / "plain")
    with pytest.raises(KeyError, match=r"no split 'train', it has a datasets.*\.Dataset: save a DatasetDict"):
        loader(tmp_path, tmp_path, name="plain", tokenizer_model_name=str(folder / "tokenizer")).load()
    with pytest.raises(KeyError, match=r"no split 'test', it has \['train', 'valid1'\]"):
        loader(folder, tmp_path, "test").load()
    for split, name in (("../x", "pairs"), ("train", "pairs/..")):
        with pytest.raises(ValueError, match="split be the name of a folder"):
            loader(folder, tmp_path, split, name=name)


def test_a_full_disk_is_an_error_and_leaves_nothing(tmp_path: pathlib.Path) -> None:
    """A write to a mapped file for which there is no room would kill the process."""
    with small_disk(tmp_path, "4m") as mounted:
        if not mounted:
            pytest.skip("nothing can be mounted here")
        with pytest.raises(OSError, match="No space left"):
            convert({"x": torch.ones(2000, 1000)}, tmp_path / "x", features=["x"])


def test_columns_that_are_no_tensors(tmp_path: pathlib.Path) -> None:
    dataset = datasets.Dataset.from_dict(
        {"ragged": [[1], [1, 2]], "text": ["a", "b"], "no": [False, False], "n": [1, 2], "none": [None, 2]}
    )
    refusals: list[tuple[Any, type[Exception], str]] = [
        ({"features": ["ragged"]}, ValueError, r"'ragged' are \['\[1\]', '\[2\]'\]"),
        ({"features": ["text"]}, ValueError, r"'text' are \['str'\]"),
        ({"features": ["m"]}, KeyError, r"no columns \['m'\], it has"),
        ({"features": ["n"], "valid_mask_key": "no"}, ValueError, "nothing to write: 2 rows, 0 of them"),
        ({"features": ["none"]}, ValueError, "'none' of integers has None"),
    ]
    for arguments, error, message in refusals:
        with pytest.raises(error, match=message):
            convert(dataset, tmp_path / "x", **arguments)
    assert not (tmp_path / "x").exists()
    with pytest.raises(ValueError, match=r"same length, they have \{'x': 1, 'y': 2\}"):
        convert({"x": [1], "y": [1, 2]}, tmp_path / "x")
    late = datasets.Dataset.from_dict({"x": [1] * 4096 + [None]})
    with pytest.raises(ValueError, match="'x' of integers has None"):
        convert(late, tmp_path / "late")


class Rows:
    """A source of twenty prompts."""

    @classmethod
    def from_dataset(cls, **given: Any) -> PromptData:
        assert sorted(given) == ["dataset_name", "from_disk", "max_length", "num_workers", "root_dir", "split"]
        ids = torch.arange(20).unsqueeze(1).repeat(1, given["max_length"])
        return PromptData(ids, torch.ones_like(ids), torch.zeros(20), labels=ids, batch_size=[20])


@pytest.mark.parametrize("prefetch", [0, 2])
def test_batches_are_epochs_of_tensorclasses(prefetch: int) -> None:
    buffer = get_dataloader(6, 4, Rows, "cpu", infinite=False, prefetch=prefetch)
    assert type(buffer) is interop.TensorDictReplayBuffer
    endless = get_dataloader(6, 4, Rows, torch.device("cpu"), prefetch=prefetch)
    for epoch in (list(buffer), list(islice(endless, 3)), list(islice(endless, 3))):
        assert len(epoch) == 3
        seen = torch.cat([batch.input_ids[:, 0] for batch in epoch])
        assert len(set(seen.tolist())) == 18
        for batch in epoch:
            assert type(batch) is PromptData and batch.batch_size == (6,) and batch.logits is None
            assert (batch.labels == batch.input_ids).all() and batch.device == torch.device("cpu")
    with pytest.raises(ValueError, match="a batch of 21 rows"):
        get_dataloader(21, 4, Rows, "cpu")


@tensorclass
class Numbered:
    value: torch.Tensor
    index: torch.Tensor


def test_a_field_takes_what_the_sampler_tells_of_it() -> None:
    rows = Numbered(torch.arange(9), torch.zeros(9, dtype=torch.int64), batch_size=[9])
    batch = interop.TensorDictReplayBuffer(storage=interop.TensorStorage(rows), batch_size=20).sample()
    assert type(batch) is Numbered and torch.equal(batch.index, batch.value) and batch.index.any()


def rollouts(models: list[Any], tokenizer: Any, **more: Any) -> RolloutFromModel:
    more = {"max_new_tokens": N, "eos_token_id": tokenizer.eos_token_id, "kl_coef": 0.3} | more
    return RolloutFromModel(*models, weighted_sum, **more)


@pytest.fixture(scope="module")
def batch(tokenizer: Any) -> PromptData:
    """Prompts of one to six tokens, the end of text in the midst of some."""
    ids = torch.randint(len(tokenizer), (B, T), generator=torch.Generator().manual_seed(1))
    rindex = torch.arange(B) % T + 1
    return PromptData(ids, (torch.arange(T) < 4).long().expand(B, T), rindex, labels=ids, batch_size=[B])


@torch.no_grad()
def log_probs(model: Any, tokens: list[int], warp: Callable[[Any], Any] | None = None) -> torch.Tensor:
    """Of each next token, of one text without padding."""
    logits = model(input_ids=torch.tensor([tokens])).logits[0]
    return (warp(logits) if warp else logits).log_softmax(-1)


@pytest.mark.parametrize("options", [None, {"do_sample": True, "temperature": 0.5, "top_k": 3}, {"do_sample": False}])
def test_log_probabilities_are_those_of_the_models(
    models: list[Any], tokenizer: Any, batch: PromptData, options: dict[str, Any] | None
) -> None:
    def warp(logits: torch.Tensor) -> torch.Tensor:
        if options is None or not options["do_sample"]:
            return logits
        return logits.masked_fill(logits < logits.topk(3).values[..., -1:], -torch.inf) / 0.5

    config = None if options is None else transformers.GenerationConfig(**options)
    with contextlib.nullcontext() if config is None else unchanged(config):
        generated, found, ratio = rollouts(models, tokenizer).generate(batch, config)
    eos = tokenizer.eos_token_id
    assert [each.shape for each in (generated, found, ratio)] == [
        (B, T + N),
        (B, N, 1),
        (B, N),
    ] and not found.requires_grad
    early = 0
    for row, start in enumerate(batch.prompt_rindex.tolist()):
        tokens = generated[row].tolist()
        new = tokens[start : start + N]
        length = new.index(eos) + 1 if eos in new else N
        early += length < N
        assert tokens[:start] == batch.input_ids[row, :start].tolist() and set(tokens[start + length :]) <= {eos}
        assert not found[row, length:].any() and not ratio[row, length:].any()
        of_model, of_reference, warped = (
            log_probs(model, tokens[: start + length], how)[start - 1 : -1]
            for model, how in ((models[0], None), (models[1], None), (models[0], warp))
        )
        chosen = torch.arange(length), torch.tensor(new[:length])
        torch.testing.assert_close(found[row, :length, 0], warped[chosen], atol=1e-4, rtol=0)
        torch.testing.assert_close(ratio[row, :length], (of_model - of_reference)[chosen], atol=1e-4, rtol=0)
        if options == {"do_sample": False}:
            assert new[:length] == of_model.argmax(-1).tolist()
    assert early or options


@contextlib.contextmanager
def unchanged(config: Any) -> Iterator[None]:
    before = config.to_dict()
    yield
    assert config.to_dict() == before


def test_generation_is_as_likely_as_the_model_says(models: list[Any], tokenizer: Any) -> None:
    n = 3000
    ids = torch.full((n, 2), 3)
    data = PromptData(ids, torch.ones_like(ids), torch.full((n,), 2), labels=ids, batch_size=[n])
    tuned = copy.deepcopy(models[0])  # a model may be saved with settings, which the default does not take over
    narrow = {"top_p": 0.1, "top_k": 1, "min_p": 0.9, "temperature": 0.1, "typical_p": 0.1, "epsilon_cutoff": 0.2}
    tuned.generation_config.update(
        **narrow, eta_cutoff=0.2, repetition_penalty=9.0, num_beams=2, num_return_sequences=2
    )
    generated, *_ = rollouts([tuned, models[1]], tokenizer, max_new_tokens=1).generate(data)
    expected = log_probs(models[0], [3, 3])[-1].exp() * n
    found = generated[:, 2].bincount(minlength=len(tokenizer))
    assert ((found - expected) ** 2 / expected).sum() < 35  # 10 degrees of freedom: 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_are_those_of_a_plain_loop(
    models: list[Any], tokenizer: Any, batch: PromptData, dtype: torch.dtype
) -> None:
    eos, clip = tokenizer.eos_token_id, 1.5
    rollout = rollouts([model.to(dtype) for model in models], tokenizer, score_clip=clip)
    try:
        generated, found, ratio = rollout.generate(batch)
        steps = rollout.create_rollout_td(batch, generated, found, ratio)
    finally:
        for model in models:
            model.float()
    assert steps.batch_size == (B, N) and steps.names == [None, "time"] and not steps.requires_grad
    assert torch.equal(steps["sample_log_prob"], found) and found.dtype == torch.float32
    assert ratio.dtype == steps["next", "reward"].dtype == torch.promote_types(dtype, torch.float32)
    baseline = weighted_sum(batch.labels, batch.attention_mask)[1]
    for row, start in enumerate(batch.prompt_rindex.tolist()):
        over = False
        text = generated[row, :start].tolist()
        whole = generated[row : row + 1].clone()
        score = weighted_sum(whole, whole != eos)[1][0] - baseline[row]
        for step in range(N):
            token = int(generated[row, start + step])
            at, after = steps[row, step], steps[row, step]["next"]
            assert at["input_ids"].tolist() == text + [eos] * (T + N - len(text))
            assert at["attention_mask"].tolist() == [each != eos for each in at["input_ids"].tolist()]
            text.append(token)
            assert at["action"] == token
            assert after["input_ids"].tolist() == text + [eos] * (T + N - len(text))
            assert after["attention_mask"].tolist() == [each != eos for each in after["input_ids"].tolist()]
            ends = token == eos and not over
            over = over or ends
            last = step == N - 1
            assert after["done"].tolist() == [ends or last] and after["terminated"].tolist() == [ends and not last]
            raw = score.clamp(-clip, clip) if ends or last else torch.zeros(())
            penalty = -0.3 * ratio[row, step]
            torch.testing.assert_close(after["reward_raw"], raw[None].to(ratio), atol=1e-6, rtol=1e-5)
            torch.testing.assert_close(after["reward_kl"], penalty[None], atol=1e-6, rtol=1e-5)
            torch.testing.assert_close(after["reward"], (raw + penalty)[None].to(ratio), atol=1e-6, rtol=1e-5)
    ended = steps["next", "terminated"].any(1).sum()
    assert 0 < ended < B and steps["next", "reward_raw"].abs().max() == clip
    dtypes = {key: steps[key].dtype for key in (*steps.keys(), ("next", "input_ids"), ("next", "attention_mask"))}
    integers = {key for key, found in dtypes.items() if found == torch.int64}
    assert integers == {"action", "input_ids", ("next", "input_ids")}


def test_the_coefficient_follows_the_rollouts(models: list[Any], tokenizer: Any, batch: PromptData) -> None:
    for steps, kept in ((None, 3), (2, 2)):
        scheduler = interop.AdaptiveKLController(init_kl_coef=0.3, target=0.01, horizon=10)
        twin = interop.AdaptiveKLController(init_kl_coef=0.3, target=0.01, horizon=10)
        rollout = rollouts(models, tokenizer, kl_scheduler=scheduler, num_steps=steps)
        means = [float(rollout.rollout_from_data(batch)["next", "reward_kl"].mean()) for _ in range(3)]
        rollout.step_scheduler()
        assert rollout.kl_coef == scheduler.coef == pytest.approx(twin.update(means[-kept:])) != 0.3
        with pytest.raises(ValueError, match="KL values"):  # they are forgotten
            rollout.step_scheduler()
    constant = rollouts(models, tokenizer, kl_scheduler=interop.ConstantKLController(kl_coef=0.7))
    constant.step_scheduler()
    assert constant.kl_coef == 0.7


def test_rollouts_that_cannot_be(models: list[Any], tokenizer: Any, batch: PromptData) -> None:
    with pytest.raises(ValueError, match="score_clip must be"):
        rollouts(models, tokenizer, score_clip=0.0)
    rollout = rollouts(models, tokenizer)
    with pytest.raises(ValueError, match="tokens, not 50256, the end of text: pass eos_token_id"):
        RolloutFromModel(*models, weighted_sum).generate(batch)
    with pytest.raises(ValueError, match="1 to 6 tokens before prompt_rindex"):
        rollout.generate(batch.replace(prompt_rindex=torch.full((B,), T + 1)))
    with pytest.raises(ValueError, match="has no labels"):
        rollout.rollout_from_data(PromptData(**{**batch.to_dict(), "labels": None}, batch_size=[B]))
    with pytest.raises(ValueError, match="set num_beams and num_return_sequences to 1"):
        rollout.generate(batch, transformers.GenerationConfig(do_sample=True, num_return_sequences=2))
    short = RolloutFromModel(TableModel(0, torch.ones(4, 2, dtype=torch.int64)), TableModel(1), weighted_sum)
    with pytest.raises(ValueError, match="stopped after 2 of 50 tokens"):
        short.generate(prompts(PromptData))
    rollout.reward_model = lambda input_ids, attention_mask: (None, torch.zeros(3))
    with pytest.raises(ValueError, match="must return 16 scores"):
        rollout.rollout_from_data(batch)


def test_the_end_of_text_of_a_subclass(models: list[Any], tokenizer: Any, batch: PromptData) -> None:
    class Ours(RolloutFromModel):
        EOS_TOKEN_ID = tokenizer.eos_token_id

    made = []
    for rollout in (Ours(*models, weighted_sum, 0.3, N), rollouts(models, tokenizer)):
        torch.manual_seed(3)
        made.append(rollout.rollout_from_data(batch))
    assert (made[0] == made[1]).all()
