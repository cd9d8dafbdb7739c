"""Messages to a prompt, by the model's chat template."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from quire.service.errors import TemplateError, bad_value
from quire.service.text.named_templates import template_names
from quire.service.text.template_renderer import TemplateRenderer

if TYPE_CHECKING:
    from quire.service.text.tokenizer import Tokenizer

TemplateMessage = dict[str, Any]  # role, content and so on, in plain types, as templates expect it


class TemplateArguments(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The template variables that a client may set."""

    enable_thinking: bool | None = None


async def render(
    renderer: TemplateRenderer,
    tokenizer: Tokenizer,
    model: str,
    messages: list[TemplateMessage],
    *,
    param: str = "messages",
    add_generation_prompt: bool = True,
    arguments: TemplateArguments | None = None,
    tools: list[dict[str, Any]] | None = None,
) -> str:
    """The prompt that `messages` make. Raises ApiError, most often a 400 that names `param`."""
    template = tokenizer.chat_template
    if template is None:
        names = ", ".join(template_names())
        raise bad_value(
            param,
            f"the model {model!r} has no chat template: continue text with /v1/completions, or start the "
            f"server with --chat-template, which takes a file or one of {names}",
            "no_chat_template",
        )
    given: dict[str, bool] = {}
    if arguments is not None and arguments.enable_thinking is not None:
        if not template.mentions("enable_thinking"):
            raise bad_value(
                "chat_template_kwargs", f"the chat template of {model!r} does not use 'enable_thinking'"
            )
        given["enable_thinking"] = arguments.enable_thinking
    if template.tool_format is None:
        uses = any(message["role"] == "tool" or "tool_calls" in message for message in messages)
        if tools or uses:
            field = "tools" if tools else param
            raise bad_value(field, f"{field}: the chat template of {model!r} knows no tools", "no_tools")
    try:
        return await renderer.render(
            template,
            messages,
            add_generation_prompt=add_generation_prompt,
            arguments=given,
            tools=tools or None,
            param=param,
        )
    except TemplateError as error:
        raise bad_value(param, str(error)) from None
