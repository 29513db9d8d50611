"""POST /tokenize and /detokenize, in vLLM's shapes.

Owns these two pages; text is encoded exactly as the completion and chat routes encode it. Never talks to the engine. Routed
by `frontend.app`.
"""

import msgspec
from aiohttp import web

from frontend.bodies import decode_body, decode_value
from frontend.chat import generation_prompt_wanted, plain_messages, template_kwargs
from frontend.chat_template import TemplateError
from frontend.errors import ApiError, clipped, invalid
from frontend.health import json_response, max_model_len
from frontend.openai import ChatRequest
from frontend.server import SERVER, Server, off_loop, read_body
from frontend.tokenizer import EncodingError


class TokenizeRequest(ChatRequest, kw_only=True):
    prompt: str | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct):
    tokens: list[int]
    model: str | None = None


async def tokenize(request: web.Request) -> web.Response:
    server = request.app[SERVER]
    body = await read_body(request, server.config.max_body_bytes)
    return json_response(await off_loop(len(body), _tokenize, server, body))


async def detokenize(request: web.Request) -> web.Response:
    server = request.app[SERVER]
    body = await read_body(request, server.config.max_body_bytes)
    return json_response(await off_loop(len(body), _detokenize, server, body))


def _tokenize(server: Server, body: bytes) -> dict[str, object]:
    asked, _ = decode_body(body, TokenizeRequest)
    server.check_model(asked.model)
    tokens = _encode(server, asked)
    names = server.text.tokenizer.tokens
    return {
        "count": len(tokens),
        "max_model_len": max_model_len(server),
        "tokens": tokens,
        "token_strs": [names[token] for token in tokens] if asked.return_token_strs else None,
    }


def _encode(server: Server, asked: TokenizeRequest) -> list[int]:
    has_messages = decode_value(asked.messages, object, "messages") is not None
    if (asked.prompt is not None) == has_messages:
        raise invalid("give either prompt or messages", "prompt")
    try:
        if asked.prompt is not None:
            return server.text.encode_prompt(asked.prompt, add_special_tokens=asked.add_special_tokens is not False)
        messages = plain_messages(asked)
        adds, continues = generation_prompt_wanted(asked, messages)
        return server.text.encode_chat(
            messages,
            add_generation_prompt=adds,
            continue_final_message=continues,
            template_kwargs=template_kwargs(asked),
        )
    except (EncodingError, TemplateError) as error:
        raise invalid(str(error), "prompt" if asked.prompt is not None else "messages") from None


def _detokenize(server: Server, body: bytes) -> dict[str, object]:
    asked, _ = decode_body(body, DetokenizeRequest)
    server.check_model(asked.model)
    size = server.text.tokenizer.vocab_size
    for token in asked.tokens:
        if not 0 <= token < size:
            raise ApiError(
                400, f"tokens has token id {clipped(token)}; the vocabulary is 0 to {size - 1}", param="tokens"
            )
    return {"prompt": server.text.tokenizer.decode(asked.tokens, skip_special_tokens=False)}
