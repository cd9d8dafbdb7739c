"""Calls with arguments as JSON: lists and lines of them, Mistral's, DeepSeek's, and Kimi's."""

from __future__ import annotations

import json
from collections.abc import Sequence

from quire.service.text.pieces import CallArguments, CallStart
from quire.service.text.tools.call_heads import MAX_HEAD, Head, JsonDepth, decode_call, match_head
from quire.service.text.tools.incoming import Functions, Incoming, NoCall, Steps, named
from quire.service.text.tools.lark import TokenOf, json_of, literal, schema_of
from quire.service.text.tools.protocol import Function

MORE = '(", " call)*'
SEPARATOR = "<｜tool▁sep｜>"
KIMI_ARGUMENTS = "<|tool_call_argument_begin|>"
PYTHON_TAG = "<|python_tag|>"
_HERMES_END = "</tool_call>"
_KEYS = ("arguments", "parameters")  # Llama's


def read_list(incoming: Incoming, functions: Functions) -> Steps[None]:
    """[{"name": …, "arguments": {…}}, …], or one of them."""
    yield from incoming.space()
    listed = yield from incoming.has("[")
    yield from read_items(incoming, functions, listed=listed)


def read_lines(incoming: Incoming, functions: Functions) -> Steps[None]:
    """Such objects, each on a line of its own."""
    yield from incoming.space()
    while (yield from incoming.next()) == "{":
        yield from _item(incoming, functions)
        yield from incoming.space()


def read_items(incoming: Incoming, functions: Functions, *, listed: bool) -> Steps[None]:
    """Read what follows the bracket of a list; or one that stands alone."""
    yield from incoming.space()
    if not listed:
        yield from _item(incoming, functions)
        return
    more = (yield from incoming.next()) != "]"
    while more:
        yield from incoming.space()
        yield from _item(incoming, functions)
        yield from incoming.space()
        more = yield from incoming.has(",")
    yield from incoming.need("]")


def _item(incoming: Incoming, functions: Functions) -> Steps[None]:
    """Tell of arguments as they come if the name stands before them."""
    if (yield from incoming.next()) != "{":
        raise NoCall
    incoming.limit = None  # its own is kept here
    head = yield from _head(incoming, _KEYS)
    if head is not None:
        named(functions, head.name)
        incoming.take(head.length)
        yield CallStart(head.name)
        yield from incoming.tell_object()
        yield from incoming.rest_of_object(JsonDepth(1))
        return
    text = yield from incoming.rest_of_object(JsonDepth())
    calls = (decode_call(text, key, functions) for key in _KEYS)
    call = next((each for each in calls if each is not None), None)
    if call is None:
        raise NoCall
    yield CallStart(call[0])
    yield CallArguments(call[1])


def _head(incoming: Incoming, keys: tuple[str, ...]) -> Steps[Head | None]:
    """Return its head; None: it has to be read whole."""
    while True:
        heads = [match_head(incoming.text[:MAX_HEAD], key) for key in keys]
        found = next((head for head in heads if isinstance(head, Head)), None)
        if found is not None or not any(head is None for head in heads) or len(incoming.text) >= MAX_HEAD:
            return found
        yield from incoming.wait()


def read_hermes(incoming: Incoming, functions: Functions) -> Steps[None]:
    """{"name": …, "arguments": {…}}. What else stands before the end is of no use."""
    if not (yield from _headed(incoming, functions, "arguments")):
        if not incoming.text.lstrip().startswith("{"):
            raise NoCall
        while (at := incoming.text.find(_HERMES_END)) < 0 and not incoming.ended:
            yield from incoming.wait()
        call = decode_call(incoming.take(at if at >= 0 else len(incoming.text)), "arguments", functions)
        if call is None:
            raise NoCall
        yield CallStart(call[0])
        yield CallArguments(call[1])
    yield from incoming.skip(_HERMES_END)


def read_llama(incoming: Incoming, functions: Functions) -> Steps[None]:
    """{"name": …, "parameters": {…}}."""
    if not (yield from _headed(incoming, functions, "parameters")):
        raise NoCall
    yield from incoming.space()
    yield from incoming.has("}")


def _headed(incoming: Incoming, functions: Functions, arguments: str) -> Steps[bool]:
    """Tell of a call up to its arguments' end, as they come. False: its head is not that of one."""
    incoming.limit = None  # its own is kept here
    head = yield from _head(incoming, (arguments,))
    if head is None or head.name not in functions:
        return False
    incoming.take(head.length)
    yield CallStart(head.name)
    yield from incoming.tell_object()
    return True


def write_list(functions: Sequence[Function], token_of: TokenOf, forced: bool, several: bool) -> list[str]:
    return [f'region: "[" call {MORE if several else ""} "]"', *_objects(functions, forced, "arguments")]


def _objects(functions: Sequence[Function], forced: bool, arguments: str) -> list[str]:
    rules = [_either(functions)]
    for at, function in enumerate(functions):
        head = json.dumps(f'{{"name": "{function.name}", "{arguments}": ')
        rules.append(f'call_{at}: {head} {json_of(schema_of(function, forced=forced))} "}}"')
    return rules


def write_hermes(functions: Sequence[Function], token_of: TokenOf, forced: bool, several: bool) -> list[str]:
    end = literal(_HERMES_END, token_of)
    return [rf'region: "\n" call "\n" {end}', *_objects(functions, forced, "arguments")]


