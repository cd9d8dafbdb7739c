"""The tools of one request: the way its model calls them, and the calls that it must or may make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from quire.service.text.pieces import AnswerParser
from quire.service.text.reasoning.harmony import HarmonyParser
from quire.service.text.structured import Form, lark_grammar
from quire.service.text.tools.formats import CallFormat
from quire.service.text.tools.protocol import FlatToolChoice, Function, ToolChoice, chosen_name
from quire.service.text.tools.regions import RegionFormat, RegionParser

if TYPE_CHECKING:
    from quire.service.text.tokenizer import Tokenizer


class ToolRequest(Protocol):
    """A request that may offer functions."""

    @property
    def offered_functions(self) -> list[Function]: ...

    @property
    def tool_choice(self) -> ToolChoice | FlatToolChoice | None: ...

    @property
    def parallel_tool_calls(self) -> bool | None: ...


@dataclass(frozen=True)
class ToolUse:
    format: CallFormat
    functions: tuple[Function, ...]
    forced: bool  # it must call one
    parallel: bool
    tokenizer: Tokenizer

    @classmethod
    def of(cls, body: ToolRequest, tokenizer: Tokenizer) -> ToolUse | None:
        """None if it has no tools to call, or the model's chat template knows none."""
        template = tokenizer.chat_template
        form = None if template is None else template.tool_format
        if form is None or not body.offered_functions:
            return None
        chosen = chosen_name(body.tool_choice)
        functions = [each for each in body.offered_functions if chosen is None or each.name == chosen]
        parallel = body.parallel_tool_calls is not False and chosen is None
        forced = chosen is not None or body.tool_choice == "required"
        return cls(form, tuple(functions), forced, parallel, tokenizer)

    def form(self) -> Form | None:
        """Return what the text must be so that all calls are right that have to be."""
        if self.forced:
            make = self.format.must_call
        elif any(function.strict for function in self.functions):
            make = self.format.may_call
        else:
            return None
        rules = make(self.functions, self.tokenizer.added_token, parallel=self.parallel)
        return Form("tools", lark_grammar(rules))

    def parser(self) -> AnswerParser:
        """For one answer."""
        return parser_of(self.format, self.functions, parallel=self.parallel)


def parser_of(form: CallFormat, functions: Sequence[Function], *, parallel: bool) -> AnswerParser:
    """Return what tells calls of `functions` from the text of one answer."""
    by_name = {function.name: function for function in functions}
    if isinstance(form, RegionFormat):
        return RegionParser(form, by_name, parallel=parallel)
    return HarmonyParser(frozenset(by_name), parallel=parallel)
