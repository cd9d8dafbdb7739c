"""Chat templates are rendered beside the event loop, in processes that have only so much time and memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from quire.service.errors import ApiError, TemplateError, too_large, worker_lost
from quire.service.text.frames import encode_frame
from quire.service.text.template_messages import Conversation, Model, Rendered
from quire.service.text.worker_pool import OutOfTime, WorkerLost, Workers

if TYPE_CHECKING:
    from quire.service.text.template import ChatTemplate

PROCESSES = 2
SECONDS = 2.0  # of processor time, for a conversation; a template that goes round ends itself after one
MAX_WAITING = 1024  # conversations
MAX_WAITING_BYTES = 64 << 20  # of those; one that comes alone may have more

_decoder = msgspec.json.Decoder(Rendered)


class TemplateRenderer:
    """Starts its processes when they are needed. They end with this process, or when closed."""

    def __init__(self, max_prompt_bytes: int, seconds: float = SECONDS) -> None:
        self._max_prompt_bytes = max_prompt_bytes
        self._seconds = seconds
        self._template: ChatTemplate | None = None
        self._workers: Workers | None = None
        self._waiting = 0
        self._bytes = 0  # of those that wait

    async def start(self, template: ChatTemplate) -> None:
        """Be ready before the first conversation comes. Raises ValueError if it is no template after all."""
        try:
            await (await self._workers_of(template)).start()
        except WorkerLost:
            raise ValueError("the process that renders the model's chat template did not start") from None

    async def render(
        self,
        template: ChatTemplate,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool,
        arguments: dict[str, Any],
        tools: list[dict[str, Any]] | None,
        param: str,
    ) -> str:
        """Raises TemplateError, or ApiError 413, 429 or 503. `param` is the field of the messages."""
        question = encode_frame(Conversation(messages, add_generation_prompt, arguments, tools))
        try:
            with self._turn(len(question)):
                answer = await (await self._workers_of(template)).ask(question)
        except OutOfTime:
            raise TemplateError(f"the model's chat template took longer than {self._seconds:g} s") from None
        except WorkerLost:
            raise worker_lost("the process that renders chat templates was killed: try again") from None
        except ValueError as error:
            raise TemplateError(str(error)) from None
        rendered = _decoder.decode(answer)
        if rendered.error:
            raise TemplateError(rendered.error)
        if rendered.too_large:
            raise too_large(param, rendered.too_large, self._max_prompt_bytes)
        return rendered.prompt

    @contextmanager
    def _turn(self, size: int) -> Iterator[None]:
        if self._waiting >= MAX_WAITING or (self._bytes and self._bytes + size > MAX_WAITING_BYTES):
            message = (
                f"{self._waiting} conversations of {self._bytes} bytes wait for their chat template, and one "
                f"of {size} more does not fit"
            )
            raise ApiError(429, message, code="queue_full", retry_after=1)
        self._waiting += 1
        self._bytes += size
        try:
            yield
        finally:
            self._waiting -= 1
            self._bytes -= size

    async def _workers_of(self, template: ChatTemplate) -> Workers:
        if self._workers is None or template is not self._template:
            await self.close()
            opening = Model(template.source, template.special_tokens, self._max_prompt_bytes)
            self._template = template
            self._workers = Workers(
                "quire.service.text.template_worker", PROCESSES, lambda: opening, self._seconds
            )
        return self._workers

    async def close(self) -> None:
        """End the processes."""
        workers, self._workers = self._workers, None
        if workers is not None:
            await workers.close()
