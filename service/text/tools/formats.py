"""The ways models write tool calls. A chat template tells which."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from quire.service.text.reasoning.formats import HARMONY
from quire.service.text.tools.gemma_calls import reader, writer
from quire.service.text.tools.json_calls import (
    KIMI_ARGUMENTS,
    PYTHON_TAG,
    SEPARATOR,
    read_deepseek,
    read_hermes,
    read_kimi,
    read_lines,
    read_list,
    read_llama,
    read_mistral,
    write_deepseek,
    write_fenced_deepseek,
    write_hermes,
    write_kimi,
    write_lines,
    write_list,
    write_llama,
    write_mistral,
    write_object,
)
from quire.service.text.tools.lark import ANY_TEXT, TokenOf, json_of, schema_of
from quire.service.text.tools.protocol import Function
from quire.service.text.tools.python_calls import read_python, write_fenced_calls, write_list_of_calls
from quire.service.text.tools.regions import RegionFormat
from quire.service.text.tools.xml_calls import (
    TAGS,
    read_glm,
    read_minimax,
    read_qwen,
    write_glm,
    write_minimax,
    write_qwen,
)


@dataclass(frozen=True)
class HarmonyCalls:
    """gpt-oss's: a message on the commentary channel to functions.name; the token that ends it is an eos."""

    opening = ()
    written_begins = ()  # channels tell calls from an answer
    markers = HARMONY.markers

    def must_call(self, functions: Sequence[Function], token_of: TokenOf, *, parallel: bool) -> str:
        """Return the rules of a grammar of one call."""
        return "\n".join(["start: call", *self._calls(functions, forced=True)])

    def may_call(self, functions: Sequence[Function], token_of: TokenOf, *, parallel: bool) -> str:
        """Return the rules of a grammar of an answer, or of one call."""
        final = '<|channel|> "final" <|message|> TEXT'
        return "\n".join([f"start: call | {final}", ANY_TEXT, *self._calls(functions, forced=False)])

    def call_or_document(
        self, functions: Sequence[Function], token_of: TokenOf, *, parallel: bool, document: str
    ) -> str:
        """Return the rules of a grammar of one call, or of a document as the answer."""
        final = '<|channel|> "final" <|message|> document'
        calls = self._calls(functions, forced=False)
        return "\n".join([f"start: call | {final}", f"document: {document}", *calls])

    def tells_from_calls(self, schema: dict[str, Any]) -> bool:
        """Return whether a document of this schema never reads as a call: its channel tells."""
        return True

    def _calls(self, functions: Sequence[Function], *, forced: bool) -> list[str]:
        rules = ["call: " + " | ".join(f"call_{at}" for at in range(len(functions)))]
        for at, function in enumerate(functions):
            head = json.dumps(f"commentary to=functions.{function.name} ")
            schema = json_of(schema_of(function, forced=forced))
            rules.append(f'call_{at}: <|channel|> {head} <|constrain|> "json" <|message|> {schema}')
        return rules


CallFormat = RegionFormat | HarmonyCalls

