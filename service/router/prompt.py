"""A request's prompt as the replica that gets it will see it, or the beginning of a long one.

What is read is bounded, and so is what waits to be: the rest goes by load. A prompt's end matters little for
where its beginning is cached.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor
from dataclasses import dataclass

from msgspec import MsgspecError, json
from starlette.requests import Request

from quire.engine.errors import FieldError
from quire.service.api.anthropic.history import beginning
from quire.service.api.anthropic.protocol import MessagesRequest
from quire.service.api.anthropic.translation import prompt_request
from quire.service.api.chat import prompt_text as chat_text
from quire.service.api.ollama.protocol import OllamaChatRequest, OllamaGenerateRequest
from quire.service.api.ollama.translation import chat_of, is_raw
from quire.service.api.request_params import cache_salt
from quire.service.api.requests.chat import ChatRequest
from quire.service.api.requests.completions import CompletionRequest
from quire.service.api.responses.messages import with_input
from quire.service.api.responses.protocol import ResponseRequest
from quire.service.api.responses.response import prompt_text as response_text
from quire.service.errors import ApiError
from quire.service.http.codec import read
from quire.service.text.template_renderer import TemplateRenderer
from quire.service.text.tokenizer import Tokenizer

_INLINE_CHARS = 2048
HEAD_CHARS = 1 << 18  # of a long text, that are tokenised
HEAD_TOKENS = 1 << 16  # of a long prompt, that are looked for
MAX_WAITING_CHARS = 4 << 20  # of texts that are being tokenised or wait for it
MAX_COMMAS = 1 << 17  # of a body: decoding goes by values, and holds up all streams

_completions = json.Decoder(CompletionRequest)
_chats = json.Decoder(ChatRequest)
_responses = json.Decoder(ResponseRequest)
_messages = json.Decoder(MessagesRequest)
_ollama_chats = json.Decoder(OllamaChatRequest)
_ollama_prompts = json.Decoder(OllamaGenerateRequest)


@dataclass(frozen=True)
class Prompt:
    tokens: list[int]
    salt: str
    whole: bool  # False: this is the beginning, or the request has more prompts than this one


@dataclass(frozen=True)
class _Given:
    content: str | list[int]
    salt: str
    special: bool = False  # whether special tokens are added to a text
    whole: bool = True


class PromptReader:
    """Prompts of the model's `max_tokens` and more are not read: replicas refuse them."""

    def __init__(
        self, tokenizer: Tokenizer, pool: Executor, renderer: TemplateRenderer, max_tokens: int
    ) -> None:
        self._tokenizer = tokenizer
        self._pool = pool
        self._renderer = renderer
        self._max_tokens = max_tokens
        self._waiting_chars = 0

    async def read(self, request: Request, body: bytes) -> Prompt | None:
        """Return its prompt; None: it goes by load.

        So does what has no prompt, or is no valid request: any replica can say what is wrong with it.
        """
        if body.count(b",") > MAX_COMMAS:
            return None
        try:
            given = await _given(request, body, self._tokenizer, self._renderer)
        except (ApiError, FieldError, MsgspecError, UnicodeError, RecursionError):
            return None
        if given is None:
            return None
        content = given.content
        tokens = content if isinstance(content, list) else await self._encode(content, special=given.special)
        if tokens is None or len(tokens) >= self._max_tokens:
            return None
        whole = given.whole and len(content) <= HEAD_CHARS and len(tokens) <= HEAD_TOKENS
        return Prompt(tokens[:HEAD_TOKENS], given.salt, whole)

    async def _encode(self, text: str, *, special: bool) -> list[int] | None:
        """Return the tokens of the text's head; None: too much waits already."""
        if len(text) <= _INLINE_CHARS:
            return self._tokenizer.encode(text, add_special_tokens=special)
        head = text[:HEAD_CHARS]
        if self._waiting_chars + len(head) > MAX_WAITING_CHARS:
            return None
        self._waiting_chars += len(head)
        try:  # in another thread, so that streams go on
            return await asyncio.get_running_loop().run_in_executor(
                self._pool, lambda: self._tokenizer.encode(head, add_special_tokens=special)
            )
        finally:
            self._waiting_chars -= len(head)


async def _given(
    request: Request, body: bytes, tokenizer: Tokenizer, renderer: TemplateRenderer
) -> _Given | None:
    """Raises for what a replica would refuse, too."""
    match request.url.path:
        case "/v1/completions":
            completion = read(body, _completions, ignore_unknown=True).body
            prompts, salt = completion.prompts, cache_salt(request, completion.cache_salt)
            if completion.truncate_prompt_tokens is not None:
                return None
            special = completion.add_special_tokens is not False
            return _Given(prompts[0], salt, special=special, whole=len(prompts) == 1)
        case "/v1/chat/completions":
            chat = read(body, _chats, ignore_unknown=True).body
            if chat.truncate_prompt_tokens is not None:
                return None
            text = await chat_text(renderer, tokenizer, "", chat)
            return _Given(text, cache_salt(request, chat.cache_salt), special=bool(chat.add_special_tokens))
        case "/v1/responses":
            response = read(body, _responses, ignore_unknown=True).body
            refers = not isinstance(response.input, str) and any(
                item.type == "item_reference" for item in response.input
            )
            if refers or response.previous_response_id is not None:
                return None  # only the replica that has it knows the prompt
            said = with_input([], response.input)
            text = await response_text(renderer, tokenizer, "", response, said)
            return _Given(text, cache_salt(request, None))
        case "/v1/messages":
            message = read(body, _messages, ignore_unknown=True).body
            chat = prompt_request(message, tokenizer.chat_template)
            text = await chat_text(renderer, tokenizer, "", chat) + beginning(message)
            return _Given(text, cache_salt(request, None))
        case "/api/chat":
            ollama_chat = chat_of(
                read(body, _ollama_chats, ignore_unknown=True).body, "", tokenizer.chat_template
            )
            text = await chat_text(renderer, tokenizer, "", ollama_chat)
            return _Given(text, cache_salt(request, None))
        case "/api/generate":
            ollama = read(body, _ollama_prompts, ignore_unknown=True).body
            if is_raw(ollama, tokenizer.chat_template):
                return _Given(ollama.prompt or "", cache_salt(request, None), special=True)
            chat = chat_of(ollama, "", tokenizer.chat_template)
            return _Given(await chat_text(renderer, tokenizer, "", chat), cache_salt(request, None))
    return None
