"""Renders a chat template in a process that may be killed: `python -m quire.service.text.template_worker`."""

from __future__ import annotations

import msgspec

from quire.service.errors import TemplateError
from quire.service.text.sizes import utf8_size
from quire.service.text.template import ChatTemplate
from quire.service.text.template_messages import Conversation, Model, Rendered
from quire.service.text.worker import Answer, work

MEMORY_BYTES = 512 << 20  # of address space, for prompts of 4 MiB


def _prepare(opening: bytes) -> Answer:
    model = msgspec.json.decode(opening, type=Model)
    template = ChatTemplate(model.template, model.special_tokens)
    template.compile()

    def answer(question: bytes) -> Rendered:
        asked = msgspec.json.decode(question, type=Conversation)
        try:
            prompt = template.render(
                asked.messages,
                add_generation_prompt=asked.add_generation_prompt,
                arguments=asked.arguments,
                tools=asked.tools,
            )
        except TemplateError as error:
            return Rendered(error=str(error))
        size = utf8_size(prompt)
        return Rendered(prompt) if size <= model.max_prompt_bytes else Rendered(too_large=size)

    return answer


if __name__ == "__main__":
    work(_prepare, MEMORY_BYTES)
