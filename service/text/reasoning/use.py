"""The thinking of one request: whether its model thinks, where that ends, and what follows by a grammar."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quire.engine.errors import FieldError
from quire.service.text.pieces import AnswerParser
from quire.service.text.reasoning.formats import FORMATS, HARMONY, ReasoningFormat
from quire.service.text.reasoning.harmony import HarmonyParser
from quire.service.text.reasoning.parser import ThinkingParser, WithoutThinking
from quire.service.text.structured import Form
from quire.service.text.tools.use import ToolUse

if TYPE_CHECKING:
    from quire.service.text.tokenizer import Tokenizer

_TAIL = 64  # tokens of a prompt, in which its template may begin or end the thinking
_BUDGET = "thinking_token_budget"
_TEXT = r"TEXT: /(.|\n)*/"
# Heads of Harmony's messages: of an answer, and of that or one that may be a call, whose rest is free.
_FINAL = '<|channel|> "final" <|message|> '
_FINAL_OR_CALL = '(<|channel|> "final" <|message|> | (" to=" /[^<]+/)? <|channel|> "commentary") '


@dataclass(frozen=True)
class Reasoning:
    format: ReasoningFormat
    inside: bool  # the prompt has begun the thinking
    tokenizer: Tokenizer
    shown: bool = True  # answers carry it

    @classmethod
    def of(
        cls,
        setting: str,
        tokenizer: Tokenizer,
        prompt: list[int],
        arguments: Mapping[str, Any],
        *,
        continues: bool = False,
        shown: bool = True,
    ) -> Reasoning | None:
        """Return it; None if all that the model says is its answer. `setting`: --reasoning-parser.

        continues: the prompt ends within what the model said.
        """
        form = _format(setting, tokenizer)
        if form is None:
            return None
        if form is HARMONY:
            return cls(form, False, tokenizer, shown)
        if any(arguments.get(name) is False for name in ("enable_thinking", "thinking")):
            return None
        tail = tokenizer.decode(prompt[-_TAIL:], skip_special_tokens=False)
        begun = max(tail.rfind(each) for each in form.begins)
        ended = max((at, at + len(each)) for each in form.ends for at in [tail.rfind(each)])
        if ended[0] > begun and not tail[ended[1] :].strip():
            return None
        inside = begun > ended[0] and (continues or not _said_after(tail, begun, form))
        return cls(form, inside, tokenizer, shown)

    def form(self, answer: Form | None, budget: int | None, *, may_call: bool = False) -> Form | None:
        """Return the grammar of a text whose answer is of this form, after thinking. Raises FieldError.

        may_call: an answer of no form may be calls.
        """
        if answer is None and budget is None:
            return None
        field = _BUDGET if answer is None else answer.field
        head = _FINAL
        if field == "tools":  # each answer has a channel of its own making
            head = ""
        elif answer is None and may_call:
            head = _FINAL_OR_CALL
        rules = _harmony_rules(budget, head) if self.format is HARMONY else self._rules(budget)
        parts = _parts("start: <[*]>*" if answer is None else answer.grammar)
        parts[0]["name"] = "answer"
        return Form(field, json.dumps({"grammars": [*_parts(rules), *parts]}))

    def _rules(self, budget: int | None) -> str:
        end = next((each for each in self.format.ends if self.tokenizer.added_token(each) is not None), None)
        if end is not None:  # a token of its own cannot be part of a text
            limit = "" if budget is None else f"[max_tokens={budget}]"
            thought = "" if budget == 0 else "thought "
            thinking = f"thinking: {thought}{self._symbol(end)}\nthought{limit}: TEXT"
        elif budget is not None:
            raise FieldError(
                _BUDGET, f"{_BUDGET} needs a model that ends its thinking with a token of its own"
            )
        else:
            thinking = f"thinking[lazy]: TEXT ({' | '.join(map(json.dumps, self.format.ends))})"
        begin = " | ".join(map(self._symbol, self.format.begins))
        if self.inside or self.format.always:
            start = f"start: ({begin})? thinking LINES @answer"
        else:
            start = f"start: (({begin}) thinking LINES)? @answer"
        return "\n".join([start, thinking, _TEXT, r"LINES: /\n*/"])

    def _symbol(self, marker: str) -> str:
        """Write it as a grammar does: a token, or a text."""
        token = self.tokenizer.added_token(marker)
        return json.dumps(marker) if token is None else f"<[{token}]>"


def may_think(setting: str, tokenizer: Tokenizer) -> bool:
    """Return whether the model has a way to think before it answers. `setting`: --reasoning-parser."""
    return _format(setting, tokenizer) is not None


def answer_parser(reasoning: Reasoning | None, tools: ToolUse | None) -> AnswerParser | None:
    """Return what tells the parts of one answer apart; None if all of it is text."""
    if reasoning is None:
        return None if tools is None else tools.parser()
    parser = _thinking_parser(reasoning, tools)
    return parser if reasoning.shown else WithoutThinking(parser)


def _thinking_parser(reasoning: Reasoning, tools: ToolUse | None) -> AnswerParser:
    if reasoning.format is HARMONY:
        names = () if tools is None else (function.name for function in tools.functions)
        return HarmonyParser(frozenset(names), parallel=tools is None or tools.parallel)
    return ThinkingParser(
        reasoning.format,
        inside=reasoning.inside,
        tools=None if tools is None else tools.parser(),
        calls=() if tools is None else tools.format.opening,
    )


def markers_of(reasoning: Reasoning | None, tools: ToolUse | None) -> tuple[str, ...]:
    """Return the tokens that must be seen even where special ones are skipped."""
    markers = () if tools is None else tools.format.markers
    return markers if reasoning is None else (*reasoning.format.markers, *markers)


def _format(setting: str, tokenizer: Tokenizer) -> ReasoningFormat | None:
    template = tokenizer.chat_template
    if template is None or setting == "none":
        return None
    return template.reasoning_format if setting == "auto" else FORMATS[setting]  # type: ignore[index]


def _said_after(tail: str, begun: int, form: ReasoningFormat) -> bool:
    """Return whether more than a line end follows what begins thinking: then a message only tells of it."""
    begin = next(each for each in form.begins if tail.startswith(each, begun))
    return bool(tail[begun + len(begin) :].strip())


def _parts(grammar: str) -> list[dict[str, Any]]:
    """Return what llguidance's text of a grammar is made of: it is a list of grammars, or rules."""
    if not grammar.startswith("{"):
        return [{"lark_grammar": grammar}]
    parts: list[dict[str, Any]] = json.loads(grammar)["grammars"]
    return parts


def _harmony_rules(budget: int | None, head: str) -> str:
    """Thinking on its channel, if any, and then the answer, after its head."""
    limit = "" if budget is None else f"[max_tokens={budget}]"
    return "\n".join(
        [
            f'start: (thinking <|start|> "assistant")? {head}@answer',
            'thinking: <|channel|> "analysis" <|message|> thought <|end|>',
            f"thought{limit}: TEXT",
            _TEXT,
        ]
    )
