"""A request that the engine works on, whichever way its answer leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import UNSET

from quire.service.answer.choice import Choice
from quire.service.answer.encoder import EventEncoder
from quire.service.answer.generation import Generation, Group
from quire.service.answer.logprobs import prompt_logprobs
from quire.service.http.framing import Framing


@dataclass(frozen=True)
class Answer:
    """One that leaves by `reply`, or by the events of an encoder. Whoever has it closes the generation."""

    generation: Generation
    reply: Callable[[], msgspec.Struct]  # once the generation has finished
    encoder: Callable[[Framing], EventEncoder]


def reply_choices(
    generation: Generation, *, with_prompt_logprobs: bool
) -> Iterator[tuple[Group, Choice, dict[str, Any]]]:
    """Return each choice that the client gets, with the fields that every kind of reply has of it."""
    of_prompt = prompt_logprobs(generation) if with_prompt_logprobs else {}
    with_ids = generation.options.token_ids
    for index, (group, choice) in enumerate(generation.returned()):
        yield (
            group,
            choice,
            {
                "index": index,
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
                "cumulative_logprob": UNSET
                if choice.cumulative_logprob is None
                else choice.cumulative_logprob,
                "token_ids": choice.tokens if with_ids else UNSET,
                "prompt_token_ids": group.prompt.tokens if with_ids else UNSET,
                "prompt_logprobs": of_prompt.get(group.stream.request_id, UNSET),
            },
        )
