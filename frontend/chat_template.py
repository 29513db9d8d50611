"""A chat template: messages to the text a model was trained to continue.

Owns the sandbox that template code runs in and the sentences for its errors. Never validates messages (that is the
request's part) and never tokenises. Called by `frontend.text`; read-only after construction, so threads may share it.
Source of the environment: transformers, chat_template_utils.py, so that templates behave as their authors tested them.
"""

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_RENDERED_CHARS = 64 * 1024 * 1024

# What code in a template can raise, apart from jinja2's own: an operation on a value of the wrong kind or size.
_RENDERING_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)

Message = Mapping[str, object]


class TemplateError(ValueError):
    """The template cannot be compiled, or refuses these messages. `index`: the message to blame, where it is known."""

    def __init__(self, message: str, index: int | None = None) -> None:
        super().__init__(message)
        self.index = index


class ChatTemplate:
    """One compiled template. `variables`, such as bos_token, are what every rendering sees."""

    def __init__(self, source: str, variables: Mapping[str, object]) -> None:
        """Raises `TemplateError` for a template that cannot be compiled."""
        # Given, as None, by transformers as well: templates ask `tools is not none`.
        self._variables = {"tools": None, "documents": None, **variables}
        try:
            self._template = _environment().from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise TemplateError(f"the model's chat template cannot be compiled: {error}") from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, object] | None = None,
        transform: Callable[[str], str] = str,
    ) -> str:
        """The text of `messages`. `transform` is applied to every string a person wrote before the template sees it.

        Content given as a list of text parts is joined in order. `continue_final_message` leaves the last message
        open, so that the model goes on with it; it excludes `add_generation_prompt`. Raises `TemplateError`.
        """
        kwargs = dict(template_kwargs or {})
        if reserved := sorted(kwargs.keys() & {"messages", "add_generation_prompt"}):
            raise TemplateError(f"chat_template_kwargs must not contain {reserved[0]}")
        plain: list[dict[str, object]] = [
            _plain_message(index, message, transform) for index, message in enumerate(messages)
        ]
        variables = self._variables | {key: _transformed(value, transform) for key, value in kwargs.items()}
        if not continue_final_message:
            variables["add_generation_prompt"] = add_generation_prompt
            return self._render_blaming(plain, variables)
        if add_generation_prompt:
            raise TemplateError("add_generation_prompt and continue_final_message exclude each other")
        variables["add_generation_prompt"] = False
        return self._render_open(plain, variables)

    def _render_open(self, messages: list[dict[str, object]], variables: dict[str, object]) -> str:
        """Render, then cut right behind the last message's content. Source: transformers' continue_final_message."""
        content = messages[-1].get("content") if messages else None
        if not isinstance(content, str):
            raise TemplateError("continue_final_message needs a last message with content", len(messages) - 1)
        # The space tells whether the template trims contents; if it does, the text before the tag is trimmed as well.
        tag = f"{secrets.token_hex(16)} "
        tagged = [*messages[:-1], {**messages[-1], "content": content + tag}]
        rendered = self._render_blaming(tagged, variables)
        end = rendered.rfind(tag.strip())
        if end < 0:
            raise TemplateError("the chat template drops the last message's content, so it cannot be continued")
        return rendered[:end] if rendered.startswith(tag, end) else rendered[:end].rstrip()

    def _render_blaming(self, messages: list[dict[str, object]], variables: dict[str, object]) -> str:
        try:
            return self._render(messages, variables)
        except TemplateError as error:
            # Only templates know which message they dislike, and they do not tell: look for the shortest beginning
            # of the conversation that fails. Bisecting keeps a long refused conversation cheap.
            shortest = _bisect(len(messages), lambda length: self._fails(messages[:length], variables))
            if shortest == 0:
                raise
            raise TemplateError(str(error), shortest - 1) from error

    def _fails(self, messages: list[dict[str, object]], variables: dict[str, object]) -> bool:
        try:
            self._render(messages, variables)
        except TemplateError:
            return True
        return False

    def _render(self, messages: list[dict[str, object]], variables: dict[str, object]) -> str:
        pieces = []
        num_chars = 0
        try:
            for piece in self._template.generate(messages=messages, **variables):
                pieces.append(piece)
                num_chars += len(piece)
                if num_chars > MAX_RENDERED_CHARS:
                    break
        except _RENDERING_ERRORS as error:
            raise TemplateError(f"the model's chat template refuses these messages: {error}") from error
        if num_chars > MAX_RENDERED_CHARS:
            raise TemplateError(f"the rendered conversation is longer than {MAX_RENDERED_CHARS} characters")
        return "".join(pieces)


def _plain_message(index: int, message: Message, transform: Callable[[str], str]) -> dict[str, object]:
    """A copy of `message` in which content parts are joined and every string is transformed, roles included."""
    plain = dict(message)
    content = plain.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        plain["content"] = "".join(_text_of_part(index, part) for part in content)
    return {key: _transformed(value, transform) for key, value in plain.items()}


def _text_of_part(index: int, part: object) -> str:
    if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise TemplateError(f"messages[{index}].content holds a part that is not text", index)
    text: str = part["text"]
    return text


def _transformed(value: object, transform: Callable[[str], str]) -> object:
    if isinstance(value, str):
        return transform(value)
    if isinstance(value, Mapping):
        return {_transformed(key, transform): _transformed(item, transform) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_transformed(item, transform) for item in value]
    return value


def _bisect(length: int, fails: Callable[[int], bool]) -> int:
    """The smallest n in 0..length with fails(n), where fails(length) holds; log2(length) calls."""
    low, high = 0, length
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fails(middle) else (middle + 1, high)
    return low


class _GenerationTag(jinja2.ext.Extension):
    """{% generation %} marks the assistant's words for training; for serving it is transparent."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own interface

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes for HTML, which models never saw.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:  # noqa: A002 - templates may name the argument
    return datetime.now().strftime(format)
