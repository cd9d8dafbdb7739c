"""Check what callers of LLM and AsyncLLM give: prompts, settings, params, stop strings."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

import msgspec

from quire.engine import messages
from quire.engine.config import OTHER_NAMES, EngineConfig, EngineInfo
from quire.sampling_params import SamplingParams
from quire.service.commands.unknown_flags import of_vllm
from quire.service.http.alternatives import alternatives
from quire.service.text.named_templates import template_names
from quire.service.text.tokenizer import Tokenizer

Prompt = str | list[int] | Mapping[str, Any]
"""The last one is as vLLM's: {"prompt": …} or {"prompt_token_ids": …}."""
Params = messages.SamplingParams  # SamplingParams is one, too
Message = dict[str, str]

_OF_FIELD = re.compile(
    r"^(?:Expected `(?P<kinds>[^`]*)`, got .*|Invalid enum value .*) - at `\$\.(?P<name>\w+)`$"
)


class ChatPrompt(list[int]):
    """Token ids of a conversation: an answer to it is a text of its own, rather than its continuation."""


def prompt_list(prompts: Prompt | Iterable[Prompt]) -> list[str | list[int]]:
    """Return the prompts, of which there may be one. Raises TypeError for what is none."""
    if isinstance(prompts, str | Mapping | ChatPrompt):
        return [_prompt(prompts)]
    given: list[Any] = list(_listed(prompts))
    if given and all(isinstance(token, Integral) for token in given):
        return [_prompt(given)]
    return [_prompt(prompt) for prompt in given]


def _listed(given: Any) -> Any:
    """Return an array, numpy's or torch's, as a list of Python's own numbers, and all else as it is."""
    return given.tolist() if hasattr(given, "tolist") else given


def _prompt(prompt: Any) -> str | list[int]:
    if isinstance(prompt, Mapping):
        names = {"prompt", "prompt_token_ids"} & prompt.keys()
        if not names or len(prompt) > 1:
            raise TypeError(
                f"a prompt must have just 'prompt' or 'prompt_token_ids', got {', '.join(map(repr, prompt))}"
            )
        prompt = prompt[names.pop()]
    if isinstance(prompt, str | ChatPrompt):
        return prompt
    tokens = _listed(prompt)
    if not isinstance(tokens, Sequence) or not all(isinstance(token, Integral) for token in tokens):
        raise TypeError(f"a prompt must be a text or a list of token ids, got {prompt!r}")
    return [int(token) for token in tokens]


def params_list(params: Params | Sequence[Params], count: int) -> list[Params]:
    """Return params for each of the prompts. Raises ValueError for too many or too few."""
    each: list[Any] = list(params) if isinstance(params, list | tuple) else [params] * count
    for own in each:
        if not isinstance(own, Params):
            raise TypeError(f"sampling_params must be SamplingParams, or a list of them, got {own!r}")
    if len(each) != count:
        raise ValueError(
            f"there are {count} prompts and {len(each)} params: give one for all, or one for each"
        )
    return each


def for_engine(params: Sequence[Params]) -> list[Params]:
    """Return what the engine is given of them; what is one object stays one."""
    made: dict[int, Params] = {}
    for own in params:
        if id(own) not in made:
            made[id(own)] = own.for_engine() if isinstance(own, SamplingParams) else own
    return [made[id(own)] for own in params]


def stop_strings(stop: str | Sequence[str], params: Sequence[Params]) -> list[tuple[str, ...]]:
    """Return the strings that end each text: `stop`, and its params' own.

    Raises TypeError or ValueError for what they may not be.
    """
    given = (stop,) if isinstance(stop, str) else tuple(stop)
    each = [(*given, *(own.stop_strings if isinstance(own, SamplingParams) else ())) for own in params]
    for strings, own in zip(each, params, strict=True):
        for string in strings:
            if not isinstance(string, str):
                raise TypeError(f"stop must be a string or several, got {string!r}")
        if "" in strings:
            raise ValueError("a stop string is empty; it needs at least one character")
        if strings and own.beam_width:
            raise ValueError("stop may not be given with beams (beam_width); stop_token_ids may")
    return each


