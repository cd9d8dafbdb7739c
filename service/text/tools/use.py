"""The tools of one request: the way its model calls them, and the calls that it must or may make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from quire.engine.errors import FieldError
from quire.service.text.pieces import AnswerParser
from quire.service.text.reasoning.harmony import HarmonyParser
from quire.service.text.structured import Document, Form, lark_grammar
from quire.service.text.tools.formats import CallFormat
from quire.service.text.tools.held_answers import CallsOrDocument, OnlyCalls
from quire.service.text.tools.lark import json_of
from quire.service.text.tools.protocol import (
    FlatToolChoice,
    Function,
    ToolChoice,
    allowed_names,
    chosen_name,
    must_call,
)
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

    @property
    def document(self) -> Document | None: ...


@dataclass(frozen=True)
class ToolUse:
    format: CallFormat
    functions: tuple[Function, ...]
    forced: bool  # it must call one
    parallel: bool
    is_told: bool  # what it may call is a grammar's to say
    tokenizer: Tokenizer
    document: Document | None = None  # what it says if it calls none

    @classmethod
    def of(cls, body: ToolRequest, tokenizer: Tokenizer) -> ToolUse | None:
        """Return it; None if it has no tools to call, or the model's chat template knows none.

        Raises FieldError.
        """
        template = tokenizer.chat_template
        form = None if template is None else template.tool_format
        if form is None or not body.offered_functions:
            return None
        allowed = allowed_names(body.tool_choice)
        functions = [each for each in body.offered_functions if allowed is None or each.name in allowed]
        parallel = body.parallel_tool_calls is not False and chosen_name(body.tool_choice) is None
        forced = must_call(body.tool_choice)
        document = None if forced else body.document
        if document is not None and not form.tells_from_calls(document.schema):
            field = document.field
            raise FieldError(
                field,
                f"{field} may be given together with tools only if no document of its schema begins as a "
                "call, and this model's calls are bare JSON: the schema must be an object, with "
                "additionalProperties false and no property 'parameters'",
            )
        is_told = any(each.strict for each in functions) or allowed is not None
        return cls(form, tuple(functions), forced, parallel, is_told, tokenizer, document)

    def form(self) -> Form | None:
        """Return what the text must be so that all calls are right that have to be, or the document.

        Raises FieldError.
        """
        given, several = (self.functions, self.tokenizer.added_token), self.parallel
        if self.document is not None:
            document = json_of(self.document.schema)
            rules = self.format.call_or_document(*given, parallel=several, document=document)
        elif self.forced:
            rules = self.format.must_call(*given, parallel=several)
        elif self.is_told:
            rules = self.format.may_call(*given, parallel=several)
        else:
            return None
        return Form("tools", lark_grammar(rules))

    def parser(self) -> AnswerParser:
        """Return what tells calls from the text of one answer."""
        parser = parser_of(self.format, self.functions, parallel=self.parallel)
        if self.document is not None and self.format.written_begins:
            return CallsOrDocument(parser, self.format.written_begins)
        return OnlyCalls(parser) if self.forced else parser


def parser_of(form: CallFormat, functions: Sequence[Function], *, parallel: bool) -> AnswerParser:
    """Return what tells calls of `functions` from the text of one answer."""
    by_name = {function.name: function for function in functions}
    if isinstance(form, RegionFormat):
        return RegionParser(form, by_name, parallel=parallel)
    return HarmonyParser(frozenset(by_name), parallel=parallel)