def write_llama(functions: Sequence[Function], token_of: TokenOf, forced: bool, several: bool) -> list[str]:
    tag = "" if forced or token_of(PYTHON_TAG) is None else f"{literal(PYTHON_TAG, token_of)}? "
    more = ' ("; " call)*' if several else ""
    rules = [f"region: {tag}call{more}", _either(functions)]
    for at, function in enumerate(functions):
        # in the parts that a document's grammar has, too, as an answer may be either
        parts = ("{", '"name"', ": ", f'"{function.name}"', ", ", '"parameters"', ": ")
        head = " ".join(map(json.dumps, parts))
        rules.append(f'call_{at}: {head} {json_of(schema_of(function, forced=forced))} "}}"')
    return rules


def write_object(functions: Sequence[Function], token_of: TokenOf, forced: bool, several: bool) -> list[str]:
    """Granite 20B's."""
    return ['region: " " call', *write_list(functions, token_of, forced, several)[1:]]


def write_lines(functions: Sequence[Function], token_of: TokenOf, forced: bool, several: bool) -> list[str]:
    """MiniMax M1's."""
    end = literal("</tool_calls>", token_of)
    call = r'"\n" call'
    region = rf'region: {f"({call})+" if several else call} "\n" {end}'
    return [region, *write_list(functions, token_of, forced, several)[1:]]


def read_mistral(incoming: Incoming, functions: Functions) -> Steps[None]:
    """Read a list, or name[ARGS]{…}."""
    yield from incoming.space()
    if (yield from incoming.next()) in ("[", "{"):
        yield from read_list(incoming, functions)
        return
    name = yield from incoming.word()
    named(functions, name)
    yield from incoming.space()
    if (yield from incoming.has("[CALL_ID]")):
        yield from incoming.space()
        yield from incoming.word()
        yield from incoming.space()
    yield from incoming.has("[ARGS]")
    yield from _arguments(incoming, name)


def _arguments(incoming: Incoming, name: str) -> Steps[None]:
    """Tell of a call whose arguments come next."""
    yield from incoming.space()
    if (yield from incoming.next()) != "{":
        raise NoCall
    yield CallStart(name)
    yield from incoming.tell_object()


def write_mistral(functions: Sequence[Function], token_of: TokenOf, forced: bool, several: bool) -> list[str]:
    separator = literal("[ARGS]", token_of)
    rules = [_either(functions).replace("call:", "region:", 1)]
    for at, function in enumerate(functions):
        schema = json_of(schema_of(function, forced=forced))
        rules.append(f"call_{at}: {json.dumps(function.name)} {separator} {schema}")
    return rules


def read_deepseek(incoming: Incoming, functions: Functions) -> Steps[None]:
    """function<｜tool▁sep｜>name, and then JSON in a fence; later models: name<｜tool▁sep｜>{…}."""
    yield from incoming.space()
    name = yield from incoming.word()
    yield from incoming.space()
    yield from incoming.has(SEPARATOR)
    yield from incoming.space()
    if name == "function" and (yield from incoming.next()) not in ("{", "`"):
        name = yield from incoming.word()
        yield from incoming.space()
        yield from incoming.has(SEPARATOR)
        yield from incoming.space()
    named(functions, name)
    yield from incoming.has("```json")
    yield from _arguments(incoming, name)
    yield from incoming.space()
    yield from incoming.has("```")


def write_deepseek(
    functions: Sequence[Function], token_of: TokenOf, forced: bool, several: bool
) -> list[str]:
    return _deepseek_rules(functions, token_of, forced, "{name} {separator} {json}")


def write_fenced_deepseek(
    functions: Sequence[Function], token_of: TokenOf, forced: bool, several: bool
) -> list[str]:
    fenced = '"function" {separator} {name} "\\n```json\\n" {json} "\\n```"'
    return _deepseek_rules(functions, token_of, forced, fenced)


def _deepseek_rules(functions: Sequence[Function], token_of: TokenOf, forced: bool, form: str) -> list[str]:
    end = literal("<｜tool▁call▁end｜>", token_of)
    rules = [_either(functions).replace("call:", "region:", 1)]
    for at, function in enumerate(functions):
        parts = {
            "{name}": json.dumps(function.name),
            "{separator}": literal(SEPARATOR, token_of),
            "{json}": json_of(schema_of(function, forced=forced)),
        }
        body = " ".join(parts.get(part, part) for part in form.split(" "))
        rules.append(f"call_{at}: {body} {end}")
    return rules


def read_kimi(incoming: Incoming, functions: Functions) -> Steps[None]:
    """functions.name:0<|tool_call_argument_begin|>{…}, where the number counts calls."""
    head = (yield from incoming.upto(KIMI_ARGUMENTS)).strip()
    name = head.removeprefix("functions.").partition(":")[0]
    named(functions, name)
    yield from _arguments(incoming, name)


def write_kimi(functions: Sequence[Function], token_of: TokenOf, forced: bool, several: bool) -> list[str]:
    separator, end = literal(KIMI_ARGUMENTS, token_of), literal("<|tool_call_end|>", token_of)
    rules = [_either(functions).replace("call:", "region:", 1), "NUMBER: /[0-9]{1,3}/"]
    for at, function in enumerate(functions):
        schema = json_of(schema_of(function, forced=forced))
        head = json.dumps(f"functions.{function.name}:")
        rules.append(f"call_{at}: {head} NUMBER {separator} {schema} {end}")
    return rules


def _either(functions: Sequence[Function]) -> str:
    return "call: " + " | ".join(f"call_{at}" for at in range(len(functions)))
