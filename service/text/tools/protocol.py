"""Tools as clients offer them, and the calls that models make of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from quire.engine.errors import FieldError
from quire.service.text.structured import MAX_SCHEMA_BYTES, Schema, check_size
from quire.service.text.tools.calls import object_of

MAX_TOOLS = 128

_STRICT = "true: the arguments always fit the parameters, whatever tool_choice is"
_FLAT_STRICT = "true (if left out): the arguments always fit the parameters, whatever tool_choice is"
_CALL_ID = "As it was returned, or your own"
_TOOL_CHOICE = (
    "none: as if there were no tools; auto (if left out): the model decides; required: it must call at "
    "least one; a function: it must call that one, once; allowed_tools: auto or required, but of some of the "
    "tools, while the prompt has all. Where one must be called, arguments fit the parameters"
)
_PARALLEL = "false: at most one call, after which the answer ends"

FunctionName = Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]
CallId = Annotated[str, Meta(min_length=1, max_length=256, description=_CALL_ID)]
_ARGUMENTS = "A JSON object, as text. The chat template gets what is none as the text that it is"
CalledName = Annotated[str, Meta(min_length=1, max_length=256)]
Arguments = Annotated[str, Meta(max_length=1 << 20, description=_ARGUMENTS)]


class Function(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: FunctionName
    description: Annotated[str, Meta(max_length=MAX_SCHEMA_BYTES)] | None = None
    parameters: Schema | None = None
    strict: Annotated[bool, Meta(description=_STRICT)] | None = None

    @property
    def schema(self) -> dict[str, Any]:
        """Return the schema of the arguments; without parameters there are none."""
        if not self.parameters:
            return {"type": "object", "properties": {}, "additionalProperties": False}
        return self.parameters

    def as_template_tool(self) -> dict[str, Any]:
        """Return it in plain types, as templates expect it."""
        described = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {
            "type": "function",
            "function": {name: value for name, value in described.items() if value is not None},
        }


class Tool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["function"]
    function: Function


class FlatTool(Function, kw_only=True, forbid_unknown_fields=True):
    """As the Responses API writes it, where functions are strict unless they say that they are not."""

    type: Literal["function"]
    strict: Annotated[bool, Meta(description=_FLAT_STRICT)] | None = True

    def __post_init__(self) -> None:
        if self.strict is None:
            self.strict = True


Tools = Annotated[list[Tool], Meta(min_length=1, max_length=MAX_TOOLS)]


class ChosenFunction(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: FunctionName


class ChosenTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="function"):
    function: ChosenFunction

    @property
    def name(self) -> str:
        return self.function.name


class FlatChosenTool(
    ChosenFunction, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="function"
):
    """As the Responses API writes it."""


AllowedMode = Literal["auto", "required"]


class AllowedTools(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    mode: AllowedMode
    tools: Annotated[list[ChosenTool], Meta(min_length=1, max_length=MAX_TOOLS)]


class AllowedChoice(
    msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="allowed_tools"
):
    allowed_tools: AllowedTools

    @property
    def mode(self) -> AllowedMode:
        return self.allowed_tools.mode

    @property
    def tools(self) -> list[ChosenTool]:
        return self.allowed_tools.tools


class FlatAllowedChoice(
    msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="allowed_tools"
):
    """As the Responses API writes it."""

    mode: AllowedMode
    tools: Annotated[list[FlatChosenTool], Meta(min_length=1, max_length=MAX_TOOLS)]


ChoiceMode = Literal["none", "auto", "required"]
ToolChoice = Annotated[ChoiceMode | ChosenTool | AllowedChoice, Meta(description=_TOOL_CHOICE)]
FlatToolChoice = Annotated[ChoiceMode | FlatChosenTool | FlatAllowedChoice, Meta(description=_TOOL_CHOICE)]
ParallelCalls = Annotated[bool, Meta(description=_PARALLEL)]


class CalledFunction(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Models write broken JSON now and then, and agents send it back with what came of it."""

    name: CalledName
    arguments: Arguments

    def as_template_function(self) -> dict[str, Any]:
        """With the arguments as an object, as templates expect them, unless they are none."""
        arguments = object_of(self.arguments) if self.arguments.strip() else {}
        return {"name": self.name, "arguments": self.arguments if arguments is None else arguments}


class ToolCall(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A call as a reply has it, and as later messages repeat it."""

    id: CallId
    type: Literal["function"] = "function"
    function: CalledFunction

    def as_template_call(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": self.function.as_template_function()}


ToolCalls = Annotated[list[ToolCall], Meta(min_length=1, max_length=MAX_TOOLS)]


def chosen_name(choice: ToolChoice | FlatToolChoice | None) -> str | None:
    """Return the name of the one function that must be called, if one is named."""
    return choice.name if isinstance(choice, ChosenTool | FlatChosenTool) else None


def allowed_names(choice: ToolChoice | FlatToolChoice | None) -> list[str] | None:
    """Return the names of those that may be called; None: all may."""
    if isinstance(choice, AllowedChoice | FlatAllowedChoice):
        return [tool.name for tool in choice.tools]
    chosen = chosen_name(choice)
    return None if chosen is None else [chosen]


def must_call(choice: ToolChoice | FlatToolChoice | None) -> bool:
    """Return whether one has to be called."""
    if isinstance(choice, AllowedChoice | FlatAllowedChoice):
        return choice.mode == "required"
    return choice == "required" or chosen_name(choice) is not None


def check_tools(functions: Sequence[Function] | None, choice: ToolChoice | FlatToolChoice | None) -> None:
    """Check that they go together. Raises FieldError."""
    if functions is None:
        if choice not in (None, "none", "auto"):
            message = "tool_choice may only be given with tools that can be called here, and there are none"
            raise FieldError("tool_choice", message)
        return
    names = [function.name for function in functions]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise FieldError("tools", f"tools has two functions named {twice!r}")
    for function in functions:
        schema = function.schema
        if schema.get("type") != "object":
            raise FieldError(
                "tools",
                f"tools must have parameters of type object, and those of {function.name!r} are of "
                f"{schema.get('type')!r}",
            )
        try:
            check_size(schema)
        except ValueError as error:
            message = f"tools has too large parameters in {function.name!r}: {error}"
            raise FieldError("tools", message) from None
    other = next((name for name in allowed_names(choice) or () if name not in names), None)
    if other is not None:
        raise FieldError("tool_choice", f"tool_choice names {other!r}, which is none of the tools")
