"""The ways models write tool calls: as Hermes and Qwen do, or as Llama 3. A chat template tells which."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from quire.service.text.structured import json_rule
from quire.service.text.tools.protocol import Function

_THINKING = ("<think>", "</think>")
_PYTHON_TAG = "<|python_tag|>"


IsToken = Callable[[str], bool]
"""Whether the vocabulary has a text as one token, which a grammar names as such."""


class Found(NamedTuple):
    """In a buffer: so many characters are text, and then a call may begin at `call` (its brace, or so)."""

    text: int
    call: int | None


@dataclass(frozen=True)
class ToolFormat:
    """`begin` and `end` stand around a call, which is {"name": ..., <arguments>: {...}}.

    Without a `begin`, calls can only come first: a text that begins with a brace may be one.
    """

    begin: str
    end: str
    arguments: str
    between: str  # two calls

    @property
    def markers(self) -> tuple[str, ...]:
        """Tokens that must be seen even where special ones are skipped."""
        return (self.begin, self.end) if self.begin else ()

    def find(self, text: str, fresh: bool, last: bool) -> Found:
        """Look for a call. `fresh`: nothing but calls came before. `last`: nothing follows."""
        if self.begin:
            at = text.find(self.begin)
            if at >= 0:
                return Found(at, at + len(self.begin))
            return Found(len(text) - (0 if last else _overlap(text, self.begin)), None)
        if not fresh:
            return Found(len(text), None)
        start = text.lstrip(" \t\r\n;")
        if start.startswith(_PYTHON_TAG):
            start = start.removeprefix(_PYTHON_TAG).lstrip()
        if start.startswith("{"):
            return Found(0, len(text) - len(start))
        may_follow = not start or _PYTHON_TAG.startswith(start)
        return Found(0 if may_follow and not last else len(text), None)

    def closing(self, text: str) -> int | None:
        """Return how much of `text` ends the call whose arguments came before; None: not there yet."""
        if self.end:
            at = text.find(self.end)
            return None if at < 0 else at + len(self.end)
        start = text.lstrip()
        if not start:
            return None
        return len(text) - len(start) + start.startswith("}")

    def must_call(self, functions: list[Function], is_token: IsToken, *, parallel: bool) -> str:
        """The rules of a grammar of one call, or of one or more if `parallel`."""
        more = f" ({json.dumps(self.between)} call)*" if parallel else ""
        return f"start: call{more}\n" + self._calls(functions, is_token, forced=True)

    def may_call(self, functions: list[Function], is_token: IsToken, *, parallel: bool) -> str:
        """The rules of a grammar of any text, in which calls are right."""
        calls = self._calls(functions, is_token, forced=False)
        if not self.begin:
            more = f" ({json.dumps(self.between)} call)*" if parallel else ""
            tag = f"{_PYTHON_TAG}? " if is_token(_PYTHON_TAG) else ""
            return f"start: {tag}call{more} | TEXT\n" + r"TEXT: /([^{\s](.|\n)*)?/" + "\n" + calls
        thinking = [marker for marker in _THINKING if is_token(marker)]
        marked = f" (({' | '.join(thinking)}) TEXT)*" if thinking else ""
        if is_token(self.begin):
            trigger = f"trigger: text {self.begin}"
        else:  # a text goes on until the marker is whole
            trigger = f"trigger[lazy]: TEXT {json.dumps(self.begin)}"
        start = "start: (trigger call)* text" if parallel else "start: trigger call | text"
        return "\n".join([start, trigger, f"text: TEXT{marked}", r"TEXT: /(.|\n)*/", calls])

    def _calls(self, functions: list[Function], is_token: IsToken, *, forced: bool) -> str:
        """Unless `forced`, `begin` stands before the call already, and arguments are free if not strict."""
        begin = _literal(self.begin if forced else "", is_token)
        end = _literal(self.end, is_token)
        line = json.dumps("\n" if self.begin else "")
        rules = ["call: " + " | ".join(f"call_{at}" for at in range(len(functions)))]
        for at, function in enumerate(functions):
            head = json.dumps(f'{{"name": "{function.name}", "{self.arguments}": ')
            schema = json_rule(function.schema if forced or function.strict else {"type": "object"})
            rules.append(f'call_{at}: {begin} {line} {head} {schema} "}}" {line} {end}')
        return "\n".join(rules) + "\n"


HERMES = ToolFormat("<tool_call>", "</tool_call>", "arguments", "\n")
LLAMA = ToolFormat("", "", "parameters", "; ")


def format_of(template: str) -> ToolFormat | None:
    """Return the way a chat template has its model write calls; None if it knows no tools."""
    if "tools" not in template:
        return None
    if HERMES.begin in template:
        return HERMES
    return LLAMA if "ipython" in template or _PYTHON_TAG in template else None


def _literal(text: str, is_token: Callable[[str], bool]) -> str:
    return text if text and is_token(text) else json.dumps(text)


def _overlap(text: str, marker: str) -> int:
    """Return how long an end of `text` is a beginning of `marker`."""
    return next((n for n in range(min(len(text), len(marker) - 1), 0, -1) if text.endswith(marker[:n])), 0)