def chat_prompt(tokenizer: Tokenizer, messages: Sequence[Message]) -> ChatPrompt:
    """Return token ids that ask for a conversation's next answer.

    Raises TypeError for what is no conversation, and ValueError without a template.
    """
    said = [] if isinstance(messages, str) else list(messages)
    if not said or not all(isinstance(message, Mapping) for message in said):
        raise TypeError(
            "a conversation must be a list of messages, such as {'role': 'user', 'content': 'Hello'}, got "
            f"{messages!r}"
        )
    template = tokenizer.chat_template
    if template is None:
        names = ", ".join(template_names())
        raise ValueError(
            f"this model has no chat template: give it a plain prompt, or a chat_template ({names}, "
            "or a file)"
        )
    text = template.render(said, add_generation_prompt=True)
    return ChatPrompt(tokenizer.encode(text, add_special_tokens=False))


def prompt_tokens(tokenizer: Tokenizer, prompt: str | list[int]) -> list[int]:
    return tokenizer.encode(prompt, add_special_tokens=True) if isinstance(prompt, str) else prompt


def usual_params(info: EngineInfo, prompt: list[int]) -> Params:
    """Return params of a request that names none: the model's folder's, and no more tokens than fit.

    An answer to a conversation has as many as fit unless the folder names a limit; another text has 16.
    """
    usual = info.sampling_defaults.params()
    room = max(info.max_request_tokens - len(prompt), 1)
    limited = info.sampling_defaults.max_tokens is not None or not isinstance(prompt, ChatPrompt)
    return msgspec.structs.replace(usual, max_tokens=min(usual.max_tokens, room) if limited else room)


def ended_by_turn(tokenizer: Tokenizer, prompt: str | list[int], params: Params) -> Params:
    """Return params by which an answer to a conversation ends with the tokens that end its turn."""
    end = tokenizer.turn_end.tokens
    if not end or not isinstance(prompt, ChatPrompt) or params.ignore_eos:
        return params
    return msgspec.structs.replace(params, stop_token_ids=(*params.stop_token_ids, *end))


def turn_stops(tokenizer: Tokenizer, prompt: str | list[int], params: Params) -> tuple[str, ...]:
    """Return the strings that end the turn of an answer to a conversation."""
    is_turn = isinstance(prompt, ChatPrompt) and not params.ignore_eos
    return tuple(tokenizer.turn_end.strings) if is_turn else ()


def engine_config(model: str, values: Mapping[str, object], unknown: Iterable[str]) -> EngineConfig:
    """Return it with those of `values` that are its fields.

    Raises TypeError for an unknown one: with what to do if it is vLLM's, else with the nearest that there is.
    Raises ValueError that names the setting, or its flag, and what it may be.
    """
    known = [name for name in EngineConfig.__struct_fields__ if name != "model"]
    for name in unknown:
        if (why := of_vllm(name)) is not None:
            raise TypeError(f"LLM has no setting {name!r}: {why}")
        near = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]!r}" if near else f"there is {', '.join(known)}"
        raise TypeError(f"LLM has no setting {name!r}: {hint}")
    settings = {name: _named_as_here(name, values[name]) for name in known}
    try:
        return msgspec.convert({"model": model, **settings}, EngineConfig)
    except msgspec.ValidationError as error:
        raise _told(error, settings) from error


def _named_as_here(setting: str, value: object) -> object:
    """Return a setting's value, of which vLLM may have another name, or torch a type."""
    names = OTHER_NAMES.get(setting, {})
    if setting == "dtype" and type(value).__module__ == "torch":
        value = str(value).removeprefix("torch.")
    return names.get(value, value) if isinstance(value, str) else value


def _told(error: msgspec.ValidationError, settings: Mapping[str, object]) -> ValueError:
    """Return what msgspec says of a value in words of this library's; a check of our own has them."""
    found = _OF_FIELD.search(str(error))
    if found is None:
        return ValueError(str(error))
    name, kinds = found["name"], found["kinds"]
    choices = ", ".join(map(repr, alternatives(EngineConfig, name)))
    may_be = f"one of {choices}" if choices else kinds.replace(" | null", " or None")
    return ValueError(f"{name} must be {may_be}, got {settings[name]!r}")
