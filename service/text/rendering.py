"""Messages to a prompt, by the model's chat template."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from quire.service.errors import TemplateError, bad_value
from quire.service.text.history import as_wanted
from quire.service.text.named_templates import template_names
from quire.service.text.template_renderer import TemplateRenderer

if TYPE_CHECKING:
    from quire.service.text.template import ChatTemplate
    from quire.service.text.tokenizer import Tokenizer

TemplateMessage = dict[str, Any]  # role, content and so on, in plain types, as templates expect it


ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class TemplateArguments(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The template variables that a client may set."""

    enable_thinking: bool | None = None
    thinking: bool | None = None
    preserve_thinking: bool | None = None
    clear_thinking: bool | None = None

    def given(self) -> dict[str, Any]:
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}


def template_arguments(
    tokenizer: Tokenizer, given: TemplateArguments | None, effort: ReasoningEffort | None
) -> tuple[dict[str, Any], list[str]]:
    """Return the variables that the chat template gets, and the fields that it has no use for."""
    template = tokenizer.chat_template
    arguments = {} if given is None else given.given()
    unused = [] if template is None else [name for name in arguments if not template.mentions(name)]
    for name in unused:
        del arguments[name]
    fields = [f"chat_template_kwargs.{name}" for name in unused]
    if effort is None or template is None:
        return arguments, fields
    if template.mentions("reasoning_effort"):
        arguments["reasoning_effort"] = effort
    elif effort == "none" and template.mentions("enable_thinking"):
        arguments.setdefault("enable_thinking", False)
    else:
        fields.append("reasoning_effort")
    return arguments, fields


async def rendered(
    renderer: TemplateRenderer, template: ChatTemplate, messages: list[TemplateMessage], param: str
) -> str:
    """Return what a template makes of messages, with nothing added. Raises ApiError, as `render` does."""
    try:
        return await renderer.render(
            template, messages, add_generation_prompt=False, arguments={}, tools=None, param=param
        )
    except TemplateError as error:
        raise bad_value(param, str(error)) from None


async def render(
    renderer: TemplateRenderer,
    tokenizer: Tokenizer,
    model: str,
    messages: list[TemplateMessage],
    *,
    param: str = "messages",
    add_generation_prompt: bool = True,
    continues: bool = False,
    arguments: dict[str, Any] | None = None,
    tools: list[dict[str, Any]] | None = None,
) -> str:
    """Return the prompt that `messages` make. Raises ApiError, most often a 400 that names `param`.

    continues: it ends where the content of the last message does.
    """
    template = tokenizer.chat_template
    if template is None:
        names = ", ".join(template_names())
        raise bad_value(
            param,
            f"the model {model!r} has no chat template: continue text with /v1/completions, or start the "
            f"server with --chat-template, which takes a file or one of {names}",
            "no_chat_template",
        )
    if template.tool_format is None:
        uses = any(message["role"] == "tool" or "tool_calls" in message for message in messages)
        if tools or uses:
            field = "tools" if tools else param
            raise bad_value(field, f"{field}: the chat template of {model!r} knows no tools", "no_tools")
    messages = as_wanted(template.source, messages, tools)
    mark = ""
    if continues:
        mark = f"-continue-{secrets.token_hex(16)}"
        messages = [*messages[:-1], {**messages[-1], "content": f"{messages[-1]['content']}{mark}"}]
    try:
        prompt = await renderer.render(
            template,
            messages,
            add_generation_prompt=add_generation_prompt,
            arguments=arguments or {},
            tools=tools or None,
            param=param,
        )
    except TemplateError as error:
        raise bad_value(param, str(error)) from None
    if mark and mark not in prompt:
        raise bad_value(param, f"the chat template of {model!r} does not show the last message's content")
    return prompt[: prompt.rindex(mark)] if mark else prompt
