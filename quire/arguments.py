"""Check what callers of LLM and AsyncLLM give: prompts, settings, stop strings."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from quire.engine.config import EngineConfig
from quire.engine.messages import SamplingParams

Prompt = str | list[int]


class ChatPrompt(list[int]):
    """Token ids of a conversation: an answer to it is a text of its own, rather than its continuation."""


def stop_strings(stop: str | Sequence[str], params: list[SamplingParams]) -> tuple[str, ...]:
    """Return the strings. Raises TypeError or ValueError for what they, or the params, may not be."""
    for own in params:
        if not isinstance(own, SamplingParams):
            raise TypeError(f"params must be SamplingParams, or a list of them, got {own!r}")
    strings = (stop,) if isinstance(stop, str) else tuple(stop)
    for string in strings:
        if not isinstance(string, str):
            raise TypeError(f"stop must be a string or several, got {string!r}")
    if "" in strings:
        raise ValueError("a stop string is empty; it needs at least one character")
    if strings and any(own.beam_width for own in params):
        raise ValueError("stop may not be given with beams (beam_width); stop_token_ids may")
    return strings


def check_names(settings: Iterable[str]) -> None:
    """Raise TypeError, which names the nearest one, for a setting that EngineConfig does not have."""
    known = [name for name in EngineConfig.__struct_fields__ if name != "model"]
    for name in settings:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]!r}" if near else f"there is {', '.join(known)}"
            raise TypeError(f"LLM has no setting {name!r}: {hint}")
