"""Chat messages as clients send them, made plain: role and one string of content each.

Owns the shape of `messages` and of `chat_template_kwargs`. Never renders: that is the template's part. Called by
`frontend.completions`.
"""

from typing import Any

import msgspec

from frontend.bodies import decode_value
from frontend.errors import clipped, invalid
from frontend.openai import ChatRequest

ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
MAX_MESSAGES = 4096
MAX_TEMPLATE_KWARGS = 32

# What the rendering call itself passes to the template; a request must not replace it.
_RESERVED_KWARGS = frozenset(
    {"messages", "tools", "documents", "chat_template", "tokenize", "add_generation_prompt", "continue_final_message"}
)

Message = dict[str, str]


class ChatMessage(msgspec.Struct):
    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[Any] | None = None
    function_call: Any = None
    audio: Any = None
    refusal: str | None = None


def plain_messages(request: ChatRequest) -> list[Message]:
    """Messages for the template. Raises ApiError(400) whose `param` holds the index of the message at fault.

    Parts of a content list are joined without anything between them, as templates that read lists do. The role
    `developer` is OpenAI's newer word for `system` and becomes it.
    """
    if bytes(request.messages) == b"null":
        raise invalid("messages is required and must be a list", "messages")
    messages = decode_value(request.messages, list[ChatMessage], "messages")
    if not messages:
        raise invalid("messages must not be empty", "messages")
    if len(messages) > MAX_MESSAGES:
        raise invalid(f"messages has {len(messages)} entries; the limit is {MAX_MESSAGES}", "messages")
    return [_plain(index, message) for index, message in enumerate(messages)]


def template_kwargs(request: ChatRequest) -> dict[str, str | int | float | bool]:
    """Extra variables for the template: few, plain values, and none that rendering sets itself."""
    given = request.chat_template_kwargs or {}
    if len(given) > MAX_TEMPLATE_KWARGS:
        raise invalid(
            f"chat_template_kwargs has {len(given)} entries; the limit is {MAX_TEMPLATE_KWARGS}", "chat_template_kwargs"
        )
    for name, value in given.items():
        if name in _RESERVED_KWARGS or not name.isidentifier() or name.startswith("_"):
            raise invalid(f"chat_template_kwargs must not set {clipped(name)}", "chat_template_kwargs")
        if not isinstance(value, str | int | float | bool) or (isinstance(value, str) and len(value) > 1024):
            raise invalid(
                f"chat_template_kwargs.{name} must be a number, a boolean or a string of at most 1024 characters",
                "chat_template_kwargs",
            )
    return dict(given)


def generation_prompt_wanted(request: ChatRequest, messages: list[Message]) -> tuple[bool, bool]:
    """(add_generation_prompt, continue_final_message); the first defaults to true unless the second is asked for."""
    continues = bool(request.continue_final_message)
    adds = not continues if request.add_generation_prompt is None else request.add_generation_prompt
    if continues and adds:
        raise invalid(
            "add_generation_prompt and continue_final_message must not both be true", "continue_final_message"
        )
    if continues and messages[-1]["role"] != "assistant":
        raise invalid("continue_final_message needs an assistant message at the end", "continue_final_message")
    return adds, continues


def _plain(index: int, message: ChatMessage) -> Message:
    where = f"messages[{index}]"
    if message.role not in ROLES:
        raise invalid(
            f"{where}.role must be one of {', '.join(sorted(ROLES))}, got {clipped(message.role)}", f"{where}.role"
        )
    for name, value in (
        ("tool_calls", message.tool_calls),
        ("function_call", message.function_call),
        ("audio", message.audio),
    ):
        if value:
            raise invalid(f"{where}.{name} is not supported by this server", f"{where}.{name}")
    plain = {
        "role": "system" if message.role == "developer" else message.role,
        "content": _content(where, message.content),
    }
    if message.name is not None:
        plain["name"] = message.name
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    return plain


def _content(where: str, content: str | list[dict[str, Any]] | None) -> str:
    if content is None:
        raise invalid(f"{where}.content is required", f"{where}.content")
    if isinstance(content, str):
        return content
    if not content:
        raise invalid(f"{where}.content must not be an empty list", f"{where}.content")
    return "".join(_part(f"{where}.content[{index}]", part) for index, part in enumerate(content))


def _part(where: str, part: dict[str, Any]) -> str:
    kind = part.get("type")
    if kind != "text":
        raise invalid(f"{where}.type must be text, got {clipped(kind)}", f"{where}.type")
    text = part.get("text")
    if not isinstance(text, str):
        raise invalid(f"{where}.text must be a string, got {clipped(text)}", f"{where}.text")
    return text
