"""The chat formats of model families: templates that write them, and readers that take them apart."""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from interop.data.arguments import class_of

Message = dict[str, Any]  # "role", "content", and perhaps "is_complete", "tool_calls", "tool_responses"

_CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}{% endgeneration %}"
    "{% else %}{{ message.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_QWEN = (
    "{% set first = messages[0].content if messages[0].role == 'system' else 'You are a helpful assistant.' %}"
    "{{ '<|im_start|>system\n' + first }}"
    "{% if tools %}{{ '\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>' }}"
    "{% for tool in tools %}{{ '\n' }}{{ tool | tojson }}{% endfor %}"
    "{{ '\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}'
    "\n</tool_call>' }}{% endif %}{{ '<|im_end|>\n' }}"
    "{% for message in messages %}{% if message.role == 'tool' %}"
    "{% if loop.first or loop.previtem.role != 'tool' %}{{ '<|im_start|>tool' }}{% endif %}"
    "{{ '\n<tool_response>\n' }}{{ message.tool_responses or message.content }}{{ '\n</tool_response>' }}"
    "{% if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% elif message.role == 'assistant' %}{{ '<|im_start|>assistant\n' if message.content or not message.tool_calls "
    "else '<|im_start|>assistant' }}{% generation %}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{% set function = call.function or call %}"
    '{{ \'\n<tool_call>\n{"name": "\' + function.name + \'", "arguments": \' }}{{ function.arguments | tojson }}'
    "{{ '}\n</tool_call>' }}{% endfor %}{% endgeneration %}{{ '<|im_end|>\n' }}"
    "{% elif message.role != 'system' or not loop.first %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_LLAMA = (
    "{{ bos_token }}{% for message in messages %}{{ '<|header_start|>' + message.role + '<|header_end|>\n\n' }}"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}{% endgeneration %}"
    "{% else %}{{ message.content }}{% endif %}{{ '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|header_start|>assistant<|header_end|>\n\n' }}{% endif %}"
)
_SPEAKERS = (
    "{% for message in messages %}{% if message.role == 'assistant' %}"
    "{{ 'Assistant:' }}{% generation %}{{ ' ' + message.content }}{% endgeneration %}ANSWERED"
    "{% elif message.role == 'user' %}{{ 'User: ' + message.content + '\n\n' }}"
    "{% else %}{{ message.content + '\n\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
_DIALOGPT = (
    "{% for message in messages %}{% if message.role == 'assistant' %}{% generation %}{{ message.content }}"
    "{% endgeneration %}{{ eos_token }}{% elif message.role == 'user' %}{{ message.content + eos_token }}{% endif %}"
    "{% endfor %}"
)


class ChatFormat(NamedTuple):
    """One chat format.

    - template: of Jinja, with the parts of the assistant between `{% generation %}` and `{% endgeneration %}`.
    - read: takes a text and the end-of-text token, and gives its messages.
    - families: parts of the names of models that use it.
    """

    template: str
    read: Callable[[str, str], Iterator[Message]]
    families: tuple[str, ...] = ()


def _read_chatml(text: str, eos: str) -> Iterator[Message]:
    return _read_marked(text, r"<\|im_start\|>(\w+)\n?(.*?)(<\|im_end\|>\n?|\Z)")


def _read_llama(text: str, eos: str) -> Iterator[Message]:
    return _read_marked(text, r"<\|header_start\|>(\w+)<\|header_end\|>\n\n(.*?)(<\|eot\|>|\Z)")


def _read_marked(text: str, pattern: str) -> Iterator[Message]:
    """Messages between marks: role, content and the end, which an unfinished message lacks."""
    for found in re.finditer(pattern, text, re.DOTALL):
        yield {"role": found[1], "content": found[2], "is_complete": bool(found[3])}


def _read_qwen(text: str, eos: str) -> Iterator[Message]:
    for message in _read_chatml(text, eos):
        if message["role"] == "tool":
            for answer in re.finditer(r"<tool_response>\n(.*?)(\n</tool_response>|\Z)", message["content"], re.DOTALL):
                yield {**message, "content": answer[1], "is_complete": message["is_complete"] and bool(answer[2])}
            continue
        calls = []
        if message["role"] == "assistant" and message["is_complete"]:
            calls = re.findall(r"\n?<tool_call>\n(.*?)\n</tool_call>", message["content"], re.DOTALL)
        try:
            functions = [{"type": "function", "function": json.loads(call)} for call in calls]
        except json.JSONDecodeError:  # a call that the model has written wrongly stays text
            functions = []
        if functions:
            content = re.sub(r"\n?<tool_call>\n.*?\n</tool_call>", "", message["content"], flags=re.DOTALL)
            message = {**message, "content": content, "tool_calls": functions}
        yield message


def _read_speakers(text: str, answered: str) -> Iterator[Message]:
    """Messages of "User: " and "Assistant:"; text before the first one is of the system."""
    parts = re.split(rf"(?:\A|(?<=\n\n)|(?<={re.escape(answered)}))(User: |Assistant:)", text)
    system = parts[0].removesuffix("\n\n")
    if system:
        yield {"role": "system", "content": system, "is_complete": parts[0] != system}
    for speaker, content in zip(parts[1::2], parts[2::2], strict=True):
        end = answered if speaker == "Assistant:" else "\n\n"
        said = content.removesuffix(end)
        role = "assistant" if speaker == "Assistant:" else "user"
        yield {
            "role": role,
            "content": said.removeprefix(" ") if role == "assistant" else said,
            "is_complete": said != content,
        }


def _read_falcon(text: str, eos: str) -> Iterator[Message]:
    return _read_speakers(text, "\n\n")


def _read_deepseek(text: str, eos: str) -> Iterator[Message]:
    return _read_speakers(text, eos)


def _read_dialogpt(text: str, eos: str) -> Iterator[Message]:
    """The format has no roles: the user begins, and speakers alternate."""
    *finished, last = text.split(eos)
    for place, content in enumerate([*finished, last] if last else finished):
        role = "assistant" if place % 2 else "user"
        yield {"role": role, "content": content, "is_complete": place < len(finished)}


FORMATS = {
    "chatml_format": ChatFormat(_CHATML, _read_chatml),
    "qwen": ChatFormat(_QWEN, _read_qwen, ("qwen",)),
    "dialogpt": ChatFormat(_DIALOGPT, _read_dialogpt, ("dialogpt",)),
    "falcon": ChatFormat(_SPEAKERS.replace("ANSWERED", "{{ '\n\n' }}"), _read_falcon, ("falcon",)),
    "deepseek": ChatFormat(
        "{{ bos_token }}" + _SPEAKERS.replace("ANSWERED", "{{ eos_token }}"), _read_deepseek, ("deepseek",)
    ),
    "llama": ChatFormat(_LLAMA, _read_llama, ("llama",)),
}


def add_chat_template(
    template_name: str,
    template: str,
    inverse_parser: Callable[[str], Any] | None = None,
    model_family_keywords: list[str] | None = None,
) -> None:
    """Make a chat template of your own known by its name, in this process. One that has the name is replaced.

    Args:
        template_name: for `chat_template_name` of `History.apply_chat_template` and `History.from_text`.
        template: of Jinja. What the assistant says should stand between `{% generation %}` and `{% endgeneration %}`, for
            its tokens to be marked.
        inverse_parser: makes a `History` of a text. Without it `from_text` cannot read the format.
        model_family_keywords: parts of the names of models that use the template, in any case.

    Example:
        >>> add_chat_template(
        ...     "bare",
        ...     "{% for message in messages %}{{ message.role }}: {{ message.content }};{% endfor %}",
        ...     inverse_parser=lambda text: History.from_chats(
        ...         [dict(zip(("role", "content"), part.split(": "))) for part in text.split(";") if part]
        ...     ),
        ... )
        >>> History.from_text("user: hello;", chat_template_name="bare").content
        ['hello']
    """
    if not template_name or not isinstance(template_name, str) or not isinstance(template, str):
        raise TypeError(f"template_name and template must be texts, got {template_name!r} and {class_of(template)}")

    def read(text: str, eos: str) -> Iterator[Message]:
        if inverse_parser is None:
            raise ValueError(f"the chat template {template_name!r} was added without inverse_parser, which reads texts")
        yield from inverse_parser(text).to_chats()

    families = tuple(word.lower() for word in model_family_keywords or ())
    FORMATS[template_name] = ChatFormat(template, read, families)


def format_named(name: str) -> ChatFormat:
    """The format of a name. KeyError with the names that are there."""
    if name not in FORMATS:
        raise KeyError(f"no chat template is named {name!r}: there are {', '.join(FORMATS)}")
    return FORMATS[name]


def family_of(model: str) -> str | None:
    """The name of the format of a model, by its name; None for an unknown family."""
    found = (name for name, each in FORMATS.items() if any(part in model.lower() for part in each.families))
    return next(found, None)


def format_of_text(text: str) -> str | None:
    """The name of the format that the marks in a text are of; None for a text without such marks."""
    if "<|im_start|>" in text:
        return "qwen" if "<tool_call>" in text or "<tool_response>" in text else "chatml_format"
    return "llama" if "<|header_start|>" in text else None
