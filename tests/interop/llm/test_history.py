"""Dialogs through templates and back, with a tokenizer of `transformers` that is trained here."""

import pytest
import torch

from interop import ContentBase, History

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

CHAT = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": " Hi\nthere "},
    {"role": "assistant", "content": " Hello! ü "},
    {"role": "user", "content": "bye"},
]
TOOLS = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "w?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}],
    },
    {"role": "tool", "content": "42"},
    {"role": "tool", "content": "43"},
    {"role": "assistant", "content": "it is"},
]
MODELS = {
    "other": "chatml_format",
    "Qwen/Q": "qwen",
    "tiiuae/falcon": "falcon",
    "deepseek-ai/d": "deepseek",
    "meta/Llama": "llama",
}


def tokenizer(model: str):
    special = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|header_start|>", "<|header_end|>", "<|eot|>", "<bos>"]
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet)
    made.train_from_iterator(["hello"], trainer)
    eos = "<|endoftext|>"
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token=eos, pad_token=eos, bos_token="<bos>")
    fast.name_or_path = model
    return fast


@pytest.mark.parametrize("model", MODELS)
def test_a_dialog_comes_back_exactly(model: str) -> None:
    tok, dialog = tokenizer(model), History.from_chats(CHAT)
    text = dialog.apply_chat_template(tokenizer=tok, add_generation_prompt=False)
    read = History.from_text(text, tokenizer=tok).to_chats()
    assert read == CHAT
    assert History.from_text(text, chat_template_name=MODELS[model], tokenizer=tok).to_chats() == read
    begun = History.from_text(dialog.apply_chat_template(tokenizer=tok), tokenizer=tok).to_chats()
    assert begun == [*read, {"role": "assistant", "content": "", "is_complete": False}]
    tokens = dialog.apply_chat_template(tokenizer=tok, add_generation_prompt=False, return_assistant_tokens_mask=True)
    said = tok.decode(tokens["input_ids"][tokens["assistant_masks"].bool()])
    assert said.strip() == CHAT[2]["content"].strip()
    assert tok.decode(tokens["input_ids"]) == text


def test_calls_and_answers_of_tools_come_back() -> None:
    tok, dialog = tokenizer("Qwen/Q"), History.from_chats(TOOLS)
    text = dialog.apply_chat_template(tokenizer=tok, add_generation_prompt=False)
    assert History.from_text(text, tokenizer=tok).to_chats() == TOOLS


def test_dialogs_of_different_lengths_grow() -> None:
    batch = History.from_chats([CHAT, CHAT[:2]])
    longer = batch.append(History(role=["user"] * 2, content=["1", "2"], batch_size=[2]), inplace=False)
    assert longer.to_chats() == [
        [*CHAT, {"role": "user", "content": "1"}],
        [*CHAT[:2], {"role": "user", "content": "2"}],
    ]
    assert batch.to_chats() == [CHAT, CHAT[:2]]
    dialog = History.from_chats(CHAT[:1])
    assert dialog.extend(History.from_chats(CHAT[1:])) is dialog and dialog.to_chats() == CHAT
    texts = batch.apply_chat_template(tokenizer=tokenizer("other"), add_generation_prompt=False)
    assert History.from_text(texts).to_chats() == [CHAT, CHAT[:2]]


def test_parts_of_contents_and_refusals() -> None:
    part = ContentBase(type="text", text="look", batch_size=[])
    template = "{% for m in messages %}{% for p in m.content %}[{{ p.type }}:{{ p.text }}]{% endfor %}{% endfor %}"
    dialog = History.from_chats([{"role": "user", "content": [part]}])
    assert dialog.apply_chat_template(tokenizer=tokenizer("other"), chat_template=template) == "[text:look]"
    with pytest.raises(ValueError, match="chat_template_name"):
        History.from_text("User: hi\n\n")
    with pytest.raises(ValueError, match="skip_special_tokens"):
        History.from_text("hi", "chatml_format")
    with pytest.raises(KeyError, match="chatml_format"):
        History.from_text("hi", "nope")
    with pytest.raises(ValueError, match="needs messages"):
        History.from_chats([])
    assert torch.Size(History.default_spec((3,)).shape) == torch.Size([])
