"""The bodies of POST /tokenize and /detokenize."""

from __future__ import annotations

import msgspec

from quire.engine.errors import FieldError
from quire.service.api.requests.chat import Messages, check_answered, check_continuation
from quire.service.json_fields import ModelName, Text, TokenIds
from quire.service.text.rendering import TemplateArguments
from quire.service.text.tools.protocol import Tools, check_tools


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Either `prompt`, or `messages` (which the chat template turns into a prompt)."""

    model: ModelName | None = None
    prompt: Text | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None  # left out: true for a prompt, false for messages
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    tools: Tools | None = None
    chat_template_kwargs: TemplateArguments | None = None
    return_token_strs: bool = False

    def __post_init__(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise FieldError("prompt", "prompt or messages must be given, and not both")
        if self.prompt is not None:
            for name in ("add_generation_prompt", "continue_final_message", "tools", "chat_template_kwargs"):
                if getattr(self, name) not in (None, False):
                    raise FieldError(name, f"{name} belongs to messages, not to a prompt")
            return
        assert self.messages is not None
        check_answered(self.messages)
        if self.continue_final_message:
            check_continuation(self.messages, self.add_generation_prompt)
        check_tools(None if self.tools is None else [tool.function for tool in self.tools], None)


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: ModelName | None = None
    tokens: TokenIds
