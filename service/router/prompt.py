"""A request's prompt as the replica that gets it will see it."""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor
from dataclasses import dataclass

from msgspec import MsgspecError, json
from starlette.requests import Request

from service.chat import prompt_text as chat_text
from service.errors import ApiError
from service.http import decode_body
from service.preparation import cache_salt
from service.protocol.chat import ChatRequest
from service.protocol.completions import CompletionRequest
from service.responses.messages import with_input
from service.responses.protocol import ResponseRequest
from service.responses.response import prompt_text as response_text
from service.template_renderer import TemplateRenderer
from service.tokenizer import Tokenizer

_INLINE_CHARS = 2048

_completions = json.Decoder(CompletionRequest)
_chats = json.Decoder(ChatRequest)
_responses = json.Decoder(ResponseRequest)


@dataclass(frozen=True)
class Prompt:
    tokens: list[int]
    salt: str
    whole: bool  # False: the request has more prompts than this one


@dataclass(frozen=True)
class _Given:
    content: str | list[int]
    salt: str
    special: bool = False  # whether special tokens are added to a text
    whole: bool = True


async def read_prompt(
    request: Request, body: bytes, tokenizer: Tokenizer, pool: Executor, renderer: TemplateRenderer
) -> Prompt | None:
    """None for what has no prompt, or is no valid request: any replica can say what is wrong with it."""
    try:
        given = await _given(request, body, tokenizer, renderer)
    except (ApiError, MsgspecError, UnicodeError, RecursionError):
        return None
    if given is None:
        return None
    content = given.content
    if isinstance(content, list):
        return Prompt(content, given.salt, given.whole)
    if len(content) <= _INLINE_CHARS:
        tokens = tokenizer.encode(content, add_special_tokens=given.special)
    else:  # long texts in another thread, so that streams go on
        loop = asyncio.get_running_loop()
        tokens = await loop.run_in_executor(
            pool, lambda: tokenizer.encode(content, add_special_tokens=given.special)
        )
    return Prompt(tokens, given.salt, given.whole)


async def _given(
    request: Request, body: bytes, tokenizer: Tokenizer, renderer: TemplateRenderer
) -> _Given | None:
    """Raises for what a replica would refuse, too."""
    match request.url.path:
        case "/v1/completions":
            completion = _completions.decode(body)
            prompts, salt = completion.prompts, cache_salt(request, completion.cache_salt)
            return _Given(prompts[0], salt, special=True, whole=len(prompts) == 1)
        case "/v1/chat/completions":
            chat = decode_body(body, _chats)
            text = await chat_text(renderer, tokenizer, "", chat)
            return _Given(text, cache_salt(request, chat.cache_salt))
        case "/v1/responses":
            response = _responses.decode(body)
            said = with_input([], response.input)
            text = await response_text(renderer, tokenizer, "", response, said)
            return _Given(text, cache_salt(request, None))
    return None