HERMES = RegionFormat(("<tool_call>",), "", read_hermes, write_hermes, within=("</tool_call>",))
LLAMA = RegionFormat(
    (), "", read_llama, write_llama, tag=PYTHON_TAG, brackets="{", repeats=False, between="; ", apart=";"
)
HARMONY_CALLS = HarmonyCalls()
QWEN_CODER = RegionFormat(("<tool_call>",), "</tool_call>", read_qwen, write_qwen)
GLM = RegionFormat(("<tool_call>",), "</tool_call>", read_glm, write_glm, within=TAGS)
LLAMA_4 = RegionFormat(
    (), "", read_python, write_list_of_calls, ("<|python_start|>", "<|python_end|>"), repeats=False
)
MISTRAL_LIST = RegionFormat(("[TOOL_CALLS]",), "", read_mistral, write_list, repeats=False)
MISTRAL = RegionFormat(
    ("[TOOL_CALLS]",), "", read_mistral, write_mistral, within=("[ARGS]", "[CALL_ID]"), between=""
)
_DEEPSEEK_AROUND = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
DEEPSEEK = RegionFormat(
    ("<｜tool▁call▁begin｜>",),
    "<｜tool▁call▁end｜>",
    read_deepseek,
    write_deepseek,
    _DEEPSEEK_AROUND,
    (SEPARATOR,),
    between="",
)
DEEPSEEK_FENCED = replace(DEEPSEEK, write=write_fenced_deepseek, between="\n")
KIMI = RegionFormat(
    ("<|tool_call_begin|>",),
    "<|tool_call_end|>",
    read_kimi,
    write_kimi,
    ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    (KIMI_ARGUMENTS,),
    between="",
)
MINIMAX = RegionFormat(
    ("<minimax:tool_call>",), "</minimax:tool_call>", read_minimax, write_minimax, repeats=False
)
MINIMAX_M1 = RegionFormat(("<tool_calls>",), "</tool_calls>", read_lines, write_lines, repeats=False)
HUNYUAN = RegionFormat(("<tool_calls>",), "</tool_calls>", read_list, write_list, repeats=False)
GRANITE_20B = RegionFormat(("<function_call>",), "", read_list, write_object, between=" ")
GEMMA = RegionFormat(
    ("<start_function_call>",),
    "<end_function_call>",
    reader("<escape>"),
    writer("<escape>", "<end_function_call>"),
    within=("<escape>",),
    between="",
)
GEMMA_4 = RegionFormat(
    ("<|tool_call>",),
    "<tool_call|>",
    reader('<|"|>'),
    writer('<|"|>', "<tool_call|>"),
    within=('<|"|>',),
    between="",
)
GEMMA_PYTHON = RegionFormat(("```tool_code",), "```", read_python, write_fenced_calls, repeats=False)
GRANITE = RegionFormat(("<|tool_call|>", "<tool_call>"), "", read_list, write_list, repeats=False)
PHI = RegionFormat(("<|tool_call|>",), "", read_list, write_list, ("<|/tool_call|>",), repeats=False)
PHI_FUNCTOOLS = RegionFormat(("functools",), "", read_list, write_list, repeats=False)

# The first whose words a template all has.
_SIGNS: tuple[tuple[tuple[str, ...], CallFormat], ...] = (
    (("to=functions.", "<|channel|>"), HARMONY_CALLS),
    (("<function=", "<tool_call>"), QWEN_CODER),
    (("<minimax:tool_call>",), MINIMAX),
    (("<|tool_call_argument_begin|>",), KIMI),
    (("<arg_key>",), GLM),
    (("<｜tool▁call▁begin｜>", "```json"), DEEPSEEK_FENCED),
    (("<｜tool▁call▁begin｜>",), DEEPSEEK),
    (("[TOOL_CALLS]", "[ARGS]"), MISTRAL),
    (("[TOOL_CALLS]",), MISTRAL_LIST),
    (("<start_function_call>",), GEMMA),
    (("<|tool_call>",), GEMMA_4),
    (("tool_code",), GEMMA_PYTHON),
    (("<tool_calls>[",), HUNYUAN),
    (("<tool_calls>",), MINIMAX_M1),
    (("<|function_call_library|>",), GRANITE_20B),
    (("<|/tool_call|>",), PHI),
    (("<|/tool|>", "message['tools']"), PHI),
    (("functools",), PHI_FUNCTOOLS),
    (("<|tool_call|>",), GRANITE),
    ((HERMES.begin,), HERMES),
    (("<|python_start|>",), LLAMA_4),
    (("<|header_start|>",), LLAMA_4),
    (("ipython",), LLAMA),
    ((PYTHON_TAG,), LLAMA),
)


def format_of(template: str) -> CallFormat | None:
    """Return the way a chat template has its model write calls; None if it knows no tools."""
    if "tools" not in template:
        return None
    return next((form for words, form in _SIGNS if all(word in template for word in words)), None)
