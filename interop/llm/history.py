"""Dialogs of a language model, message by message, and as text and tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from tensordict import NonTensorData, NonTensorStack, TensorClass, TensorDict, TensorDictBase, lazy_stack

from interop.data.arguments import class_of
from interop.llm.chat_templates import Message, family_of, format_named, format_of_text

if TYPE_CHECKING:
    from interop.specs import Composite

Applied = str | torch.Tensor | TensorDictBase | list[Any]  # text or tokens, or of a batch
_FIELDS = ("role", "content", "is_complete", "tool_calls", "tool_responses")


class ContentBase(TensorClass["nocast", "shadow"]):  # type: ignore[name-defined]
    """One part of the content of a message that is not text alone.

    - type: what it is: "text", "image", "audio", "video", "file" or "function_call".
    - text, url, data: the content itself, its address, or its bytes in base 64.
    - mime_type, name, size: of a file; the size in bytes.
    - function_name, function_args: of a call.
    """

    type: Literal["text", "image", "audio", "video", "file", "function_call"]
    text: str | None = None
    url: str | None = None
    data: str | None = None
    mime_type: str | None = None
    name: str | None = None
    size: int | None = None
    function_name: str | None = None
    function_args: dict | None = None

    def as_message_part(self) -> dict[str, Any]:
        """The part as chat templates of `transformers` take it: a dict without the fields that are None."""
        values = {name: getattr(self, name) for name in type(self).__annotations__}
        return {name: value for name, value in values.items() if value is not None}


class History(TensorClass["nocast"]):  # type: ignore[name-defined]
    """A dialog [messages], or a batch of dialogs [batch, messages], whose dialogs may be of different lengths.

    - role: who speaks, such as "system", "user", "assistant" and "tool".
    - content: a text, a `ContentBase` or a list of these.
    - is_complete: False for a message that was cut off.
    - tool_calls: of an assistant: a list of dicts {"function": {"name", "arguments"}}. tool_responses: of a tool.

        >>> dialog = History(role=["user", "assistant"], content=["Hi", "Hello!"], batch_size=[2])
        >>> dialog = dialog.append(History(role="user", content="Bye", batch_size=[]))
        >>> text = dialog.apply_chat_template(tokenizer=tokenizer, add_generation_prompt=False)
        >>> History.from_text(text, tokenizer=tokenizer).content[-1]
        'Bye'

    Lists hold one value for each message, in nested lists for a batch.
    """

    role: Any
    content: Any
    is_complete: Any = True
    tool_calls: Any = None
    tool_responses: Any = None

    def __post_init__(self) -> None:
        for name in _FIELDS:
            value = self._tensordict.get(name, None)
            data = value.data if isinstance(value, NonTensorData) else None  # a stack has a value for each already
            if self.batch_size and isinstance(data, list):
                self._tensordict.set(name, _stacked(name, data, self.batch_size))

    # ------------------------------------------------------------------ messages

    @classmethod
    def from_chats(cls, chats: Sequence[Any]) -> History:
        """A history of messages as `transformers` has them: of a list of dicts, or of a list of such lists.

        ValueError for no messages, KeyError for a message without "role" or "content", and for unknown entries.
        """
        chats = list(chats)
        if not chats or any(not isinstance(each, dict) and not len(each) for each in chats):
            raise ValueError("from_chats needs messages: a list of dicts with 'role' and 'content', or lists of these")
        if not isinstance(chats[0], dict):
            messages = [message for chat in chats for message in chat]
            names = _names_in(messages)
            return lazy_stack([cls._of_messages(list(chat), names) for chat in chats])
        return cls._of_messages(chats, _names_in(chats))

    @classmethod
    def _of_messages(cls, messages: list[Message], names: Sequence[str]) -> History:
        values = {name: [message.get(name, name == "is_complete" or None) for message in messages] for name in names}
        stacks = {name: NonTensorStack(*map(NonTensorData, each)) for name, each in values.items()}
        return cls(**stacks, batch_size=[len(messages)])

    def to_chats(self) -> list[Any]:
        """The messages as lists of dicts: those of a dialog, or a list of dialogs. The inverse of `from_chats`."""
        if self.batch_dims > 1:
            return [each.to_chats() for each in self.unbind(0)]
        return [_message(each) for each in (self.unbind(0) if self.batch_dims else [self])]

    def append(self, history: History, *, inplace: bool = True, dim: int = -1) -> History:
        """Add a message at the end of each dialog, the last dim. `history` has one dim less. Returns the longer history.

        With `inplace` it is this object.
        """
        dim = dim % self.batch_dims
        if history.batch_dims != self.batch_dims - 1 or dim != self.batch_dims - 1:
            raise RuntimeError(
                f"append() adds a message to each dialog, at the last dim: the batch size {list(self.batch_size)} needs a "
                f"history with one dim less, got {list(history.batch_size)} and dim={dim}"
            )
        added = history.to_chats()
        return self._joined(added if self.batch_dims == 1 else [[each] for each in added], dim, inplace)

    def extend(self, history: History, *, inplace: bool = True, dim: int = 0) -> History:
        """Add the messages of another history with as many dims along a dim: 0 adds dialogs to a batch, 1 messages to each.

        Returns the longer history; with `inplace` it is this object.
        """
        if history.batch_dims != self.batch_dims:
            raise RuntimeError(
                f"extend() joins histories of as many dims, got {list(self.batch_size)} and {list(history.batch_size)}"
            )
        return self._joined(history.to_chats(), dim % self.batch_dims, inplace)

    def _joined(self, added: list[Any], dim: int, inplace: bool) -> History:
        chats = self.to_chats()
        if self.batch_dims > 2:
            raise RuntimeError(f"histories of more than two dims cannot be joined, got {list(self.batch_size)}")
        if dim and len(chats) != len(added):
            raise RuntimeError(f"{len(chats)} dialogs cannot be joined with messages of {len(added)}")
        joined = [one + other for one, other in zip(chats, added, strict=True)] if dim else chats + added
        made = type(self).from_chats(joined)
        if not inplace:
            return made
        self.__dict__.update(made.__dict__)
        return self

    # ------------------------------------------------------------------ text and tokens

    def apply_chat_template(
        self,
        *,
        tokenizer: object,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        chat_template_name: str | None = None,
        continue_final_message: bool = False,
        tokenize: bool | None = None,
        padding: bool | str = False,
        truncation: bool | str = False,
        return_tensors: str | None = None,
        return_dict: bool | None = None,
        return_assistant_tokens_mask: bool = False,
        **kwargs: object,
    ) -> Applied:
        """The dialog as text, or as tokens; for a batch a list of these, or a lazy stack of tensordicts.

        Args:
            tokenizer: of `transformers`, with `apply_chat_template`.
            add_generation_prompt: end with the beginning of an answer.
            chat_template: a template of Jinja. By default that of `chat_template_name`, else that of the tokenizer, else
                that of the family of its model, else "chatml_format".
            chat_template_name: "chatml_format", "qwen", "dialogpt", "falcon", "deepseek" or "llama".
            continue_final_message: leave the last message open.
            tokenize: return tokens, int64 [1, tokens].
            return_dict: return a tensordict of tokens "input_ids" and "attention_mask", [tokens] each. By default it
                is True with `return_assistant_tokens_mask`. Without `return_tensors` or `tokenize` the result is text.
            return_assistant_tokens_mask: add "assistant_masks": 1 for the tokens that the assistant has said. ValueError for
                a template without `{% generation %}`.
            padding, truncation, return_tensors: of the tokenizer; tensors are those of torch.
            kwargs: for the tokenizer, such as `tools`.
        """
        if return_assistant_tokens_mask:
            tokenize = return_dict = True
        elif tokenize is None:
            tokenize = return_tensors is not None
        template = self._template(tokenizer, chat_template, chat_template_name)
        if return_assistant_tokens_mask and "generation" not in template:
            raise ValueError(
                "the chat template does not mark what the assistant says by {% generation %}: give chat_template_name="
                "'chatml_format' or that of the family of the model"
            )
        options = {
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
            "continue_final_message": continue_final_message,
            "chat_template": template,
            "tokenize": tokenize,
            **kwargs,
        }
        if tokenize:
            options.update(
                padding=padding,
                truncation=truncation,
                return_tensors="pt",
                return_dict=True,
                return_assistant_tokens_mask=return_assistant_tokens_mask,
            )
        return _applied(self.to_chats(), tokenizer, options, bool(return_dict))

    @staticmethod
    def _template(tokenizer: object, template: str | None, name: str | None) -> str:
        if template is not None:
            return template
        own = getattr(tokenizer, "chat_template", None)
        if name is None and isinstance(own, str):
            return own
        return format_named(name or _family(tokenizer) or "chatml_format").template

    @classmethod
    def from_text(
        cls,
        text: str | list[str],
        chat_template_name: str | None = None,
        chat_template: str | None = None,
        tokenizer: object = None,
    ) -> History:
        """The messages of a text that a chat template has made; of several texts a batch.

        Contents come back exactly. A message that was cut off has `is_complete` False, and so has an answer that has only
        begun. The format is that of `chat_template_name`, else of the marks in the text, else of the family of the model
        of the tokenizer. Calls and answers of tools come back in the format "qwen". Formats without marks
        cannot tell messages from contents that look like them: "falcon" and "deepseek" split at "User: " and "Assistant:"
        that begin a paragraph, "dialogpt" has no roles but the user and the assistant in turns.

        `chat_template` is the template of Jinja, whose format is found by its marks.

        ValueError for a format that is not known, and for a text without messages.
        """
        if not isinstance(text, str):
            return lazy_stack([cls.from_text(each, chat_template_name, chat_template, tokenizer) for each in text])
        family = None if tokenizer is None else _family(tokenizer)
        name = chat_template_name or (family if family in ("qwen",) else None)
        name = name or format_of_text(chat_template or text) or family
        if name is None:
            raise ValueError(
                "the format of the text is unknown: give chat_template_name, such as 'falcon', or a tokenizer"
            )
        eos, bos = (getattr(tokenizer, token, None) for token in ("eos_token", "bos_token"))
        found = list(format_named(name).read(text.removeprefix(bos or ""), eos or _EOS.get(name, "<|endoftext|>")))
        if not found:
            raise ValueError(
                f"the text has no message in the format {name!r}: was it decoded with skip_special_tokens=True? It begins "
                f"{text[:60]!r}"
            )
        return cls.from_chats(found)

    @classmethod
    def default_spec(cls, shape: Sequence[int] = (-1,)) -> Composite:
        """The spec of a history with this batch size; -1 is any number of messages."""
        from interop.specs import Composite, NonTensor  # a program without specs does not load them

        size = torch.Size(shape)
        examples = {"role": "user", "content": "", "is_complete": True, "tool_calls": None, "tool_responses": None}
        specs = {name: NonTensor(shape=size, example_data=example) for name, example in examples.items()}
        return Composite(specs, shape=size[:-1], data_cls=cls)


_EOS = {"deepseek": "<｜end▁of▁sentence｜>"}  # noqa: RUF001  # of the models, which write it so


def _message(single: History) -> Message:
    """A history without dims as a message."""
    values = {name: getattr(single, name) for name in _FIELDS}
    kept = {name: value for name, value in values.items() if value is not None or name in ("role", "content")}
    if kept["is_complete"]:
        del kept["is_complete"]
    return kept


def _applied(chats: list[Any], tokenizer: object, options: dict[str, Any], as_dict: bool) -> Applied:
    """The text or the tokens of a dialog, or of each of several."""
    if not isinstance(chats[0], dict):
        made = [_applied(each, tokenizer, options, as_dict) for each in chats]
        return lazy_stack(made) if isinstance(made[0], TensorDictBase) else made
    messages = [{**message, "content": _plain(message["content"])} for message in chats]
    result = tokenizer.apply_chat_template(messages, **options)  # type: ignore[attr-defined]
    if not options["tokenize"]:
        return result
    tokens = {name: torch.as_tensor(result[name]) for name in result}
    return TensorDict({name: each.reshape(-1) for name, each in tokens.items()}) if as_dict else tokens["input_ids"]


def _family(tokenizer: object) -> str | None:
    return family_of(str(getattr(tokenizer, "name_or_path", "")))


def _names_in(messages: Sequence[Any]) -> list[str]:
    """The fields that a message has. KeyError for unknown and missing ones."""
    for message in messages:
        if not isinstance(message, dict):
            raise TypeError(f"a message is a dict, got {class_of(message)}")
        unknown = [name for name in message if name not in _FIELDS]
        lacking = [name for name in ("role", "content") if name not in message]
        if unknown or lacking:
            raise KeyError(f"a message has {', '.join(_FIELDS)}; it has {sorted(message)}")
    return [
        name for name in _FIELDS if name in ("role", "content", "is_complete") or any(name in each for each in messages)
    ]


def _stacked(name: str, values: list[Any], size: torch.Size) -> NonTensorStack:
    """One value for each message, of lists that are nested as deep as there are dims."""
    if len(values) != size[0]:
        raise ValueError(f"{name} has {len(values)} values for a batch of size {list(size)}: give one for each message")
    if len(size) == 1:
        return NonTensorStack(*map(NonTensorData, values))
    return NonTensorStack(*(_stacked(name, list(value), size[1:]) for value in values))


def _plain(content: object) -> object:
    """The content as chat templates take it."""
    if isinstance(content, ContentBase):
        return [part.as_message_part() for part in (content.unbind(0) if content.batch_dims else [content])]
    if isinstance(content, list):
        return [each.as_message_part() if isinstance(each, ContentBase) else each for each in content]
    return content
