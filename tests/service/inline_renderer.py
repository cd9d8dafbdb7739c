"""Renders right away, for tests that count the turns of the loop."""

from __future__ import annotations

from typing import Any

from quire.service.text.template import ChatTemplate
from quire.service.text.template_renderer import TemplateRenderer


class InlineRenderer(TemplateRenderer):
    def __init__(self) -> None:
        super().__init__(max_prompt_bytes=4 << 20)

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
        return template.render(
            messages, add_generation_prompt=add_generation_prompt, arguments=arguments, tools=tools
        )
