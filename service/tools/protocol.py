"""What clients may say of tools, and the calls that models make of them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from service.structured_output import MAX_SCHEMA_BYTES, Schema, check_size

MAX_TOOLS = 128

_STRICT = "true: the arguments always fit the parameters, whatever tool_choice is"
_CALL_ID = "As it was returned, or your own"

FunctionName = Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]
CallId = Annotated[str, Meta(min_length=1, max_length=256, description=_CALL_ID)]
Arguments = Annotated[str, Meta(max_length=1 << 20, description="A JSON object, as text")]


class Function(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: FunctionName
    description: Annotated[str, Meta(max_length=MAX_SCHEMA_BYTES)] | None = None
    parameters: Schema | None = None
    strict: Annotated[bool, Meta(description=_STRICT)] | None = None

    @property
    def schema(self) -> dict[str, Any]:
        """Of the arguments; without parameters there are none."""
        if self.parameters is None:
            return {"type": "object", "properties": {}, "additionalProperties": False}
        return self.parameters


class Tool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["function"]
    function: Function

    def as_template_tool(self) -> dict[str, Any]:
        """In plain types, as templates expect it."""
        function = self.function
        described = {
            "name": function.name,
            "description": function.description,
            "parameters": function.parameters,
        }
        return {
            "type": "function",
            "function": {name: value for name, value in described.items() if value is not None},
        }


Tools = Annotated[list[Tool], Meta(min_length=1, max_length=MAX_TOOLS)]


class ChosenFunction(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: FunctionName


class ChosenTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["function"]
    function: ChosenFunction


ToolChoice = Literal["none", "auto", "required"] | ChosenTool


class CalledFunction(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: FunctionName
    arguments: Arguments

    def as_template_function(self) -> dict[str, Any]:
        """With the arguments as an object, as templates expect them."""
        return {"name": self.name, "arguments": msgspec.json.decode(self.arguments, type=dict[str, Any])}

    def __post_init__(self) -> None:
        try:
            msgspec.json.decode(self.arguments, type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError) as error:
            raise ValueError(f"arguments must be a JSON object: {error}") from None


class ToolCall(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A call as a reply has it, and as later messages repeat it."""

    id: CallId
    type: Literal["function"] = "function"
    function: CalledFunction

    def as_template_call(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": self.function.as_template_function()}


ToolCalls = Annotated[list[ToolCall], Meta(min_length=1, max_length=MAX_TOOLS)]


def check_tools(tools: list[Tool], choice: ToolChoice | None) -> None:
    """Raises ValueError that names the field."""
    names = [tool.function.name for tool in tools]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"tools has two functions named {twice!r}")
    for tool in tools:
        schema = tool.function.schema
        if schema.get("type") != "object":
            raise ValueError(
                f"tools must have parameters of type object, and those of {tool.function.name!r} are of "
                f"{schema.get('type')!r}"
            )
        try:
            check_size(schema)
        except ValueError as error:
            raise ValueError(f"tools has too large parameters in {tool.function.name!r}: {error}") from None
    if isinstance(choice, ChosenTool) and choice.function.name not in names:
        raise ValueError(f"tool_choice names {choice.function.name!r}, which is none of the tools")
